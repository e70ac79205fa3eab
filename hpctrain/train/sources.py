"""Tensors of a TrainState as the sources of a checkpoint: on the host, sharded or on a device.

What a rank holds of a parameter does not move between the steps, so views of it are made once
and copied from as often as needed. A tensor that something other than the optimizer changes
while it waits to be copied is found by torch's own version counter; the checkpoint then fails
with its name, and from the next one on that tensor is copied before the save returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpctrain.errors import CheckpointError
from hpctrain.io.shards import ShardSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
        current: gives the tensor that stands now where ``owner`` stood.
        eager: forward or backward may change it (buffers).
    """

    spec: ShardSpec
    local: torch.Tensor
    owner: torch.Tensor
    current: Callable[[], Any]
    eager: bool = False


class TorchSources:
    """See :class:`hpctrain.io.sources.Sources`."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = list(held)
        self.specs = tuple(h.spec for h in held)
        self._eager = {index for index, h in enumerate(held) if h.eager}
        self.eager: Sequence[int] = sorted(self._eager)
        self._pointers = [h.local.data_ptr() for h in held]
        self._versions: list[int] = []
        device = next((h.local.device for h in held if h.local.is_cuda), None)
        self.lands_at_settle = device is not None
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arrays = [None if h.local.is_cuda else as_numpy(h.local) for h in held]

    def still_valid(self) -> bool:
        """Whether the model and the optimizer still hold these very tensors."""
        pairs = zip(self._held, self._pointers, strict=True)
        return all(h.current() is h.owner and h.local.data_ptr() == at for h, at in pairs)

    def begin(self) -> None:
        self.eager = sorted(self._eager)
        self._versions = [h.owner._version for h in self._held]
        if self._stream is not None:
            # The update that made these values may still be running.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, index: int, rows: slice | EllipsisType, out: NDArray[Any]) -> None:
        array = self._arrays[index]
        if array is not None:
            np.copyto(out, array[rows])
            return
        source = self._held[index].local[rows]
        raw = _RAW.get(source.dtype)
        target = torch.from_numpy(out)
        with torch.cuda.stream(self._stream):
            target.copy_(source if raw is None else source.view(raw), non_blocking=True)

    def check(self) -> None:
        changed = [
            index
            for index, (h, before) in enumerate(zip(self._held, self._versions, strict=True))
            if h.owner._version != before and index not in self._eager
        ]
        if changed:
            self._eager.update(changed)
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


def dtype_name(tensor: torch.Tensor) -> str:
    """``float32`` and the like."""
    return str(tensor.dtype).removeprefix("torch.")


def as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """A view of a host tensor's elements, raw bits where numpy has no such type."""
    raw = _RAW.get(tensor.dtype)
    found: NDArray[Any] = (tensor if raw is None else tensor.view(raw)).numpy()
    return found


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """numpy dtype of :func:`as_numpy`."""
    empty = torch.empty(0, dtype=_RAW.get(dtype, dtype))
    return empty.numpy().dtype


def from_numpy(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """The tensor whose :func:`as_numpy` is ``array``."""
    tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    return tensor.view(dtype) if dtype in _RAW else tensor
