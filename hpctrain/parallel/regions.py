"""Entering and leaving the tensor-parallel region of a layer, with the right gradients.

Between regions the residual stream is whole on every rank of the group, or, under sequence
parallelism, each rank holds a slice of the sequence (Korthikanti et al. 2022, section 4.2.2)::

                     enter                    leave
    plain       x ──identity──▶ [ local ] ──all-reduce──────▶ y     (f and g of Megatron-LM)
                dx ◀─all-reduce─         ◀──identity───────── dy
    sequence    x ──all-gather─▶ [ local ] ──reduce-scatter─▶ y     (g and ḡ)
                dx ◀reduce-scatter─      ◀──all-gather─────── dy

Sequences are dimension 1 of (B, S, H).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.parallel.split_backward import WeightGrads


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share the layers of one stage.

    Attributes:
        group: torch process group.
        rank: of this process in it.
        size: ranks.
        sequence: the residual stream is sliced along the sequence.
        overlap: a block works on half of its samples while the other half is being summed.
        weight_grads: where layers leave their weight gradients if a schedule splits backward.
    """

    group: Any
    rank: int
    size: int
    sequence: bool = False
    overlap: bool = False
    weight_grads: WeightGrads | None = None

    def enter(self, x_BSH: Tensor) -> Tensor:
        """The whole input of a region."""
        return _Enter.apply(x_BSH, self)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, y_BSH: Tensor) -> Tensor:
        """The sum of the ranks' outputs: whole, or this rank's slice of the sequence."""
        return _Leave.apply(y_BSH, self)  # type: ignore[no-any-return,no-untyped-call]

    def start_leave(self, y_BSH: Tensor) -> Callable[[], Tensor]:
        """As :meth:`leave`, in two parts: the sum begins now, and the result waits for it."""
        pending: list[Pending] = []
        begun = _StartLeave.apply(y_BSH, self, pending)  # type: ignore[no-untyped-call]
        return lambda: _FinishLeave.apply(begun, pending)  # type: ignore[no-untyped-call]

    def gather(self, x_BSH: Tensor) -> Tensor:
        """Slices of the sequence to the whole; no gradient."""
        slices = x_BSH.new_empty(self.size * x_BSH.shape[0], *x_BSH.shape[1:])
        dist.all_gather_into_tensor(slices, x_BSH.contiguous(), group=self.group)
        stacked = slices.view(self.size, *x_BSH.shape)
        return stacked.movedim(0, 1).flatten(1, 2)

    def start_reduce(self, y_BSH: Tensor) -> Pending:
        """Begin to sum the ranks' tensors; see :class:`Pending`. The input may be overwritten."""
        if not self.sequence:
            whole = y_BSH.contiguous()
            return Pending(whole, dist.all_reduce(whole, group=self.group, async_op=True), whole)
        slices = torch.stack(y_BSH.chunk(self.size, dim=1))
        mine = torch.empty_like(slices[0])
        work = dist.reduce_scatter_tensor(
            mine, slices.flatten(0, 1), group=self.group, async_op=True
        )
        return Pending(mine, work, slices)


@dataclass(frozen=True)
class Pending:
    """A reduction under way; ``source`` lives until it is done."""

    result: Tensor
    work: Any
    source: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.gather(x) if group.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.start_reduce(grad.clone()).wait(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.start_reduce(y.clone()).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group: TensorGroup = ctx.group
        return group.gather(grad) if group.sequence else grad, None


class _StartLeave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: TensorGroup, pending: list[Pending]) -> Tensor:
        ctx.group = group
        pending.append(group.start_reduce(y.clone()))
        return pending[0].result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group: TensorGroup = ctx.group
        return group.gather(grad) if group.sequence else grad, None, None


class _FinishLeave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, pending: list[Pending]) -> Tensor:
        pending.pop().wait()
        return begun.view_as(begun)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def share(total: int, size: int, rank: int) -> tuple[int, int]:
    """First and one past the last of ``total`` things of a rank; the first ranks take the rest.

    Raises:
        ValueError: fewer things than ranks.
    """
    if total < size:
        raise ValueError(f"{total} cannot be shared by {size} ranks")
    each, rest = divmod(total, size)
    first = rank * each + min(rank, rest)
    return first, first + each + (rank < rest)


class Heads:
    """Which heads a rank computes.

    Heads go to ranks in whole key-value groups where there are enough of them; where there are
    fewer key-value heads than ranks, query heads are shared out and each rank needs some of the
    key-value heads. What does not divide is shared unevenly.

    Args:
        heads, kv_heads: of the whole layer.
        size, rank: of the group.

    Attributes:
        query: range of the rank's query heads.
        kv: range of the key-value heads they need.
        shared: key-value heads are fewer than ranks.
        uneven: for each query head its key-value head within ``kv``, where these do not pair in
            runs of equal length; else None.

    Raises:
        ValueError: fewer query heads than ranks.
    """

    def __init__(self, heads: int, kv_heads: int, size: int, rank: int) -> None:
        repeat = heads // kv_heads
        self.shared = kv_heads < size
        if self.shared:
            self.query = share(heads, size, rank)
            self.kv = (self.query[0] // repeat, (self.query[1] - 1) // repeat + 1)
        else:
            self.kv = share(kv_heads, size, rank)
            self.query = (self.kv[0] * repeat, self.kv[1] * repeat)
        wanted = [head // repeat - self.kv[0] for head in range(*self.query)]
        each, rest = divmod(len(wanted), self.kv[1] - self.kv[0])
        regular = None if rest else [i // each for i in range(len(wanted))]
        self.uneven = None if regular == wanted else wanted
