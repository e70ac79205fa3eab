"""What a rank of a pipeline holds: its stages as modules with the names of the whole model.

A stage of our transformer is a :class:`Transformer` over some layers, the first with the
embedding, the last with norm and output layer. A tied output layer is the embedding's weight:
where both stages lie on one rank (V-shaped schedules) the last stage borrows it, elsewhere it is a
copy and the gradients of the two are summed. A user's own model can be cut where it is an
``nn.Sequential``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.linear import ColumnLinear, RowLinear
from hpctrain.parallel.split_backward import SplitLinear
from hpctrain.schedule.job import stage_layers

if TYPE_CHECKING:
    from hpctrain.schedule import Schedule
    from hpctrain.spec.job import JobSpec


@dataclass
class Stages:
    """The chunks of one rank.

    Attributes:
        modules: in the order of ``Action.chunk``.
        copies: names of parameters that another rank owns.
        lenders: chunk that borrows a weight -> chunk that has it.
    """

    modules: list[nn.Module]
    copies: set[str] = field(default_factory=set)
    lenders: dict[int, int] = field(default_factory=dict)


def transformer_stages(spec: JobSpec, schedule: Schedule, rank: int) -> Stages:
    """Stages of our transformer on the meta device, not yet cut by tensor parallelism."""
    dims = spec.model.transformer()
    layers = stage_layers(spec, dims.layers, schedule.stages.stages)
    last = len(layers) - 1
    modules = [
        Transformer(
            dims,
            layers=layers[stage],
            has_embedding=stage == 0,
            has_head=stage == last,
            device="meta",
        )
        for _, stage in schedule.stages.held[rank]
    ]
    return Stages(list(modules), _copies(modules, schedule, rank, dims.tied_embeddings))


def sequential_stages(spec: JobSpec, model: nn.Module, schedule: Schedule, rank: int) -> Stages:
    """Stages of a user's ``nn.Sequential``.

    Raises:
        UsageError: it is no sequential model, or two stages share a parameter.
    """
    entry = spec.model.module
    if not isinstance(model, nn.Sequential):
        raise UsageError(
            f"parallel.pipeline: {entry} returned a {type(model).__name__}; a pipeline can cut an "
            "nn.Sequential only",
            hint="return nn.Sequential(first, block, block, …, last), or set parallel.pipeline: 1",
        )
    children = list(model._modules.items())  # named_children() leaves repeated ones out
    layers = stage_layers(spec, len(children), schedule.stages.stages)
    owner: dict[int, tuple[int, str]] = {}
    for stage, members in enumerate(layers):
        for index in members:
            name, child = children[index]
            assert child is not None, "a sequential model has no holes"
            for inner, parameter in child.named_parameters():
                first = owner.setdefault(id(parameter), (stage, f"{name}.{inner}"))
                if first[0] != stage:
                    raise UsageError(
                        f"parallel.pipeline: {first[1]} and {name}.{inner} of {entry} are one "
                        f"parameter in the stages {first[0]} and {stage}; stages share nothing"
                    )
    modules = []
    for _, stage in schedule.stages.held[rank]:
        part = nn.Sequential()
        for index in layers[stage]:
            part.add_module(*children[index])
        modules.append(part)
    return Stages(list(modules), _copies(modules, schedule, rank, tied=False))


def _copies(modules: Sequence[nn.Module], schedule: Schedule, rank: int, tied: bool) -> set[str]:
    """Names that the first route owns elsewhere: a second route's, a tied output layer's."""
    names: set[str] = set()
    first, *_, last = schedule.stages.routes[0]
    for (route, _), module in zip(schedule.stages.held[rank], modules, strict=True):
        logical = getattr(module, "logical_names", {})
        if route > 0:
            names |= {logical.get(name, name) for name, _ in module.named_parameters()}
            names |= {name for name, _ in module.named_buffers()}
        elif tied and first != last:
            names |= set(logical.values())
    return names


def lend_embedding(stages: Stages, schedule: Schedule, rank: int) -> None:
    """Let a tied output layer use the embedding where both lie on this rank, in place.

    After tensor parallelism, which cuts both alike, and before anything is sharded.
    """
    held = list(schedule.stages.held[rank])
    last = schedule.stages.stages - 1
    for chunk, (route, stage) in enumerate(held):
        module = stages.modules[chunk]
        if stage != last or not isinstance(module, Transformer) or module.embedding is not None:
            continue
        if not module.dims.tied_embeddings or (route, 0) not in held:
            continue
        lender = held.index((route, 0))
        first = stages.modules[lender]
        assert isinstance(first, Transformer) and first.embedding is not None
        borrow(module.head, first.embedding.tokens)
        stages.lenders[chunk] = lender


class _Borrowed:
    """A weight that is looked up where it belongs at each use, whoever replaced it there."""

    lender: tuple[nn.Module]

    @property
    def weight(self) -> Any:
        return self.lender[0].weight


class BorrowedLinear(_Borrowed, SplitLinear):  # type: ignore[override]
    """An output layer with the embedding's weight."""


class BorrowedColumnLinear(_Borrowed, ColumnLinear):  # type: ignore[override]
    """The same of a tensor-parallel model."""


def borrow(head: nn.Module | None, lender: nn.Module) -> None:
    """Make ``head`` use the weight of ``lender``, in place."""
    assert isinstance(head, nn.Linear) and head.bias is None
    del head.weight
    if isinstance(head, ColumnLinear):
        head.__class__ = BorrowedColumnLinear
    else:
        head.__class__ = BorrowedLinear
        head.store = None
    head.lender = (lender,)  # a tuple: not a submodule of the head


# ---- what passes between stages -----------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """The form of what goes from stage to stage.

    Attributes:
        shapes: batch of a micro-batch -> shape of the input of every stage (None for the first,
            which takes the batch itself).
        dtype: on the way.
        stream: of the residual stream inside a stage.
    """

    shapes: Callable[[Any], Sequence[torch.Size | None]]
    dtype: torch.dtype
    stream: torch.dtype


def transformer_shapes(stages: int, hidden: int, sequence_shards: int) -> Callable[[Any], Any]:
    """Shapes (B, S, H), or (B, S / shards, H) under sequence parallelism."""

    def shapes(batch: Any) -> list[torch.Size | None]:
        samples, length = batch[0].shape
        between = torch.Size((samples, length // sequence_shards, hidden))
        return [None, *([between] * (stages - 1))]

    return shapes


def sequential_shapes(
    model: nn.Sequential, layers: Sequence[range]
) -> Callable[[Any], Sequence[torch.Size | None]]:
    """Shapes found by running the whole model, as cut, once on the meta device."""
    children = list(_on_meta(model))
    known: dict[torch.Size, list[torch.Size | None]] = {}

    def shapes(batch: Any) -> list[torch.Size | None]:
        x = batch[0]
        if x.shape not in known:
            found: list[torch.Size | None] = []
            with torch.no_grad():
                meta = torch.empty_like(x, device="meta")
                for members in layers:
                    found.append(meta.shape if found else None)
                    for index in members:
                        meta = children[index](meta)
            known[x.shape] = found
        return known[x.shape]

    return shapes


def _on_meta(model: nn.Sequential) -> nn.Sequential:
    """A copy without memory and without communication."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            memo[id(module.group)] = module.group
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    found: nn.Sequential = copy.deepcopy(model, memo)
    for module in found.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return found
