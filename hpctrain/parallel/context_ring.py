"""Ring attention: keys and values travel round the ranks, queries stay (Liu et al. 2023).

::

            member 0         member 1         member 2         member 3
    t = 0   q0 × kv0         q1 × kv1         q2 × kv2         q3 × kv3
            kv0 ──▶          kv1 ──▶          kv2 ──▶          kv3 ──▶ (to 0)
    t = 1   q0 × kv3         q1 × kv0         q2 × kv1         q3 × kv2       …

While a block is computed with, the next one is on its way, into a second buffer. In backward keys
and values go round again, and behind each block goes the sum of its gradients so far, which ends
at the block's owner. With both ways (the idea of TokenRing, Wang et al. 2024: use links in both
directions) half of the blocks come from each side, so that a link carries half as much in each
direction; what moves are keys and values still, which grouped-query attention makes small.

With a causal mask and chunks dealt out as in :class:`~hpctrain.spec.sequence.SequenceSplit`, each
member computes half a block at every step: no mask, no wasted products, no one idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.parallel.context_blocks import Merged, Tile, attend_backward

Tiles = Callable[[int], list[Tile]]
"""Member whose block it is -> tiles of this rank's queries with it."""


class Hop:
    """Tensors under way: one leaves, one comes."""

    __slots__ = ("_buffer", "_sent", "_works")

    def __init__(self, buffer: Tensor, sent: Tensor, works: Sequence[Any]) -> None:
        self._buffer, self._sent, self._works = buffer, sent, works

    def wait(self) -> Tensor:
        """What came, when what left has left."""
        for work in self._works:
            work.wait()
        return self._buffer


@dataclass(frozen=True)
class Ring:
    """The members of a ring.

    Attributes:
        group: torch process group, in the order of the ring.
        rank: of this process in it.
        size: members.
        both_ways: blocks come from both neighbours.
    """

    group: Any
    rank: int
    size: int
    both_ways: bool = False

    @property
    def ways(self) -> list[tuple[int, int]]:
        """(direction, steps): the block of step t comes from the member ``direction·t`` back."""
        steps = self.size - 1
        if not self.both_ways or steps < 2:
            return [(1, steps)]
        return [(1, steps - steps // 2), (-1, steps // 2)]

    def owner(self, direction: int, step: int) -> int:
        """Whose block is here after some steps."""
        return (self.rank - direction * step) % self.size

    def shift(self, tensor: Tensor, shape: Sequence[int], distance: int) -> Hop:
        """Send to the member ``distance`` on, receive as much from as far back.

        All members do this at the same point of their program, so messages between two of them
        come in the order in which they are expected.
        """
        to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
        tensor = tensor.contiguous()
        buffer = torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.device.type == "cuda":
            works: list[Any] = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, tensor, group=self.group, group_peer=to),
                    dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=source),
                ]
            )
        else:
            works = [
                dist.isend(tensor, group=self.group, group_dst=to),
                dist.irecv(buffer, group=self.group, group_src=source),
            ]
        return Hop(buffer, tensor, works)

    def travel(self, block: Tensor, shapes: Sequence[Sequence[int]]) -> Iterator[Visit]:
        """The other members' blocks, each while the next one is on its way.

        Args:
            block: this member's.
            shapes: of every member's.
        """
        hops = {way: self._next(block, way, 1, shapes) for way, steps in self.ways if steps}
        yield Visit(self.rank, 0, 0, block)
        for step in range(1, self.size):
            for way, steps in self.ways:
                if step > steps:
                    continue
                block = hops[way].wait()
                if step < steps:
                    hops[way] = self._next(block, way, step + 1, shapes)
                yield Visit(self.owner(way, step), way, step, block)
                del block

    def _next(self, block: Tensor, way: int, step: int, shapes: Sequence[Sequence[int]]) -> Hop:
        return self.shift(block, shapes[self.owner(way, step)], way)


@dataclass(frozen=True, slots=True)
class Visit:
    """A block that is here.

    Attributes:
        owner: member it belongs to.
        way, step: how it came; 0 of one's own.
        block: keys and values, (2, B, K, S, D).
    """

    owner: int
    way: int
    step: int
    block: Tensor


def ring_attention(
    q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, ring: Ring, lengths: Sequence[int], of: Tiles
) -> Tensor:
    """Attention of this member's queries to the keys of all.

    Args:
        q_BNSD, k_BKSD, v_BKSD: of this member; K divides N.
        ring: its members.
        lengths: tokens of every member.
        of: tiles with each member's block.

    Returns:
        (B, N, S, D).
    """
    return _RingAttention.apply(q_BNSD, k_BKSD, v_BKSD, ring, lengths, of)  # type: ignore[no-any-return,no-untyped-call]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, lengths: Sequence[int], of: Tiles
    ) -> Tensor:
        merged = Merged(q)
        for visit in ring.travel(torch.stack((k, v)), _shapes(k, lengths)):
            for tile in of(visit.owner):
                merged.add(tile, q, *visit.block)
        out = merged.out.to(q.dtype)
        ctx.ring, ctx.lengths, ctx.of = ring, lengths, of
        ctx.save_for_backward(q, k, v, out, merged.lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        grad = grad.contiguous()
        wide = lse.dtype
        of_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        shapes = _shapes(k, ctx.lengths)
        own = torch.zeros(shapes[ring.rank], dtype=wide, device=q.device)
        behind: dict[int, Hop] = {}  # sums of gradients that follow the blocks, by direction
        home: list[Hop] = []
        for visit in ring.travel(torch.stack((k, v)), shapes):
            found = own if visit.way == 0 else torch.zeros(
                shapes[visit.owner], dtype=wide, device=q.device
            )  # fmt: skip
            keys, values = visit.block
            for tile in ctx.of(visit.owner):
                rows = [tile.of_rows(x) for x in (grad, q, out, lse)]
                dq, dk, dv = attend_backward(
                    rows[0],
                    rows[1],
                    tile.of_keys(keys),
                    tile.of_keys(values),
                    rows[2],
                    rows[3],
                    tile.causal,
                )
                tile.of_rows(of_q).add_(dq)
                tile.of_keys(found[0]).add_(dk)
                tile.of_keys(found[1]).add_(dv)
            if visit.way == 0:
                continue
            if visit.step > 1:
                found += behind[visit.way].wait()
            steps = dict(ring.ways)[visit.way]
            if visit.step < steps:
                following = ring.owner(visit.way, visit.step + 1)
                behind[visit.way] = ring.shift(found, shapes[following], visit.way)
            else:
                home.append(ring.shift(found, own.shape, -visit.way * steps))
        for hop in home:
            own += hop.wait()
        of_k, of_v = own.to(k.dtype)
        return of_q.to(q.dtype), of_k, of_v, None, None, None


def _shapes(k_BKSD: Tensor, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    samples, heads, _, width = k_BKSD.shape
    return [(2, samples, heads, length, width) for length in lengths]
