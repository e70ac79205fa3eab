"""What a run writes about itself: one JSON object a line, or one small JSON file.

These are the only formats that ranks, the launcher and the login node share. A reader
ignores fields it does not know, so that an older command can read a newer run; a field is
never given another meaning. Times are seconds since the epoch (UTC), durations seconds,
memory bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

SCHEMA_VERSION = 1
"""Version of every record below and of every ``--json`` answer."""

RunStatus = Literal[
    "created",  # run directory made, nothing started
    "submitted",  # Slurm has the job
    "starting",  # ranks are being bootstrapped
    "running",
    "stopping",  # a signal or the deadline was agreed on, last checkpoint being written
    "stopped",  # ended early, resumable
    "finished",
    "failed",
    "cancelled",
]


def finite(value: Any) -> Any:
    """The same data with None in place of every number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class Record:
    """Mix-in of the frozen dataclasses below: to and from JSON, unknown fields dropped."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]

    def to_json(self) -> str:
        """One line; a number that is not finite becomes null, which is JSON where NaN is not."""
        return json.dumps(finite(self.to_dict()), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Raises ValueError where a required field is missing."""
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        try:
            return cls(**{key: value for key, value in data.items() if key in known})
        except TypeError as error:
            raise ValueError(f"not a {cls.__name__}: {error}") from None


@dataclass(frozen=True, slots=True)
class StepRecord(Record):
    """One optimizer step, written by rank 0 to ``metrics.jsonl``.

    Attributes:
        step: 1-based number of the finished step.
        time: when it ended.
        loss: mean over the global batch, nats a token (or what the user's loss means);
            None where it was not finite.
        lr: learning rate of this step.
        grad_norm: global L2 norm before clipping.
        tokens: tokens (or samples, for a model without sequences) seen so far, all ranks.
        step_seconds: wall time of the step, slowest rank.
        tokens_per_second: tokens of this step over ``step_seconds``, all ranks.
        data_seconds: waiting for data on rank 0.
        checkpoint_seconds: the step was blocked by a checkpoint on rank 0.
        memory_bytes: peak of the device, or resident size of the process on CPU; rank 0.
        comm: axis -> calls, bytes and seconds of communication in this step on rank 0.
        compute_seconds: time of computing on rank 0 where it was noted, as an emulated machine
            does; 0 where it was not.
        experts: of a model with experts, over all steps since the last record: ``busiest``, the
            load of the most wanted expert over the mean of its layer, in the layer where that is
            most; ``idle``, the largest share of a layer's experts that nobody wanted; ``dropped``,
            the share of all choices that the capacity left out.
    """

    step: int
    time: float
    loss: float | None
    lr: float
    grad_norm: float | None
    tokens: int
    step_seconds: float
    tokens_per_second: float
    data_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    memory_bytes: int = 0
    comm: dict[str, dict[str, float]] = field(default_factory=dict)
    compute_seconds: float = 0.0
    experts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateRecord(Record):
    """Where a run stands; ``state.json``, replaced whole.

    Attributes:
        status: see RunStatus.
        step: last finished step.
        total_steps: steps of the whole run.
        time: when this was written.
        world_size: ranks of the present or last incarnation.
        reason: why it stops, stopped or failed; empty while all is well.
        durable_step: last step whose checkpoint is committed, -1 for none.
        resumed_from: step this incarnation started from, -1 for a fresh start.
    """

    status: RunStatus
    step: int
    total_steps: int
    time: float
    world_size: int
    reason: str = ""
    durable_step: int = -1
    resumed_from: int = -1


@dataclass(frozen=True, slots=True)
class FailureRecord(Record):
    """A rank that raised; ``failures/<attempt>-rank<N>.json``, written before anything else."""

    rank: int
    host: str
    time: float
    error: str
    message: str
    traceback: str
    attempt: int = 0
    step: int = -1
    pid: int = 0


@dataclass(frozen=True, slots=True)
class EventRecord(Record):
    """Something a person wants to know later; ``events.jsonl``.

    ``kind`` is a short word (started, resumed, checkpoint, checkpoint_skipped, signal,
    deadline, stopped, finished, failed, warning); ``data`` holds its details.
    """

    kind: str
    time: float
    message: str
    attempt: int = 0
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaunchRecord(Record):
    """How an incarnation of the run was started; ``launch.json``, one entry an attempt.

    Attributes:
        attempt: 0 for the first start, one more a resume.
        launcher: ``local`` or ``slurm``.
        submitted: when.
        world_size: planned ranks.
        job_id: Slurm's, empty for local.
        pid: of the local launcher process, 0 for Slurm.
        pid_started: start time of that process in clock ticks (``/proc/PID/stat`` field
            22), so that a reused pid is not taken for the run.
        host: where ``pid`` lives, or where the job was submitted.
        cluster: Slurm's cluster name.
        restore: step of the checkpoint to start from; -1 is the newest good one, or none.
        restart: how often Slurm had requeued the job when this incarnation began.
        started: when its job began to run; 0 where only its submission was seen.
        nodes: that it runs on, in Slurm's bracket form; empty where not known.
        automatic: it follows an earlier incarnation by itself, nobody asked for it.
    """

    attempt: int
    launcher: Literal["local", "slurm"]
    submitted: float
    world_size: int
    job_id: str = ""
    pid: int = 0
    pid_started: int = 0
    host: str = ""
    cluster: str = ""
    restore: int = -1
    restart: int = 0
    started: float = 0.0
    nodes: str = ""
    automatic: bool = False


Why = Literal[
    "walltime",  # it ended, or came within the margin
    "signal",  # a rank or the script was asked to stop
    "preempted",  # a job of higher priority took the nodes
    "requeued",  # somebody, or Slurm for a reason it does not tell, requeued the job
    "node_failure",
    "rank_failure",  # a rank raised, was killed, or left with an error
    "hang",  # the watchdog ended it
    "bad_nodes",  # the preflight asked to go on without them
    "lost",  # nobody wrote an end
]
"""Why an incarnation of a run ended before its last step."""


@dataclass(frozen=True, slots=True)
class RestartRecord(Record):
    """An incarnation that ended too early, and what followed; ``restarts.jsonl``.

    Attributes:
        attempt: the incarnation that ended.
        time: when.
        why: see Why.
        reason: the same in words.
        action: ``requeue`` and ``slurm`` (the same job again, by us or by Slurm itself),
            ``successor`` (another job), ``stop`` (nothing follows; ``reason`` has why).
        from_step: step of the stored checkpoint that the next one starts from; 0 for none.
        step: last finished step.
        nodes: that it ran on, in Slurm's bracket form.
        seconds_lost: of work since that checkpoint, which is done again.
        job_id: of the incarnation that ended.
        next_job_id: of the one that follows; empty for none.
        excluded: nodes that the next one leaves out.
    """

    attempt: int
    time: float
    why: Why
    reason: str
    action: Literal["requeue", "slurm", "successor", "stop"]
    from_step: int
    step: int
    nodes: str
    seconds_lost: float
    job_id: str = ""
    next_job_id: str = ""
    excluded: tuple[str, ...] = ()


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a small JSON file: readers see the old or the new one, never half of one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(
        json.dumps(finite(dict(data)), indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    aside.replace(path)


def append_line(path: Path, record: Record) -> None:
    """Append one record with a single write, so that lines of two writers never mix."""
    line = (record.to_json() + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a small JSON file, or None where it is missing or not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return data if isinstance(data, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON-lines file; a torn last line (a killed writer) is left out."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    data = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if isinstance(data, dict):
                    yield data
    except FileNotFoundError:
        return
