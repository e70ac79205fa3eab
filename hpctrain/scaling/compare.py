"""Two collections point by point: how much faster, and whether that is more than noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.scaling.collect import Collection, PointRuns
from hpctrain.scaling.stats import CONFIDENCE, Estimate, rank_sum, welch


@dataclass(frozen=True)
class Pair:
    """One point in both.

    Attributes:
        title: its settings.
        ranks: devices of a and b.
        a, b: seconds of a step.
        ratio: tokens a second and device of b over a's: above 1, b is faster.
        p: two-sided; None where nothing can be said.
        test: which test gave it.
    """

    title: str
    ranks: tuple[int, int]
    a: Estimate
    b: Estimate
    ratio: Estimate
    p: float | None
    test: str

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < 1 - CONFIDENCE

    @property
    def verdict(self) -> str:
        if self.p is None:
            return "too few runs to tell"
        if not self.significant:
            return "no difference beyond noise"
        return "faster" if self.ratio.value > 1 else "slower"

    def to_dict(self) -> dict[str, Any]:
        return {
            "point": self.title,
            "devices": list(self.ranks),
            "step_seconds": [self.a.value, self.b.value],
            "ratio": self.ratio.value,
            "ratio_low": self.ratio.low,
            "ratio_high": self.ratio.high,
            "p": self.p,
            "test": self.test,
            "verdict": self.verdict,
        }


def compare(a: Collection, b: Collection) -> list[Pair]:
    """Points that both measured, matched by their settings; a single point in each is a pair.

    Several runs of a point in both are compared by Welch's test on the logarithms of their
    medians. Of single runs the steps are compared by the rank-sum test, which takes them for
    independent: a disturbance that lasts makes it too sure.

    Raises:
        UsageError: no point is in both.
    """
    ours = {point.title: point for point in a.points if point.usable}
    theirs = {point.title: point for point in b.points if point.usable}
    common = [title for title in ours if title in theirs]
    pairs = [(title, ours[title], theirs[title]) for title in common]
    if not pairs and len(ours) == len(theirs) == 1:
        one, other = next(iter(ours.values())), next(iter(theirs.values()))
        pairs = [(one.title, one, other)]
    if not pairs:
        by_size = [(p, q) for p in ours.values() for q in theirs.values() if p.ranks == q.ranks]
        sizes = [p.ranks for p, _ in by_size]
        if by_size and len(set(sizes)) == len(sizes):
            pairs = [(f"{p.ranks} devices", p, q) for p, q in by_size]
    if not pairs:
        raise UsageError(
            f"no point is measured in both {a.name} and {b.name}",
            hint=f"{a.name} has {_titles(ours)}; {b.name} has {_titles(theirs)}",
        )
    return [_pair(title, one, other) for title, one, other in pairs]


def _titles(points: dict[str, PointRuns]) -> str:
    return ", ".join(list(points)[:6]) or "none"


def _pair(title: str, one: PointRuns, other: PointRuns) -> Pair:
    first = [run.step_seconds for run in one.usable]
    second = [run.step_seconds for run in other.usable]
    a, b = Estimate.of(first), Estimate.of(second)
    tokens = other.usable[0].tokens_per_step / one.usable[0].tokens_per_step
    ratio = a.per(b, tokens * one.ranks / other.ranks)
    p, test = welch(first, second), "Welch's t over runs"
    if p is None:
        steps = [[record.step_seconds for record in run.steady] for run in
                 (one.usable[0], other.usable[0])]  # fmt: skip
        p, test = rank_sum(steps[0], steps[1]), "rank sum over the steps of single runs"
    return Pair(title, (one.ranks, other.ranks), a, b, ratio, p, test if p is not None else "")
