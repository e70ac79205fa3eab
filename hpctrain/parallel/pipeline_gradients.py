"""Gradients of a pipeline's chunks over the data-parallel ranks.

Neither DDP nor FSDP2's own hooks know when a gradient is complete here: the backwards of several
micro-batches are under way at once, and a weight gradient may come after its backward. So every
chunk is reduced once a step, when its last weight gradient is done: ``begin`` before the step,
``reduce`` then, ``finish`` after the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.parallel.model import local_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from hpctrain.parallel.pipeline_exchange import Arrival, Exchange

_BUCKET_BYTES = 25 << 20


class ChunkGradients(Protocol):
    """What the executor asks of a chunk."""

    def begin(self) -> None:
        """Before the first action of a step."""

    def gather(self, *, wait: bool = False) -> None:
        """Start to gather the parameters; a forward waits for it by itself."""

    def reshard(self, *, keep_root: bool) -> None:
        """Drop what was gathered; ``keep_root``: but for what stands outside of blocks."""

    def settle(self) -> None:
        """After a weight pass."""

    def reduce(self) -> None:
        """Start to sum the complete gradients over the data-parallel ranks."""

    def finish(self) -> None:
        """Wait for the sum."""


class Replicated:
    """Every rank holds the parameters; gradients are summed in buckets.

    The loss is divided by the number of ranks, so that the sum is a mean.

    Args:
        parameters: of the chunk.
        group: of the ranks with copies; None where this one is alone.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: Any | None) -> None:
        self._group = group
        self._buckets: list[tuple[Tensor, list[tuple[nn.Parameter, Tensor]]]] = []
        self._works: list[Any] = []
        if group is not None:
            for members in _buckets([p for p in parameters if p.requires_grad]):
                flat = torch.empty(
                    sum(p.numel() for p in members),
                    dtype=members[0].dtype,
                    device=members[0].device,
                )
                pieces = torch.split(flat, [p.numel() for p in members])
                views = [piece.view_as(p) for p, piece in zip(members, pieces, strict=True)]
                self._buckets.append((flat, list(zip(members, views, strict=True))))

    def begin(self) -> None:
        for flat, members in self._buckets:
            flat.zero_()
            for parameter, view in members:
                parameter.grad = view

    def gather(self, *, wait: bool = False) -> None:
        pass

    def reshard(self, *, keep_root: bool) -> None:
        pass

    def settle(self) -> None:
        pass

    def reduce(self) -> None:
        self._works = [
            dist.all_reduce(flat, group=self._group, async_op=True) for flat, _ in self._buckets
        ]

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class Sharded:
    """FSDP2, told when to gather, to reduce and to let go.

    Its hooks still gather what a forward needs and is not there; they reduce nothing and, so
    that a weight pass finds its parameter, let go of nothing.
    """

    def __init__(self, module: FSDPModule) -> None:
        from torch.distributed.fsdp import fully_shard

        self._module = module
        self._state: Any = fully_shard.state(module)  # type: ignore[attr-defined]

    def begin(self) -> None:
        # The whole chunk is one root, whichever of its modules runs first.
        self._state._lazy_init()
        self._module.set_is_last_backward(False)
        self._module.set_reshard_after_backward(False)
        self._module.set_requires_gradient_sync(False)

    def gather(self, *, wait: bool = False) -> None:
        for group in self._groups():
            group.unshard(async_op=not wait)
            if wait:
                group.wait_for_unshard()

    def reshard(self, *, keep_root: bool) -> None:
        for group in self._groups():
            if not (keep_root and group in self._state._fsdp_param_groups):
                group.reshard()

    def settle(self) -> None:
        # Gradients in bf16 move to the fp32 sum.
        for group in self._groups():
            group.post_backward()

    def reduce(self) -> None:
        self._module.set_is_last_backward(True)
        self._module.set_reshard_after_backward(True)
        self._module.set_requires_gradient_sync(True)
        for group in self._groups():
            group.post_backward()
        self._state._root_post_backward_final_callback()

    def finish(self) -> None:
        pass

    def _groups(self) -> list[Any]:
        return [
            group
            for state in self._state._state_ctx.all_states
            for group in state._fsdp_param_groups
        ]


class SummedCopies:
    """Parameters that two ranks of the pipeline hold: their gradients are added up.

    Both ranks get the same sum, bit for bit, and stay equal.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], peer: int, tag: int) -> None:
        self._parameters = parameters
        self._peer, self._tag = peer, tag
        self._arrival: Arrival | None = None
        self._mine = torch.empty(0)

    @torch.no_grad()
    def start(self, exchange: Exchange) -> None:
        """Send this rank's gradients; they are complete."""
        gradients = [local_of(p.grad) for p in self._parameters if p.grad is not None]
        self._mine = torch.cat([gradient.flatten() for gradient in gradients])
        self._arrival = exchange.swap(self._mine, self._peer, self._tag)

    @torch.no_grad()
    def finish(self, exchange: Exchange) -> None:
        assert self._arrival is not None, "start() comes first"
        other = self._arrival.wait()
        total = self._mine + other
        exchange.release(other)
        gradients = [local_of(p.grad) for p in self._parameters if p.grad is not None]
        pieces = torch.split(total, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
        self._arrival, self._mine = None, torch.empty(0)


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one type in groups of some size, the last ones, whose gradients come first,
    first."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        fits = parameter.nbytes <= room and parameter.dtype == found[-1][0].dtype
        if not fits:
            found.append([])
            room = _BUCKET_BYTES
        found[-1].append(parameter)
        room -= parameter.nbytes
    return found
