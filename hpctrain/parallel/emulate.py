"""Layers that take a set time by sleeping: the shape of a schedule without its hardware.

Ranks that sleep need no core, so that many of them on two cores keep time as many devices would.
The layers compute as well, small ones as a rule; a pass sleeps for what its computing left of its
time. Time in which a layer waited for other ranks does not count towards that. A pass that took
too long, because its sleep ended late or the core was not there, makes the next one shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.parallel.data import blocks_of
from hpctrain.parallel.split_backward import WeightGrads


@dataclass(frozen=True)
class Passes:
    """Seconds of a block's passes.

    Attributes:
        forward, inputs, weights: of forward, input gradient and weight gradient.
        head, embedding: further seconds of all passes, in the last block before an output layer
            and the first one behind an embedding, a third in each pass.
        blocked: seconds that this rank has waited for others so far.
        note: told how long each pass took.
        late: seconds that passes so far took too long; the next ones are shorter by them.
    """

    forward: float
    inputs: float
    weights: float
    head: float = 0.0
    embedding: float = 0.0
    blocked: Callable[[], float] = field(default=lambda: 0.0, repr=False)
    note: Callable[[float], None] = field(default=lambda seconds: None, repr=False)
    late: list[float] = field(default_factory=lambda: [0.0], repr=False)

    def longer(self, seconds: float) -> Passes:
        """With a third of ``seconds`` more in each pass."""
        more = seconds / 3.0
        return replace(
            self,
            forward=self.forward + more,
            inputs=self.inputs + more,
            weights=self.weights + more,
            head=0.0,
            embedding=0.0,
        )


class _Stretch:
    """A stretch of computing on this rank, made as long as it should be."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._began = self._blocked = 0.0

    def begin(self) -> None:
        self._blocked = self._passes.blocked()
        self._began = time.perf_counter()

    def end(self, seconds: float) -> None:
        waited = self._passes.blocked() - self._blocked
        late = self._passes.late
        end = self._began + waited + seconds - late[0]
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)
        late[0] = time.perf_counter() - end
        self._passes.note(seconds)


def emulate(module: nn.Module, passes: Passes, store: WeightGrads | None) -> None:
    """Let every block take its time in forward, input gradient and weight gradient.

    Args:
        module: a model or a stage, before it is sharded.
        passes: seconds of each.
        store: where the weight gradient is a pass of its own, its time is in that pass.
    """
    blocks = list(blocks_of(module))
    for number, block in enumerate(blocks):
        mine = passes
        if number == 0 and passes.embedding and getattr(module, "embedding", None) is not None:
            mine = mine.longer(passes.embedding)
        if number == len(blocks) - 1 and passes.head and getattr(module, "head", None) is not None:
            mine = mine.longer(passes.head)
        block.forward = _timed(block.forward, mine, store)


def _timed(
    forward: Callable[..., Tensor], passes: Passes, store: WeightGrads | None
) -> Callable[..., Tensor]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        ahead, back = _Stretch(passes), _Stretch(passes)
        ahead.begin()
        entered = _Enter.apply(x, back, passes, store)  # type: ignore[no-untyped-call]
        output = _Leave.apply(forward(entered, *args, **kwargs), back)  # type: ignore[no-untyped-call]
        ahead.end(passes.forward)
        return output

    return run


class _Leave(torch.autograd.Function):
    """Where a block's backward begins."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, back: _Stretch) -> Tensor:
        ctx.back = back
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.back.begin()
        return grad, None


class _Enter(torch.autograd.Function):
    """Where a block's backward ends: both gradients, or the input's alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, back: _Stretch, passes: Passes, store: WeightGrads | None
    ) -> Tensor:
        ctx.back, ctx.passes, ctx.store = back, passes, store
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        passes, store = ctx.passes, ctx.store
        if store is None or not store.deferring:
            ctx.back.end(passes.inputs + passes.weights)
            return grad, None, None, None
        ctx.back.end(passes.inputs)
        pause = _Stretch(passes)

        def weights() -> None:
            pause.begin()
            pause.end(passes.weights)

        store.later(weights)
        return grad, None, None, None
