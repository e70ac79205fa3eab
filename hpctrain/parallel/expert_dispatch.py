"""Ways of rows to their experts and back: flat, in two levels, with hot experts copied instead.

Every way is a generator that yields where messages are under way, so that several parts of the
tokens can be worked on at a time::

    part 1   ── dispatch ──▶ experts ── combine ──▶
    part 2        ── dispatch ──▶ experts ── combine ──▶

T tokens, H width of the residual stream, k choices of a token, E experts of the ranks of a route.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hpctrain.model.moe import combine, expand, slots_of, spread
from hpctrain.model.moe_routing import DROPPED
from hpctrain.parallel.expert_exchange import Order, exchange, gather_counts, start_exchange

Way = Generator[None, None, Tensor]
Range = tuple[int, int]


@dataclass(frozen=True)
class Route:
    """Ranks that hold the experts between them.

    Attributes:
        group: process group of the members.
        rank: of this process in it.
        bounds: first and one past the last expert of each member.
        inner: group of the ranks that share each expert of a member.
        copies: experts of others that a member may take copies of.
        worth: rows that make a copy cheaper than sending them.
    """

    group: Any
    rank: int
    bounds: tuple[Range, ...]
    inner: Any = None
    copies: int = 0
    worth: int = 0

    @property
    def experts(self) -> int:
        """Number of experts of all members."""
        return self.bounds[-1][1]

    def owner(self, expert: int) -> int:
        """The member that holds an expert."""
        return next(m for m, (first, last) in enumerate(self.bounds) if first <= expert < last)


@dataclass(frozen=True)
class Crossing:
    """How a route looks from nodes: first to the node, along this rank's rail, then inside.

    Attributes:
        across: process group of the rail, one member a node.
        node: of this process.
        node_of: (E,) int64, node of each expert.
        inner_of: (E,) int64, its number among those of its node.
        inside: route among the members of this node.
    """

    across: Any
    node: int
    node_of: Tensor
    inner_of: Tensor
    inside: Route


@dataclass(frozen=True)
class CopyPlan:
    """Who takes copies of which experts, in ascending order; all members know it alike."""

    route: Route
    copies: tuple[tuple[int, ...], ...]

    @property
    def mine(self) -> tuple[int, ...]:
        """Experts that this member gets copies of."""
        return self.copies[self.route.rank]


class Network(Protocol):
    """The experts of this rank."""

    def __call__(self, rows: Tensor, counts: Sequence[int], copies: CopyPlan | None) -> Tensor:
        """What the experts make of rows in their order, those of copies after its own."""


def run_together(ways: Iterable[Way]) -> list[Tensor]:
    """Take all ways to their end, one leg of each at a time; their results in order."""
    pending = dict(enumerate(ways))
    found: dict[int, Tensor] = {}
    while pending:
        for number, way in list(pending.items()):
            try:
                next(way)
            except StopIteration as end:
                found[number] = end.value
                del pending[number]
    return [found[number] for number in sorted(found)]


def flat(
    x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor, route: Route, network: Network
) -> Way:
    """Each row goes straight to the rank of its expert.

    Args:
        x_TH: tokens of this rank.
        experts_Tk: their choices, by number in the route; DROPPED where there is none.
        weights_Tk: of the experts' outputs.
        route: where the experts are.
        network: this rank's experts.
    """
    k, me = experts_Tk.shape[1], route.rank
    slots, counts = slots_of(experts_Tk, route.experts)
    table = gather_counts(counts, route.group)
    plan = plan_copies(table, route) if route.copies else None
    if plan is not None:
        experts_Tk = _renumbered(experts_Tk, plan)
        slots, _ = slots_of(experts_Tk, route.experts)
    local = _local_counts(table, route, plan)
    receive = [sum(row) for row in local]
    send = [sum(_local_row(table, route, plan, me, member)) for member in range(len(table))]
    arrived = start_exchange(expand(x_TH, slots, k), send, receive, route.group)
    yield
    order = Order(local, x_TH.device)
    rows = order.sort(arrived())
    if route.inner is not None and route.inner.size() > 1:
        rows = _by_sharers(rows, order.rows, route.inner, network)
    else:
        rows = network(rows, order.rows, plan)
    returned = start_exchange(order.undo(rows), receive, send, route.group)
    yield
    return combine(returned(), slots, weights_Tk)


def hierarchical(
    x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor, crossing: Crossing, network: Network
) -> Way:
    """A token goes once to each node that has an expert of its choice, is spread there, and
    comes back as one sum (the dispatch of DeepSeek-V3 2024, section 3.2.2; two levels as in
    HetuMoE, Nie et al. 2022). Arguments as :func:`flat`."""
    tokens, _ = experts_Tk.shape
    across, me = crossing.across, crossing.node
    nodes = across.size()
    chosen = experts_Tk.clamp(min=0)
    node_Tk = crossing.node_of[chosen].masked_fill(experts_Tk == DROPPED, DROPPED)
    number = torch.arange(nodes, device=x_TH.device)
    wanted_TN = (node_Tk.unsqueeze(1) == number.view(1, -1, 1)).any(2)
    slots, counts = slots_of(torch.where(wanted_TN, number, DROPPED), nodes)
    send = counts.tolist()
    receive = [row[me] for row in gather_counts(counts, across)]
    here = node_Tk[slots // nodes] == (slots % nodes).unsqueeze(1)
    ids = torch.where(here, crossing.inner_of[chosen][slots // nodes], DROPPED)
    arriving = start_exchange(expand(x_TH, slots, nodes), send, receive, across)
    ids = exchange(ids.to(torch.int32), send, receive, across).to(torch.int64)
    weights = expand(weights_Tk, slots, nodes) * here
    weights = exchange(weights, send, receive, across)
    yield
    rows = yield from flat(arriving(), ids, weights, crossing.inside, network)
    returned = start_exchange(rows, receive, send, across)
    yield
    return spread(returned(), slots, tokens, nodes).sum(1)


# ---- experts that several ranks share -----------------------------------------------------------


def _by_sharers(rows: Tensor, counts: Sequence[int], group: Any, network: Network) -> Tensor:
    """Every sharer of the experts gets all rows and computes its part; the parts are summed."""
    members = group.size()
    table = gather_counts(torch.tensor(counts, device=rows.device), group)
    own, sizes = [rows.shape[0]] * members, [sum(row) for row in table]
    order = Order(table, rows.device)
    everything = exchange(rows.repeat(members, 1), own, sizes, group)
    parts = order.undo(network(order.sort(everything), order.rows, None))
    returned = exchange(parts, sizes, own, group)
    return returned.view(members, rows.shape[0], rows.shape[1]).sum(0)


# ---- copies of hot experts ----------------------------------------------------------------------


def plan_copies(table: Sequence[Sequence[int]], route: Route) -> CopyPlan:
    """Each member takes copies of the experts of others that it has most rows for, where the
    rows weigh more than the expert (the sparse materialisation of Hecate, Qing et al. 2025).

    Args:
        table: rows of each member for each expert.
        route: with the most ``copies`` of a member, and the rows that are ``worth`` one.
    """
    found = []
    for member, row in enumerate(table):
        first, last = route.bounds[member]
        hot = [e for e in range(len(row)) if row[e] > route.worth and not first <= e < last]
        hot.sort(key=lambda e: (-row[e], e))
        found.append(tuple(sorted(hot[: route.copies])))
    return CopyPlan(route, tuple(found))


def _renumbered(experts_Tk: Tensor, plan: CopyPlan) -> Tensor:
    """Choices by the place of their expert in the order (destination, own first, number)."""
    route, copies = plan.route, set(plan.mine)

    def key(expert: int) -> tuple[int, bool, int]:
        copied = expert in copies
        return route.rank if copied else route.owner(expert), copied, expert

    order = sorted(range(route.experts), key=key)
    place = [0] * len(order)
    for at, expert in enumerate(order):
        place[expert] = at
    found = torch.tensor(place, device=experts_Tk.device)[experts_Tk.clamp(min=0)]
    return found.masked_fill(experts_Tk == DROPPED, DROPPED)


def _local_counts(
    table: Sequence[Sequence[int]], route: Route, plan: CopyPlan | None
) -> list[list[int]]:
    """Rows that this member gets from each, by expert of its own and then by copy."""
    return [_local_row(table, route, plan, source, route.rank) for source in range(len(table))]


def _local_row(
    table: Sequence[Sequence[int]], route: Route, plan: CopyPlan | None, source: int, member: int
) -> list[int]:
    """Rows of ``source`` for each expert and each copy of ``member``."""
    row = table[source]
    own = range(*route.bounds[member])
    if plan is None:
        return [row[e] for e in own]
    elsewhere = set(plan.copies[source])
    copied = [row[e] if source == member else 0 for e in plan.copies[member]]
    return [0 if e in elsewhere else row[e] for e in own] + copied


def fetch_copies(plan: CopyPlan, matrices: Sequence[Tensor]) -> list[Tensor]:
    """The matrices of the copied experts, from their owners; their gradients go back there.

    Args:
        plan: who gets what.
        matrices: of this rank's experts, (E here, …) each.
    """
    route = plan.route
    first, last = route.bounds[route.rank]
    wanted = [[e - first for e in copies if first <= e < last] for copies in plan.copies]
    receive = [sum(a <= e < b for e in plan.mine) for a, b in route.bounds]
    packed = torch.cat([matrix.flatten(1) for matrix in matrices], dim=1)
    rows = torch.tensor([e for one in wanted for e in one], dtype=torch.int64, device=packed.device)
    send = [len(one) for one in wanted]
    got = exchange(packed.index_select(0, rows), send, receive, route.group)
    parts = torch.split(got, [matrix[0].numel() for matrix in matrices], dim=1)
    return [
        part.reshape(len(plan.mine), *matrix.shape[1:])
        for part, matrix in zip(parts, matrices, strict=True)
    ]
