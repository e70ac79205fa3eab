"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3).

Column-parallel: each rank has some rows of the weight, that is some outputs. Row-parallel:
some columns, that is some inputs, and the ranks' outputs are summed. A column-parallel layer
followed by a row-parallel one needs one reduction forward and one backward.

The gradient of a column-parallel layer's input is summed over the ranks while the gradient of
its weight is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.parallel.regions import TensorGroup
from hpctrain.parallel.split_backward import add_weight_grad, linear


def column_linears(
    x_BSH: Tensor, layers: Sequence[tuple[Tensor, Tensor | None]], group: TensorGroup
) -> list[Tensor]:
    """Apply several column-parallel linears to one input, entering the region once.

    Args:
        x_BSH: whole, or this rank's slice of the sequence.
        layers: local weight (outputs, H) and bias (outputs,) of each.
        group: of the region.

    Returns:
        (B, S, outputs) of each, S the whole sequence.
    """
    dtype = _compute_dtype(x_BSH)
    weights = [weight for weight, _ in layers]
    outputs = _ColumnLinears.apply(x_BSH.to(dtype), group, *weights)  # type: ignore[no-untyped-call]
    return [
        y if bias is None else y + bias.to(dtype)
        for y, (_, bias) in zip(outputs, layers, strict=True)
    ]


def row_linear(y_BSF: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup) -> Tensor:
    """A row-parallel linear: local weight (H, inputs); leaves the region.

    Returns:
        (B, S, H), whole or this rank's slice of the sequence; the bias is added once.
    """
    z_BSH = group.leave(row_partial(y_BSF, weight, group))
    return z_BSH if bias is None else z_BSH + bias.to(z_BSH.dtype)


def row_partial(y_BSF: Tensor, weight: Tensor, group: TensorGroup) -> Tensor:
    """This rank's part of a row-parallel linear's sum, (B, S, H) of the whole sequence."""
    y_BSF = y_BSF.to(_compute_dtype(y_BSF))
    if group.weight_grads is None:
        return F.linear(y_BSF, weight.to(y_BSF.dtype))
    return linear(y_BSF, weight, None, group.weight_grads)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What autocast would compute a linear in; the input's own type without it."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.weights = weights  # see split_backward: the gradient has to reach the parameter
        ctx.save_for_backward(x)
        whole = group.gather(x) if group.sequence else x
        return tuple(whole @ weight.to(x.dtype).T for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group: TensorGroup = ctx.group
        (x,) = ctx.saved_tensors
        weights: tuple[Tensor, ...] = ctx.weights
        grad_x = grads[0] @ weights[0].to(x.dtype)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x += grad @ weight.to(x.dtype)
        pending = group.start_reduce(grad_x)

        def whole() -> Tensor:
            # The slices are gathered again: keeping the whole would undo what sequence
            # parallelism saves.
            return group.gather(x) if group.sequence else x

        store = group.weight_grads
        if store is not None and store.deferring:

            def task() -> None:
                inputs = whole()
                for weight, grad in zip(weights, grads, strict=True):
                    add_weight_grad(weight, grad, inputs)

            store.later(task)
            return pending.wait(), None, *(None for _ in weights)
        rows = whole().flatten(0, -2)
        of_weights = [
            (grad.flatten(0, -2).T @ rows).to(weight.dtype)
            for weight, grad in zip(weights, grads, strict=True)
        ]
        return pending.wait(), None, *of_weights


class ColumnLinear(nn.Linear):
    """A linear of a user's model of which each rank has some outputs; enters the region."""

    group: TensorGroup

    def forward(self, x: Tensor) -> Tensor:
        (y,) = column_linears(x, [(self.weight, self.bias)], self.group)
        return y


class RowLinear(nn.Linear):
    """A linear of a user's model of which each rank has some inputs; leaves the region."""

    group: TensorGroup

    def forward(self, y: Tensor) -> Tensor:
        return row_linear(y, self.weight, self.bias, self.group)
