"""The state of linear attention, handed from rank to rank (LASP, Sun et al. 2024).

Each rank holds consecutive tokens and first computes, with all others at the same time, what its
own add up to. Then the states go down the line, one message of D×D numbers a head, whatever the
length of the sequence; in backward their gradients come up it::

    forward     rank 0 ──M──▶ rank 1 ──M──▶ rank 2        M ← λ^tokens·M + own
    backward    rank 0 ◀──dM── rank 1 ◀──dM── rank 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class StateLine:
    """Ranks in the order of the sequence.

    Attributes:
        group: torch process group.
        rank: of this process in it.
        size: ranks.
    """

    group: Any
    rank: int
    size: int

    def before(self, own: Tensor, decay: Tensor) -> Tensor:
        """The state before this rank's tokens.

        Args:
            own: what they add up to, (B, N, D, D).
            decay: of a state over them, (N, 1, 1).
        """
        return _Before.apply(own, decay.detach(), self)  # type: ignore[no-any-return,no-untyped-call]

    def receive(self, like: Tensor, source: int) -> Tensor:
        """From a rank of the line; zeros from beyond its ends."""
        if not 0 <= source < self.size:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(found, group=self.group, group_src=source)
        return found

    def send(self, tensor: Tensor, to: int) -> None:
        """To a rank of the line; nothing beyond its ends."""
        if 0 <= to < self.size:
            dist.send(tensor.contiguous(), group=self.group, group_dst=to)


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, decay: Tensor, line: StateLine) -> Tensor:
        ctx.line = line
        ctx.save_for_backward(decay)
        state = line.receive(own, line.rank - 1)
        line.send(state * decay + own, line.rank + 1)
        return state

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        line: StateLine = ctx.line
        (decay,) = ctx.saved_tensors
        after = line.receive(grad, line.rank + 1)
        line.send(grad + decay * after, line.rank - 1)
        return after, None, None
