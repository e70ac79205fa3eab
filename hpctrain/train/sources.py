"""Tensors of a TrainState as the sources of a checkpoint: on the host, sharded or on a device.

What a rank holds of a parameter does not move between the steps, so views of it are made once
and copied from as often as needed. A tensor that something other than the optimizer changes
while it waits to be copied is found by torch's own version counter; the checkpoint then fails
with its name, and from the next one on that tensor is copied before the save returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpctrain.errors import CheckpointError
from hpctrain.io.shards import ShardSpec
from hpctrain.io.staging import Item

if TYPE_CHECKING:
    from numpy.typing import NDArray

_VERSION = attrgetter("_version")
_RAW = {  # no numpy type of its own: raw bits
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A tensor that this rank writes.

    Attributes:
        spec: its box.
        local: the elements.
        owner: the tensor that the model or the optimizer knows, whose version counts changes.
        state, key: of an optimizer state, where ``owner`` stands; None and empty for others.
        eager: forward or backward may change it (buffers).
    """

    spec: ShardSpec
    local: torch.Tensor
    owner: torch.Tensor
    state: dict[str, Any] | None = None
    key: str = ""
    eager: bool = False


class TorchSources:
    """See :class:`hpctrain.io.sources.Sources`."""

    def __init__(self, held: Sequence[Held]) -> None:
        self.specs = tuple(h.spec for h in held)
        self.eager = frozenset(index for index, h in enumerate(held) if h.eager)
        self._locals = [h.local for h in held]
        # What nobody but the optimizer knows of needs no watching.
        self._watched = [i for i, h in enumerate(held) if h.state is None]
        self._owners = [_alias(held[i].owner) for i in self._watched]
        self._stale = False
        self._states = [(h.state, h.key, h.owner) for h in held if h.state is not None]
        self._counts = {id(h.state): (h.state, len(h.state)) for h in held if h.state is not None}
        self._places = [(h.local, h.local.data_ptr()) for h in held if h.state is None]
        self._versions: list[int] = []
        device = next((h.local.device for h in held if h.local.is_cuda), None)
        self.lands_at_settle = device is not None
        self._stream = None
        if device is not None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arrays = [None if h.local.is_cuda else as_numpy(h.local) for h in held]
        self._pairs: dict[int, tuple[Sequence[Item], list[torch.Tensor], list[torch.Tensor]]] = {}

    def still_valid(self) -> bool:
        """Whether the model and the optimizer seem to hold these very tensors still; a look at
        some, for the training waits. :meth:`check` looks at all."""
        some = (self._states[:1], self._places[:1])
        return not self._stale and self._hold(*some)

    @staticmethod
    def _hold(
        states: Sequence[tuple[dict[str, Any], str, torch.Tensor]],
        places: Sequence[tuple[torch.Tensor, int]],
    ) -> bool:
        return all(state.get(key) is tensor for state, key, tensor in states) and all(
            tensor.data_ptr() == at for tensor, at in places
        )

    def register(self, images: Sequence[NDArray[Any]]) -> Callable[[], None]:
        if self._stream is None:
            return lambda: None
        # Into pageable memory CUDA copies by way of a small buffer of its own, and waits.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        places = [(image.ctypes.data, image.nbytes) for image in images]
        pinned = [at for at, size in places if int(runtime.cudaHostRegister(at, size, 0)) == 0]

        def release() -> None:
            for at in pinned:
                runtime.cudaHostUnregister(at)

        return release

    def begin(self) -> None:
        self._versions = list(map(_VERSION, self._owners))
        if self._stream is not None:
            # The update that made these values may still be running.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, items: Sequence[Item]) -> None:
        if len(items) == 1 and (array := self._arrays[items[0].index]) is not None:
            np.copyto(items[0].out, array[items[0].rows])
            return
        # One call for many tensors: Python's lock is held once, not once for each.
        targets, sources = self._paired(items)
        with torch.no_grad():
            if self._stream is None:
                torch._foreach_copy_(targets, sources)
            else:
                with torch.cuda.stream(self._stream):
                    torch._foreach_copy_(targets, sources, non_blocking=True)

    def _paired(self, items: Sequence[Item]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Places in a buffer and what goes there, as tensors; kept for the next save."""
        known = self._pairs.get(id(items))
        if known is None or known[0] is not items:
            targets = [torch.from_numpy(item.out) for item in items]
            sources = [_bits(self._locals[item.index])[item.rows] for item in items]
            known = self._pairs[id(items)] = (items, targets, sources)
        return known[1:]

    def check(self) -> None:
        counted = all(len(state) == count for state, count in self._counts.values())
        if not counted or not self._hold(self._states, self._places):
            self._stale = True
            raise CheckpointError(
                "tensors of the model or the optimizer were replaced by others, or came, since the "
                "last checkpoint; the next one takes the new ones"
            )
        self.confirm()

    def confirm(self) -> None:
        versions = list(map(_VERSION, self._owners))
        if versions == self._versions:
            return
        changed = [
            index
            for index, now, before in zip(self._watched, versions, self._versions, strict=True)
            if now != before and index not in self.eager
        ]
        if changed:
            self.eager = self.eager.union(changed)
            names = ", ".join(self.specs[index].name for index in changed[:3])
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise CheckpointError(
                f"{names}{more}: changed between the save and the optimizer's step, by something "
                "other than the optimizer; from now on copied before the step goes on"
            )

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def order(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same version counter, which plain ones tell twice as fast as parameters."""
    return tensor.detach() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with numpy's idea of its dtype."""
    raw = _RAW.get(tensor.dtype)
    return tensor if raw is None else tensor.view(raw)


def dtype_name(tensor: torch.Tensor) -> str:
    """``float32`` and the like."""
    return str(tensor.dtype).removeprefix("torch.")


def as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """A view of a host tensor's elements, raw bits where numpy has no such type."""
    found: NDArray[Any] = _bits(tensor).numpy()
    return found


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """numpy dtype of :func:`as_numpy`."""
    empty = torch.empty(0, dtype=_RAW.get(dtype, dtype))
    return empty.numpy().dtype


def from_numpy(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """The tensor whose :func:`as_numpy` is ``array``."""
    tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    return tensor.view(dtype) if dtype in _RAW else tensor
