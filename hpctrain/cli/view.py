"""Where a run stands: what its own files, its launcher and Slurm say, put together once."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import Any

from hpctrain import errors
from hpctrain.cli.metrics import Pace, recent
from hpctrain.errors import Exit, HpctrainError, SchedulerError
from hpctrain.records import FailureRecord, LaunchRecord, RestartRecord, StateRecord, read_json
from hpctrain.rundir import RunDir

FINAL = frozenset({"finished", "stopped", "failed", "cancelled"})
"""Status words after which nothing of a run is left running."""
_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"})
_ACTIVE = frozenset({"starting", "running", "stopping"})


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment.

    Attributes:
        run: its directory.
        status: a RunStatus, or ``pending`` while Slurm has not started the job.
        reason: why it pends, stopped or failed; empty while all is well.
        step, total_steps: last finished step, and how many there will be.
        pace: newest steps of this incarnation, or of the one before until it has done one.
        begun: this incarnation has done a step.
        state: as the ranks last wrote it, or None.
        launch: newest LaunchRecord, or None.
        attempts: incarnations so far.
        failures: of this incarnation, the one that the others follow from first.
        slurm: what Slurm says, or None.
        restarts: incarnations that ended too early, and what followed.
    """

    run: RunDir
    status: str
    reason: str
    step: int
    total_steps: int
    pace: Pace
    begun: bool
    state: StateRecord | None
    launch: LaunchRecord | None
    attempts: int
    failures: tuple[FailureRecord, ...]
    slurm: SlurmWord | None = None
    restarts: tuple[RestartRecord, ...] = ()

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def durable_step(self) -> int:
        """Last step whose checkpoint is committed, -1 for none."""
        return -1 if self.state is None else self.state.durable_step

    @property
    def world_size(self) -> int | None:
        """Ranks of the present or last incarnation."""
        if self.launch is None:
            return None
        state = self.state
        told = state is not None and state.world_size and state.time > self.launch.submitted
        return state.world_size if state is not None and told else self.launch.world_size

    @property
    def has_eta(self) -> bool:
        """Whether it is at work, and the time to go can be told."""
        return self.begun and not self.is_final and self.status != "pending"

    @property
    def restarted(self) -> int:
        """Times that the run went on by itself."""
        return sum(one.action != "stop" for one in self.restarts)

    @property
    def walltime_left(self) -> float | None:
        """Seconds until Slurm ends the job; None where it does not run or has no end."""
        if self.slurm is None or self.slurm.end is None or self.slurm.over or self.slurm.waiting:
            return None
        return max(0.0, self.slurm.end - time.time())

    @property
    def would_lose(self) -> float | None:
        """Seconds of work that would have to be done again if the run died now."""
        if self.is_final or self.status == "pending" or not self.begun or self.launch is None:
            return None
        since = [one.time for one in self.pace.records if one.step <= self.durable_step]
        if since:
            return max(0.0, time.time() - since[-1])
        records = self.pace.records
        # The step of the checkpoint is not among the newest records: at their pace.
        if self.durable_step > 0 and len(records) > 1:
            first, last = records[0], records[-1]
            pace = (last.time - first.time) / max(1, last.step - first.step)
            return time.time() - last.time + pace * (last.step - self.durable_step)
        begun = self.launch.started or records[0].time - records[0].step_seconds
        return max(0.0, time.time() - begun)

    @property
    def exit_code(self) -> Exit | None:
        """Exit code of the run; None while it is not over."""
        if self.status == "failed":
            return failure_code(self.failures)
        codes = {"finished": Exit.OK, "stopped": Exit.STOPPED, "cancelled": Exit.STOPPED}
        return codes.get(self.status)

    def to_dict(self) -> dict[str, Any]:
        """The ``--json`` answer of ``hpctrain status``."""
        last, launch = self.pace.last, self.launch
        return {
            "run": self.run.id,
            "path": str(self.run.root),
            "status": self.status,
            "reason": self.reason,
            "step": self.step,
            "total_steps": self.total_steps,
            "loss": None if last is None else last.loss,
            "tokens_per_second": self.pace.tokens_per_second,
            "comm": {} if last is None else last.comm,
            "seconds_left": self.pace.seconds_left if self.has_eta else None,
            "durable_step": self.durable_step,
            "resumed_from": -1 if self.state is None else self.state.resumed_from,
            "attempt": self.attempts - 1,
            "restarts": self.restarted,
            "walltime_left": self.walltime_left,
            "would_lose_seconds": self.would_lose,
            "launcher": None if launch is None else launch.launcher,
            "world_size": self.world_size,
            "host": None if launch is None else launch.host,
            "job_id": launch.job_id if launch is not None and launch.job_id else None,
            "slurm_state": None if self.slurm is None else self.slurm.state,
            "nodes": None if self.slurm is None else self.slurm.nodes,
            "failure": self.failures[0].to_dict() if self.failures else None,
            "failed_ranks": [failure.rank for failure in self.failures],
            "exit_code": None if self.exit_code is None else int(self.exit_code),
            "updated": None if self.state is None else self.state.time,
        }


@dataclass(frozen=True, slots=True)
class SlurmWord:
    """What Slurm says about the job of a run.

    Attributes:
        state: Slurm's own word, for example ``PENDING``.
        over: the job has ended, however.
        waiting: the job has not started.
        reason: why it waits or failed, in words.
        nodes: its node list, empty where it has none.
        end: when Slurm ends it; None where it says nothing.
    """

    state: str
    over: bool
    waiting: bool
    reason: str = ""
    nodes: str = ""
    end: float | None = None


def look(run: RunDir, *, ask_slurm: bool = True) -> RunView:
    """Read everything about a run once.

    Args:
        run: whose state.
        ask_slurm: False where Slurm was asked a moment ago or is known to be of no help.
    """
    launches = run.read_launches()
    launch = launches[-1] if launches else None
    # First whether it lives, then what it wrote: an end between the two is then a final
    # state of a dead run, and not a lost one.
    living = _living(launch)
    state = run.read_state()
    word = None
    if ask_slurm and (state is None or state.status not in FINAL):
        word = _ask_slurm(launch)
        state = run.read_state()
    elif ask_slurm and state is not None and state.status in ("stopped", "failed"):
        # Its script decides whether it goes on, or Slurm has requeued it by itself.
        word = _ask_slurm(launch, known=False)
        state = run.read_state()
    attempt = len(launches) - 1
    failures = tuple(run.read_failures(attempt)) if launches else ()
    restarts = tuple(run.read_restarts())
    if restarts and restarts[-1].attempt == attempt and restarts[-1].action != "stop":
        failures = ()  # they are dealt with: the next incarnation is on its way
    if failures:
        from hpctrain.slurm.lifecycle import cause

        first, _ = cause(failures)
        failures = (first, *(one for one in failures if one is not first))
    status, reason = _status(run, state, launch, living, word, failures)
    records = recent(run)
    since = launch.submitted if launch is not None else 0.0
    fresh = [record for record in records if record.time >= since]
    total = state.total_steps if state is not None else _planned_steps(run)
    step = 0 if state is None else state.step
    if fresh and (status in _ACTIVE or status == "failed"):  # whose ranks wrote no end
        step = max(step, fresh[-1].step)
    pace = Pace(total, fresh or [record for record in records if record.step <= step])
    return RunView(
        run, status, reason, step, total, pace, bool(fresh), state, launch, len(launches),
        failures, word, restarts,
    )  # fmt: skip


def failure_code(failures: tuple[FailureRecord, ...]) -> Exit:
    """What the ranks of a failed run exited with, from the error of the first."""
    found = _our_error(failures[0].error) if failures else None
    return Exit.RANK_FAILED if found is None else found.exit_code


def _our_error(name: str) -> type[HpctrainError] | None:
    """The class of an error of ours by its name."""
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, HpctrainError) else None


def _status(
    run: RunDir,
    state: StateRecord | None,
    launch: LaunchRecord | None,
    living: bool | None,
    word: SlurmWord | None,
    failures: tuple[FailureRecord, ...],
) -> tuple[str, str]:
    status = "created" if state is None else state.status
    reason = "" if state is None else state.reason
    if word is not None and word.waiting:
        after = f"; before: {reason}" if reason else ""
        return "pending", f"{word.reason}{after}"
    if word is not None and not word.over:
        if status in ("finished", "cancelled"):
            return status, reason
        if status in FINAL or failures:
            return "stopping", reason or failure_words(failures)
        return ("starting" if status in ("created", "submitted") else status), reason
    if status in FINAL:
        return status, reason
    if failures:
        return "failed", failure_words(failures)
    if word is not None:
        if word.state == "COMPLETED":
            # The script ends with 0 where all ranks did; their last words may still be on the
            # way to this host through a network file system.
            return "finished", ""
        ended = "cancelled" if word.state.startswith("CANCELLED") else "failed"
        return ended, word.reason or f"Slurm ended the job: {word.state}"
    if living is False:
        return "failed", lost_words(run)
    if living and status in ("created", "submitted"):
        return "starting", reason
    return status, reason


_TELLING = re.compile(r"signal \d|exit code|error|killed|not found|no such file", re.IGNORECASE)


def lost_words(run: RunDir) -> str:
    """Why a run is taken for lost, with the most telling line that its launcher printed."""
    try:
        lines = run.job_log.read_text(errors="replace").splitlines()[-50:]
    except OSError:
        lines = []
    lines = [line.strip("= \t") for line in lines if line.strip("= \t")]
    telling = [line for line in lines if _TELLING.search(line)] or lines
    if telling:
        return f"lost: the ranks wrote no end; the launcher said: {telling[-1]}"
    return (
        "lost: neither the ranks nor the launcher wrote an end (killed, out of memory, or the "
        "machine went down)"
    )


def failure_words(failures: tuple[FailureRecord, ...]) -> str:
    """The first failure in words."""
    first = failures[0]
    at = f" at step {first.step}" if first.step >= 0 else ""
    lines = first.message.splitlines() or ["no message"]
    # An error of ours is words for a person, with advice in its further lines.
    text = "\n".join(lines) if _our_error(first.error) else lines[0]
    return f"rank {first.rank} on {first.host}{at}: {first.error}: {text}"


def _living(launch: LaunchRecord | None) -> bool | None:
    if launch is None or launch.launcher != "local":
        return None
    from hpctrain.launchers.local_run import local_alive

    return local_alive(launch)


def _ask_slurm(launch: LaunchRecord | None, *, known: bool = True) -> SlurmWord | None:
    """What Slurm says; None where there is nothing to ask or it does not answer.

    Args:
        launch: whose job.
        known: the job must be known to it; False asks whether it is in the queue, no more.
    """
    if launch is None or launch.launcher != "slurm":
        return None
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.slurm.reasons import why_failed, why_pending

    client = SlurmClient(os.environ)
    try:
        info = client.state(launch.job_id) if known else client.queued(launch.job_id)
        if info is None and not known:
            return None
        if info is None:
            # Another cluster's Slurm knows nothing about this job.
            if launch.cluster and client.cluster() != launch.cluster:
                return None
            lost = (
                f"lost: Slurm no longer knows job {launch.job_id}, and its ranks wrote no end; "
                "hpctrain logs shows what they printed"
            )
            return SlurmWord("UNKNOWN", over=True, waiting=False, reason=lost)
    except SchedulerError:
        return None
    waiting = info.state in _WAITING
    return SlurmWord(
        info.state,
        over=info.final,
        waiting=waiting,
        reason=why_pending(info.reason) if waiting else why_failed(info) if info.final else "",
        nodes=info.nodes,
        end=info.end,
    )


def _planned_steps(run: RunDir) -> int:
    return int((read_json(run.provenance) or {}).get("steps", 0))


def age(since: float) -> float:
    """Seconds since a time of the records."""
    return max(0.0, time.time() - since)
