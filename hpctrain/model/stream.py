"""Long sequences a piece at a time, with the gradients of the whole (StreamBP, Luo et al. 2025).

The output layer makes V logits of each token and the feed-forward network F channels, both many
times the width of the residual stream, and neither looks at another token. So a piece of the
sequence goes through, gives its gradients, and is forgotten before the next one. What is kept
grows with the sequence as the residual stream does, whatever V and F are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def piecewise(function: Callable[[Tensor], Tensor], x_BSH: Tensor, tokens: int) -> Tensor:
    """``function(x)`` of a function that treats each token alone; backward computes it again.

    Args:
        function: (B, s, H) -> (B, s, H), for any s.
        x_BSH: its input.
        tokens: of each sequence in a piece.
    """
    pieces = [
        checkpoint(function, piece, use_reentrant=False, preserve_rng_state=False)
        for piece in torch.split(x_BSH, tokens, dim=1)
    ]
    return torch.cat(pieces, dim=1)


def streamed_loss(
    x_BSH: Tensor,
    head: Callable[[Tensor], Tensor],
    weights: Sequence[Tensor],
    token_loss: Callable[[Tensor, Tensor], Tensor],
    targets_BS: Tensor,
    tokens: int,
) -> Tensor:
    """The mean loss over all tokens; logits of one piece exist at a time.

    Gradients are made in forward, piece by piece, while a piece's logits are at hand: nothing is
    computed twice.

    Args:
        x_BSH: the output layer's input; of the whole of ``targets_BS``, or one of equal slices of
            the sequence on as many ranks, whose logits ``head`` gives together.
        head: (B, s, H) -> logits of these tokens, those of all slices one after the other.
        weights: that ``head`` uses and that want gradients.
        token_loss: (logits, targets) -> mean.
        targets_BS: int64, of the whole sequence.
        tokens: of each sequence, or slice, in a piece.
    """
    slices = targets_BS.chunk(targets_BS.shape[1] // x_BSH.shape[1], dim=1)
    return _Streamed.apply(x_BSH, head, token_loss, slices, tokens, *weights)  # type: ignore[no-any-return,no-untyped-call]


class _Streamed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Callable[[Tensor], Tensor],
        token_loss: Callable[[Tensor, Tensor], Tensor],
        slices: Sequence[Tensor],
        tokens: int,
        *weights: Tensor,
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        length = x.shape[1]
        of_x = torch.empty_like(x) if wanted else None
        # Sums over many pieces: in float32 at least.
        of_weights = [
            torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
            for w in weights
            if wanted
        ]
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        for first in range(0, length, tokens):
            stop = min(first + tokens, length)
            targets = torch.cat([part[:, first:stop] for part in slices], dim=1)
            with torch.set_grad_enabled(wanted):
                piece = x[:, first:stop].detach().requires_grad_(wanted)
                loss = token_loss(head(piece), targets) * ((stop - first) / length)
            total += loss.detach()
            if of_x is not None:
                of_piece, *found = torch.autograd.grad(loss, [piece, *weights])
                of_x[:, first:stop] = of_piece
                for sum_, one in zip(of_weights, found, strict=True):
                    sum_ += one
            del loss, piece
        ctx.gradients = None if of_x is None else (of_x, of_weights)
        ctx.types = [w.dtype for w in weights]
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "backward of a streamed loss runs once: its gradients are given away"
            )
        of_x, of_weights = ctx.gradients
        ctx.gradients = None
        found = [(w.mul_(grad)).to(kind) for w, kind in zip(of_weights, ctx.types, strict=True)]
        return of_x.mul_(grad), None, None, None, None, *found
