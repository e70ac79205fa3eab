"""Sequences of mixed lengths over ranks: plans against bounds, and against static packing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ImpossibleError
from hpctrain.schedule.lengths import (
    Costs,
    degrees,
    fill,
    long_tailed,
    plan_lengths,
    static_plan,
)
from hpctrain.testing.ranks import run_ranks

# A model of 7e9 parameters, 32 layers of width 4096 with 8 key-value heads of 128, at 150 TFLOP/s
# and 40 GB/s: 6 FLOP a parameter and token, 12·width a layer and pair of tokens.
COSTS = Costs(
    token=6 * 7e9 / 150e12,
    pair=12 * 32 * 4096 / 150e12,
    wire=32 * 2 * 1024 * 2 * 4 / 40e9,
    hop=32 * 3 * 20e-6,
)


def test_group_sizes_are_nested():
    assert degrees(8) == [1, 2, 4, 8]
    assert degrees(12) == [1, 2, 4, 12]
    assert degrees(7) == [1, 7]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=40),
    st.sampled_from([1, 2, 6, 8]),
    st.integers(500, 1000),
)
def test_every_sequence_is_placed_once_where_it_fits(lengths, ranks, capacity):
    if max(lengths) > ranks * capacity:
        with pytest.raises(ImpossibleError, match="does not fit"):
            plan_lengths(lengths, ranks, capacity, COSTS)
        return
    plan = plan_lengths(lengths, ranks, capacity, COSTS)
    placed = sorted(i for pack in plan.packs for i in pack.sequences)
    assert placed == list(range(len(lengths)))
    for pack in plan.packs:
        assert sum(lengths[i] for i in pack.sequences) <= pack.degree * capacity
        assert pack.first % pack.degree == 0 and pack.ranks.stop <= ranks
    sizes = [pack.degree for pack in plan.packs]
    assert sizes == sorted(sizes, reverse=True)
    # No plan is faster than the work shared evenly, or than the longest sequence on all ranks.
    assert plan.makespan >= plan.work / ranks * (1 - 1e-9)
    assert plan.idle >= -1e-9 * plan.work
    # Ranks wait for nobody before the end: what they do adds up to when they are done.
    for rank in range(ranks):
        busy = sum(pack.seconds for pack in plan.of_rank(rank))
        assert busy == pytest.approx(plan.seconds[rank])
    for pack in plan.packs:
        alone = [COSTS.seconds(lengths[i], pack.degree) for i in pack.sequences]
        assert pack.seconds == pytest.approx(sum(alone))


def test_equal_sequences_need_no_groups():
    plan = plan_lengths([1000] * 16, 8, 4000, COSTS)
    assert {pack.degree for pack in plan.packs} == {1}
    assert plan.idle == pytest.approx(0, abs=1e-9 * plan.work)


def test_one_long_sequence_is_spread_as_widely_as_memory_or_time_ask():
    (pack,) = plan_lengths([8000], 8, 1000, COSTS).packs
    assert pack.degree == 8
    plan = plan_lengths([8000] + [50] * 4, 8, 4000, COSTS)
    assert plan.packs[0].degree == 8, "two ranks would do for memory; all others would wait"


def test_first_fit_decreasing():
    assert fill([(0, 3), (1, 7), (2, 4), (3, 6)], 10) == [[1, 0], [3, 2]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ranks", "longest"), [(8, 32768), (32, 131072), (64, 131072)])
def test_fewer_idle_slots_than_static_packing(ranks, longest, seed):
    lengths = long_tailed(8 * ranks, 2048, longest, seed)
    capacity = 8192
    static = static_plan(lengths, ranks, capacity, COSTS)
    planned = plan_lengths(lengths, ranks, capacity, COSTS)
    assert static.idle / planned.idle >= 1.3
    assert planned.idle < 0.02 * planned.work
    assert planned.makespan < static.makespan


def sleep_through(plans):
    """Seconds of each plan on ranks that sleep as long as they would compute, groups together."""
    import time

    from mpi4py import MPI

    from hpctrain.schedule.lengths import degrees

    comm = MPI.COMM_WORLD
    groups = {size: comm.Split(comm.rank // size) for size in degrees(comm.size)}  # once
    found = []
    for packs in plans:
        comm.Barrier()
        began = time.perf_counter()
        for degree, first, seconds in packs:
            if first <= comm.rank < first + degree:
                groups[degree].Barrier()  # a ring starts when all are there
                time.sleep(seconds)
        comm.Barrier()
        found.append(time.perf_counter() - began)
    return found


@pytest.mark.mpi
def test_on_ranks_that_sleep():
    """The simulation's times are those of real ranks in real groups."""
    lengths = long_tailed(24, 2048, 32768, 2)
    planned = plan_lengths(lengths, 4, 8192, COSTS)
    static = static_plan(lengths, 4, 8192, COSTS)
    scale = 2.0 / planned.makespan
    plans = [[(p.degree, p.first, p.seconds * scale) for p in x.packs] for x in (planned, static)]
    times = run_ranks(4, sleep_through, plans)
    took = [max(rank[i] for rank in times) for i in (0, 1)]
    assert took[0] == pytest.approx(2.0, rel=0.15)
    assert took[1] == pytest.approx(static.makespan * scale, rel=0.15)
    idle = [4 * seconds - planned.work * scale for seconds in took]
    assert idle[1] / idle[0] >= 1.3
