"""One run in numbers, from its own files."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.records import EventRecord, LaunchRecord, StepRecord
from hpctrain.rundir import RunDir
from hpctrain.scaling.steps import WARM_UP, effective, steady
from hpctrain.spec import JobSpec, read_job


@dataclass(frozen=True, slots=True)
class Attempt:
    """One incarnation: how it was started, the steps that it did, how it ended."""

    number: int
    launcher: str
    job_id: str
    submitted: float
    world_size: int
    first_step: int | None
    last_step: int | None
    ended: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A run's table; durations in seconds, sizes in bytes.

    Attributes:
        spec: the job as it is in force now.
        steps: every step that counts, in order.
        steady: the steps that speed is taken from: all but the first of each attempt.
        attempts: oldest first.
        checkpoints: committed, as their events say; ``(step, bytes, seconds)``.
    """

    run: RunDir
    spec: JobSpec
    steps: Sequence[StepRecord]
    steady: Sequence[StepRecord]
    attempts: Sequence[Attempt]
    checkpoints: Sequence[tuple[int, int, float]]

    def to_dict(self) -> dict[str, Any]:
        """The ``--json`` answer of ``hpctrain report``, without the run's state."""
        answer: dict[str, Any] = {
            "name": self.spec.name,
            "machine": self.spec.machine,
            "world_size": self.attempts[-1].world_size if self.attempts else None,
            "parameters": self.parameters,
            "steps": len(self.steps),
            "first_step": self.steps[0].step if self.steps else None,
            "last_step": self.steps[-1].step if self.steps else None,
            "total_steps": self.spec.train.steps,
            "tokens": self.steps[-1].tokens if self.steps else 0,
            "first_loss": self.steps[0].loss if self.steps else None,
            "last_loss": self.steps[-1].loss if self.steps else None,
            "lowest_loss": min(self.losses, default=None),
            "warm_up_steps": WARM_UP,
            "tokens_per_second": self.tokens_per_second,
            "step_seconds_median": self.step_seconds(0.5),
            "step_seconds_p95": self.step_seconds(0.95),
            "model_flops_per_second": self.model_flops_per_second,
            "time": self.time_split,
            "memory_bytes": max((record.memory_bytes for record in self.steps), default=None),
            "checkpoints": [
                {"step": step, "bytes": size, "seconds": seconds}
                for step, size, seconds in self.checkpoints
            ],
            "attempts": [
                {name: getattr(one, name) for name in Attempt.__slots__} for one in self.attempts
            ],
        }
        return answer

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.steps if record.loss is not None]

    @property
    def parameters(self) -> int | None:
        """Of the model; None for a user's own."""
        own = self.spec.model.module is not None
        return None if own else self.spec.model.transformer().parameters

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the steady steps, all ranks."""
        return _median([record.tokens_per_second for record in self.steady])

    def step_seconds(self, quantile: float) -> float | None:
        """A quantile of the steady steps' durations, without the checkpoints between them."""
        ordered = sorted(record.step_seconds for record in self.steady)
        return ordered[int(quantile * (len(ordered) - 1))] if ordered else None

    @property
    def model_flops_per_second(self) -> float | None:
        """FLOP/s of the model over all ranks, recompute not counted; None for a user's own."""
        speed, length = self.tokens_per_second, self.spec.data.sequence_length
        if self.spec.model.module is not None or speed is None or length is None:
            return None
        return speed * self.spec.model.transformer().model_flops_per_token(length)

    @property
    def time_split(self) -> dict[str, float]:
        """Seconds of all steps: waiting for data, communication by axis, the rest, checkpoints."""
        steps = sum(record.step_seconds for record in self.steps)
        data = sum(record.data_seconds for record in self.steps)
        split = {"data": data}
        for record in self.steps:
            for axis, amounts in record.comm.items():
                key = f"comm {axis}"
                split[key] = split.get(key, 0.0) + amounts.get("seconds", 0.0)
        split["compute"] = max(0.0, steps - sum(split.values()))
        split["checkpoint"] = sum(record.checkpoint_seconds for record in self.steps)
        return split


def summarise(run: RunDir) -> Summary:
    """Read a run's files.

    Raises:
        SpecError, UsageError: its job.yaml is damaged.
    """
    launches = run.read_launches()
    records = list(run.read_steps())
    events = run.read_events()
    steps = effective(records)
    attempts = [_attempt(launch, launches, records, events) for launch in launches]
    spec = read_job(run.job).spec
    warm = steady(steps, launches)
    return Summary(run, spec, steps, warm, attempts, _checkpoints(events))


def _attempt(
    launch: LaunchRecord,
    launches: Sequence[LaunchRecord],
    records: Sequence[StepRecord],
    events: Sequence[EventRecord],
) -> Attempt:
    later = [other.submitted for other in launches if other.attempt > launch.attempt]
    end = min(later, default=float("inf"))
    mine = [record for record in records if launch.submitted <= record.time < end]
    said = [event for event in events if event.attempt == launch.attempt]
    endings = [event.kind for event in said if event.kind in ("stopped", "finished", "failed")]
    return Attempt(
        number=launch.attempt,
        launcher=launch.launcher,
        job_id=launch.job_id,
        submitted=launch.submitted,
        world_size=launch.world_size,
        first_step=mine[0].step if mine else None,
        last_step=mine[-1].step if mine else None,
        ended=endings[-1] if endings else "",
    )


def _checkpoints(events: Sequence[EventRecord]) -> list[tuple[int, int, float]]:
    """The last one of each step, in the order of steps."""
    found: dict[int, tuple[int, int, float]] = {}
    for event in events:
        if event.kind == "checkpoint":
            step = int(event.data.get("step", -1))
            seconds = float(event.data.get("seconds", 0.0))
            found[step] = (step, int(event.data.get("bytes", 0)), seconds)
    return [found[step] for step in sorted(found)]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
