"""Order of predicted and measured times, and what order a perfect prediction could reach."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from published_rows import Row

NOISE = 0.03
"""Standard deviation between runs of one layout where rows do not show it: the BLOOM search ran one
three times and got 117.1, 123.7 and 123.8 s, another 110.4, 110.5 and 113.5 s."""
LAYOUTS = 5
"""Fewest layouts of a model on a machine that are ranked."""


@dataclass(frozen=True)
class Outcome:
    """A measured row and what the planner says of it."""

    row: Row
    predicted: float
    used: float

    @property
    def error(self) -> float:
        """predicted / measured - 1; 0 where nothing was measured."""
        return self.predicted / self.row.seconds - 1 if self.row.seconds else 0.0


def source_name(row: Row) -> str:
    """Short name of a row's source: the id without its number."""
    return row.ident.rsplit("-", 1)[0]


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    i = 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in range(i, j + 1):
            ranks[order[k]] = (i + j) / 2
        i = j + 1
    return ranks


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation, ties at their mean rank; 0 where one side is constant."""
    x, y = _ranks(a), _ranks(b)
    if len(set(x)) < 2 or len(set(y)) < 2:
        return 0.0
    return statistics.correlation(x, y)


def scatter(rows: Iterable[Row]) -> float:
    """Scatter of measured times that no layout explains, found without the planner.

    Rows that differ in nothing but the micro-batch follow seconds = (m + p - 1) * (a + b * size),
    with m micro-batches on p stages, whatever a block costs (a and b not negative). What they
    depart from it, or from each other where even the size is the same, is noise. The median over
    such families, or NOISE where there are none.
    """
    families: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        plan, work = row.plan, row.work
        key = (work.model, work.sequence, work.global_batch, work.kernel, work.norms_fused)
        key += (work.dtype, work.platform.name, work.stack.name)
        states = (plan.layout, plan.virtual, plan.recompute, plan.sequence_parallel, plan.states)
        families[key + states].append(row)
    found = [deviation(family) for family in families.values()]
    known = [d for d in found if d is not None]
    return statistics.median(known) if known else NOISE


def deviation(family: Sequence[Row]) -> float | None:
    """Relative standard deviation of a family from its law; None with too few rows."""
    sizes = {row.plan.micro_batch for row in family}
    free = len(family) - min(2, len(sizes))
    if free < 1:
        return None
    terms = []
    for row in family:
        passes = row.work.micro_batches(row.plan) + row.plan.layout.pp - 1
        share = passes / (row.seconds or math.inf)
        terms.append((share, share * row.plan.micro_batch))
    best = math.inf
    for a, b in _laws(terms) if len(sizes) > 1 else [_one(terms, 0)]:
        if a >= 0 and b >= 0:
            best = min(best, sum((1 - a * x - b * y) ** 2 for x, y in terms))
    return math.sqrt(best / free)


def _laws(terms: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Least-squares (a, b) of a*x + b*y = 1, free and with either at 0."""
    xx, yy = sum(x * x for x, _ in terms), sum(y * y for _, y in terms)
    xy = sum(x * y for x, y in terms)
    sx, sy = sum(x for x, _ in terms), sum(y for _, y in terms)
    found = [_one(terms, 0), _one(terms, 1)]
    below = xx * yy - xy * xy
    if below > 1e-12 * xx * yy:
        found.append(((sx * yy - sy * xy) / below, (sy * xx - sx * xy) / below))
    return found


def _one(terms: Sequence[tuple[float, float]], which: int) -> tuple[float, float]:
    value = sum(t[which] for t in terms) / sum(t[which] ** 2 for t in terms)
    return (value, 0.0) if which == 0 else (0.0, value)


def repeatability(measured: Sequence[float], noise: float) -> float:
    """Rank correlation that a second measurement would have with this one, if runs of one layout
    differ by ``noise``: what no prediction can be expected to pass. Mean of 200 draws."""
    draw = random.Random(0)
    again = ([m * math.exp(draw.gauss(0.0, noise)) for m in measured] for _ in range(200))
    return statistics.fmean(spearman(measured, second) for second in again)


def ranking(found: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For each (source, model, devices) with enough layouts: rank correlation, that of a repeated
    measurement, and what choosing the predicted best costs against the best measured (seconds a
    FLOP)."""
    groups: dict[tuple[str, str, int], list[Outcome]] = defaultdict(list)
    for o in found:
        if o.row.seconds and o.row.kind != "moe":
            groups[source_name(o.row), o.row.model, o.row.devices].append(o)
    table = []
    for (source, model, devices), members in groups.items():
        layouts = {(o.row.plan, o.row.work.sequence, o.row.work.kernel) for o in members}
        if len(layouts) < LAYOUTS:
            continue
        # rows of a group may differ in size of model or batch: time a FLOP compares them
        scale = [
            o.row.work.global_batch
            * o.row.work.sequence
            * o.row.work.model.model_flops_per_token(o.row.work.sequence)
            for o in members
        ]
        measured = [(o.row.seconds or 0.0) / s for o, s in zip(members, scale, strict=True)]
        guessed = [o.predicted / s for o, s in zip(members, scale, strict=True)]
        chosen = measured[guessed.index(min(guessed))]
        noise = scatter(o.row for o in members)
        table.append(
            {
                "source": source,
                "model": model,
                "devices": devices,
                "rows": len(members),
                "spearman": spearman(measured, guessed),
                "noise": noise,
                "spearman_of_a_repeat": repeatability(measured, noise),
                "spread": max(measured) / min(measured) - 1,
                "chosen_over_best": chosen / min(measured) - 1,
            }
        )
    return table
