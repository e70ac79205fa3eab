"""Ulysses: ranks exchange sequence for heads before attention, and back after it.

Each rank comes with all heads of some tokens and leaves with some heads of all tokens, attends as
one rank would, and goes back (Jacobs et al. 2023, DeepSpeed-Ulysses, section 3)::

              heads                        heads
           0  1  2  3                   0  1 │ 2  3
    rank 0 ▓▓▓▓▓▓▓▓▓▓ tokens 0 … S/2    ▓▓▓▓▓│░░░░░ tokens
    rank 1 ░░░░░░░░░░ tokens S/2 … S    ▓▓▓▓▓│░░░░░ 0 … S
                                       rank 0  rank 1

Neither heads nor tokens have to divide. Where there are fewer key-value heads than ranks, each
rank gets those that its query heads need, and their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.parallel.regions import Heads

Range = tuple[int, int]


@dataclass(frozen=True)
class HeadExchange:
    """The ranks that exchange.

    Attributes:
        group: torch process group.
        rank: of this process in it.
        size: ranks.
    """

    group: Any
    rank: int
    size: int

    def to_heads(
        self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Some heads of all tokens, in the order of the ranks.

        Args:
            q_BNSD, k_BKSD, v_BKSD: all heads of this rank's tokens.
            lengths: tokens of every rank.

        Returns:
            Queries of this rank's heads, and the keys and values that they need: one for each
            run of as many queries, or, where they do not pair so, one for each query.
        """
        heads = [Heads(q_BNSD.shape[1], k_BKSD.shape[1], self.size, r) for r in range(self.size)]
        ranges = ([h.query for h in heads], [h.kv for h in heads], [h.kv for h in heads])
        q, k, v = _ToHeads.apply(self, lengths, ranges, q_BNSD, k_BKSD, v_BKSD)  # type: ignore[no-untyped-call]
        uneven = heads[self.rank].uneven
        return (q, k, v) if uneven is None else (q, k[:, uneven], v[:, uneven])

    def to_tokens(self, y_BNSD: Tensor, heads: int, lengths: Sequence[int], kv: int) -> Tensor:
        """All heads of this rank's tokens.

        Args:
            y_BNSD: this rank's heads of all tokens.
            heads, kv: query and key-value heads that were shared out.
            lengths: tokens of every rank.
        """
        ranges = [Heads(heads, kv, self.size, r).query for r in range(self.size)]
        return _ToTokens.apply(self, lengths, ranges, y_BNSD)  # type: ignore[no-any-return,no-untyped-call]

    def swap(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """One flat piece to each rank, one from each.

        Args:
            pieces: to every rank.
            sizes: elements from every rank.
        """
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        received = sent.new_empty(sum(sizes))
        splits = [piece.numel() for piece in pieces]
        dist.all_to_all_single(received, sent, list(sizes), splits, group=self.group)
        return list(torch.split(received, list(sizes)))

    def heads_out(
        self, tensors: Sequence[Tensor], ranges: Sequence[Sequence[Range]], lengths: Sequence[int]
    ) -> list[Tensor]:
        """Each tensor (B, n, S, D): heads to their ranks, tokens together."""
        samples, width = tensors[0].shape[0], tensors[0].shape[3]
        pieces = [
            torch.cat(
                [x[:, slice(*of[r])].flatten() for x, of in zip(tensors, ranges, strict=True)]
            )
            for r in range(self.size)
        ]
        counts = [of[self.rank][1] - of[self.rank][0] for of in ranges]
        each = samples * width
        sizes = [each * sum(counts) * length for length in lengths]
        received = self.swap(pieces, sizes)
        split = [
            torch.split(piece, [each * n * length for n in counts])
            for piece, length in zip(received, lengths, strict=True)
        ]
        return [
            torch.cat(
                [
                    part[i].view(samples, n, length, width)
                    for part, length in zip(split, lengths, strict=True)
                ],
                dim=2,
            )
            for i, n in enumerate(counts)
        ]

    def heads_back(
        self, tensors: Sequence[Tensor], ranges: Sequence[Sequence[Range]], lengths: Sequence[int]
    ) -> list[Tensor]:
        """The other way; where several ranks had a head, the sum over them."""
        samples, width = tensors[0].shape[0], tensors[0].shape[3]
        cut = [torch.split(x, list(lengths), dim=2) for x in tensors]
        pieces = [torch.cat([x[r].flatten() for x in cut]) for r in range(self.size)]
        mine = lengths[self.rank]
        counts = [[of[r][1] - of[r][0] for of in ranges] for r in range(self.size)]
        each = samples * mine * width
        received = self.swap(pieces, [each * sum(n) for n in counts])
        results = [
            x.new_zeros(samples, max(stop for _, stop in of), mine, width)
            for x, of in zip(tensors, ranges, strict=True)
        ]
        for rank, piece in enumerate(received):
            for part, result, of, n in zip(
                torch.split(piece, [each * n for n in counts[rank]]),
                results,
                ranges,
                counts[rank],
                strict=True,
            ):
                result[:, slice(*of[rank])] += part.view(samples, n, mine, width)
        return results


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: HeadExchange,
        lengths: Sequence[int],
        ranges: Sequence[Sequence[Range]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.lengths, ctx.ranges = exchange, lengths, ranges
        return tuple(exchange.heads_out(tensors, ranges, lengths))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.exchange.heads_back(grads, ctx.ranges, ctx.lengths)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: HeadExchange, lengths: Sequence[int], ranges: Sequence[Range], y: Tensor
    ) -> Tensor:
        ctx.exchange, ctx.lengths, ctx.ranges = exchange, lengths, ranges
        return exchange.heads_back([y], [ranges], lengths)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (found,) = ctx.exchange.heads_out([grad], [ctx.ranges], ctx.lengths)
        return None, None, None, found
