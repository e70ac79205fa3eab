"""The experts of a layer: feed-forward networks side by side, and their products.

R rows, each for one expert, stand in the order of the experts; E experts. Experts have no biases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.spec.transformer import TransformerDims


class Deferral(Protocol):
    """Takes weight gradients that are to be computed later than backward."""

    @property
    def deferring(self) -> bool:
        """Whether the backward under way leaves them."""

    def later(self, task: Callable[[], None]) -> None:
        """Leave one."""


class ExpertMatrix(nn.Module):
    """One matrix of every expert, ``weight`` (E, outputs, inputs)."""

    def __init__(self, experts: int, outputs: int, inputs: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs, **factory))


class Experts(nn.Module):
    """Every expert is down(gelu(up(x))) or down(silu(gate(x))·up(x)), without biases."""

    def __init__(self, dims: TransformerDims, **factory: Any) -> None:
        super().__init__()
        moe = dims.moe
        assert moe is not None
        gated = dims.activation == "swiglu"
        self.up = ExpertMatrix(moe.experts, moe.hidden, dims.hidden, **factory)
        self.gate = ExpertMatrix(moe.experts, moe.hidden, dims.hidden, **factory) if gated else None
        self.down = ExpertMatrix(moe.experts, dims.hidden, moe.hidden, **factory)
        self.deferral: Deferral | None = None

    def forward(self, x_RH: Tensor, counts: Sequence[int]) -> Tensor:
        """What each row's expert makes of it.

        Args:
            x_RH: rows in the order of the experts.
            counts: rows of each expert.
        """
        gate = None if self.gate is None else self.gate.weight
        weights = self.up.weight, gate, self.down.weight
        return self.network(x_RH, *weights, counts, self.deferral)

    def network(
        self,
        x_RH: Tensor,
        up: Tensor,
        gate: Tensor | None,
        down: Tensor,
        counts: Sequence[int],
        deferral: Deferral | None,
    ) -> Tensor:
        """The networks with these weights."""
        y_RF = grouped_linear(x_RH, up, counts, deferral)
        if gate is None:
            y_RF = F.gelu(y_RF, approximate="tanh")
        else:
            y_RF = F.silu(grouped_linear(x_RH, gate, counts, deferral)) * y_RF
        return grouped_linear(y_RF, down, counts, deferral)


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Sequence[int], deferral: Deferral | None = None
) -> Tensor:
    """Each row times the transposed matrix of its expert.

    Args:
        x: (R, inputs), in the order of the experts.
        weight: (E, outputs, inputs).
        counts: rows of each expert; they sum to R.
        deferral: where the weight gradient is left if a schedule splits backward.

    Returns:
        (R, outputs), in the type that autocast asks for, else that of ``x``.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    # The cast is outside of the function: autograd gives the gradient back its type.
    return _Grouped.apply(x.to(dtype), weight, counts, deferral)  # type: ignore[no-any-return,no-untyped-call]


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Sequence[int], deferral: Deferral | None
    ) -> Tensor:
        ctx.counts, ctx.deferral = counts, deferral
        # Not saved for backward: a gradient that comes later has to reach the parameter itself.
        ctx.weight = weight
        ctx.save_for_backward(x)
        return rows_times(x, weight.to(x.dtype).transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight: Tensor = ctx.weight
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = rows_times(grad, weight.to(grad.dtype), ctx.counts)
        if not ctx.needs_input_grad[1]:
            return of_x, None, None, None
        if ctx.deferral is not None and ctx.deferral.deferring:

            def task() -> None:
                later = products_of(grad, x, ctx.counts).to(weight.dtype)
                torch.autograd.backward([weight], [later])

            ctx.deferral.later(task)
            return of_x, None, None, None
        return of_x, products_of(grad, x, ctx.counts).to(weight.dtype), None, None


@torch.no_grad()
def rows_times(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """x (R, K) times (E, K, N), each row with its expert's matrix: (R, N)."""
    if _by_library(x):
        return F.grouped_mm(x, matrices, offs=_ends(counts, x))
    found = x.new_empty(x.shape[0], matrices.shape[2])
    split = torch.split(x, list(counts)), torch.split(found, list(counts))
    for rows, result, matrix in zip(*split, matrices, strict=True):
        if rows.shape[0]:
            torch.mm(rows, matrix, out=result)
    return found


@torch.no_grad()
def products_of(grad: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """gradᵀ·x of each expert's rows: (E, N, K) of grad (R, N) and x (R, K)."""
    if _by_library(x):
        return F.grouped_mm(grad.T, x, offs=_ends(counts, x))
    found = x.new_zeros(len(counts), grad.shape[1], x.shape[1])
    split = torch.split(grad, list(counts)), torch.split(x, list(counts))
    for ours, rows, result in zip(*split, found, strict=True):
        if rows.shape[0]:
            torch.mm(ours.T, rows, out=result)
    return found


def _by_library(x: Tensor) -> bool:
    """Whether one kernel does all experts: that of GPUs for bf16, which a loop would starve."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0


def _ends(counts: Sequence[int], like: Tensor) -> Tensor:
    """One past each expert's last row, as grouped_mm takes it."""
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.to(like.device, non_blocking=True)
