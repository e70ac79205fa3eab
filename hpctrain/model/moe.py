"""A feed-forward network made of experts: router, dispatch, experts, combination.

::

            ┌ router ── weights, experts ─────────────┐
    x ──────┼ rows in the order of experts ── experts ┴── Σ weight · output ──▶ y
            └ shared experts ─────────────────────────────────────────────── + ┘

T tokens, H width of the residual stream, E experts, k choices of a token, R rows of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.moe_experts import Experts
from hpctrain.model.moe_routing import (
    DROPPED,
    balance_loss,
    choose,
    loads_of,
    scores_of,
    weights_of,
    within_capacity,
    z_loss,
)
from hpctrain.spec.transformer import TransformerDims


@dataclass(frozen=True, slots=True)
class Routing:
    """Where tokens go.

    Attributes:
        experts: (T, k) int64; DROPPED where a choice is not followed.
        weights: (T, k), of the experts' outputs.
    """

    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """Scores experts and chooses among them, in float32 at least.

    Attributes:
        bias: (E,), of the choice; only where the load is balanced by it.
        loss_scale: factor that the loss of the step has in backward: the balance losses, which
            enter there, have to have the same.
        load: (E,) int64, how often backward saw each expert chosen since it was set to zero.
        dropped: (1,) int64, how many of these choices were not followed.
    """

    bias: Tensor | None
    load: Tensor
    dropped: Tensor

    def __init__(self, dims: TransformerDims, **factory: Any) -> None:
        super().__init__()
        assert dims.moe is not None
        self.moe = dims.moe
        self.weight = nn.Parameter(torch.empty(self.moe.experts, dims.hidden, **factory))
        device = factory.get("device")
        self.register_buffer(
            "bias",
            torch.zeros(self.moe.experts, device=device) if self.moe.bias_rate else None,
        )
        load = torch.zeros(self.moe.experts, dtype=torch.int64, device=device)
        self.register_buffer("load", load, persistent=False)
        self.register_buffer("dropped", load.new_zeros(1), persistent=False)
        self.loss_scale = 1.0

    def forward(self, x_BSH: Tensor) -> Routing:
        """Choices and weights of all tokens; adds the balance losses to what backward sees."""
        moe = self.moe
        dtype = torch.promote_types(x_BSH.dtype, torch.float32)
        with torch.autocast(x_BSH.device.type, enabled=False):
            logits = F.linear(x_BSH.to(dtype), self.weight.to(dtype))
            scores = scores_of(logits, moe)
            experts = choose(scores, moe, self.bias)
            weights = weights_of(scores, experts, moe)
            followed = experts if moe.capacity is None else self.limit(experts)
            if self.training and torch.is_grad_enabled():
                seen = loads_of(experts, moe.experts), (followed == DROPPED).sum()
                weights = self._with_losses(weights, logits, scores, *seen)
        return Routing(followed.flatten(0, 1), weights.flatten(0, 1))

    def _with_losses(
        self, weights: Tensor, logits: Tensor, scores: Tensor, local: Tensor, dropped: Tensor
    ) -> Tensor:
        moe, tokens = self.moe, self.tokens(scores.shape[1])
        loss = scores.new_zeros(())
        if moe.balance:
            loss = loss + moe.balance * balance_loss(scores, self.whole(local), tokens, moe)
        if moe.z_loss:
            loss = loss + moe.z_loss * z_loss(logits, tokens)
        args = weights, loss * self.loss_scale, (self.load, self.dropped), (local.sum(0), dropped)
        return _WithLoss.apply(*args)  # type: ignore[no-any-return,no-untyped-call]

    # What sequences that lie on several ranks change:

    def tokens(self, here: int) -> int:
        """Tokens of a whole sequence."""
        return here

    def whole(self, loads_BE: Tensor) -> Tensor:
        """Loads of whole sequences."""
        return loads_BE

    def limit(self, experts_BSk: Tensor) -> Tensor:
        """Choices within the capacity of the experts."""
        return within_capacity(experts_BSk, self.moe)


class _WithLoss(torch.autograd.Function):
    """The weights as they are; in backward, once for each forward that counts, a loss beside
    them and the load noted (a forward that is done twice is not counted twice)."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        loss: Tensor,
        totals: tuple[Tensor, ...],
        seen: tuple[Tensor, ...],
    ) -> Tensor:
        ctx.totals, ctx.seen = totals, seen
        ctx.like = loss.dtype, loss.device
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for total, seen in zip(ctx.totals, ctx.seen, strict=True):
            total.add_(seen)
        dtype, device = ctx.like
        return grad, torch.ones((), dtype=dtype, device=device), None, None


class MixtureOfExperts(nn.Module):
    """In place of a block's feed-forward network (Shazeer et al. 2017; shared experts: Dai et al.
    2024, section 3.2)."""

    def __init__(self, dims: TransformerDims, shared: nn.Module | None, **factory: Any) -> None:
        super().__init__()
        self.router = Router(dims, **factory)
        self.experts = Experts(dims, **factory)
        self.shared = shared

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSH = self.routed(x_BSH)
        return y_BSH if self.shared is None else y_BSH + self.shared(x_BSH)

    def routed(self, x_BSH: Tensor) -> Tensor:
        """The routed experts' part of the output."""
        routing = self.router(x_BSH)
        x_TH = x_BSH.flatten(0, 1)
        slots, counts = slots_of(routing.experts, self.router.moe.experts)
        rows = expand(x_TH, slots, routing.experts.shape[1])
        rows = self.experts(rows, counts.tolist())
        return combine(rows, slots, routing.weights).view_as(x_BSH)


# ---- rows ---------------------------------------------------------------------------------------


@torch.no_grad()
def slots_of(experts_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The choices that are followed, in the order of experts and, of one expert, of tokens.

    Args:
        experts_Tk: choices, DROPPED where one is not followed.
        experts: number of experts.

    Returns:
        (R,) int64, places in the flattened choices; (E,) int64, rows of each expert.
    """
    flat = experts_Tk.flatten()
    counts = torch.bincount(flat + 1, minlength=experts + 1)
    slots = flat.argsort(stable=True)[int(counts[0]) :]
    return slots, counts[1:]


def expand(x_TH: Tensor, slots: Tensor, k: int) -> Tensor:
    """The row of x for each slot: (R, H)."""
    return _Expand.apply(x_TH, slots, k)  # type: ignore[no-any-return,no-untyped-call]


def combine(rows_RH: Tensor, slots: Tensor, weights_Tk: Tensor) -> Tensor:
    """The weighted sum of each token's rows, added up in the order of choices: (T, H).

    Args:
        rows_RH: in the order of ``slots``.
        slots: places in the flattened (T, k).
        weights_Tk: factors.
    """
    spread_TkH = spread(rows_RH, slots, *weights_Tk.shape)
    return (spread_TkH * weights_Tk.to(rows_RH.dtype).unsqueeze(-1)).sum(1)


def spread(rows_RH: Tensor, slots: Tensor, tokens: int, k: int) -> Tensor:
    """Rows at their places in (T, k, H), zeros at the others."""
    flat = rows_RH.new_zeros(tokens * k, rows_RH.shape[1]).index_copy(0, slots, rows_RH)
    return flat.view(tokens, k, rows_RH.shape[1])


class _Expand(torch.autograd.Function):
    """index_select whose gradient is added up in the order of choices, on every device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.k, ctx.tokens = k, x.shape[0]
        return x.index_select(0, slots // k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return spread(grad, slots, ctx.tokens, ctx.k).sum(1), None, None
