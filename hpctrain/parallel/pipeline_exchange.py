"""Messages between the ranks of a pipeline.

A schedule's lists are ordered such that messages between two ranks are received in the order in
which they are sent, so none carries a label. Receive buffers are used again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Send = tuple[Tensor, int]
"""(contiguous tensor, rank in the pipeline)"""
Receive = tuple[torch.Size, torch.dtype, int]
"""(shape, type, rank in the pipeline)"""
Waiting = Callable[[], AbstractContextManager[Any]]
_KEPT = 16
"""Sends that may be under way at once."""


class Arrival:
    """A message under way to this rank."""

    __slots__ = ("buffer", "waiting", "work")

    def __init__(self, buffer: Tensor, work: Any, waiting: Waiting) -> None:
        self.buffer, self.work, self.waiting = buffer, work, waiting

    def wait(self) -> Tensor:
        """The tensor, once it is here. Give it back with :meth:`Exchange.release`."""
        with self.waiting():
            self.work.wait()
        return self.buffer


class Exchange:
    """Sends and receives of one rank.

    Args:
        group: process group of the pipeline.
        device: of the tensors.
        waiting: around every wait for a message, which is where a pipeline idles.
    """

    def __init__(
        self, group: Any, device: torch.device, waiting: Waiting = contextlib.nullcontext
    ) -> None:
        self.group = group
        self.device = device
        self.waiting = waiting
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()
        # NCCL runs the messages of one batch side by side; others would run in a fixed order.
        self._batches = device.type == "cuda"

    def post(self, messages: Sequence[Send | Receive], tag: int = 0) -> list[Arrival]:
        """Start messages, in this order; returns the arrivals of the receives.

        The tag only says what they hold, where the backend takes one.
        """
        operations = [self._operation(message) for message in messages]
        if self._batches:
            found: list[Any] = dist.batch_isend_irecv(
                [dist.P2POp(op, t, group=self.group, group_peer=peer) for op, t, peer in operations]
            )
            works: list[Any] = found if len(found) == len(operations) else found * len(operations)
        else:
            works = [
                dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)
                if operation is dist.isend
                else dist.irecv(tensor, group=self.group, group_src=peer, tag=tag)
                for operation, tensor, peer in operations
            ]
        arrivals = []
        for (operation, tensor, _), work in zip(operations, works, strict=True):
            if operation is dist.isend:
                self._sent.append((work, tensor))
            else:
                arrivals.append(Arrival(tensor, work, self.waiting))
        self._forget_sent()
        return arrivals

    def release(self, *buffers: Tensor | None) -> None:
        """Nobody reads these received tensors any more."""
        for buffer in buffers:
            if buffer is not None:
                self._free.setdefault((buffer.shape, buffer.dtype), []).append(buffer)

    def swap(self, tensor: Tensor, peer: int, tag: int) -> Arrival:
        """Send a tensor to a rank that sends one of the same form back."""
        (arrival,) = self.post([(tensor, peer), (tensor.shape, tensor.dtype, peer)], tag)
        return arrival

    def flush(self) -> None:
        """Wait for all sends."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _operation(self, message: Send | Receive) -> tuple[Any, Tensor, int]:
        if len(message) == 2:
            tensor, peer = message
            return dist.isend, tensor.contiguous(), peer
        shape, dtype, peer = message
        free = self._free.get((shape, dtype))
        buffer = free.pop() if free else torch.empty(shape, dtype=dtype, device=self.device)
        return dist.irecv, buffer, peer

    def _forget_sent(self) -> None:
        """Let go of what has gone, oldest first.

        gloo does not say of a send that it is done unless one waits for it. Waiting for an old
        one is safe: the lists could be run with sends that block.
        """
        while self._sent and (len(self._sent) > _KEPT or self._sent[0][0].is_completed()):
            self._sent.popleft()[0].wait()
