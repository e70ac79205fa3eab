"""Sequences of very different lengths over the ranks of a step: each gets ranks of its own number.

Attention costs the square of a length and all else the length, so neither equal numbers of
sequences nor equal numbers of tokens make equal work; and a context group wide enough for the
longest sequence wastes its messages on the many short ones. Here a sequence is spread over as few
ranks as finish it in time (the idea of FlexSP, Wang et al. 2025, and ByteScale, Ge et al. 2025;
long sequences over many ranks, short ones on one, as in Zeppelin, Chen et al. 2025).

Groups are the nodes of a tree, so that a few process groups, made once, serve every plan::

    degree 4   [      0 1 2 3      ]      longest sequences, first
    degree 2   [  0 1  ] [  2 3    ]      then these
    degree 1   [0] [1]    [2] [3]         shortest, last, into whatever is left

All ranks of a group have the same groups above it and have done the same work when it starts:
nobody waits before the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.errors import ImpossibleError

_TRIES = 24


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of forward and backward; of any unit, as long as it is one.

    Attributes:
        token: of everything but attention, a token.
        pair: of attention, a pair of query and key.
        wire: of handing on the keys and values of a token, and their gradients.
        hop: of a message.
        launch: of one more forward and backward.
    """

    token: float
    pair: float
    wire: float = 0.0
    hop: float = 0.0
    launch: float = 0.0

    def work(self, length: int) -> float:
        """Compute of a sequence with a causal mask, on all its ranks together."""
        return self.token * length + self.pair * length * (length + 1) / 2

    def seconds(self, length: int, degree: int) -> float:
        """On each of ``degree`` ranks: the ring hides behind attention as far as that lasts."""
        attention = self.pair * length * (length + 1) / 2 / degree
        ring = (degree - 1) * (self.hop + self.wire * length / degree)
        return self.token * length / degree + max(attention, ring)


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences that go through the model together on the ranks of one group.

    Attributes:
        degree: ranks.
        first: lowest of them, a multiple of ``degree``.
        sequences: their numbers.
        seconds: that each of the ranks works on them.
    """

    degree: int
    first: int
    sequences: tuple[int, ...]
    seconds: float

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.degree)


@dataclass(frozen=True)
class LengthPlan:
    """Who works on what in a step.

    Attributes:
        ranks: of the step.
        packs: in the order in which every rank of a group comes to them, larger groups first.
        seconds: until each rank is done.
        work: compute of all sequences together.
    """

    ranks: int
    packs: tuple[Pack, ...]
    seconds: tuple[float, ...]
    work: float

    @property
    def makespan(self) -> float:
        return max(self.seconds)

    @property
    def idle(self) -> float:
        """Time of all ranks, up to the end of the step, in which they do not compute."""
        return self.ranks * self.makespan - self.work

    def of_rank(self, rank: int) -> list[Pack]:
        """What a rank takes part in, in order."""
        return [pack for pack in self.packs if rank in pack.ranks]


def degrees(ranks: int) -> list[int]:
    """Group sizes of the tree: powers of two as long as they divide, and all ranks."""
    found = [1]
    while ranks % (2 * found[-1]) == 0:
        found.append(2 * found[-1])
    return found if found[-1] == ranks else [*found, ranks]


def plan_lengths(
    lengths: Sequence[int], ranks: int, capacity: int, costs: Costs, widest: int | None = None
) -> LengthPlan:
    """Give each sequence a group, so that the last rank is done early.

    For a time that the step may take, each sequence gets the smallest group that is done with it
    in that time and has the memory for it; then, longest first, each goes to the group of its
    size whose ranks have least to do. Several times are tried, and the best plan is kept.

    Args:
        lengths: tokens of each sequence of a step.
        ranks: of the step, data- and context-parallel ones together.
        capacity: tokens that a rank can hold in one forward and backward.
        costs: what takes how long.
        widest: most ranks of a sequence, a divisor of ``ranks``; without, all of them.

    Raises:
        ImpossibleError: a sequence does not fit that many ranks together.
    """
    sizes = degrees(widest or ranks)
    if max(lengths) > sizes[-1] * capacity:
        raise ImpossibleError(
            f"a sequence of {max(lengths)} tokens does not fit {sizes[-1]} ranks with {capacity} "
            "each"
        )
    work = sum(map(costs.work, lengths))
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    best: LengthPlan | None = None
    limit = work / ranks
    for _ in range(_TRIES):
        found = _within(lengths, order, sizes, ranks, capacity, costs, limit, work)
        if best is None or found.makespan < best.makespan * (1 - 1e-9):
            best = found
        limit *= 1.06
    assert best is not None
    return best


def _within(
    lengths: Sequence[int],
    order: Sequence[int],
    sizes: Sequence[int],
    ranks: int,
    capacity: int,
    costs: Costs,
    limit: float,
    work: float,
) -> LengthPlan:
    by_degree: dict[int, list[int]] = {size: [] for size in sizes}
    for index in order:
        length = lengths[index]
        fit = [size for size in sizes if size <= max(1, length) <= size * capacity]
        if not fit:
            raise ImpossibleError(f"{length} tokens do not fit groups of {sizes} with {capacity}")
        timely = [size for size in fit if costs.seconds(length, size) <= limit]
        # Where nothing is done in time, what is done first.
        chosen = timely[0] if timely else min(fit, key=lambda d: costs.seconds(length, d))
        by_degree[chosen].append(index)
    loads = [0.0] * ranks
    packs: list[Pack] = []
    for size in reversed(sizes):
        held: dict[int, list[int]] = {}
        for index in by_degree[size]:
            first = min(range(0, ranks, size), key=lambda f: loads[f])
            held.setdefault(first, []).append(index)
            for rank in range(first, first + size):
                loads[rank] += costs.seconds(lengths[index], size)
        for first, indices in held.items():
            for members in fill([(i, lengths[i]) for i in indices], size * capacity):
                seconds = costs.launch + sum(costs.seconds(lengths[i], size) for i in members)
                packs.append(Pack(size, first, tuple(members), seconds))
                for rank in range(first, first + size):
                    loads[rank] += costs.launch
    return LengthPlan(ranks, tuple(packs), tuple(loads), work)


def fill(items: Sequence[tuple[int, int]], room: int) -> list[list[int]]:
    """Numbers of items in as few bins as first-fit decreasing finds.

    Args:
        items: (number, size) each, none above ``room``.
        room: of a bin.
    """
    bins: list[tuple[int, list[int]]] = []
    for number, size in sorted(items, key=lambda item: -item[1]):
        for place, (left, members) in enumerate(bins):
            if size <= left:
                members.append(number)
                bins[place] = (left - size, members)
                break
        else:
            bins.append((room - size, [number]))
    return [members for _, members in bins]


def static_plan(
    lengths: Sequence[int], ranks: int, capacity: int, costs: Costs, degree: int | None = None
) -> LengthPlan:
    """What one degree for all gives: packs of equal length, dealt to the groups by their work.

    Sequences are packed into rows that a group can hold, each row attends document by document,
    and what is missing in a row is padding that the linear layers compute all the same.

    Args:
        lengths, ranks, capacity, costs: as of :func:`plan_lengths`.
        degree: of every group; without, the best of those that hold the longest sequence.
    """
    if degree is None:
        fit = [d for d in degrees(ranks) if max(lengths) <= d * capacity]
        plans = [static_plan(lengths, ranks, capacity, costs, d) for d in fit]
        return min(plans, key=lambda plan: plan.makespan)
    rows = fill(list(enumerate(lengths)), degree * capacity)
    seconds = []
    for row in rows:
        pairs = sum(lengths[i] * (lengths[i] + 1) / 2 for i in row)
        ring = (degree - 1) * (costs.hop + costs.wire * capacity)
        attention = costs.pair * pairs / degree
        seconds.append(costs.launch + costs.token * capacity + max(attention, ring))
    loads = [0.0] * (ranks // degree)
    packs = []
    for number in sorted(range(len(rows)), key=lambda n: -seconds[n]):
        group = min(range(len(loads)), key=lambda g: loads[g])
        loads[group] += seconds[number]
        packs.append(Pack(degree, group * degree, tuple(rows[number]), seconds[number]))
    spread = tuple(loads[rank // degree] for rank in range(ranks))
    return LengthPlan(ranks, tuple(packs), spread, sum(map(costs.work, lengths)))


def long_tailed(count: int, median: int, longest: int, seed: int, sigma: float = 1.4) -> list[int]:
    """Lengths as collected texts have them: log-normal, cut at the longest.

    Args:
        count: sequences.
        median, longest: tokens.
        seed: of the draw.
        sigma: of the logarithm; 1.4 puts the 99th percentile at 26 times the median.
    """
    import random

    draw = random.Random(seed)  # noqa: S311
    return [
        max(1, min(longest, round(median * math.exp(draw.gauss(0.0, sigma))))) for _ in range(count)
    ]
