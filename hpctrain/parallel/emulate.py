"""Layers that take a set time by sleeping: the shape of a schedule without its hardware.

Ranks that sleep need no core, so that many of them on two cores keep time as many devices would.
The layers compute as well; with small ones the sleep is all that counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.parallel.data import blocks_of
from hpctrain.parallel.split_backward import WeightGrads


def emulate(module: nn.Module, seconds: float, store: WeightGrads | None) -> None:
    """Let every block sleep in its forward, its input gradient and its weight gradient.

    Args:
        module: a model or a stage, before it is sharded.
        seconds: of each of the three.
        store: where the weight gradient is a pass of its own, the sleep is in that pass.
    """
    for block in blocks_of(module):
        block.forward = _slow(block.forward, seconds, store)


def _slow(
    forward: Callable[..., Tensor], seconds: float, store: WeightGrads | None
) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _Sleep.apply(forward(*args, **kwargs), seconds, store)  # type: ignore[no-untyped-call]

    return run


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, store: WeightGrads | None) -> Tensor:
        ctx.seconds, ctx.store = seconds, store
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        seconds, store = ctx.seconds, ctx.store
        time.sleep(seconds)
        if store is not None and store.deferring:
            store.later(lambda: time.sleep(seconds))
        else:
            time.sleep(seconds)
        return grad, None, None
