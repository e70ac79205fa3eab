"""Uneven stages: against trying every cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ImpossibleError
from hpctrain.schedule import (
    Costs,
    Memory,
    make,
    share_layers,
    simulate,
    split_layers,
    stage_sums,
)

layer_times = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=9)


def every_cut(layers: int, stages: int):
    for borders in combinations(range(1, layers), stages - 1):
        ends = (0, *borders, layers)
        yield tuple(b - a for a, b in pairwise(ends))


@settings(max_examples=150, deadline=None)
@given(layer_times, st.integers(1, 5), st.data())
def test_no_cut_is_better(times, stages, data):
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=stages, max_size=stages))
    if stages > len(times):
        with pytest.raises(ImpossibleError, match="too few"):
            split_layers(times, stages, speeds=speeds)
        return
    counts = split_layers(times, stages, speeds=speeds)

    def stage_times(cut):
        return [t / s for t, s in zip(stage_sums(cut, times), speeds, strict=True)]

    def quality(cut):
        return max(stage_times(cut)), sum(t * t for t in stage_times(cut))

    slowest, squares = min(quality(cut) for cut in every_cut(len(times), stages))
    assert len(counts) == stages
    assert sum(counts) == len(times)
    assert min(counts) >= 1
    assert quality(counts)[0] == pytest.approx(slowest)
    assert quality(counts)[1] == pytest.approx(squares)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_memory_is_kept_or_refused(layers, stages, data):
    numbers = st.integers(1, 4).map(float)
    times, state, activation = (
        tuple(data.draw(st.lists(numbers, min_size=layers, max_size=layers))) for _ in range(3)
    )
    in_flight = tuple(float(stages - stage) for stage in range(stages))
    limit = (float(data.draw(st.integers(2, 60))),) * stages
    memory = Memory(state, activation, in_flight, limit)

    def fits(cut):
        held = zip(stage_sums(cut, state), stage_sums(cut, activation), in_flight, strict=True)
        return all(s + a * n <= limit[0] for s, a, n in held)

    possible = [cut for cut in every_cut(layers, stages) if fits(cut)] if stages <= layers else []
    if not possible:
        with pytest.raises(ImpossibleError):
            split_layers(times, stages, memory=memory)
        return
    counts = split_layers(times, stages, memory=memory)
    assert fits(counts)
    best = min(max(stage_sums(cut, times)) for cut in possible)
    assert max(stage_sums(counts, times)) == pytest.approx(best)


def test_an_uneven_cut_pays_off_in_the_pipeline():
    # an output layer worth three layers: 34 = 31 + 3 over 4 stages
    times = [1.0] * 31 + [3.0]
    even, uneven = (8, 8, 8, 8), split_layers(times, 4)
    assert uneven[-1] < 8

    def seconds(counts):
        sums = stage_sums(counts, times)
        costs = Costs(forward=sums, input_grad=sums, weight_grad=sums)
        return simulate(make("1f1b", ranks=4, micro_batches=16), costs).makespan

    assert seconds(uneven) < seconds(even)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 100), st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_shares_follow_the_weights(layers, weights):
    if layers < len(weights):
        with pytest.raises(ImpossibleError, match="too few"):
            share_layers(layers, weights)
        return
    counts = share_layers(layers, weights)
    assert sum(counts) == layers
    assert min(counts) >= 1
    exact = [layers * w / sum(weights) for w in weights]
    if min(exact) >= 1:  # nobody had to be raised to one: largest remainder is within one
        assert all(abs(c - e) < 1 for c, e in zip(counts, exact, strict=True))


def test_known_shares():
    assert share_layers(32, [1, 1, 2, 2]) == (5, 5, 11, 11)
    assert share_layers(10, [1, 1, 1]) == (4, 3, 3)
    assert share_layers(4, [100, 1, 1]) == (2, 1, 1)


def test_bad_input():
    with pytest.raises(ValueError, match="speeds"):
        split_layers([1.0, 1.0], 2, speeds=[1.0])
    with pytest.raises(ValueError, match="at least 0"):
        split_layers([1.0, -1.0], 2)
    with pytest.raises(ValueError, match="weights"):
        share_layers(4, [1, 0])
    with pytest.raises(ValueError, match="dealt out"):
        stage_sums((1, 2), [1.0])
    with pytest.raises(ValueError, match=r"memory\.limit: 2 numbers, found 1"):
        split_layers([1.0, 1.0], 2, memory=Memory((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, (1.0,)))
