"""TrainState: everything that a restart needs, as shards of global tensors and plain values.

Names in a checkpoint: ``model/<parameter or buffer>`` and ``optimizer/<state>/<parameter>``,
both by the model's own fully qualified names, whatever wraps the model. A tensor that several
ranks hold whole is written by one of them, in turn, so that the ranks share the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpctrain.errors import CheckpointError
from hpctrain.io.restore import Request
from hpctrain.io.shards import ShardSpec
from hpctrain.parallel.model import ParallelModel, Part
from hpctrain.parallel.optimizer import BlockOptimizer
from hpctrain.train import rng
from hpctrain.train.sources import (
    Held,
    TorchSources,
    as_numpy,
    dtype_name,
    from_numpy,
    numpy_dtype,
)

if TYPE_CHECKING:
    from hpctrain.io.checkpoint import CheckpointReader


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
    _sources: TorchSources | None = field(default=None, repr=False)
    _states: int = field(default=-1, repr=False)
    _stateless: list[str] = field(default_factory=list, repr=False)

    def sources(self) -> TorchSources:
        """What this rank writes. The same object as long as the tensors are the same."""
        states = len(self.optimizer.state)
        if self._sources is None or states != self._states or not self._sources.still_valid():
            self._sources = TorchSources([e.held() for e in self._entries() if e.part.writer])
            self._states = states
            self._stateless = [
                name
                for name, parameter in self.model.named_parameters()
                if self._updates(parameter) and not self.optimizer.state.get(parameter)
            ]
        return self._sources

    def _updates(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank's optimizer has to do with a parameter."""
        optimizer = self.optimizer
        if isinstance(optimizer, BlockOptimizer):
            return optimizer.owns(parameter)
        return parameter.requires_grad

    def scalars(self) -> dict[str, Any]:
        """Progress, and the trained parameters that have no optimizer state (yet)."""
        values: dict[str, Any] = {"step": self.step, "tokens": self.tokens}
        values["samples"] = self.samples
        if self._stateless:
            values["without_optimizer_state"] = self._stateless
        return values

    def restore(self, reader: CheckpointReader) -> bool:
        """Read this rank's parts; True where its random generators were restored too.

        Generators belong to a rank: they are restored only on the same number of ranks.

        Raises:
            CheckpointError: a tensor is missing, has another shape or is not the model's.
        """
        scalars = reader.scalars
        self._make_optimizer_states(reader)
        parts = [entry.part for entry in self._entries()]
        self._compare(parts, reader)
        context = self.model.context
        same_world = reader.world_size == context.world_size
        generators = reader.rank_requests(context.rank) if same_world else []
        self._fill(parts, generators, reader)
        self.step = int(scalars["step"])
        self.tokens = int(scalars["tokens"])
        self.samples = int(scalars["samples"])
        if same_world:
            rng.restore({request.leaf: request.out[0] for request in generators})
        return same_world

    def _entries(self) -> Iterator[_Entry]:
        """Every tensor of the state on this rank, with its name in a checkpoint."""
        model, states = self.model, self.optimizer.state
        for name, parameter in model.named_parameters():
            part = dataclasses.replace(model.part(name, parameter), name=f"model/{name}")
            yield _Entry(part, parameter)
        for name, buffer in model.named_buffers():
            part = dataclasses.replace(model.part(name, buffer), name=f"model/{name}")
            yield _Entry(part, buffer, eager=True)
        for name, parameter in model.named_parameters():
            for key, value in self._optimizer_state(name, parameter):
                part = self._optimizer_part(key, name, parameter, value)
                yield _Entry(part, value, states[parameter], key)

    def _optimizer_part(
        self, key: str, name: str, parameter: torch.Tensor, value: torch.Tensor
    ) -> Part:
        entry = f"optimizer/{key}/{name}"
        if isinstance(self.optimizer, BlockOptimizer):
            return self.optimizer.state_part(entry, name, parameter, key, value)
        if value.dim() > 0:
            return self.model.part(entry, value, like=name)
        # A number beside a parameter (a step count): who writes the first element writes it.
        whose = self.model.part(name, parameter)
        writer = whose.writer and not any(whose.offsets)
        return Part(entry, value.detach(), (), (), writer)

    def _optimizer_state(
        self, name: str, parameter: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for key, value in self.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"optimizer state {key!r} of {name} is a {type(value).__name__}; "
                    "only tensors can be saved"
                )
            yield key, value

    @staticmethod
    def _fill(parts: Sequence[Part], more: Sequence[Request], reader: CheckpointReader) -> None:
        """Read every part, straight into its place where that is host memory without gaps."""
        requests, later = list(more), []
        for part in parts:
            local = part.local
            direct = local.device.type == "cpu" and local.is_contiguous()
            shape = tuple(local.shape)
            out = as_numpy(local) if direct else np.empty(shape, numpy_dtype(local.dtype))
            requests.append(Request(part.name, part.offsets, out))
            if not direct:
                later.append((local, out))
        reader.require(requests)
        reader.read_all(requests)
        for local, out in later:
            local.copy_(from_numpy(out, local.dtype))

    def _compare(self, parts: Sequence[Part], reader: CheckpointReader) -> None:
        """The checkpoint must hold the model's tensors, all of them and no others."""
        mine = {part.name: (part.global_shape, dtype_name(part.local)) for part in parts}
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

    def _make_optimizer_states(self, reader: CheckpointReader) -> None:
        """Allocate the states that the first optimizer step would make."""
        saved: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}
        for entry, form in reader.tensors().items():
            kind, _, rest = entry.partition("/")
            if kind == "optimizer":
                key, _, name = rest.partition("/")
                saved.setdefault(name, {})[key] = form
        kinds = sorted({key for states in saved.values() for key in states})
        never = set(reader.scalars.get("without_optimizer_state", ()))
        lost = []
        own = self.optimizer if isinstance(self.optimizer, BlockOptimizer) else None
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and name not in never:
                wanted = own.state_keys(parameter) if own is not None else kinds
                lost += [f"optimizer/{k}/{name}" for k in wanted if k not in saved.get(name, {})]
            for key, (shape, dtype) in saved.get(name, {}).items():
                kind = getattr(torch, dtype)
                like: torch.Tensor | None
                if own is not None:
                    like = own.empty_state(parameter, key, shape, kind)
                elif shape:
                    like = torch.zeros_like(
                        parameter, dtype=kind, memory_format=torch.preserve_format
                    )
                else:
                    like = torch.zeros((), dtype=kind, device=parameter.device)
                if like is not None:
                    self.optimizer.state[parameter][key] = like.detach()
        if lost:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            raise CheckpointError(
                f"{reader.path} does not fit the model: there is no {', '.join(lost[:3])}{more}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A tensor of the state.

    Attributes:
        part: its box, and whether this rank writes it.
        owner, state, key, eager: see Held.
    """

    part: Part
    owner: torch.Tensor
    state: dict[str, Any] | None = None
    key: str = ""
    eager: bool = False

    def held(self) -> Held:
        part = self.part
        shape = tuple(part.local.shape)
        spec = ShardSpec(part.name, part.global_shape, part.offsets, shape, dtype_name(part.local))
        return Held(spec, part.local, self.owner, self.state, self.key, self.eager)
