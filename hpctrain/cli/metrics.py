"""What ``metrics.jsonl`` says: the steps that count, speed, and new lines as they come."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpctrain.records import StepRecord
from hpctrain.rundir import RunDir

_WINDOW = 50
_TAIL_BYTES = 65536


def effective(records: Iterable[StepRecord]) -> list[StepRecord]:
    """One record a step: a resumed run repeats the steps after its checkpoint, the last counts."""
    kept: list[StepRecord] = []
    for record in records:
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept


@dataclass(slots=True)
class MetricsTail:
    """New records of a growing file; half a line is kept until the rest of it has come.

    Args:
        run: whose metrics.
        offset: bytes to skip; see :meth:`from_end`.
    """

    run: RunDir
    offset: int = 0
    _rest: bytes = b""

    @classmethod
    def from_end(cls, run: RunDir, back: int = 0) -> MetricsTail:
        """From the present end of the file, or up to ``back`` bytes before it."""
        try:
            size = run.metrics.stat().st_size
        except FileNotFoundError:
            size = 0
        return cls(run, max(0, size - back))

    def read(self) -> list[StepRecord]:
        """Records that were completed since the last call."""
        try:
            with self.run.metrics.open("rb") as stream:
                stream.seek(self.offset)
                new = stream.read()
        except FileNotFoundError:
            return []
        self.offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [record for line in lines if (record := parse(line)) is not None]


def parse(line: bytes) -> StepRecord | None:
    """The record of a line, or None where it is not one (a torn or foreign line)."""
    try:
        data = json.loads(line)
        return StepRecord.from_dict(data) if isinstance(data, dict) else None
    except ValueError:
        return None


def recent(run: RunDir) -> list[StepRecord]:
    """The newest records, as many as speed and time to go need."""
    return effective(MetricsTail.from_end(run, _TAIL_BYTES).read())[-_WINDOW:]


@dataclass(slots=True)
class Pace:
    """Speed and time to go, from the newest steps of one incarnation of a run."""

    total: int
    records: list[StepRecord] = field(default_factory=list)

    def add(self, new: Sequence[StepRecord]) -> None:
        self.records = effective([*self.records, *new])[-_WINDOW:]

    @property
    def last(self) -> StepRecord | None:
        return self.records[-1] if self.records else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median of the newest steps."""
        speeds = [record.tokens_per_second for record in self.records[-20:]]
        return statistics.median(speeds) if speeds else None

    @property
    def seconds_left(self) -> float | None:
        """By the clock between records, so that checkpoints and waits count too."""
        if not self.records:
            return None
        first, last = self.records[0], self.records[-1]
        if last.step == first.step:
            return (self.total - last.step) * last.step_seconds
        per_step = (last.time - first.time) / (last.step - first.step)
        return max(0.0, (self.total - last.step) * per_step)
