"""Why a job ended and whether the run goes on, for each way of ending."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from hpctrain.records import FailureRecord, LaunchRecord, RestartRecord, StateRecord, StepRecord
from hpctrain.slurm.answers import JobNow
from hpctrain.slurm.lifecycle import (
    Ended,
    chain,
    due_to,
    ended,
    lost,
    refusal,
    seconds_lost,
)


def state(status: str, reason: str = "") -> StateRecord:
    return StateRecord(status, 8, 40, 100.0, 2, reason)  # type: ignore[arg-type]


def failure(error: str, message: str = "no") -> FailureRecord:
    return FailureRecord(1, "node2", 100.0, error, message, "", step=8)


def now(state: str, restarts: int = 0, **more: Any) -> JobNow:
    keys = {"preempted": False, "run_seconds": 60, "time_limit": 600, **more}
    return JobNow(state, restarts, **keys)


RUNNING = now("RUNNING")
DEADLINE = state("stopped", "deadline: the walltime ends within the margin")
USR1 = state("stopped", "signal SIGUSR1: the scheduler announces the end of the walltime")
USR2 = state("stopped", "signal SIGUSR2")
TERM = state("stopped", "signal SIGTERM: cancelled, preempted or requeued by the scheduler")
ASKED = state("stopped", "stop file: someone asked with hpctrain cancel or Ctrl-C")
BAD = state("stopped", "preflight: bad nodes node3: node3: computes at 1 GFLOP/s")


@pytest.mark.parametrize(
    ("code", "state", "failures", "job", "why", "goes_on", "by_slurm"),
    [
        (75, DEADLINE, [], RUNNING, "walltime", True, False),
        (75, USR1, [], RUNNING, "walltime", True, False),
        (143, USR2, [], RUNNING, "signal", True, False),
        (75, ASKED, [], RUNNING, "signal", False, False),
        (75, BAD, [], RUNNING, "bad_nodes", True, False),
        # Slurm's restart count grows when it decides to requeue.
        (75, TERM, [], now("COMPLETING", 1), "requeued", True, True),
        (75, TERM, [], now("PENDING", 1), "requeued", True, True),
        (75, TERM, [], now("COMPLETING", 1, preempted=True), "preempted", True, True),
        (75, TERM, [], now("COMPLETING", preempted=True), "preempted", True, False),
        (75, TERM, [], now("COMPLETING"), "signal", False, False),  # scancel
        (137, None, [], now("COMPLETING", run_seconds=590), "walltime", True, False),
        (75, TERM, [], None, "signal", True, False),  # Slurm does not answer
        (6, state("running"), [failure("RuntimeError")], RUNNING, "rank_failure", True, False),
        (6, state("running"), [failure("OSError")], RUNNING, "rank_failure", True, False),
        (6, state("running"), [failure("SystemExit")], RUNNING, "rank_failure", True, False),
        (6, state("running"), [failure("HangError")], RUNNING, "hang", True, False),
        (6, state("running"), [failure("NameError")], RUNNING, "rank_failure", False, False),
        (6, state("running"), [failure("RankFailedError")], RUNNING, "rank_failure", False, False),
        (5, None, [failure("CheckpointError")], RUNNING, "rank_failure", False, False),
        (3, None, [failure("ImpossibleError")], RUNNING, "rank_failure", False, False),
        (143, state("running"), [], RUNNING, "rank_failure", True, False),
        (3, state("running"), [], RUNNING, "rank_failure", True, False),
        (75, None, [], RUNNING, "signal", True, False),
        (128 + signal.SIGUSR1, None, [], RUNNING, "signal", True, False),
        (128 + signal.SIGUSR2, None, [], RUNNING, "signal", True, False),
        (128 + signal.SIGSEGV, None, [], RUNNING, "rank_failure", True, False),
    ],
)
def test_every_way_of_ending(
    code: int, state: Any, failures: Any, job: Any, why: str, goes_on: bool, by_slurm: bool
) -> None:
    found = ended(code, state, failures, job, 0)
    assert found is not None
    assert (found.why, found.goes_on, found.by_slurm) == (why, goes_on, by_slurm)
    assert found.reason


def test_those_that_lost_their_peer_are_not_the_cause() -> None:
    gloo = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection closed by peer"
    both = [failure("RuntimeError", gloo), failure("NameError", "name 'lr' is not defined")]
    found = ended(6, state("running"), both, RUNNING, 0)
    assert found is not None
    assert (found.goes_on, "NameError" in found.reason) == (False, True)
    killed = ended(6, state("running"), both[:1], RUNNING, 0)
    assert killed is not None
    assert killed.goes_on
    said = "a rank was killed or left without a word; rank 1 on node2 lost its peer at step 8"
    assert killed.reason == said


LOG = """\
slurmstepd: error: *** JOB 4769 ON node7 CANCELLED AT 2026-11-29T19:57:03 DUE TO PREEMPTION ***
slurmstepd-node7: error: *** STEP 4769.0 ON node7 CANCELLED AT 2026-11-29T19:57:03 DUE TO X ***
"""


def test_slurms_own_word_for_why() -> None:
    assert due_to(LOG) == "PREEMPTION"
    assert due_to("*** JOB 1 ON node4 CANCELLED AT 2026-11-29T19:57:02 ***") == ""
    lost_node = (
        "*** JOB 1 ON n4 CANCELLED AT X DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
    )
    assert due_to(lost_node) == "NODE FAILURE"
    for due, why in (("PREEMPTION", "preempted"), ("JOB REQUEUE", "requeued"),
                     ("NODE FAILURE", "node_failure"), ("", "requeued")):  # fmt: skip
        found = ended(75, TERM, [], now("COMPLETING", 1), 0, due)
        assert found is not None
        assert (found.why, found.by_slurm) == (why, True)
    limit = ended(75, None, [], now("COMPLETING"), 0, "TIME LIMIT")
    assert limit is not None
    assert (limit.why, limit.goes_on) == ("walltime", True)


def test_ranks_that_the_script_ended_before_the_walltime_did() -> None:
    peer = failure("RuntimeError", "Connection closed by peer")
    for state_, failures in ((state("running"), []), (state("running"), [peer]), (None, [])):
        found = ended(143, state_, failures, RUNNING, 0, late=True)
        assert found is not None
        assert (found.why, found.goes_on, found.by_slurm) == ("walltime", True, False)
    assert ended(143, state("finished"), [], RUNNING, 0, late=True) is None


def test_an_incarnation_that_could_not_say_how_it_ended() -> None:
    assert lost(state("running"), "").why == "node_failure"
    assert lost(TERM, "").why == "requeued"
    assert lost(TERM, "PREEMPTION").why == "preempted"


def test_a_finished_run_has_not_ended_too_early() -> None:
    assert ended(143, state("finished"), [], RUNNING, 0) is None
    assert ended(0, None, [], RUNNING, 0) is None


def test_a_requeue_that_was_before_this_incarnation_counts_for_nothing() -> None:
    found = ended(75, USR2, [], now("RUNNING", 3), 3)
    assert found is not None
    assert not found.by_slurm


def restart(attempt: int, from_step: int, action: Any = "requeue") -> RestartRecord:
    return RestartRecord(attempt, 1.0, "rank_failure", "", action, from_step, from_step, "", 0.0)


FAILED = Ended("rank_failure", "it broke")
PREEMPTED = Ended("preempted", "taken")


@pytest.mark.parametrize(
    ("end", "steps", "from_step", "most", "said"),
    [
        (FAILED, [], 0, 20, None),  # once more, even from the start
        (FAILED, [0], 0, 20, "no progress since the last restart"),
        (FAILED, [0], 5, 20, None),
        (FAILED, [0, 5, 10], 10, 20, "no progress since the last restart"),
        (FAILED, [0, 5, 10], 15, 3, "restarted 3 times, slurm.max_restarts is 3"),
        (FAILED, [0, 5], 10, 3, None),
        (FAILED, [], 5, 0, "slurm.max_restarts is 0"),
        (PREEMPTED, [5], 5, 20, None),  # no fault of the job
        (PREEMPTED, [5, 5], 5, 20, None),
        (PREEMPTED, [5, 5, 5], 5, 20, "no progress since 3 restarts"),
        (PREEMPTED, [0, 5, 5], 5, 20, None),
        (Ended("signal", "asked", goes_on=False), [], 5, 20, "somebody asked"),
        (Ended("rank_failure", "typo", goes_on=False), [], 5, 20, "the same would happen again"),
    ],
)
def test_when_a_run_stops(
    end: Ended, steps: list[int], from_step: int, most: int, said: str | None
) -> None:
    history = [restart(number, step) for number, step in enumerate(steps)]
    found = refusal(end, history, from_step, most)
    assert found is None if said is None else said in (found or "")


def test_a_start_by_hand_begins_a_new_count() -> None:
    launches = [
        LaunchRecord(n, "slurm", 0.0, 2, automatic=automatic)
        for n, automatic in enumerate([False, True, False, True])
    ]
    restarts = [restart(0, 5), restart(1, 5, "stop"), restart(2, 10)]
    assert chain(launches, restarts) == [restarts[2]]


def test_seconds_lost_are_those_since_the_state_of_the_checkpoint() -> None:
    steps = [StepRecord(n, 100.0 + n, 1.0, 0.1, 1.0, n, 1.0, 1.0) for n in range(1, 9)]
    assert seconds_lost(steps, 5, 90.0, 110.0) == pytest.approx(5.0)  # step 5 ended at 105
    assert seconds_lost(steps, 0, 99.0, 110.0) == pytest.approx(11.0)
    assert seconds_lost(steps, 8, 99.0, 108.0) == 0.0
    # A step of that number of an earlier incarnation is not this one's.
    assert seconds_lost(steps, 5, 107.0, 110.0) == pytest.approx(3.0)
