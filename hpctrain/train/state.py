"""TrainState: everything that a restart needs, as shards of global tensors and plain values.

Names in a checkpoint: ``model/<parameter or buffer>`` and ``optimizer/<state>/<parameter>``,
both by the model's own fully qualified names, whatever wraps the model. A tensor that several
ranks hold whole is written by one of them, in turn, so that the ranks share the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpctrain.errors import CheckpointError
from hpctrain.io.shards import TensorShard
from hpctrain.parallel.model import ParallelModel, Part
from hpctrain.train import rng

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpctrain.io.checkpoint import CheckpointReader

_RAW = {  # no numpy type of its own: raw bits
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


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

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    step: int = 0
    tokens: int = 0
    samples: int = 0

    def shards(self) -> list[TensorShard]:
        """The parts that this rank writes."""
        return [
            TensorShard(
                part.name,
                part.global_shape,
                part.offsets,
                _to_numpy(part.local),
                _dtype_name(part.local),
            )
            for part in self._parts()
            if part.writer
        ]

    def scalars(self) -> dict[str, Any]:
        """Progress and the optimizer's per-parameter numbers (AdamW's step counts)."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "samples": self.samples,
            "optimizer": self._optimizer_scalars(),
        }

    def restore(self, reader: CheckpointReader) -> bool:
        """Read this rank's parts; True where its random generators were restored too.

        Generators belong to a rank: they are restored only on the same number of ranks.

        Raises:
            CheckpointError: a tensor is missing, has another shape or is not the model's.
        """
        scalars = reader.scalars
        self._make_optimizer_states(scalars["optimizer"])
        parts = list(self._parts())
        self._compare(parts, reader)
        for part in parts:
            found = reader.read(part.name, part.offsets, tuple(part.local.shape))
            part.local.copy_(_from_numpy(found, part.local.dtype))
        self.step = int(scalars["step"])
        self.tokens = int(scalars["tokens"])
        self.samples = int(scalars["samples"])
        context = self.model.context
        generators = None
        if reader.world_size == context.world_size:
            generators = reader.rank_state(context.rank)
        if generators is None:
            return False
        rng.restore(dict(generators))
        return True

    def _parts(self) -> Iterator[Part]:
        model = self.model
        for name, parameter in model.named_parameters():
            yield dataclasses.replace(model.part(name, parameter), name=f"model/{name}")
        for name, buffer in model.named_buffers():
            yield dataclasses.replace(model.part(name, buffer), name=f"model/{name}")
        for name, parameter in model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    yield model.part(f"optimizer/{key}/{name}", value, like=name)

    def _compare(self, parts: Sequence[Part], reader: CheckpointReader) -> None:
        """The checkpoint must hold the model's tensors, all of them and no others."""
        mine = {part.name: (part.global_shape, _dtype_name(part.local)) for part in parts}
        reader.check(mine)
        held = set().union(*self.model.context.comm.allgather(set(mine)))
        extra = sorted(reader.tensors().keys() - held)
        if extra:
            rest = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
            raise CheckpointError(
                f"{reader.path} does not fit the model: it holds {', '.join(extra[:3])}{rest}, "
                "which the model has not",
                hint="resume with the model section the checkpoint was made with",
            )

    def _optimizer_scalars(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    found.setdefault(key, {})
                elif isinstance(value, torch.Tensor | int | float):
                    found.setdefault(key, {})[name] = float(value)
        return found

    def _make_optimizer_states(self, saved: dict[str, dict[str, float]]) -> None:
        """Allocate the states that the first optimizer step would make."""
        for name, parameter in self.model.named_parameters():
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
