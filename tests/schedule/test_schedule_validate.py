"""Every schedule passes the validator; whatever is broken does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpctrain.errors import ImpossibleError
from hpctrain.schedule import (
    Action,
    ActionKind,
    InvalidScheduleError,
    Schedule,
    find_problems,
    make,
    names,
    simulate,
    validate,
    without_transfers,
)

K = ActionKind
METHODS = [name for name in names() if name != "auto"]
SUFFIXES = ["", "+2bp", "+vocab", "+offload", "+fsdp", "+vocab+offload+fsdp", "+2bp+fsdp"]


def build(name: str, p: int, m: int, v: int | None, **options) -> Schedule:
    try:
        return make(name, ranks=p, chunks=v, micro_batches=m, **options)
    except ImpossibleError:
        assume(False)
        raise


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(METHODS),
    st.sampled_from(SUFFIXES),
    st.integers(1, 16),
    st.integers(1, 64),
    st.sampled_from([None, 1, 2, 3, 4]),
)
def test_every_schedule_validates(name, suffix, p, m, v):
    schedule = build(name + suffix, p, m, v)
    assert find_problems(schedule) == ()
    assert (schedule.ranks, schedule.micro_batches) == (p, m)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_at_a_size_it_allows(name):
    for p, m in ((2, 2), (2, 8), (4, 4), (4, 8), (8, 16)):
        validate(make(name, ranks=p, micro_batches=m))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(METHODS), st.integers(1, 6), st.integers(1, 12))
def test_passes_without_transfers_take_the_same_time(name, p, m):
    bare = build(name, p, m, None, transfers=False)
    full = build(name, p, m, None)
    assert find_problems(bare, passes_only=True) == ()
    assert without_transfers(full) == bare
    assert simulate(bare).makespan == simulate(full).makespan
    assert simulate(bare).peak_activations == simulate(full).peak_activations
    if p > 1:
        assert find_problems(bare)  # as a table to execute it lacks its transfers


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(METHODS), st.sampled_from(SUFFIXES), st.integers(1, 6), st.integers(1, 8))
def test_json_round_trip(name, suffix, p, m):
    schedule = build(name + suffix, p, m, None)
    assert Schedule.from_json(json.dumps(schedule.to_json())) == schedule


SMALL = [
    make(name, ranks=4, micro_batches=4)
    for name in (
        "1f1b",
        "zb-v",
        "interleaved",
        "bitpipe",
        "1f1b+vocab",
        "bfs+fsdp",
        "gpipe+offload",
    )
]


def edited(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return schedule.with_actions(tuple(rows))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_nothing_can_be_left_out_or_done_twice(data):
    schedule = data.draw(st.sampled_from(SMALL))
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    at = data.draw(st.integers(0, len(row) - 2))  # OPT may be left out
    victim = row[at]
    assert find_problems(edited(schedule, rank, row[:at] + row[at + 1 :])), victim
    assert find_problems(edited(schedule, rank, [*row[: at + 1], victim, *row[at + 1 :]])), victim


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_pass_cannot_change_its_rank_stage_or_micro_batch(data):
    schedule = data.draw(st.sampled_from(SMALL))
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    places = [i for i, a in enumerate(row) if a.micro_batch is not None]
    at = data.draw(st.sampled_from(places))
    change = data.draw(st.sampled_from(["stage", "micro_batch", "peer", "chunk"]))
    value = getattr(row[at], change)
    assume(value is not None)
    row[at] = row[at]._replace(**{change: value + data.draw(st.sampled_from([-1, 1, 100]))})
    assert find_problems(edited(schedule, rank, row))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_a_receive_brings_cannot_be_used_before(data):
    schedule = data.draw(st.sampled_from(SMALL[:4]))
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    receives = [i for i, a in enumerate(row) if a.kind in (K.RECV_F, K.RECV_B)]
    at = data.draw(st.sampled_from(receives))
    user = {K.RECV_F: (K.F,), K.RECV_B: (K.B, K.I)}[row[at].kind]
    use = next(i for i, a in enumerate(row) if a.kind in user and a[1:3] == row[at][1:3])
    moved = row[:at] + row[at + 1 : use + 1] + [row[at]] + row[use + 1 :]
    assert find_problems(edited(schedule, rank, moved))


def test_the_classic_deadlock_is_found():
    """Two ranks in steady 1F1B that both send before they receive."""
    schedule = make("1f1b", ranks=2, micro_batches=4)
    rows = []
    for rank in range(2):
        row = []
        for action in without_transfers(schedule).actions[rank]:
            kind, stage, j, chunk, _ = action
            before, after = [], []
            if kind is K.F and rank == 1:
                before = [Action(K.RECV_F, stage, j, chunk, 0)]
            if kind is K.F and rank == 0:
                after = [Action(K.SEND_F, stage, j, chunk, 1)]
            if kind is K.B and rank == 1:
                after = [Action(K.SEND_B, stage, j, chunk, 0)]
            if kind is K.B and rank == 0:
                before = [Action(K.RECV_B, stage, j, chunk, 1)]
            row += [*before, action, *after]
        rows.append(tuple(row))
    naive = schedule.with_actions(tuple(rows))
    # rank 0: F0 send F1 send recv B0 ...; rank 1: recv F0 B0 send recv ...
    problems = find_problems(naive)
    assert problems
    assert all("stuck" in problem for problem in problems)
    assert find_problems(schedule) == ()


def test_ranks_that_wait_for_each_other_are_named():
    schedule = make("gpipe", ranks=2, micro_batches=1, transfers=False)
    f0 = Action(K.F, 0, 0, 0)
    f1, b1 = Action(K.F, 1, 0, 0), Action(K.B, 1, 0, 0)
    with pytest.raises(InvalidScheduleError, match="rank 1: B stage 1 micro-batch 0"):
        simulate(schedule.with_actions(((f0, Action(K.B, 0, 0, 0)), (b1, f1))))
    v = make("zb-v", ranks=2, micro_batches=2, transfers=False)
    rows = [list(row) for row in v.actions]
    late = rows[1].index(Action(K.F, 1, 0, 0))
    rows[1].insert(rows[1].index(Action(K.F, 2, 1, 1)), rows[1].pop(late))
    with pytest.raises(InvalidScheduleError):
        simulate(v.with_actions(tuple(tuple(row) for row in rows)))


def test_a_broken_promise_of_memory_is_found():
    lazy = make("gpipe", ranks=4, micro_batches=8)
    claim = make("1f1b", ranks=4, micro_batches=8).claim
    problems = find_problems(lazy.with_actions(lazy.actions, claim=claim))
    assert "rank 0: holds 8 activations, gpipe claims 4" in problems


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format"),
        ({"version": 2}, "version"),
        ({"actions": [[["NOPE", 0]]]}, "NOPE"),
        ({"actions": [[["F", "0"]]]}, "integer"),
        ({"actions": [[[]]]}, "1 to 5 cells"),
        ({"routes": [[0, 0]]}, "each at least once"),
        ({"ranks": 0}, "at least 1 rank"),
        ({"micro_batches": 0}, "at least 1 micro-batch"),
        ({"claim": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_a_document_that_is_no_schedule_is_refused(change, message):
    document = make("1f1b", ranks=2, micro_batches=2).to_json() | change
    with pytest.raises(ValueError, match=message):
        Schedule.from_json(document)


@pytest.mark.parametrize("key", ["name", "routes", "micro_batches", "actions", "claim", "route_of"])
def test_a_missing_key_is_named(key):
    document = make("1f1b", ranks=2, micro_batches=2).to_json()
    del document[key]
    with pytest.raises(ValueError, match=key):
        Schedule.from_json(document)
