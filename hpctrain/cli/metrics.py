"""What ``metrics.jsonl`` says: the steps that count, and how fast they are."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.records import StepRecord
from hpctrain.rundir import RunDir
from hpctrain.scaling.steps import effective

_WINDOW = 50
_TAIL_BYTES = 65536


def recent(run: RunDir) -> list[StepRecord]:
    """The newest records, as many as speed and time to go need; lines that are none are left out.

    A torn last line is one that is being written; the first may be cut by where reading began.
    """
    try:
        with run.metrics.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _TAIL_BYTES))
            lines = stream.read().splitlines()
    except FileNotFoundError:
        return []
    found = (_parse(line) for line in lines)
    return effective(record for record in found if record is not None)[-_WINDOW:]


def _parse(line: bytes) -> StepRecord | None:
    try:
        data = json.loads(line)
        return StepRecord.from_dict(data) if isinstance(data, dict) else None
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed and time to go, from the newest steps of one incarnation of a run."""

    total: int
    records: Sequence[StepRecord] = ()

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
