"""Slow ranks and slow links told apart, from the timing that the ranks keep anyway.

Every rank knows how long its steps took and how long of that it communicated. A rank that
computes slowly arrives last, so that the others wait for it and it waits for nobody: its own
work is longer than the others' and its communication shorter. Where a link is slow all ranks
work for the same time, and communication is longer for those behind the link, or for all.
The distinction is that of C4 (Dong et al. 2024, section 4.2), on means over a window of steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SLOW = 1.3
"""A rank is slow whose work takes longer than this times the median."""
_WORTH = 0.1
"""Differences below this part of a step are not worth a word."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Mean seconds of a rank's steps in a window.

    Attributes:
        rank, host: who.
        work: neither communication nor waiting for data.
        data: waiting for data.
        comm: communication on all axes.
        volume: bytes that the collectives move out of a rank.
    """

    rank: int
    host: str
    work: float
    data: float
    comm: float
    volume: float

    @property
    def step(self) -> float:
        return self.work + self.data + self.comm


@dataclass(frozen=True, slots=True)
class Finding:
    """What is slow.

    Attributes:
        kind: ``rank``, ``data`` or ``link``.
        ranks: which; all of them where a link is suspected.
        message: in words.
    """

    kind: Literal["rank", "data", "link"]
    ranks: tuple[int, ...]
    message: str


def diagnose(timings: Sequence[Timing], best_rate: float | None) -> list[Finding]:
    """What is slow in a window.

    Args:
        timings: one a rank.
        best_rate: highest bytes/s of communication in the windows before, None for the first.
    """
    step = statistics.median(one.step for one in timings)
    found: list[Finding] = []
    for kind, field, words in (("rank", "work", "computes"), ("data", "data", "waits for data")):
        values = [float(getattr(one, field)) for one in timings]
        usual = statistics.median_low(values)
        # Of two ranks the faster one is the measure; the median would lie between them.
        slow = [
            one
            for one, value in zip(timings, values, strict=True)
            if value > SLOW * usual and value - usual > _WORTH * step
        ]
        slow = [one for one in slow if one.comm <= statistics.median(t.comm for t in timings)]
        for one in slow:
            value = float(getattr(one, field))
            found.append(
                Finding(
                    kind,  # type: ignore[arg-type]
                    (one.rank,),
                    f"rank {one.rank} on {one.host} {words} for {value:.3g} s a step, "
                    f"{usual:.3g} s is usual: the others wait for it",
                )
            )
    rate = comm_rate(timings)
    if not found and rate is not None and best_rate is not None and rate < best_rate / 2:
        comm = statistics.median(one.comm for one in timings)
        if comm > _WORTH * step:
            found.append(
                Finding(
                    "link",
                    tuple(one.rank for one in timings),
                    f"all ranks compute alike and communicate at {rate / 1e6:.3g} MB/s, "
                    f"{best_rate / 1e6:.3g} MB/s was reached before: a link is slow",
                )
            )
    return found


def comm_rate(timings: Sequence[Timing]) -> float | None:
    """Bytes/s of communication, of the ranks that wait least; None where nothing was timed."""
    rates = [one.volume / one.comm for one in timings if one.comm > 0 and one.volume > 0]
    return max(rates, default=None)


def slow_links(rates: Sequence[tuple[str, str, float]], below: float) -> list[str]:
    """Names of nodes whose links are slow.

    Args:
        rates: (node, node, bytes/s) of measured pairs.
        below: part of the median under which a node is slow.

    Returns:
        Nodes whose best pair is far below the best pairs of the others. Of two nodes nobody can
        tell which one is slow.
    """
    nodes = sorted({name for one, other, _ in rates for name in (one, other)})
    best = {node: max(rate for one, other, rate in rates if node in (one, other)) for node in nodes}
    if not best:
        return []
    usual = statistics.median_high(best.values())
    return [node for node in nodes if best[node] < below * usual]
