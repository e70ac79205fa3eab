"""Where each rank of a layout sits: axes onto packages, nodes, rails and switch groups.

A placement is a RankGrid, that is, an axis order and a permutation of the places, with the cost
of a step's traffic on it. The default numbers the axes from the inside out: tensor, context with
the experts, shard, pipeline, replicate. The improver tries every order of the axes, nodes sorted
by switch group, and then swaps nodes and ranks until none helps; it starts from the default and
keeps only what is cheaper.

torch sorts the ranks of every process group. Unless told that groups will be made unsorted, only
placements are taken in which each group's ranks ascend along its axis (RankGrid.ascending).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.errors import ImpossibleError
from hpctrain.fabric import (
    KINDS,
    AxisCost,
    Fabric,
    Traffic,
    UnknownSpeedError,
    axis_cost,
    axis_cost_of,
    group_kinds,
)
from hpctrain.layout import DEFAULT_ORDER, DENSE_AXES, ParallelLayout, RankGrid, expand_axes
from hpctrain.machine import LinkKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_GAIN = 1e-9
"""Smallest relative gain that counts as cheaper; below it lies rounding."""


@dataclass(frozen=True)
class Placement:
    """Ranks of a layout on the nodes of a job.

    Attributes:
        grid: who is where: its ranks are places, counted node by node.
        fabric: the nodes.
        costs: of each traffic, in its order; empty where no traffic was given.
        default_seconds: what the default placement costs, None where it was not judged.
        evaluations: placements that were judged to find this one.
        note: why a placement was not judged, else empty.
    """

    grid: RankGrid
    fabric: Fabric
    costs: tuple[AxisCost, ...] = ()
    seconds: float | None = None
    default_seconds: float | None = None
    evaluations: int = 0
    note: str = ""

    def place(self, rank: int) -> tuple[int, int]:
        """Node and local slot of a global rank."""
        return self.fabric.place(rank)

    @property
    def gain(self) -> float:
        """Default cost over this cost, at least 1; 1 where neither is known."""
        if not self.seconds or not self.default_seconds:
            return 1.0
        return self.default_seconds / self.seconds


@dataclass(frozen=True, slots=True)
class AxisLinks:
    """The groups of one axis and what links them.

    Attributes:
        axis: name.
        size, groups: ranks of a group, and number of groups.
        kind: farthest link that a group spans.
        bandwidth: bytes/s one way of that kind of link; None where unknown.
        nodes: most nodes that a group spans.
    """

    axis: str
    size: int
    groups: int
    kind: LinkKind
    bandwidth: float | None
    nodes: int


def default_placement(layout: ParallelLayout, fabric: Fabric) -> Placement:
    """Ranks numbered by DEFAULT_ORDER over the nodes as they are given.

    Raises:
        ImpossibleError: the layout does not fill the nodes exactly.
    """
    _check_size(layout, fabric)
    return Placement(RankGrid(layout, DEFAULT_ORDER), fabric)


def place(
    layout: ParallelLayout,
    fabric: Fabric,
    traffic: Sequence[Traffic] = (),
    *,
    swaps: int = 500,
    orders: Iterable[tuple[str, ...]] | None = None,
    ascending: bool = True,
    seed: int = 0,
) -> Placement:
    """The cheapest placement found; never worse than the default.

    Args:
        layout: degrees; must fill the fabric.
        fabric: the nodes.
        traffic: what a step moves; without it the default is returned.
        swaps: most pairs of nodes, and as many of ranks, to try to swap after the best order
            is found; 0 keeps to orders.
        orders: axis orders to try; None: all that differ.
        ascending: take only placements in which the ranks of every group ascend, as torch's
            process groups need unless they are made with ``sort_ranks=False``.
        seed: of the order in which pairs are tried, where there are more than ``swaps``.

    Raises:
        ImpossibleError: the layout does not fill the nodes exactly.
    """
    default = default_placement(layout, fabric)
    if not traffic:
        return default
    try:
        judge = _Judge(layout, fabric, traffic, ascending)
        start = judge.seconds(DEFAULT_ORDER, judge.nodes_as_given)
    except UnknownSpeedError as error:
        return Placement(default.grid, fabric, note=error.message)
    best_order: tuple[str, ...] = DEFAULT_ORDER
    best_places, best = judge.nodes_as_given, start
    for order, given in judge.candidates(orders):
        places = judge.admit(order, given)
        if places is None:
            continue
        seconds = judge.seconds(order, places)
        if seconds < best * (1 - _GAIN):
            best_order, best_places, best = order, places, seconds
    best_places, best = _swap(judge, best_order, best_places, best, swaps, seed)
    grid = RankGrid(layout, best_order, _permutation(best_places))
    costs = tuple(axis_cost(fabric, grid, one) for one in traffic)
    return Placement(grid, fabric, costs, best, start, judge.evaluations)


def axis_links(
    grid: RankGrid, fabric: Fabric, axes: Sequence[str] | None = None
) -> list[AxisLinks]:
    """For each axis with more than one rank: its groups and the farthest link in them.

    Args:
        grid: ranks and coordinates.
        fabric: the nodes.
        axes: names; None: all of both meshes.
    """
    import numpy as np

    found = []
    for axis in axes or (*DENSE_AXES, "edp", "ep", "etp"):
        rows = grid.groups(axis)
        if rows.shape[1] == 1:
            continue
        kind = KINDS[int(group_kinds(fabric, rows).max())]
        node = np.sort(fabric.node_of[rows], axis=1)
        nodes = 1 + (node[:, 1:] != node[:, :-1]).sum(axis=1)
        rate = fabric.bandwidth(kind)
        found.append(AxisLinks(axis, rows.shape[1], rows.shape[0], kind, rate, int(nodes.max())))
    return found


def _check_size(layout: ParallelLayout, fabric: Fabric) -> None:
    if layout.world_size != fabric.size:
        raise ImpossibleError(
            f"the layout has {layout.world_size} ranks ({layout.describe()}), the nodes have "
            f"places for {fabric.size}",
            hint="give every place a rank: change nodes, ranks a node or the degrees",
        )


def _permutation(places: Ints) -> tuple[int, ...] | None:
    """Places by position, None where they are in order."""
    listed = tuple(int(place) for place in places)
    return None if listed == tuple(range(len(listed))) else listed


class _Judge:
    """Costs of placements of one layout, with the groups of each order kept."""

    def __init__(
        self,
        layout: ParallelLayout,
        fabric: Fabric,
        traffic: Sequence[Traffic],
        ascending: bool,
    ) -> None:
        import numpy as np

        self.layout = layout
        self.fabric = fabric
        self.ascending = ascending
        self.traffic = [
            one for one in traffic if layout_size(layout, one.axes) > 1 and one.exposed > 0
        ]
        self.evaluations = 0
        self.nodes_as_given: Ints = np.arange(fabric.size)
        self._rows: dict[tuple[str, ...], list[Ints]] = {}

    def seconds(self, order: tuple[str, ...], places: Ints) -> float:
        """Exposed seconds of a step with ``places[position]`` as global ranks."""
        self.evaluations += 1
        if order not in self._rows:
            grid = RankGrid(self.layout, order)
            self._rows[order] = [grid.groups(*one.axes) for one in self.traffic]
        total = 0.0
        for one, rows in zip(self.traffic, self._rows[order], strict=True):
            total += one.exposed * axis_cost_of(self.fabric, places[rows], one).seconds
        return total

    def admit(self, order: tuple[str, ...], places: Ints) -> Ints | None:
        """The placement with its coordinates renumbered so that all groups ascend, if they can.

        Renumbering an axis, all along it, leaves every group with the same members.
        """
        import numpy as np

        if not self.ascending:
            return places
        cube = places.reshape([self.layout.size(axis) for axis in order])
        for axis in range(cube.ndim):
            others = tuple(a for a in range(cube.ndim) if a != axis)
            cube = np.take(cube, np.argsort(cube.min(axis=others)), axis=axis)
        admitted = cube.reshape(-1)
        grid = RankGrid(self.layout, order, _permutation(admitted))
        return admitted if grid.ascending() else None

    def candidates(
        self, orders: Iterable[tuple[str, ...]] | None
    ) -> Iterator[tuple[tuple[str, ...], Ints]]:
        """Every order that differs, with nodes as given and sorted by switch group."""
        import numpy as np

        layouts = [self.nodes_as_given]
        by_group = np.argsort(self.fabric.group_of_node, kind="stable")
        if not np.array_equal(by_group, np.arange(len(by_group))):
            rank_node = self.fabric.node_of
            rank_order = np.argsort(np.argsort(by_group)[rank_node], kind="stable")
            layouts.append(rank_order)
        for order in distinct_orders(self.layout) if orders is None else orders:
            for places in layouts:
                yield order, places


def layout_size(layout: ParallelLayout, axes: Sequence[str]) -> int:
    """Ranks of a joint group of several axes."""
    size = 1
    for axis in expand_axes(axes):
        size *= layout.size(axis)
    return size


def distinct_orders(layout: ParallelLayout) -> list[tuple[str, ...]]:
    """Orders of the dense axes that place ranks differently: axes of size 1 stay outermost."""
    idle = tuple(axis for axis in DEFAULT_ORDER if layout.size(axis) == 1)
    busy = [axis for axis in DEFAULT_ORDER if layout.size(axis) > 1]
    return [(*idle, *order) for order in itertools.permutations(busy)]


def _swap(
    judge: _Judge, order: tuple[str, ...], places: Ints, best: float, budget: int, seed: int
) -> tuple[Ints, float]:
    """Swap whole nodes, then single ranks, as long as one makes the placement cheaper."""
    import numpy as np

    fabric = judge.fabric
    first = np.searchsorted(fabric.node_of, np.arange(fabric.nodes + 1))

    def swap_nodes(places: Ints, a: int, b: int) -> Ints | None:
        if first[a + 1] - first[a] != first[b + 1] - first[b]:
            return None
        moved = places.copy()
        node = fabric.node_of[places]
        moved[node == a] += first[b] - first[a]
        moved[node == b] += first[a] - first[b]
        return moved

    def swap_ranks(places: Ints, i: int, j: int) -> Ints | None:
        if fabric.alike(int(places[i]), int(places[j])):
            return None
        moved = places.copy()
        moved[i], moved[j] = places[j], places[i]
        return moved

    draw = random.Random(seed)  # noqa: S311 (a search order, not a secret)
    for count, move in ((fabric.nodes, swap_nodes), (len(places), swap_ranks)):
        since_gain = 0
        pairs = _pairs(count, draw)
        for _ in range(budget):
            if count < 2 or since_gain >= count * (count - 1) // 2:
                break
            since_gain += 1
            moved = move(places, *next(pairs))
            tried = None if moved is None else judge.admit(order, moved)
            if tried is None:
                continue
            seconds = judge.seconds(order, tried)
            if seconds < best * (1 - _GAIN):
                places, best, since_gain = tried, seconds, 0
    return places, best


def _pairs(count: int, draw: random.Random) -> Iterator[tuple[int, int]]:
    """Pairs of numbers below ``count`` without end: rounds of all of them where they are few."""
    few = 256
    while True:
        if count <= few:
            pairs = list(itertools.combinations(range(count), 2))
            draw.shuffle(pairs)
            yield from pairs
        else:
            first, second = draw.sample(range(count), 2)
            yield first, second
