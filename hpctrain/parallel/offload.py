"""Activations that wait for backward in host memory (PipeOffload, Wan et al. 2025).

What autograd saves during one forward goes through a :class:`Shelf`. ``offload`` copies it to
the host and lets go of it on the device, ``reload`` brings it back; on a GPU both run beside the
computation, on a stream of their own. On a CPU the copy stays in the same memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Saved:
    """One saved tensor: on the device, or its copy on the host."""

    __slots__ = ("device", "host", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.host: Tensor | None = None
        self.device = tensor.device


class Shelf:
    """What one forward saved for its backward.

    Args:
        stream: copies run on it; None on a CPU.

    ::

        shelf = Shelf()
        with shelf.saving():
            y = stage(x)
        shelf.offload()
        ...
        shelf.reload()
        y.backward()
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream
        self._saved: list[_Saved] = []
        self._known: dict[tuple[Any, ...], _Saved] = {}
        self._done: torch.cuda.Event | None = None

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Around the forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(s.tensor.nbytes for s in self._saved if s.tensor is not None)

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) or base.dim() == 0:
            return tensor
        # Several nodes save one tensor; it is moved once.
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._known:
            self._known[key] = _Saved(tensor)
            self._saved.append(self._known[key])
        return self._known[key]

    @staticmethod
    def _unpack(saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert saved.tensor is not None, "the activations are in host memory"
        return saved.tensor

    def offload(self) -> None:
        """Copy everything to the host; the device's memory is free when that is done."""
        self._known.clear()
        with self._beside():
            for saved in self._saved:
                tensor = saved.tensor
                assert tensor is not None, "offloaded already"
                saved.host = torch.empty_like(
                    tensor, device="cpu", pin_memory=self._stream is not None
                )
                saved.host.copy_(tensor, non_blocking=True)
                if self._stream is not None:
                    tensor.record_stream(self._stream)
                saved.tensor = None

    def reload(self) -> None:
        """Copy everything back; :meth:`wait` before it is used."""
        with self._beside():
            for saved in self._saved:
                assert saved.host is not None, "nothing was offloaded"
                saved.tensor = saved.host.to(saved.device, non_blocking=True)
                saved.host = None
            if self._stream is not None:
                self._done = self._stream.record_event()

    def wait(self) -> None:
        """Let the current stream wait for the reload."""
        if self._done is not None:
            self._done.wait()

    def _beside(self) -> Any:
        """Work inside runs on the copy stream, after what the computation has done so far."""
        if self._stream is None:
            return torch.no_grad()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)
