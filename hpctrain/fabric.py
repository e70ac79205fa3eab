"""What a placement costs: the nodes of a job, the traffic of its axes, the links between.

Global ranks are numbered node by node, as Slurm does with ``--ntasks-per-node``: a rank is a
place.

Cost of one kind of traffic (all groups of an axis communicate at the same time):

- ring collectives over n ranks pass ``2(n-1)/n·S`` (all-reduce) or ``(n-1)/n·S`` (all-gather,
  reduce-scatter) bytes through every rank (Patarasuk and Yuan 2009). A group enters and leaves
  each of its nodes once, spread over the network cards of its members there; cards add up what
  all groups send through them; inside a node the slowest link of a group's members counts. Inside
  and outside work at the same time, so the slower one is the cost.
- all-to-all sends ``S/n`` to each member, through the sender's own card where it leaves the node.
- a chain (pipeline) sends ``S`` from each member to the next, and as much back.
- measured rates between nodes slow a group down to the slowest hop of its ring over its nodes.
- where cards of different numbers meet only inside nodes (rail-only networks), what changes rail
  passes a link inside the node as well.

numpy is imported inside functions only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from hpctrain.errors import ImpossibleError
from hpctrain.layout import RankGrid
from hpctrain.machine import LinkKind, Machine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

Pattern = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "chain"]

KINDS = (
    LinkKind.DEVICE,
    LinkKind.PACKAGE,
    LinkKind.NODE,
    LinkKind.RAIL,
    LinkKind.SWITCH_GROUP,
    LinkKind.GLOBAL,
)
"""Nearest first; a group's kind is the farthest among its members."""
_INSIDE = frozenset({LinkKind.DEVICE, LinkKind.PACKAGE, LinkKind.NODE})
_RAIL = KINDS.index(LinkKind.RAIL)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the groups of some axes move in one step.

    Attributes:
        axes: axes whose joint groups communicate, for example ``("dp_shard", "cp")``.
        pattern: what they do.
        bytes: size S of a step's operations together: the whole buffer of an all-reduce, the
            gathered buffer of an all-gather or reduce-scatter, what a rank sends in an
            all-to-all, what a stage hands to the next in a chain (one direction).
        messages: operations a step, for latency.
        exposed: part of the time that nothing hides, 0 to 1.
    """

    axes: tuple[str, ...]
    pattern: Pattern
    bytes: float
    messages: int = 1
    exposed: float = 1.0


@dataclass(frozen=True, slots=True)
class AxisCost:
    """Cost of one Traffic.

    Attributes:
        axes, pattern: of the traffic.
        seconds: of a step, before ``exposed`` is applied.
        network: seconds of the busiest network card; inside: of the slowest group in a node;
            latency: seconds that messages take however small.
        kind: farthest link that any group spans.
        groups, crossing: number of groups and how many of them leave a node.
    """

    axes: tuple[str, ...]
    pattern: Pattern
    seconds: float
    network: float
    inside: float
    latency: float
    kind: LinkKind
    groups: int
    crossing: int


class UnknownSpeedError(ImpossibleError):
    """A placement cannot be judged: a link that it uses has no known speed."""


class Fabric:
    """Nodes of a job with what lies between their ranks, as arrays over global ranks.

    Build it with ``of`` (one kind of node) or ``mixed``.
    """

    def __init__(
        self,
        parts: Sequence[_Part],
        groups: Sequence[int],
        between: float | None,
        node_rates: ArrayLike | None = None,
    ) -> None:
        import numpy as np

        self.parts = tuple(parts)
        self.groups = tuple(groups)
        self.between = between
        nodes, cards, packages = 0, 0, 0
        node_of, card_of, rail_of, package_of = [], [], [], []
        pair, together, inside_package, card_rates, part_of = [], [], [], [], []
        for number, part in enumerate(self.parts):
            machine, per_node = part.machine, part.ranks_per_node
            count = part.nodes
            slot_cards = np.array(machine.slot_nics(per_node))
            kinds, slot_packages = np.unique(machine.slot_packages(per_node), return_inverse=True)
            rails = np.array([nic.rail for nic in machine.node.nics] or [0])
            here = np.repeat(np.arange(count), per_node)
            width = len(rails)
            node_of.append(nodes + here)
            card_of.append(cards + here * width + np.tile(slot_cards, count))
            rail_of.append(np.tile(rails[slot_cards], count))
            package_of.append(packages + here * len(kinds) + np.tile(slot_packages, count))
            speeds = part.speeds
            pair += [speeds[LinkKind.NODE]] * count
            together += [part.together] * count
            inside_package += [speeds[LinkKind.PACKAGE]] * count
            rates = [math.inf if kind in _INSIDE else speeds[kind] for kind in KINDS]
            if between is not None:
                rates[-1] = min(rates[-1], between)
            card_rates += [rates] * (count * width)
            part_of += [number] * count
            nodes, cards, packages = (
                nodes + count,
                cards + count * width,
                packages + count * len(kinds),
            )
        self.nodes, self.cards = nodes, cards
        self.node_of: Ints = np.concatenate(node_of)
        self.card_of: Ints = np.concatenate(card_of)
        self.rail_of: Ints = np.concatenate(rail_of)
        self.package_of: Ints = np.concatenate(package_of)
        self.part_of_node: Ints = np.array(part_of)
        self.pair: Floats = np.array(pair, dtype=float)
        self.together: Floats = np.array(together, dtype=float)
        self.inside_package: Floats = np.array(inside_package, dtype=float)
        # Bytes/s of each card over each kind of link (index into KINDS).
        self.card_rates: Floats = np.array(card_rates, dtype=float)
        self.group_of_node: Ints = np.array(self.groups)
        # Bytes/s of a card between two nodes where they were measured; unknown is no limit.
        self.node_rates: Floats | None = None
        if node_rates is not None:
            measured = np.array(node_rates, dtype=float)
            if measured.shape != (nodes, nodes):
                raise ValueError(f"node_rates of shape {measured.shape} for {nodes} nodes")
            measured = np.where(np.isnan(measured), np.inf, measured)
            np.fill_diagonal(measured, np.inf)
            self.node_rates = measured
        if len(self.groups) != nodes:
            raise ValueError(f"{len(self.groups)} switch groups for {nodes} nodes")

    @classmethod
    def of(
        cls,
        machine: Machine,
        nodes: int,
        ranks_per_node: int | None = None,
        *,
        groups: Sequence[int] | None = None,
        speeds: Mapping[LinkKind, float] | None = None,
        node_rates: ArrayLike | None = None,
    ) -> Fabric:
        """Nodes of one machine.

        Args:
            machine: its description.
            nodes: nodes of the job.
            ranks_per_node: None: one a device.
            groups: switch group of each node (see ``switch_groups_of``); None: by the size of
                a group, as if the nodes were consecutive.
            speeds: bytes/s by kind that replace the description's, for example measured ones.
            node_rates: measured bytes/s of one card from node i to node j, shape (nodes,
                nodes); NaN where not measured. They can only slow a link down.
        """
        part = _Part.of(machine, nodes, ranks_per_node, speeds or {})
        if groups is None:
            groups = machine.switch_groups(nodes)
        return cls([part], groups, None, node_rates)

    @classmethod
    def mixed(
        cls,
        machines: Sequence[tuple[Machine, int]],
        *,
        between: float | None = None,
        groups: Sequence[int] | None = None,
    ) -> Fabric:
        """Nodes of several machines in one job, in this order.

        Args:
            machines: each with its number of nodes, all devices used.
            between: bytes/s one way of a network card towards another switch group, hence
                towards another machine; None: the slower of the two cards.
            groups: switch group of each node; None: one a machine.
        """
        parts = [_Part.of(machine, nodes, None, {}) for machine, nodes in machines]
        default = [number for number, part in enumerate(parts) for _ in range(part.nodes)]
        return cls(parts, default if groups is None else groups, between)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.node_of)

    @cached_property
    def latency(self) -> Mapping[LinkKind, float]:
        """Seconds of a small message by kind, the slowest of the machines; 0 where unknown."""
        return {
            kind: max(part.machine.link(kind).latency or 0.0 for part in self.parts)
            for kind in KINDS
        }

    @cached_property
    def rail_only(self) -> bool:
        """Whether cards of different numbers meet only inside nodes."""
        return any(part.machine.network.rail_only for part in self.parts)

    def bandwidth(self, kind: LinkKind) -> float | None:
        """Bytes/s one way of one device or card over that kind of link, the slowest machine's;
        None where unknown."""
        rates = [part.speeds[kind] for part in self.parts]
        if kind is LinkKind.GLOBAL and self.between is not None:
            rates.append(self.between)
        return None if any(math.isnan(rate) for rate in rates) else min(rates)

    def alike(self, a: int, b: int) -> bool:
        """Whether two places are the same to everyone: one package, one card."""
        return bool(self.package_of[a] == self.package_of[b] and self.card_of[a] == self.card_of[b])

    def place(self, rank: int) -> tuple[int, int]:
        """Node and local slot of a global rank."""
        node = int(self.node_of[rank])
        first = int(self.node_of.searchsorted(node))
        return node, rank - first

    def device_peaks(self, dtype: str) -> Floats:
        """Peak FLOP/s of each rank's device, NaN where unknown; for shares of unequal devices."""
        import numpy as np

        peaks = [part.machine.node.device.peak_flops.get(dtype) for part in self.parts]
        known = np.array([np.nan if peak is None else peak for peak in peaks], dtype=float)
        return np.asarray(known[self.part_of_node[self.node_of]])


@dataclass(frozen=True, slots=True)
class _Part:
    """Some nodes of one machine with the speeds that hold for them (NaN where unknown)."""

    machine: Machine
    nodes: int
    ranks_per_node: int
    speeds: Mapping[LinkKind, float]
    together: float

    @classmethod
    def of(
        cls,
        machine: Machine,
        nodes: int,
        ranks_per_node: int | None,
        given: Mapping[LinkKind, float],
    ) -> _Part:
        per_node = machine.devices_per_node if ranks_per_node is None else ranks_per_node
        machine.check_ranks_per_node(per_node)
        speeds = {}
        for kind in KINDS:
            known = given.get(kind, machine.link(kind).bandwidth)
            speeds[kind] = float("nan") if known is None else known
        aggregate = None if LinkKind.NODE in given else machine.link(LinkKind.NODE).aggregate
        together = speeds[LinkKind.NODE] if aggregate is None else aggregate
        return cls(machine, nodes, per_node, speeds, together)


# ---- cost ----------------------------------------------------------------------------------


def axis_cost(fabric: Fabric, grid: RankGrid, traffic: Traffic) -> AxisCost:
    """Cost of one kind of traffic of a step under a placement.

    Raises:
        UnknownSpeedError: a link that it uses has no known speed.
        ValueError: grid and fabric have different sizes.
    """
    if grid.size != fabric.size:
        raise ValueError(f"a grid of {grid.size} ranks on {fabric.size} places")
    return axis_cost_of(fabric, grid.groups(*traffic.axes), traffic)


def axis_cost_of(fabric: Fabric, rows: Ints, traffic: Traffic) -> AxisCost:
    """Cost of the groups ``rows`` (shape groups × members, global ranks)."""
    groups, n = rows.shape
    if n == 1:
        return AxisCost(
            traffic.axes, traffic.pattern, 0.0, 0.0, 0.0, 0.0, LinkKind.DEVICE, groups, 0
        )
    spans = _Spans(fabric, rows)
    if traffic.pattern == "chain":
        network, inside = _chain(fabric, rows, traffic.bytes)
        hops = 1
    elif traffic.pattern == "all_to_all":
        network, inside = _all_to_all(fabric, spans, traffic.bytes)
        hops = 1
    else:
        passes = 2 if traffic.pattern == "all_reduce" else 1
        network, inside = _ring(fabric, spans, traffic.bytes * passes * (n - 1) / n)
        hops = passes * (n - 1)
    kind = KINDS[int(spans.kind.max())]
    latency = traffic.messages * hops * fabric.latency[kind]
    if math.isnan(network) or math.isnan(inside):
        raise UnknownSpeedError(
            f"the speed of {kind.value} links of "
            f"{' and '.join(dict.fromkeys(p.machine.name for p in fabric.parts))} is not known",
            hint="measure it with `hpctrain topo --measure`, or state links in a site file",
        )
    return AxisCost(
        traffic.axes,
        traffic.pattern,
        max(network, inside) + latency,
        network,
        inside,
        latency,
        kind,
        groups,
        int(spans.leaves.sum()),
    )


def group_kinds(fabric: Fabric, rows: Ints) -> Ints:
    """Farthest link (index into KINDS) of each group of ``rows`` (groups × members)."""
    return _Spans(fabric, rows).kind


class _Spans:
    """Groups cut into their parts on each node.

    A *span* is the members of one group on one node. Arrays over spans: ``group``, ``node``,
    ``count``; over groups: ``leaves`` (spans several nodes) and ``kind`` (index into KINDS);
    over members in the order of ``ranks``: ``span``.
    """

    def __init__(self, fabric: Fabric, rows: Ints) -> None:
        import numpy as np

        groups, n = rows.shape
        self.size = n
        self.ranks = np.sort(rows, axis=1)
        node = fabric.node_of[self.ranks]
        first = np.ones((groups, n), dtype=bool)
        first[:, 1:] = node[:, 1:] != node[:, :-1]
        starts = np.flatnonzero(first.reshape(-1))
        self.span = np.cumsum(first.reshape(-1)) - 1
        self.group = starts // n
        self.node = node.reshape(-1)[starts]
        self.count = np.diff(starts, append=groups * n)
        spans_of = np.bincount(self.group, minlength=groups)
        self.leaves = spans_of > 1
        flat = self.ranks.reshape(-1)
        package = fabric.package_of[flat]
        self.one_package = np.minimum.reduceat(package, starts) == np.maximum.reduceat(
            package, starts
        )
        # Cards of a span and how many they are; a card is named by span and number.
        pairs = np.unique(self.span * fabric.cards + fabric.card_of[flat])
        self.card_span, self.card = np.divmod(pairs, fabric.cards)
        self.cards = np.bincount(self.card_span, minlength=len(starts))
        self.kind = self._kinds(fabric, rows.shape[0], flat, node)
        self.rate = self._measured(fabric, groups)

    def _kinds(self, fabric: Fabric, groups: int, flat: Ints, node: Ints) -> Ints:
        import numpy as np

        kind = np.full(groups, KINDS.index(LinkKind.NODE))
        inside = np.ones(groups, dtype=bool)
        np.logical_and.at(inside, self.group, self.one_package)
        kind[inside & ~self.leaves] = KINDS.index(LinkKind.PACKAGE)
        if not self.leaves.any():
            return kind
        # One rail: every span has the same set of rails, hence each as many as all together.
        rails = int(fabric.rail_of.max()) + 1
        rail = fabric.rail_of[flat]
        member_group = np.repeat(np.arange(groups), self.size)
        of_group = np.bincount(np.unique(member_group * rails + rail) // rails, minlength=groups)
        of_span = np.bincount(np.unique(self.span * rails + rail) // rails)
        same = np.ones(groups, dtype=bool)
        np.logical_and.at(same, self.group, of_span == of_group[self.group])
        switch = fabric.group_of_node[node]
        far = switch.min(axis=1) != switch.max(axis=1)
        kind[self.leaves] = KINDS.index(LinkKind.SWITCH_GROUP)
        kind[self.leaves & same] = _RAIL
        kind[self.leaves & far] = KINDS.index(LinkKind.GLOBAL)
        return kind

    def _measured(self, fabric: Fabric, groups: int) -> Floats:
        """Slowest measured rate of a card on each group's ring over its nodes; inf if none."""
        import numpy as np

        rate = np.full(groups, np.inf)
        if fabric.node_rates is None:
            return rate
        following = np.arange(len(self.group)) + 1
        last = np.append(self.group[1:] != self.group[:-1], True)
        first_of = np.searchsorted(self.group, np.arange(groups))
        following[last] = first_of
        np.minimum.at(rate, self.group, fabric.node_rates[self.node, self.node[following]])
        return rate

    def card_rates(self, fabric: Fabric, card: Ints, group: Ints) -> Floats:
        """Bytes/s of cards that serve the given groups."""
        import numpy as np

        return np.minimum(fabric.card_rates[card, self.kind[group]], self.rate[group])


def _busiest(loads: Floats) -> float:
    """The largest load; NaN if any is, since then the largest is not known."""
    return float(loads.max()) if len(loads) else 0.0


def _busiest_card(cards: Ints, loads: Floats) -> float:
    """As _busiest, of the sums by card."""
    import numpy as np

    return _busiest(np.asarray(np.bincount(cards, weights=loads), dtype=float))


def _ring(fabric: Fabric, spans: _Spans, volume: float) -> tuple[float, float]:
    """Seconds in the network and inside nodes when ``volume`` bytes pass through every rank."""
    import numpy as np

    crosses = spans.leaves[spans.group[spans.card_span]]
    card, span = spans.card[crosses], spans.card_span[crosses]
    load = volume / spans.cards[span] / spans.card_rates(fabric, card, spans.group[span])
    network = _busiest_card(card, load)
    passes = np.where(spans.count > 1, 1.0, 0.0)
    if fabric.rail_only:
        changes_rail = spans.kind[spans.group] > _RAIL
        passes = passes + np.where(changes_rail, 1.0, 0.0)
    used = passes > 0
    inside = volume * passes[used] / _inside_speed(fabric, spans)[used]
    return network, _busiest(inside)


def _inside_speed(fabric: Fabric, spans: _Spans) -> Floats:
    """Bytes/s that each member of a span can send to the others of it."""
    import numpy as np

    node = spans.node
    peers = np.maximum(spans.count - 1, 1)
    mesh = np.minimum(fabric.together[node], fabric.pair[node] * peers)
    return np.where(spans.one_package & (spans.count > 1), fabric.inside_package[node], mesh)


def _all_to_all(fabric: Fabric, spans: _Spans, size: float) -> tuple[float, float]:
    """Seconds in the network and inside nodes when every rank sends ``size / n`` to each."""
    import numpy as np

    n = spans.size
    member_count = spans.count[spans.span]
    group = spans.group[spans.span]
    outside = size * (n - member_count) / n
    sends = outside > 0
    network = 0.0
    if sends.any():
        card = fabric.card_of[spans.ranks.reshape(-1)][sends]
        load = outside[sends] / spans.card_rates(fabric, card, group[sends])
        network = _busiest_card(card, load)
    amount = size * (spans.count - 1) / n
    if fabric.rail_only:
        changes_rail = spans.kind[spans.group] > _RAIL
        amount = amount + np.where(changes_rail, size * (n - spans.count) / n, 0.0)
    used = amount > 0
    return network, _busiest(amount[used] / _inside_speed(fabric, spans)[used])


def _chain(fabric: Fabric, rows: Ints, size: float) -> tuple[float, float]:
    """Seconds when every member sends ``size`` to the next and as much back."""
    import numpy as np

    a, b = rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1)
    kind = edge_kinds(fabric, a, b)
    crosses = kind >= _RAIL
    network = 0.0
    if crosses.any():
        card = np.concatenate([fabric.card_of[a[crosses]], fabric.card_of[b[crosses]]])
        rate = fabric.card_rates[card, np.tile(kind[crosses], 2)]
        if fabric.node_rates is not None:
            pair = fabric.node_rates[fabric.node_of[a[crosses]], fabric.node_of[b[crosses]]]
            back = fabric.node_rates[fabric.node_of[b[crosses]], fabric.node_of[a[crosses]]]
            rate = np.minimum(rate, np.concatenate([pair, back]))
        network = _busiest_card(card, size / rate)
    near = ~crosses & (kind > KINDS.index(LinkKind.DEVICE))
    hop = crosses & fabric.rail_only & (kind > _RAIL)
    node = fabric.node_of[a]
    speed = np.where(
        kind == KINDS.index(LinkKind.PACKAGE), fabric.inside_package[node], fabric.pair[node]
    )
    used = near | hop
    return network, _busiest(size / speed[used])


def edge_kinds(fabric: Fabric, a: Ints, b: Ints) -> Ints:
    """Kind (index into KINDS) of the link between ranks ``a[i]`` and ``b[i]``."""
    import numpy as np

    node_a, node_b = fabric.node_of[a], fabric.node_of[b]
    near = np.where(
        fabric.package_of[a] == fabric.package_of[b],
        KINDS.index(LinkKind.PACKAGE),
        KINDS.index(LinkKind.NODE),
    )
    far = np.where(
        fabric.rail_of[a] == fabric.rail_of[b],
        _RAIL,
        KINDS.index(LinkKind.SWITCH_GROUP),
    )
    other = fabric.group_of_node[node_a] != fabric.group_of_node[node_b]
    far = np.where(other, KINDS.index(LinkKind.GLOBAL), far)
    kind = np.where(node_a == node_b, near, far)
    return np.where(a == b, KINDS.index(LinkKind.DEVICE), kind)
