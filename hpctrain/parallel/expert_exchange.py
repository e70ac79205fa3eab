"""Rows that change ranks: uneven all-to-all under autograd, begun and ended apart.

Between begin and end a rank computes something else, in forward and, because backward goes the
same way back, in backward too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.runtime.hierarchical import all_gather_op


def start_exchange(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: Any
) -> Callable[[], Tensor]:
    """Send rows to the members of a group; the result waits for what they send.

    Args:
        x: (R, …), in the order of the members that get them.
        send: rows for each member.
        receive: rows from each member.
        group: process group.

    Returns:
        A function that gives the received rows, in the order of the members; called once.
    """
    if group.size() == 1:
        return lambda: x
    transfer = _Transfer(list(send), list(receive), group)
    begun = _Start.apply(x, transfer)  # type: ignore[no-untyped-call]
    return lambda: _Finish.apply(begun, transfer)  # type: ignore[no-untyped-call]


def exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> Tensor:
    """As :func:`start_exchange`, at once."""
    return start_exchange(x, send, receive, group)()


def gather_counts(counts: Tensor, group: Any) -> list[list[int]]:
    """Every member's counts, in the order of the members."""
    if group.size() == 1:
        return [counts.tolist()]
    found = counts.new_empty(group.size(), counts.numel())
    all_gather_op(found.view(-1), counts, group=group)
    return found.tolist()


class _Transfer:
    """One exchange under way, there or back."""

    def __init__(self, send: list[int], receive: list[int], group: Any) -> None:
        self.send, self.receive, self.group = send, receive, group
        self._work: Any = None
        self._buffer: Tensor | None = None
        self._source: Tensor | None = None

    def launch(self, x: Tensor, *, back: bool) -> Tensor:
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        self._source = x.contiguous()
        buffer = x.new_empty(sum(receive), *x.shape[1:])
        self._work = dist.all_to_all_single(
            buffer, self._source, receive, send, group=self.group, async_op=True
        )
        self._buffer = buffer
        return buffer

    def wait(self) -> Tensor:
        assert self._buffer is not None, "nothing is under way"
        self._work.wait()
        buffer, self._buffer, self._work, self._source = self._buffer, None, None, None
        return buffer


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.launch(x, back=False)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.wait(), None  # what _Finish began; the gradient itself is not here


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return begun.view_as(begun)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.launch(grad, back=True)
        return grad, None


# ---- order --------------------------------------------------------------------------------------


class Order:
    """Rows by (source, expert) put in the order (expert, source), and back.

    Args:
        counts: rows of each source for each expert.
        device: of the rows.
    """

    def __init__(self, counts: Sequence[Sequence[int]], device: torch.device) -> None:
        table = torch.tensor(counts, dtype=torch.int64)
        self.rows = table.sum(0).tolist()
        """Of each expert, from all sources."""
        sources, experts = table.shape
        ids = torch.arange(experts).repeat(sources).repeat_interleave(table.flatten())
        there = ids.argsort(stable=True)
        back = torch.empty_like(there)
        back[there] = torch.arange(len(there))
        self._there, self._back = there.to(device), back.to(device)

    def sort(self, x: Tensor) -> Tensor:
        """To the order of experts."""
        return _Permute.apply(x, self._there, self._back)  # type: ignore[no-any-return,no-untyped-call]

    def undo(self, x: Tensor) -> Tensor:
        """To the order of sources."""
        return _Permute.apply(x, self._back, self._there)  # type: ignore[no-any-return,no-untyped-call]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


# ---- tokens that several ranks hold alike -------------------------------------------------------


def own_rows(x: Tensor, group: Any) -> Tensor:
    """This member's share of rows that all members hold alike, (T, …)."""
    return _OwnRows.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]


def all_rows(x: Tensor, total: int, group: Any) -> Tensor:
    """The shares of all members, on each of them: (total, …); undoes :func:`own_rows`."""
    return _AllRows.apply(x, total, group)  # type: ignore[no-any-return,no-untyped-call]


def _share(total: int, group: Any) -> tuple[int, int, int]:
    """First row, one past the last, and rows of the largest share."""
    most = -(-total // group.size())
    first = min(total, group.rank() * most)
    return first, min(total, first + most), most


def _gather(x: Tensor, total: int, group: Any) -> Tensor:
    _, _, most = _share(total, group)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: x.shape[0]] = x
    found = x.new_empty(group.size() * most, *x.shape[1:])
    if most:
        all_gather_op(found, padded, group=group)
    return found[:total]


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.total, ctx.group = x.shape[0], group
        first, last, _ = _share(x.shape[0], group)
        return x[first:last].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.total, ctx.group), None


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: int, group: Any) -> Tensor:
        ctx.total, ctx.group = total, group
        return _gather(x, total, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        first, last, _ = _share(ctx.total, ctx.group)
        return grad[first:last].clone(), None, None
