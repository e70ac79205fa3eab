"""Whether a run goes on by itself when one of its jobs has ended, and why it ended: pure
decisions, from what the ranks, the batch script and Slurm have said.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.errors import Exit
from hpctrain.records import (
    FailureRecord,
    LaunchRecord,
    RestartRecord,
    StateRecord,
    StepRecord,
    Why,
)
from hpctrain.slurm.answers import JobNow

HANG = "HangError"
"""Error of the FailureRecord that the watchdog writes."""

_PERMANENT = frozenset(
    {
        "UsageError", "SpecError", "ImpossibleError", "SchedulerError", "CheckpointError",
        "RankFailedError", "AssertionError", "AttributeError", "ImportError", "IndentationError",
        "IndexError", "KeyError", "ModuleNotFoundError", "NameError",
        "RecursionError", "SyntaxError", "TypeError", "UnboundLocalError", "ValueError",
        "ZeroDivisionError",
    }
)  # fmt: skip
"""Errors of a job, its data or its code: the same again after any number of restarts."""

_FROM_OUTSIDE = frozenset({"preempted", "requeued", "node_failure", "signal", "bad_nodes"})
"""What no fault of the job brings about: it may come again before there was progress."""
_ASKED = frozenset({128 + signal.SIGUSR1, 128 + signal.SIGUSR2})
"""Exit codes of ranks that were asked to stop before they could handle that: who but Slurm and
people that ask sends these signals?"""
_PATIENCE = 3
"""Restarts in a row without progress that such a cause may bring about."""
_LATE_SECONDS = 30.0
"""Slurm ends jobs up to this long before or after their walltime (it looks every 30 s)."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Why an incarnation ended before its last step.

    Attributes:
        why, reason: as in RestartRecord.
        goes_on: nothing in it speaks against another try.
        by_slurm: Slurm has requeued the job already.
    """

    why: Why
    reason: str
    goes_on: bool = True
    by_slurm: bool = False


def ended(
    code: int,
    state: StateRecord | None,
    failures: Sequence[FailureRecord],
    job: JobNow | None,
    restart: int,
    due: str = "",
    late: bool = False,
) -> Ended | None:
    """Why an incarnation ended; None where it has done its last step.

    Args:
        code: exit status of srun.
        state: as the ranks of this incarnation wrote it, or None.
        failures: of this incarnation, first one first.
        job: what Slurm says of the job now, or None.
        restart: Slurm's count of requeues when this incarnation began.
        due: why Slurm ended the job, as its daemon wrote into the log, from :func:`due_to`.
        late: the batch script ended the ranks since the walltime was nearly over.
    """
    if state is not None and state.status == "finished":
        return None
    if state is None and code == 0 and not failures:
        return None
    asked = state is not None and "stop file" in state.reason
    if asked and state is not None and state.status == "stopped":
        return Ended("signal", state.reason, goes_on=False)
    if job is not None:
        found = _by_slurm(job, restart, due)
        if found is not None:
            return found
    if state is not None and state.status == "stopped":
        return _stopped(state.reason)
    if late:
        return Ended("walltime", "the ranks had not stopped when the walltime was nearly over")
    if failures:
        return _failed(failures)
    if code == Exit.STOPPED or code in _ASKED:
        return Ended("signal", "asked to stop before the ranks had begun")
    words = f"the ranks wrote no end and left with {code}{_signal(code)}: see logs/job.log"
    return Ended("rank_failure", words)


_DUE: dict[str, tuple[Why, str]] = {
    "PREEMPTION": ("preempted", "a job of higher priority took the nodes"),
    "NODE FAILURE": ("node_failure", "a node was lost"),
    "TIME LIMIT": ("walltime", "the walltime ended before the ranks had stopped"),
    "JOB REQUEUE": ("requeued", "somebody requeued the job, or Slurm for a reason of its own"),
}


def due_to(log: str) -> str:
    """Why Slurm ended a job, in its own words (``PREEMPTION``); empty where it did not say.

    Nothing else tells a preemption from a requeue: scontrol shows neither (tried on 22.05), but
    slurmstepd writes it into the log of the job.

    Args:
        log: what one incarnation has written.
    """
    # NODE FAILURE goes on with ", SEE SLURMCTLD LOG FOR DETAILS".
    found = re.findall(r"\*\*\* JOB \S+ .*CANCELLED AT \S+ DUE TO ([A-Z]+(?: [A-Z]+)*)", log)
    return found[-1] if found else ""


def _by_slurm(job: JobNow, restart: int, due: str) -> Ended | None:
    """What Slurm did to the job; None while it lets it run."""
    if job.state == "RUNNING":
        return None
    why, words = _DUE.get(due, ("requeued", "Slurm requeued the job"))
    if job.preempted:
        why, words = _DUE["PREEMPTION"]
    if job.restarts > restart or job.state in ("PENDING", "REQUEUED"):
        return Ended(why, words, by_slurm=True)
    if why in ("preempted", "node_failure") or job.state == "NODE_FAIL":
        return Ended(*((why, words) if due or job.preempted else _DUE["NODE FAILURE"]))
    late = job.time_limit is not None and job.run_seconds >= job.time_limit - _LATE_SECONDS
    if why == "walltime" or late:
        return Ended(*_DUE["TIME LIMIT"])
    return Ended("signal", "cancelled with scancel", goes_on=False)


def lost(state: StateRecord | None, due: str) -> Ended:
    """Why an incarnation ended whose batch script could not say so.

    Args:
        state: as its ranks wrote it, or None.
        due: from :func:`due_to`.
    """
    if due in _DUE:
        return Ended(*_DUE[due])
    if state is not None and state.status == "stopped":
        return Ended("requeued", f"Slurm requeued the job: {state.reason}")
    return Ended("node_failure", "a node was lost: neither ranks nor batch script wrote an end")


def _stopped(reason: str) -> Ended:
    if "walltime" in reason:
        return Ended("walltime", reason)
    if "bad nodes" in reason:
        return Ended("bad_nodes", reason)
    return Ended("signal", reason)


_CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection refused|remote process exited|"
    r"communicator was aborted",
    re.IGNORECASE,
)
"""What ranks say whose peer is gone: not the cause."""


def cause(failures: Sequence[FailureRecord]) -> tuple[FailureRecord, bool]:
    """The failure that the others follow from; False where it is not among them, since a rank
    that is killed writes nothing."""
    own = [one for one in failures if not _CONSEQUENCE.search(one.message)]
    return (own or failures)[0], bool(own)


def _failed(failures: Sequence[FailureRecord]) -> Ended:
    first, own = cause(failures)
    lines = first.message.splitlines() or ["no message"]
    at = f" at step {first.step}" if first.step >= 0 else ""
    words = f"rank {first.rank} on {first.host}{at}: {first.error}: {lines[0]}"
    if first.error == HANG:
        return Ended("hang", f"{lines[0]}")
    if not own:
        lost = f"rank {first.rank} on {first.host} lost its peer{at}"
        return Ended("rank_failure", f"a rank was killed or left without a word; {lost}")
    return Ended("rank_failure", words, goes_on=first.error not in _PERMANENT)


def _signal(code: int) -> str:
    try:
        return f" (killed by {signal.Signals(code - 128).name})" if code > 128 else ""
    except ValueError:
        return ""


def chain(
    launches: Sequence[LaunchRecord], restarts: Sequence[RestartRecord]
) -> list[RestartRecord]:
    """Restarts since a person last started the run."""
    first = max((one.attempt for one in launches if not one.automatic), default=0)
    return [one for one in restarts if one.attempt >= first and one.action != "stop"]


def refusal(
    end: Ended, history: Sequence[RestartRecord], from_step: int, max_restarts: int
) -> str | None:
    """Why a run does not go on by itself; None where it does.

    Args:
        end: of the incarnation that is over.
        history: restarts so far, from :func:`chain`, without this one.
        from_step: step of the newest stored checkpoint, 0 for none.
        max_restarts: the job's.
    """
    if not end.goes_on:
        if end.why == "rank_failure":
            return "the same would happen again"
        return "somebody asked for it"
    if max_restarts == 0:
        return "slurm.max_restarts is 0"
    if len(history) >= max_restarts:
        return f"it was restarted {len(history)} times, slurm.max_restarts is {max_restarts}"
    idle = 0
    for one in reversed(history):
        if one.from_step < from_step:
            break
        idle += 1
    patience = _PATIENCE if end.why in _FROM_OUTSIDE else 1
    if idle >= patience:
        return (
            f"no progress since the last restart: the newest checkpoint is that of step "
            f"{from_step} still"
            if idle == 1
            else f"no progress since {idle} restarts: the newest checkpoint is that of step "
            f"{from_step} still"
        )
    return None


def seconds_lost(steps: Sequence[StepRecord], from_step: int, began: float, over: float) -> float:
    """Seconds of work that are done again: since the state of the checkpoint was reached.

    Args:
        steps: the newest records of the run.
        from_step: step of the newest stored checkpoint.
        began: when the incarnation began, seconds since the epoch.
        over: when it ended.
    """
    reached = [one.time for one in steps if one.step == from_step and one.time >= began]
    return max(0.0, over - max([began, *reached[-1:]]))
