"""TrainState: everything that a restart needs, as shards of global tensors and plain values.

Names in a checkpoint: ``model/<parameter or buffer>`` and ``optimizer/<state>/<parameter>``,
both by the model's own fully qualified names, whatever wraps the model. A tensor that several
ranks hold whole is written by one of them, in turn, so that the ranks share the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from hpctrain.errors import CheckpointError
from hpctrain.io.shards import TensorShard
from hpctrain.parallel.parallelize import unwrapped
from hpctrain.train import rng

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpctrain.io.checkpoint import CheckpointReader

_RAW = {  # no numpy type of its own: raw bits
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Box:
    """A rank's part of a global tensor: the tensor it lies in and where it stands.

    ``mine`` says that this rank is the one, of those that hold the same part, that writes it.
    """

    name: str
    local: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    mine: bool


@dataclass
class TrainState:
    """What is trained and how far it is.

    Attributes:
        model: as parallelised.
        optimizer: over its parameters.
        step: optimizer steps done.
        tokens: tokens (samples, for models without sequences) seen, all ranks.
        samples: samples taken from the data order, all ranks: the data cursor.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    tokens: int = 0
    samples: int = 0

    def shards(self, rank: int, world_size: int) -> list[TensorShard]:
        """The parts that this rank writes."""
        return [
            TensorShard(
                box.name,
                box.global_shape,
                box.offsets,
                _to_numpy(box.local),
                _dtype_name(box.local),
            )
            for box in self._boxes(rank, world_size)
            if box.mine
        ]

    def scalars(self) -> dict[str, Any]:
        """Progress and the optimizer's per-parameter numbers (AdamW's step counts)."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "samples": self.samples,
            "optimizer": self._optimizer_scalars(),
        }

    def restore(self, reader: CheckpointReader, rank: int, world_size: int) -> bool:
        """Read this rank's parts; True where its random generators were restored too.

        Generators belong to a rank: they are restored only on the same number of ranks.

        Raises:
            CheckpointError: a tensor is missing, has another shape or is not the model's.
        """
        scalars = reader.scalars
        self._make_optimizer_states(scalars["optimizer"])
        boxes = list(self._boxes(rank, world_size))
        _compare(boxes, reader)
        for box in boxes:
            found = reader.read(box.name, box.offsets, tuple(box.local.shape))
            box.local.copy_(_from_numpy(found, box.local.dtype))
        self.step = int(scalars["step"])
        self.tokens = int(scalars["tokens"])
        self.samples = int(scalars["samples"])
        generators = reader.rank_state(rank) if reader.world_size == world_size else None
        if generators is None:
            return False
        rng.restore(dict(generators))
        return True

    def _boxes(self, rank: int, world_size: int) -> Iterator[Box]:
        tensors = list(_named_tensors(self.model))
        states = [
            (f"optimizer/{key}/{name}", value)
            for name, parameter in unwrapped(self.model).named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        ]
        for index, (name, tensor) in enumerate([*tensors, *states]):
            yield _box(name, tensor.detach(), index % world_size == rank)

    def _optimizer_scalars(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for name, parameter in unwrapped(self.model).named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    found.setdefault(key, {})
                elif isinstance(value, torch.Tensor | int | float):
                    found.setdefault(key, {})[name] = float(value)
        return found

    def _make_optimizer_states(self, saved: dict[str, dict[str, float]]) -> None:
        """Allocate the states that the first optimizer step would make."""
        for name, parameter in unwrapped(self.model).named_parameters():
            if not parameter.requires_grad:
                continue
            state = self.optimizer.state[parameter]
            for key, numbers in saved.items():
                if name in numbers:
                    state[key] = torch.tensor(
                        numbers[name], dtype=torch.float32, device=parameter.device
                    )
                elif not numbers:
                    state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    inner = unwrapped(model)
    for name, parameter in inner.named_parameters():
        yield f"model/{name}", parameter
    persistent = inner.state_dict(keep_vars=True).keys()
    for name, buffer in inner.named_buffers():
        if name in persistent:
            yield f"model/{name}", buffer


def _box(name: str, tensor: torch.Tensor, turn: bool) -> Box:
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Box(name, tensor, shape, (0,) * len(shape), turn)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    local = tensor.to_local()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    at = mesh.get_coordinate()
    assert at is not None, "this rank is not part of the tensor's mesh"
    copies = [i for i, placement in zip(at, placements, strict=True) if placement == Replicate()]
    empty = local.numel() == 0
    mine = not empty and not any(copies)
    offsets = (0,) * tensor.dim() if empty else tuple(offsets)
    return Box(name, local, tuple(tensor.shape), offsets, mine)


def _compare(boxes: Sequence[Box], reader: CheckpointReader) -> None:
    """The checkpoint must hold the model's tensors, all of them and no others."""
    reader.check({box.name: (box.global_shape, _dtype_name(box.local)) for box in boxes})
    extra = sorted(reader.tensors().keys() - {box.name for box in boxes})
    if extra:
        rest = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        raise CheckpointError(
            f"{reader.path} does not fit the model: it holds {', '.join(extra[:3])}{rest}, which "
            "the model has not",
            hint="resume with the model section the checkpoint was made with",
        )


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _to_numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    tensor = tensor.contiguous().cpu()
    raw = _RAW.get(tensor.dtype)
    array: NDArray[np.generic] = (tensor if raw is None else tensor.view(raw)).numpy()
    return array


def _from_numpy(array: NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(dtype) if dtype in _RAW else tensor
