"""The automatic scheduler is never behind a hand-made one and keeps its memory limit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ImpossibleError
from hpctrain.schedule import Costs, find_problems, make, simulate

BY_HAND = {1: ["1f1b", "gpipe", "zb-h1", "zb-h2"], 2: ["zb-v", "v-half", "v-min", "hanayo"]}
times = st.floats(0.25, 2)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(1, 16),
    st.sampled_from([1, 2]),
    st.floats(0.3, 2.2),
    times,
    times,
    times,
    st.floats(0, 0.5),
)
def test_never_behind_a_hand_made_schedule(p, m, v, share, f, i, w, x):
    costs = Costs(forward=f, input_grad=i, weight_grad=w, transfer=x)
    limit = share * p
    try:
        auto = make("auto", ranks=p, chunks=v, micro_batches=m, costs=costs, limit=limit)
    except ImpossibleError:
        auto = None
    if auto is not None:
        assert find_problems(auto) == ()
        mine = simulate(auto, costs)
        assert max(mine.peak_activations) <= limit + 1e-6
    for name in BY_HAND[v]:
        other = simulate(make(name, ranks=p, micro_batches=m, transfers=False), costs)
        if max(other.peak_activations) <= limit:
            assert auto is not None
            assert mine.makespan <= other.makespan + 1e-9, name


@pytest.mark.parametrize(
    ("p", "m", "v", "limit", "makespan", "span"),
    [
        (4, 8, 1, 4, 27, 27),  # ZB-H1: 3 m + p - 1
        (4, 8, 1, 7, 27, 24),  # ZB-H2: no bubble on any rank
        (4, 8, 2, 4, 25.5, 24),  # ZB-V
        (8, 32, 1, 15, 103, 96),
        (8, 32, 2, 8, 99.5, 96),
    ],
)
def test_on_the_papers_own_terms(p, m, v, limit, makespan, span):
    schedule = make("auto", ranks=p, chunks=v, micro_batches=m, limit=limit)
    timeline = simulate(schedule)
    assert timeline.makespan <= makespan
    assert max(timeline.rank_spans) <= span
    assert max(timeline.peak_activations) <= limit


def test_more_memory_is_never_slower():
    before = float("inf")
    for limit in (2, 3, 4, 5):
        found = simulate(make("auto", ranks=4, micro_batches=12, limit=limit)).makespan
        assert found <= before
        before = found


def test_it_is_better_than_any_hand_made_one_where_those_do_not_fit():
    # between V-Min's memory and ZB-V's, and with a slow input gradient
    costs = Costs(forward=1.0, input_grad=1.3, weight_grad=0.7, transfer=0.1)
    mine = simulate(make("auto", ranks=8, micro_batches=24, costs=costs, limit=6), costs)
    for name in ("v-half", "v-min"):
        other = simulate(make(name, ranks=8, micro_batches=24), costs)
        assert max(other.peak_activations) <= 6
        assert mine.makespan < 0.97 * other.makespan


def test_too_little_memory_is_refused():
    with pytest.raises(ImpossibleError, match=r"at most 0\.5 activations"):
        make("auto", ranks=4, micro_batches=8, limit=0.5)


def test_it_is_quick_enough_for_a_command():
    schedule = make("auto", ranks=8, micro_batches=64)
    assert simulate(schedule).makespan == pytest.approx(3 * 64 + 7 / 2)
