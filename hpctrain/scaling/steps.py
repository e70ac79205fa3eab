"""The steps of a run that count, and those that speed is taken from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpctrain.records import LaunchRecord, StepRecord

WARM_UP = 5
"""Steps after each start that say nothing about speed: first touches, caches, connections."""


def effective(records: Iterable[StepRecord]) -> list[StepRecord]:
    """One record a step: a resumed run repeats the steps after its checkpoint, the last counts."""
    kept: list[StepRecord] = []
    for record in records:
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept


def steady(
    steps: Sequence[StepRecord], launches: Sequence[LaunchRecord], warm_up: int = WARM_UP
) -> list[StepRecord]:
    """The steps without the first ``warm_up`` of each start, and never fewer than half of them.

    A start of fewer than ``2 · warm_up`` steps loses its first half, rounded up; a start of one
    step keeps it.
    """
    starts = sorted(launch.submitted for launch in launches)
    parts: dict[int, list[StepRecord]] = {}
    for record in steps:
        number = sum(start <= record.time for start in starts)
        parts.setdefault(number, []).append(record)
    kept: list[StepRecord] = []
    for part in parts.values():
        cold = min(warm_up, (len(part) + 1) // 2) if len(part) > 1 else 0
        kept += part[cold:]
    return kept
