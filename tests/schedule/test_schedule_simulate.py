"""The simulator against time lines worked out by hand, and against bounds nothing can beat."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpctrain.errors import ImpossibleError
from hpctrain.schedule import ActionKind, Costs, make, names, simulate

K = ActionKind
METHODS = [name for name in names() if name != "auto"]


def starts(timeline, kind: ActionKind) -> list[list[float]]:
    """Start times of one kind, rank by rank."""
    rows: list[list[float]] = [[] for _ in range(timeline.schedule.ranks)]
    for rank, action, start, _ in timeline.spans():
        if action.kind is kind:
            rows[rank].append(start)
    return rows


def test_1f1b_on_two_ranks_by_hand():
    timeline = simulate(make("1f1b", ranks=2, micro_batches=3))
    # rank 0: F0 F1 .  B0 B0 F2 B1 B1 .  B2 B2      rank 1: . F0 B0 B0 F1 B1 B1 F2 B2 B2 .
    assert starts(timeline, K.F) == [[0, 1, 6], [1, 4, 7]]
    assert starts(timeline, K.B) == [[4, 7, 10], [2, 5, 8]]
    assert timeline.makespan == 12
    assert timeline.busy == (9, 9)
    assert timeline.bubble_fraction == pytest.approx(0.25)


def test_transfers_take_time_and_run_beside_the_computation():
    schedule = make("gpipe", ranks=2, micro_batches=2)
    timeline = simulate(schedule, Costs(transfer=0.5))
    assert starts(timeline, K.F) == [[0, 1], [1.5, 2.5]]
    assert starts(timeline, K.B) == [[6, 8], [3.5, 5.5]]
    assert timeline.makespan == 10


def test_transfers_of_one_link_follow_one_another():
    timeline = simulate(make("gpipe", ranks=2, micro_batches=3), Costs(transfer=3.0))
    # sent at 1, 2, 3; one at a time: there at 4, 7, 10
    assert starts(timeline, K.F)[1] == [4, 7, 10]


def test_every_link_can_have_its_own_time():
    slow_down = ((0.0, 2.0), (0.25, 0.0))
    timeline = simulate(make("gpipe", ranks=2, micro_batches=1), Costs(transfer=slow_down))
    assert starts(timeline, K.F) == [[0], [3]]
    assert starts(timeline, K.B) == [[6.25], [4]]


def test_times_of_single_stages():
    costs = Costs(forward=(1.0, 2.0), input_grad=(1.0, 3.0), weight_grad=(0.5, 0.25))
    timeline = simulate(make("gpipe", ranks=2, micro_batches=1), costs)
    assert starts(timeline, K.B) == [[1 + 2 + 3.25], [3]]
    assert timeline.makespan == 1 + 2 + 3.25 + 1.5
    own = simulate(make("gpipe", ranks=2, micro_batches=1), Costs(backward=(4.0, 5.0)))
    assert own.makespan == 1 + 1 + 5 + 4


def test_chunks_share_the_time_of_a_whole_stage():
    whole = simulate(make("1f1b", ranks=4, micro_batches=8))
    for v in (2, 4):
        looped = simulate(make("interleaved", ranks=4, chunks=v, micro_batches=8))
        assert looped.busy == pytest.approx(whole.busy)


def test_memory_over_time_by_hand():
    timeline = simulate(make("1f1b", ranks=2, micro_batches=3))
    assert timeline.memory(0) == [(0, 1), (1, 2), (6, 2), (9, 1), (12, 0)]
    assert timeline.memory(1) == [(1, 1), (4, 1), (7, 1), (10, 0)]
    assert timeline.peak_activations == (2, 1)


def test_after_the_input_gradient_a_share_is_kept_for_the_weights():
    schedule = make("gpipe+2bp", ranks=1, micro_batches=2)
    # F0 F1 I0 I1 W0 W1
    quarter = simulate(schedule, Costs(weight_grad_share=0.25))
    assert quarter.memory(0) == [(0, 1), (1, 2), (3, 1.25), (4, 0.5), (5, 0.25), (6, 0)]
    whole = simulate(schedule)
    assert whole.memory(0)[-2:] == [(5, 1), (6, 0)]


def test_stages_can_keep_different_amounts():
    timeline = simulate(make("1f1b", ranks=2, micro_batches=4), Costs(activation=(3.0, 1.0)))
    assert timeline.peak_activations == (6, 1)


def test_micro_batches_in_flight_of_each_stage():
    assert simulate(make("1f1b", ranks=4, micro_batches=8)).in_flight == (4, 3, 2, 1)
    assert simulate(make("gpipe", ranks=2, micro_batches=5)).in_flight == (5, 5)
    v = simulate(make("zb-v", ranks=4, micro_batches=8))
    assert v.in_flight == (8, 7, 6, 5, 4, 3, 2, 1)
    # rank 0 has the first and the last stage, which are not at their most at one time
    assert (v.in_flight[0] + v.in_flight[-1]) / 2 >= v.peak_activations[0] == 4


def test_offloaded_activations_leave_when_the_copy_ends():
    schedule = make("gpipe+offload", ranks=1, micro_batches=3, fraction=1.0, transfers=False)
    # F0 out F1 out F2 ... : copies of 1.5 follow one another, 1-2.5 and 2.5-4
    timeline = simulate(schedule, Costs(offload=1.5, reload=0.5))
    copies = [(s.start, s.end) for s in timeline.spans() if s.action.kind is K.OFFLOAD]
    assert copies[:2] == [(1, 2.5), (2.5, 4)]
    free = simulate(schedule)
    assert max(free.peak_activations) < max(timeline.peak_activations) <= 3


def test_a_gather_is_waited_for_and_the_optimizer_waits_for_the_scatter():
    schedule = make("gpipe+fsdp", ranks=1, micro_batches=1)
    timeline = simulate(schedule, Costs(gather=2.0, scatter=5.0, optimizer=1.0))
    span = {s.action.kind: (s.start, s.end) for s in timeline.spans()}
    assert span[K.GATHER] == (0, 2)
    assert span[K.F] == (2, 3)
    assert span[K.SCATTER] == (5, 10)
    assert span[K.OPT] == (10, 11)
    assert timeline.busy == (4,)


def test_the_optimizer_waits_for_the_other_copy_of_its_stages():
    schedule = make("bitpipe", ranks=2, micro_batches=2)
    timeline = simulate(schedule, Costs(reduce=4.0, optimizer=1.0))
    last_backward = max(s.end for s in timeline.spans() if s.action.kind is K.B)
    steps = [s.start for s in timeline.spans() if s.action.kind is K.OPT]
    assert max(steps) == last_backward + 4.0 / 2  # a chunk is half of a stage


def test_the_output_layer_is_waited_for_on_all_ranks():
    schedule = make("1f1b+vocab", ranks=2, micro_batches=1)
    costs = Costs(vocabulary_forward=0.5, vocabulary_weight_grad=0.25, collective=0.125)
    timeline = simulate(schedule, costs)
    embedded = 0.125  # E takes no time, its sum does
    assert starts(timeline, K.F) == [[embedded], [embedded + 1]]
    output = embedded + 2 + 0.125
    assert starts(timeline, K.S) == [[output], [output]]
    assert starts(timeline, K.B)[1] == [output + 0.5 + 0.125]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(METHODS),
    st.integers(1, 8),
    st.integers(1, 16),
    st.sampled_from([None, 2, 4]),
    st.floats(0.1, 4),
    st.floats(0.1, 4),
    st.floats(0.1, 4),
    st.floats(0, 2),
)
def test_nothing_is_faster_than_its_work_and_its_longest_chain(name, p, m, v, f, i, w, x):
    try:
        schedule = make(name, ranks=p, chunks=v, micro_batches=m, transfers=False)
    except ImpossibleError:
        assume(False)
        raise
    costs = Costs(forward=f, input_grad=i, weight_grad=w, transfer=x)
    timeline = simulate(schedule, costs)
    work = m * (f + i + w)
    assert timeline.busy == pytest.approx((work,) * p)
    route = schedule.stages.routes[0]
    hops = sum(a != b for a, b in pairwise(route))
    backward = i if schedule.split_backward else i + w
    chain = p * (f + backward) + 2 * hops * x
    assert timeline.makespan >= max(work, chain) * (1 - 1e-9)
    assert 0 <= timeline.overlapped_bubble_fraction <= timeline.bubble_fraction + 1e-9 < 1
    for rank in range(p):
        assert timeline.memory(rank)[-1][1] == pytest.approx(0, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(METHODS), st.integers(2, 6), st.integers(2, 12), st.floats(1.01, 3))
def test_time_scales_and_slower_parts_never_help(name, p, m, factor):
    try:
        schedule = make(name, ranks=p, micro_batches=m, transfers=False)
    except ImpossibleError:
        assume(False)
        raise
    base = simulate(schedule, Costs(transfer=0.25))
    scaled = simulate(
        schedule,
        Costs(forward=factor, input_grad=factor, weight_grad=factor, transfer=0.25 * factor),
    )
    assert scaled.makespan == pytest.approx(base.makespan * factor)
    for slower in (
        Costs(transfer=0.25 * factor),
        Costs(forward=factor, transfer=0.25),
        Costs(weight_grad=factor, transfer=0.25),
    ):
        assert simulate(schedule, slower).makespan >= base.makespan - 1e-9


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1.0}, "forward"),
        ({"transfer": float("nan")}, "transfer"),
        ({"weight_grad_share": 1.5}, "weight_grad_share"),
        ({"input_grad": "fast"}, "numbers"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        Costs(**costs)


def test_costs_that_do_not_fit_the_schedule_are_refused():
    schedule = make("1f1b", ranks=4, micro_batches=4)
    with pytest.raises(ValueError, match="4 stages, found 3"):
        simulate(schedule, Costs(forward=(1.0, 1.0, 1.0)))
    with pytest.raises(ValueError, match="4 x 4"):
        simulate(schedule, Costs(transfer=((0.0, 1.0), (1.0, 0.0))))


def test_a_large_pipeline_is_simulated_in_well_under_a_second():
    schedule = make("1f1b", ranks=64, micro_batches=512, transfers=False)
    began = time.process_time()
    timeline = simulate(schedule)
    assert time.process_time() - began < 1.0
    assert timeline.bubble_fraction == pytest.approx(63 / (512 + 63))


def test_a_planner_can_look_at_a_hundred_schedules_a_second():
    began = time.process_time()
    for _ in range(20):
        for name in ("1f1b", "zb-h1", "zb-v", "v-half", "interleaved"):
            simulate(make(name, ranks=4, micro_batches=16, transfers=False))
    assert time.process_time() - began < 1.0
