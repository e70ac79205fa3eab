"""Linear attention: a state of D×D a head in place of all keys and values.

yₜ = norm(φ(qₜ)ᵀ Mₜ), Mₜ = λ·Mₜ₋₁ + φ(kₜ)·vₜᵀ with φ(x) = 1 + elu(x) (Katharopoulos et al. 2020,
section 3.2) and a decay λ of each head whose logarithms are a geometric series (the slopes of
Press et al. 2022, ALiBi, section 3; as in TransNormerLLM, Qin et al. 2023, with whose norm, a
division by the root mean square, the outputs end). The decay says where a token is, so positions
may be left out.

Computed in chunks: products inside a chunk, and the state from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
"""Tokens whose pairs are computed one by one."""

Before = Callable[[Tensor, Tensor], Tensor]
"""(state that this rank's tokens add up to, its decay over them (N, 1, 1)) -> state before them."""


class LinearAttention(nn.Module):
    """Takes the place of softmax attention in a block.

    Args:
        heads: query heads of the whole layer.
        eps: of the norm.
    """

    def __init__(self, heads: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.heads = range(heads)
        self.slopes = [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]
        self.before: Before | None = None

    def select(self, first: int, stop: int) -> None:
        """Keep some of the heads, as a tensor-parallel rank does."""
        self.heads = self.heads[first:stop]

    def forward(
        self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, starts_BS: Tensor | None = None
    ) -> Tensor:
        """Shapes: K divides N; S consecutive tokens."""
        assert starts_BS is None, "documents are not told apart; check() has refused them"
        kind, dtype = q_BNSD.device.type, q_BNSD.dtype
        with torch.autocast(kind, enabled=False):
            wide = torch.promote_types(dtype, torch.float32)
            repeat = q_BNSD.shape[1] // k_BKSD.shape[1]
            q = F.elu(q_BNSD.to(wide)) + 1
            k = (F.elu(k_BKSD.to(wide)) + 1).repeat_interleave(repeat, 1)
            v = v_BKSD.to(wide).repeat_interleave(repeat, 1)
            slopes = torch.tensor([self.slopes[h] for h in self.heads], dtype=wide, device=q.device)
            y, state = chunked(q, k, v, slopes)
            if self.before is not None:
                # What earlier tokens on other ranks left, seen by all tokens here.
                length = q.shape[2]
                ages = torch.arange(1, length + 1, dtype=wide, device=q.device)
                decay = torch.exp(-slopes.unsqueeze(-1) * ages).unsqueeze(-1)
                y = y + (q * decay) @ self.before(state, decay[:, -1:])
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.to(dtype)


def chunked(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Σ over s ≤ t of exp(−slope·(t−s))·(qₜ·kₛ)·vₛ, and the state after the last token.

    Args:
        q, k, v: (B, N, S, D).
        slopes: (N,).

    Returns:
        (B, N, S, D) and (B, N, D, D), keys by values.
    """
    length = q.shape[2]
    missing = -length % CHUNK
    # Zeros before the first token add nothing to any state.
    q, k, v = (F.pad(x, (0, 0, missing, 0)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))  # type: ignore[no-untyped-call]
    place = torch.arange(CHUNK, dtype=q.dtype, device=q.device)
    slope = slopes.view(-1, 1, 1)
    apart = (place.unsqueeze(-1) - place).clamp(min=0)
    inside = torch.exp(-slope * apart).tril().unsqueeze(1)  # (N, 1, C, C)
    y = (q @ k.transpose(-1, -2) * inside) @ v
    to_end = torch.exp(-slope * (CHUNK - 1 - place).unsqueeze(-1)).unsqueeze(1)
    added = (k * to_end).transpose(-1, -2) @ v  # (B, N, chunks, D, D)
    state, befores = torch.zeros_like(added[:, :, 0]), []
    for one in added.unbind(2):
        befores.append(state)
        state = torch.exp(-slope * CHUNK) * state + one
    from_start = torch.exp(-slope * (place + 1).unsqueeze(-1)).unsqueeze(1)
    y = y + (q * from_start) @ torch.stack(befores, dim=2)
    return y.flatten(2, 3)[:, :, missing:], state
