"""ParallelModel: what this rank holds of a model, and where each part stands in the whole.

A parameter is cut twice. Tensor parallelism (and whatever else works inside a layer) leaves
this rank a smaller parameter; its :class:`Cut` says which box of the global tensor that is and
which ranks hold the others. Sharded data parallelism (FSDP2) then cuts that box again along
its first dimension; torch's DTensor knows about this second cut and of nothing else. Boxes of
global tensors, for initialisation, checkpoints and norms, are worked out here and only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.optim.clip import Axes, global_norm, scale_gradients
from hpctrain.parallel.data import SHARD_AXES, SHARDS

if TYPE_CHECKING:
    from hpctrain.parallel.context import ContextGroups
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.runtime.context import RankContext

_COPY_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axes along which ranks of one pipeline stage may hold copies."""
_EXPERT_COPY_AXES = ("edp", "ep", "etp")
"""The same of routed experts, where these lie on the ranks in another way."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What tensor parallelism left of a parameter on this rank.

    Attributes:
        global_shape: of the whole parameter.
        offsets: of the part in it, one a dimension.
        axes: mesh axes whose ranks hold different parts; on all others are copies.
        partial: axes whose ranks each have a part of the gradient's sum: copies that see
            different tokens (norms under sequence parallelism).
        expert: a routed expert's, whose axes are those of the expert mesh.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    axes: Axes = ()
    partial: Axes = ()
    expert: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of this rank as a box of a global tensor.

    Attributes:
        name: in the whole model.
        local: the elements held here.
        global_shape: of the whole.
        offsets: of the box, one a dimension.
        writer: of all ranks that hold this box, this one writes it.
    """

    name: str
    local: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    writer: bool


class ParallelModel:
    """The chunks of a model that this rank runs.

    Args:
        chunks: modules to call, one without pipeline parallelism; as wrapped for data
            parallelism. Their parameters have the names of the whole model.
        context: of this rank.
        cuts: by name; a parameter without one is whole.
        copies: names of parameters that another pipeline stage owns (the output layer's copy
            of a tied embedding): not written, not counted in norms.

    Attributes:
        token_loss: (logits of this rank, targets) -> mean cross entropy.
        expert_divisor: of the gradients of experts on a mesh of their own.
        pipeline: runs the chunks in a pipeline; None without one.
        contexts: groups that share sequences; None without context parallelism.
    """

    token_loss: Callable[[Tensor, Tensor], Tensor]
    pipeline: Pipeline | None = None
    expert_divisor: float = 1.0
    contexts: ContextGroups | None = None

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        context: RankContext,
        cuts: Mapping[str, Cut] | None = None,
        copies: frozenset[str] = frozenset(),
    ) -> None:
        self.chunks = list(chunks)
        self.context = context
        self.cuts = dict(cuts or {})
        self.copies = copies
        self._groups = self._all_groups()

    @property
    def whole(self) -> nn.Module:
        """The only chunk.

        Raises:
            ValueError: there are several.
        """
        if len(self.chunks) != 1:
            raise ValueError(f"the model is in {len(self.chunks)} chunks on this rank")
        return self.chunks[0]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank by their names in the whole model, each once."""
        for chunk in self.chunks:
            inner = unwrapped(chunk)
            logical: Mapping[str, str] = getattr(inner, "logical_names", {})
            for name, parameter in inner.named_parameters():
                yield logical.get(name, name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that belong to the state."""
        for chunk in self.chunks:
            inner = unwrapped(chunk)
            persistent = inner.state_dict(keep_vars=True).keys()
            yield from ((n, b) for n, b in inner.named_buffers() if n in persistent)

    def cut(self, name: str, parameter: Tensor) -> Cut:
        """The cut of a parameter; of a whole one, a trivial cut."""
        shape = tuple(parameter.shape)
        return self.cuts.get(name) or Cut(shape, (0,) * len(shape))

    def part(self, name: str, tensor: Tensor, like: str | None = None) -> Part:
        """Where a tensor stands that is cut as a parameter is.

        Args:
            name: of the part.
            tensor: of the parameter's form: itself, or an optimizer state.
            like: name of the parameter; ``name`` without.
        """
        parameter = like or name
        cut = self.cut(parameter, tensor)
        local, inner, sharded = _data_parallel_box(tensor.detach())
        offsets = tuple(a + b for a, b in zip(cut.offsets, inner, strict=True))
        if local.numel() == 0:
            offsets = (0,) * tensor.dim()
        writer = (
            local.numel() > 0
            and parameter not in self.copies
            and self._turn({*cut.axes, *sharded}, name, cut.expert)
        )
        return Part(name, local, cut.global_shape, offsets, writer)

    def writes(self, parameter: str, entry: str, spread: Axes = ()) -> bool:
        """Whether this rank writes what it keeps beside a parameter (an optimizer state).

        Args:
            parameter: its name.
            entry: name of what is written.
            spread: axes whose ranks keep different parts, beside those that cut the parameter.
        """
        cut = self.cuts.get(parameter)
        over = {*(cut.axes if cut else ()), *spread}
        expert = cut is not None and cut.expert
        return parameter not in self.copies and self._turn(over, entry, expert)

    def _turn(self, cut_over: set[str], name: str, expert: bool) -> bool:
        """Of the ranks that hold copies, one writes; which one differs from name to name."""
        place, copies = 0, 1
        for axis in _EXPERT_COPY_AXES if expert else _COPY_AXES:
            if axis not in cut_over:
                size = self.context.size(axis)
                place = place * size + self.context.coordinate(axis)
                copies *= size
        return sum(name.encode()) % copies == place

    # ---- gradients --------------------------------------------------------------------------

    def is_expert(self, name: str) -> bool:
        """Whether a parameter is a routed expert's that lies on ranks of the expert mesh."""
        cut = self.cuts.get(name)
        return cut is not None and cut.expert

    def sum_partial_gradients(self) -> None:
        """Add up the gradients of copies that saw different tokens.

        Those of experts on an expert mesh are the sum over all tokens of the step then; what
        makes of it the mean over data-parallel ranks is ``expert_divisor``.
        """
        by_axis: dict[str, list[Tensor]] = {}
        for name, parameter in self.named_parameters():
            cut = self.cuts.get(name)
            if cut is None or parameter.grad is None:
                continue
            for axis in cut.partial:
                by_axis.setdefault(axis, []).append(local_of(parameter.grad))
        for axis, gradients in sorted(by_axis.items()):
            if axis == "edp" and self.expert_divisor != 1:
                torch._foreach_div_(gradients, self.expert_divisor)
            if self.context.size(axis) == 1:
                continue
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self.group(axis))
            pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    def clip(self, max_norm: float | None) -> Tensor:
        """Scale all gradients to a global norm of at most ``max_norm``; returns the norm before.

        Each part of the whole model is counted once, wherever copies of it lie.
        """
        counted = [p for name, p in self.named_parameters() if name not in self.copies]
        axes = {id(p.grad): self._norm_axes(name, p) for name, p in self.named_parameters()}
        norm = global_norm(
            counted,
            reduce=self._sum,
            sharding=lambda gradient: axes[id(gradient)],
            groups=self._groups,
        )
        if max_norm is not None:
            scale_gradients(self.parameters(), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _norm_axes(self, name: str, parameter: Tensor) -> Axes:
        _, _, sharded = _data_parallel_box(parameter.detach())
        axes = {*self.cut(name, parameter).axes, *sharded}
        if self.context.size("pp") > 1:
            axes.add("pp")
        return tuple(sorted(axis for axis in axes if self.context.size(axis) > 1))

    def _all_groups(self) -> tuple[Axes, ...]:
        """Every combination of axes that a norm is summed over on any rank."""
        mine = {self._norm_axes(name, p) for name, p in self.named_parameters()}
        if self.context.size("pp") == 1:
            return tuple(sorted(mine))
        return tuple(sorted(set().union(*self.context.comm.allgather(mine))))

    def _sum(self, value: Tensor, axes: Axes) -> Tensor:
        for axis in axes:
            dist.all_reduce(value, group=self.group(axis))
        return value

    def group(self, axis: str) -> dist.ProcessGroup:
        """Process group of this rank along an axis of either mesh."""
        if axis in _EXPERT_COPY_AXES:
            return self.context.communicators.along(axis).group
        return self.context.mesh[axis].get_group()


def unwrapped(model: nn.Module) -> nn.Module:
    """The module whose parameter names are the model's own (DDP puts ``module.`` before)."""
    from torch.nn.parallel import DistributedDataParallel

    return model.module if isinstance(model, DistributedDataParallel) else model


def local_of(tensor: Tensor) -> Tensor:
    """The elements on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _data_parallel_box(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], Axes]:
    """(local elements, their offsets in the tensor, axes that shard it) of FSDP2's cut."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim(), ()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    names = mesh.mesh_dim_names
    assert names is not None
    sharded = tuple(
        axis
        for name, placement in zip(names, placements, strict=True)
        if not placement.is_replicate()
        for axis in (SHARD_AXES if name == SHARDS else (name,))
    )
    return tensor.to_local(), tuple(offsets), sharded
