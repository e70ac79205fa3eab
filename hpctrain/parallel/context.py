"""Context parallelism: ranks share the sequence; only attention looks beyond a rank's part.

Each rank of a context group holds some places of every sequence
(:class:`~hpctrain.spec.sequence.SequenceSplit`), as tokens, targets and everything between.
Embedding, norms, linears, dropout and the loss need no more than the places' numbers. Attention
fetches what it has not: by a ring (:mod:`~hpctrain.parallel.context_ring`), by exchanging
sequence for heads (:mod:`~hpctrain.parallel.context_exchange`), or by both, the exchange among
neighbours and the ring between them::

    two-level, 8 ranks on 2 nodes       ring between members of equal place
    node 0   0 ══ 1 ══ 2 ══ 3           0 ─ 4   1 ─ 5   2 ─ 6   3 ─ 7
    node 1   4 ══ 5 ══ 6 ══ 7           ══ exchange of heads

Parameters see different tokens on each rank of the group: their gradients are averaged over it
together with the data-parallel ranks, and the loss of a rank is weighted with its share of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.errors import ImpossibleError
from hpctrain.model.linear_attention import LinearAttention
from hpctrain.model.moe_routing import within_capacity
from hpctrain.model.transformer import Attention, CausalAttention
from hpctrain.parallel.context_blocks import Tile, documents_of, tiles
from hpctrain.parallel.context_exchange import HeadExchange
from hpctrain.parallel.context_ring import Ring, ring_attention
from hpctrain.parallel.context_state import StateLine
from hpctrain.parallel.expert import ParallelRouter
from hpctrain.schedule.lengths import degrees
from hpctrain.spec.sequence import Run, SequenceSplit, count

if TYPE_CHECKING:
    from hpctrain.parallel.batch import MicroBatch
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec


@dataclass(frozen=True)
class SequencePart:
    """The places of a sequence that one rank holds.

    Attributes:
        split: of the sequence over the context group.
        place: of the rank in the group.
        length: of the sequence where the job says it; without, it has to divide.
    """

    split: SequenceSplit
    place: int
    length: int | None = None

    @cached_property
    def _held(self) -> int | None:
        return None if self.length is None else self.split.count(self.length, self.place)

    def whole(self, held: int) -> int:
        """Length of the sequence of which this rank holds ``held`` tokens."""
        if self.length is not None and held == self._held:
            return self.length
        return held * self.split.size

    def take(self, micro: MicroBatch) -> MicroBatch:
        """This rank's part of a micro-batch of whole sequences.

        Raises:
            ImpossibleError: the sequences are shorter than the group, or of a length that is not
                the job's and does not divide.
        """
        if self.split.size == 1:
            return micro
        tokens, targets = micro.batch
        length = tokens.shape[1]
        if not self.split.fits(length) or (length != self.length and length % self.split.size):
            raise ImpossibleError(
                f"parallel.context: {self.split.size} ranks cannot share sequences of {length} "
                "tokens",
                hint=f"sequences of a multiple of {self.split.size} tokens",
            )
        runs = self.split.runs(length, self.place)
        positions = torch.cat([torch.arange(a, b) for a, b in runs])
        return replace(
            micro,
            batch=(tokens[:, positions], targets[:, positions]),
            positions=positions,
            weight=count(runs) * self.split.size / length,
        )


def sequence_part(spec: JobSpec, context: RankContext) -> SequencePart:
    """What a rank of a job holds of each sequence."""
    length = spec.data.sequence_length
    return SequencePart(spec.sequence_split(), context.coordinate("cp"), length)


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the sequences of this one.

    Attributes:
        part: what this rank holds.
        ring: of the members; None where there is one.
        exchange: among the ranks of this member; None where it is one.
        everyone: process group of all of them.
    """

    part: SequencePart
    ring: Ring | None
    exchange: HeadExchange | None
    everyone: Any = None

    @property
    def split(self) -> SequenceSplit:
        return self.part.split

    def inner_lengths(self, length: int) -> list[int]:
        """Tokens of the ranks that exchange heads with this one, itself included."""
        first = self.part.place // self.split.inner * self.split.inner
        return [self.split.count(length, first + i) for i in range(self.split.inner)]

    def gather(self, x_BSk: Tensor, length: int) -> Tensor:
        """The whole sequence in order, of parts (B, S, k); no gradient."""
        counts = [self.split.count(length, place) for place in range(self.split.size)]
        samples, held, width = x_BSk.shape
        padded = x_BSk.new_zeros(samples, max(counts), width)
        padded[:, :held] = x_BSk
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.everyone)
        whole = x_BSk.new_empty(samples, length, width)
        for place, (part, n) in enumerate(zip(parts, counts, strict=True)):
            whole[:, self.places(length, place)] = part[:, :n]
        return whole

    def places(self, length: int, place: int | None = None) -> Tensor:
        """Places of a rank's tokens, this one's without a place."""
        runs = self.split.runs(length, self.part.place if place is None else place)
        return torch.cat([torch.arange(a, b) for a, b in runs])

    def member_runs(self, length: int) -> list[list[Run]]:
        """Places of every member of the ring."""
        return [self.split.member_runs(length, m) for m in range(self.split.ring)]


@dataclass
class ContextGroups:
    """The groups that attention may use, made once, and the one that it uses now.

    Attributes:
        by_degree: number of ranks -> group; None where this rank is alone.
        degree: of the micro-batch at hand.
    """

    by_degree: Mapping[int, ContextGroup | None]
    degree: int

    @property
    def current(self) -> ContextGroup | None:
        return self.by_degree[self.degree]

    def enter(self, micro: MicroBatch) -> None:
        """Forward and backward of this micro-batch come next."""
        if micro.degree is not None:
            self.degree = micro.degree


def context_groups(spec: JobSpec, context: RankContext) -> ContextGroups | None:
    """The context groups of this rank; None where it is alone. Every rank has to come here."""
    part = sequence_part(spec, context)
    split = part.split
    if split.size == 1:
        return None
    both = spec.parallel.context.both_ways
    if spec.data.documents == "each":
        found: dict[int, ContextGroup | None] = {1: None}
        for degree in degrees(split.size)[1:]:
            _, inside = context.communicators.halves("cp", degree)
            place = part.place % degree
            of = SequencePart(SequenceSplit(degree), place)
            found[degree] = ContextGroup(of, Ring(inside, place, degree, both), None)
        return ContextGroups(found, split.size)
    between, inside = context.communicators.halves("cp", split.inner)
    ring = exchange = None
    if split.ring > 1:
        ring = Ring(between, part.place // split.inner, split.ring, both)
    if split.inner > 1:
        exchange = HeadExchange(inside, part.place % split.inner, split.inner)
    everyone = context.communicators.along("cp").group
    group = ContextGroup(part, ring, exchange, everyone)
    return ContextGroups({split.size: group}, split.size)


def share_sequence(model: nn.Module, groups: ContextGroups) -> None:
    """Let attention and routers of a model or stage reach the other ranks' tokens, in place."""
    for module in model.modules():
        if isinstance(module, ParallelRouter):
            module.__class__ = ContextRouter
            assert isinstance(module, ContextRouter) and groups.current is not None
            module.context = groups.current
        if not isinstance(module, Attention):
            continue
        if isinstance(module.core, LinearAttention):
            group = groups.current
            assert group is not None and group.ring is not None
            ring = group.ring
            module.core.before = StateLine(ring.group, ring.rank, ring.size).before
        else:
            module.core = ContextAttention(groups)


class ContextAttention(CausalAttention):
    """Causal attention over sequences of which each rank of a group holds a part."""

    def __init__(self, groups: ContextGroups) -> None:
        super().__init__()
        self.groups = groups

    def forward(
        self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, starts_BS: Tensor | None = None
    ) -> Tensor:
        """As one rank alone; ``starts_BS`` is of the whole sequence."""
        group = self.groups.current
        if group is None:
            return super().forward(q_BNSD, k_BKSD, v_BKSD, starts_BS)
        held = q_BNSD.shape[2]
        length = group.part.whole(held) if starts_BS is None else starts_BS.shape[1]
        exchange, ring = group.exchange, group.ring
        heads, kv = q_BNSD.shape[1], k_BKSD.shape[1]
        lengths = group.inner_lengths(length)
        if exchange is not None:
            q_BNSD, k_BKSD, v_BKSD = exchange.to_heads(q_BNSD, k_BKSD, v_BKSD, lengths)
        if ring is None:
            y_BNSD = super().forward(q_BNSD, k_BKSD, v_BKSD, starts_BS)
        else:
            runs = group.member_runs(length)
            documents = None if starts_BS is None else documents_of(starts_BS)
            counts = [count(one) for one in runs]
            of = _tiles_with(runs, ring.rank, documents)
            y_BNSD = ring_attention(q_BNSD, k_BKSD, v_BKSD, ring, counts, of)
        if exchange is not None:
            y_BNSD = exchange.to_tokens(y_BNSD, heads, lengths, kv)
        return y_BNSD


class ContextRouter(ParallelRouter):
    """A router of sequences of which each rank of a context group holds a part."""

    context: ContextGroup

    def tokens(self, here: int) -> int:
        return self.context.part.whole(super().tokens(here))

    def whole(self, loads_BE: Tensor) -> Tensor:
        total = super().whole(loads_BE).clone()
        dist.all_reduce(total, group=self.context.everyone)
        return total

    def limit(self, experts_BSk: Tensor) -> Tensor:
        slices = self._slices
        part = experts_BSk if slices is None else slices.gather(experts_BSk)
        length = self.context.part.whole(part.shape[1])
        whole = within_capacity(self.context.gather(part, length), self.moe)
        mine = whole[:, self.context.places(length).to(whole.device)]
        return mine if slices is None else mine.chunk(slices.size, dim=1)[slices.rank]


def _tiles_with(
    held: Sequence[Sequence[Run]], rank: int, documents: list[list[Run]] | None
) -> Callable[[int], list[Tile]]:
    """Member -> tiles of this one's queries with its keys."""

    def of(member: int) -> list[Tile]:
        return tiles(held[rank], held[member], documents, same=member == rank)

    return of
