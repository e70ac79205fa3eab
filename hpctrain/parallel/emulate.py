"""Layers that take a set time: the shape of a schedule without its hardware.

The layers compute as well, small ones as a rule. What a pass takes is up to a pace: by the clock
on the wall it sleeps for what its computing left of its time, so that many ranks on two cores keep
time as many devices would; an emulated machine has a clock of its own
(hpctrain.runtime.emulated_clock).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hpctrain.model.moe import MixtureOfExperts
from hpctrain.parallel.data import blocks_of
from hpctrain.parallel.split_backward import WeightGrads


class Pace(Protocol):
    """How passes take their time."""

    def before(self, seconds: float) -> float:
        """A pass of ``seconds`` begins; what is returned goes to ``after``."""

    def after(self, began: float, seconds: float) -> None:
        """It has computed."""


class WallPace:
    """By the clock on the wall.

    A pass that took too long, because its sleep ended late or the core was not there, makes the
    next one shorter.
    """

    def __init__(self) -> None:
        self._late = 0.0

    def before(self, seconds: float) -> float:
        return time.perf_counter()

    def after(self, began: float, seconds: float) -> None:
        end = began + seconds - self._late
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self._late = time.perf_counter() - end


@dataclass(frozen=True)
class Passes:
    """Seconds of a block's passes.

    Attributes:
        forward, inputs, weights: of forward, input gradient and weight gradient.
        head, embedding: further seconds of all passes, in the last block before an output layer
            and the first one behind an embedding, a third in each pass.
        again: of the forward pass where it is run once more for the backward pass, without head and
            embedding; None where it is ``forward``.
        dense: the first three of a block without experts, where others have some.
        vocabulary: of the passes E, S, T and D of Vocabulary Parallelism.
        pace: how they are taken.
        note: told how long each pass took.
    """

    forward: float
    inputs: float
    weights: float
    head: float = 0.0
    embedding: float = 0.0
    again: float | None = None
    dense: tuple[float, float, float] | None = None
    vocabulary: Mapping[str, float] = field(default_factory=dict)
    pace: Pace = field(default_factory=WallPace, repr=False)
    note: Callable[[float], None] = field(default=lambda seconds: None, repr=False)

    def take(self, kind: str) -> None:
        """The time of a pass of Vocabulary Parallelism, now."""
        seconds = self.vocabulary.get(kind, 0.0)
        self.pace.after(self.pace.before(seconds), seconds)
        self.note(seconds)

    def of(self, block: nn.Module) -> Passes:
        """Of a block with experts or without."""
        if self.dense is None or any(isinstance(m, MixtureOfExperts) for m in block.modules()):
            return self
        forward, inputs, weights = self.dense
        return replace(self, forward=forward, inputs=inputs, weights=weights)

    def longer(self, seconds: float) -> Passes:
        """With a third of ``seconds`` more in each pass."""
        more = seconds / 3.0
        return replace(
            self,
            forward=self.forward + more,
            inputs=self.inputs + more,
            weights=self.weights + more,
            again=self.forward if self.again is None else self.again,
            head=0.0,
            embedding=0.0,
        )


class _Stretch:
    """A stretch of computing on this rank, made as long as it should be."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._began = self._seconds = 0.0

    def begin(self, seconds: float) -> None:
        self._seconds = seconds
        self._passes.note(seconds)
        self._began = self._passes.pace.before(seconds)

    def end(self) -> None:
        self._passes.pace.after(self._began, self._seconds)


def emulate(module: nn.Module, passes: Passes, store: WeightGrads | None) -> None:
    """Let every block take its time in forward, input gradient and weight gradient.

    Args:
        module: a model or a stage, before it is sharded.
        passes: seconds of each.
        store: where the weight gradient is a pass of its own, its time is in that pass.
    """
    blocks = list(blocks_of(module))
    for number, block in enumerate(blocks):
        mine = passes.of(block)
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
        again = torch._C._current_graph_task_id() != -1  # inside of a backward pass
        ahead.begin(passes.forward if not again or passes.again is None else passes.again)
        entered = _Enter.apply(x, back, passes, store)  # type: ignore[no-untyped-call]
        output = forward(entered, *args, **kwargs)
        output = _Leave.apply(output, back, passes, store)  # type: ignore[no-untyped-call]
        ahead.end()
        return output

    return run


class _Leave(torch.autograd.Function):
    """Where a block's backward begins."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, back: _Stretch, passes: Passes, store: WeightGrads | None
    ) -> Tensor:
        ctx.back, ctx.passes, ctx.store = back, passes, store
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        deferring = ctx.store is not None and ctx.store.deferring
        ctx.back.begin(ctx.passes.inputs + (0.0 if deferring else ctx.passes.weights))
        return grad, None, None, None


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
        ctx.back.end()
        if store is not None and store.deferring:
            pause = _Stretch(passes)

            def weights() -> None:
                pause.begin(passes.weights)
                pause.end()

            store.later(weights)
        return grad, None, None, None
