"""The weight gradient as a pass of its own (Qi et al. 2023, section 2: B and W).

Backward of a linear is two matrix products: the gradient of its input, which the layer before
waits for, and that of its weight, which nobody waits for. Where a schedule runs them apart, the
first pass (I) is autograd's own, except that linears leave their second product in a
:class:`WeightGrads`; the second pass (W) takes it from there. Between the passes only the inputs
of the linears and the gradients of their outputs are held. The gradients of vectors (norms) and
of the embedding cost next to nothing and belong to I.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Task = Callable[[], None]


class WeightGrads:
    """What is left to do for weights, by the pass that left it."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[Task]] = {}
        self._open: list[Task] | None = None

    @property
    def deferring(self) -> bool:
        """Whether a pass that leaves weight gradients for later is under way."""
        return self._open is not None

    @contextmanager
    def defer(self, key: Hashable) -> Iterator[None]:
        """Backward inside leaves its weight gradients under ``key``."""
        self._open = self._waiting.setdefault(key, [])
        try:
            yield
        finally:
            self._open = None

    def later(self, task: Task) -> None:
        """Leave something for the weight pass of the backward under way."""
        assert self._open is not None, "no backward is being split"
        self._open.append(task)

    def run(self, key: Hashable) -> None:
        """Do, and forget, what was left under ``key``."""
        tasks = self._waiting.pop(key)
        tasks.reverse()
        while tasks:
            tasks.pop()()

    def __len__(self) -> int:
        """Tasks that wait."""
        return sum(len(tasks) for tasks in self._waiting.values())


@torch.no_grad()
def add_weight_grad(weight: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add gradᵀ·x to the gradient of the parameter that ``weight`` is, or is a cast or part of.

    Args:
        weight: (outputs, inputs).
        grad: (…, outputs), gradient of the layer's output.
        x: (…, inputs), the layer's input.
    """
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    if weight.is_leaf and weight.grad is not None and weight.grad.dtype == grad.dtype:
        weight.grad.addmm_(grad.T, x)
    else:
        torch.autograd.backward([weight], [(grad.T @ x).to(weight.dtype)])


def add_bias_grad(bias: Tensor, grad: Tensor) -> None:
    """Add the sum of ``grad`` (…, outputs) over all but its last dimension."""
    torch.autograd.backward([bias], [grad.flatten(0, -2).sum(0).to(bias.dtype)])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGrads | None) -> Tensor:
    """A linear layer whose weight gradient can be left to a pass of its own.

    Args:
        x: (…, inputs).
        weight: (outputs, inputs).
        bias: (outputs,).
        store: of the rank; None is torch's own linear.
    """
    if store is None:
        return F.linear(x, weight, bias)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    return _Linear.apply(x, weight, bias, store)  # type: ignore[no-any-return,no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGrads
    ) -> Tensor:
        ctx.store = store
        # Not saved for backward: what recomputation or offloading gives back of a saved tensor
        # is another tensor, and the gradient has to reach the parameter.
        ctx.parameters = weight, bias
        ctx.save_for_backward(x)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.parameters
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_x = grad @ weight.to(grad.dtype) if needs_x else None
        if ctx.store.deferring:

            def task() -> None:
                if needs_weight:
                    add_weight_grad(weight, grad, x)
                if needs_bias:
                    add_bias_grad(bias, grad)

            ctx.store.later(task)
            return of_x, None, None, None
        rows = grad.flatten(0, -2)
        of_weight = (rows.T @ x.flatten(0, -2)).to(weight.dtype) if needs_weight else None
        return of_x, of_weight, rows.sum(0).to(bias.dtype) if needs_bias else None, None


class SplitLinear(nn.Linear):
    """nn.Linear with a backward that can be split."""

    store: WeightGrads

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.store)


def split_linears(module: nn.Module, store: WeightGrads) -> None:
    """Let the backward of every plain linear of a module be split, in place."""
    for linear in module.modules():
        if type(linear) is nn.Linear:
            linear.__class__ = SplitLinear
            linear.store = store  # type: ignore[assignment]
