"""Puts a rank's executor together from its chunks, as :mod:`parallelize` made them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from hpctrain.model.transformer import Transformer
from hpctrain.parallel.data import REPLICA_AXES
from hpctrain.parallel.pipeline import Pipeline
from hpctrain.parallel.pipeline_exchange import Exchange
from hpctrain.parallel.pipeline_gradients import (
    ChunkGradients,
    Replicated,
    Sharded,
    SummedCopies,
)
from hpctrain.parallel.pipeline_stages import (
    Stages,
    Wire,
    sequential_shapes,
    transformer_shapes,
)
from hpctrain.parallel.pipeline_vocabulary import Vocabulary
from hpctrain.runtime.emulated_links import COPIES, TIED
from hpctrain.runtime.lane import Lane
from hpctrain.schedule import ActionKind
from hpctrain.schedule.job import stage_layers

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from hpctrain.parallel.batch import MicroBatch
    from hpctrain.parallel.model import ParallelModel
    from hpctrain.parallel.regions import TensorGroup
    from hpctrain.parallel.split_backward import WeightGrads
    from hpctrain.runtime.context import RankContext
    from hpctrain.schedule import Schedule
    from hpctrain.spec.job import JobSpec


def wire_of(
    spec: JobSpec, schedule: Schedule, group: TensorGroup | None, model: nn.Module | None = None
) -> Wire:
    """What passes between the stages of a job.

    Args:
        spec: resolved job.
        schedule: of its pipeline.
        group: tensor group, if any.
        model: the user's whole model, cut as it will run.
    """
    bf16 = spec.train.precision == "bf16"
    # Under autocast the residual stream is fp32, but what crosses the wire was computed in bf16.
    stream = torch.bfloat16 if bf16 and spec.parallel.fsdp else torch.float32
    dtype = torch.bfloat16 if bf16 else stream
    stages = schedule.stages.stages
    if model is None:
        shards = group.size if group is not None and group.sequence else 1
        return Wire(
            transformer_shapes(stages, spec.model.transformer().hidden, shards), dtype, stream
        )
    assert isinstance(model, nn.Sequential), "sequential_stages() has refused others"
    layers = stage_layers(spec, len(model), stages)
    return Wire(sequential_shapes(model, layers), dtype, stream)


def build_pipeline(
    spec: JobSpec,
    parallel: ParallelModel,
    schedule: Schedule,
    stages: Stages,
    wire: Wire,
    tensor: TensorGroup | None,
    store: WeightGrads | None,
) -> Pipeline:
    """The executor of this rank; collective over no one.

    Args:
        spec: resolved job.
        parallel: its chunks are the stages, wrapped.
        schedule: with transfers.
        stages: how the chunks came to be.
        wire: what passes between stages.
        tensor: tensor group, if any.
        store: of weight gradients, where backward is split.
    """
    context = parallel.context
    rank = context.coordinate("pp")
    sharded = spec.parallel.fsdp
    copies = context.communicators.along(*REPLICA_AXES)
    replicas = copies.size
    group = copies.group if not sharded and replicas > 1 else None
    gradients: list[ChunkGradients] = [
        Sharded(cast("FSDPModule", chunk))
        if sharded
        # Experts on a mesh of their own are summed over it when the step is done.
        else Replicated(
            (p for n, p in chunk.named_parameters() if not parallel.is_expert(n)), group
        )
        for chunk in parallel.chunks
    ]
    scale = 1.0 if sharded else 1.0 / replicas
    own = spec.model.module is not None
    vocabulary = None
    if schedule.vocabulary:
        rows = context.grid.groups("pp").tolist()
        vocabulary = Vocabulary(
            parallel.chunks[-1],
            parallel.cuts["embedding.tokens.weight"].offsets[0],
            {
                (kind, first): context.communicators.make_groups("pp", rows)
                for kind in (ActionKind.SHARE, ActionKind.COMBINE)
                for first in (True, False)
            },
            context.communicators.make_groups("pp", context.grid.groups("pp", "tp").tolist()),
            Lane(context.device, context.communicators.counter),
            rank,
            (schedule.stages.routes[0][0], schedule.stages.routes[0][-1]),
            tensor,
            wire,
            schedule.vocabulary,
            scale / schedule.micro_batches,
        )
    token_loss = parallel.token_loss
    streams = spec.parallel.stream is not None

    def loss(output: Tensor, micro: MicroBatch) -> Tensor:
        mean = output if streams else token_loss(output, micro.batch[1])
        return mean * micro.weight

    return Pipeline(
        schedule,
        rank,
        parallel.chunks,
        call=_call_own if own else _call_streamed if streams else _call,
        loss=loss,
        wire=wire,
        exchange=Exchange(context.mesh["pp"].get_group(), context.device, _waiting(context)),
        gradients=gradients,
        copies=_second_copies(parallel, schedule, rank),
        tied=_tied(parallel, schedule, rank),
        store=store,
        lenders=stages.lenders,
        vocabulary=vocabulary,
        scale=scale,
    )


def _call(module: nn.Module, source: Tensor, keys: Tensor, micro: MicroBatch) -> Tensor:
    return module(source, keys, micro.positions, micro.starts)  # type: ignore[no-any-return]


def _call_streamed(module: nn.Module, source: Tensor, keys: Tensor, micro: MicroBatch) -> Tensor:
    targets = micro.batch[1]  # a stage without output layer has no use for them
    return module(source, keys, micro.positions, micro.starts, targets)  # type: ignore[no-any-return]


def _call_own(module: nn.Module, source: Tensor, _keys: Tensor, _micro: MicroBatch) -> Tensor:
    return module(source)  # type: ignore[no-any-return]


def _second_copies(
    parallel: ParallelModel, schedule: Schedule, rank: int
) -> dict[int, SummedCopies]:
    """Chunks of a bidirectional pipeline: each stage is held by two ranks."""
    routes = schedule.stages.routes
    if len(routes) == 1:
        return {}
    return {
        chunk: SummedCopies(
            list(parallel.chunks[chunk].parameters()), routes[1 - route][stage], COPIES
        )
        for chunk, (route, stage) in enumerate(schedule.stages.held[rank])
    }


def _tied(parallel: ParallelModel, schedule: Schedule, rank: int) -> list[SummedCopies]:
    """The tied embedding and output layer of each route, where they lie on two ranks."""
    found = []
    last = schedule.stages.stages - 1
    for chunk, (route, stage) in enumerate(schedule.stages.held[rank]):
        module = parallel.chunks[chunk]
        first_rank, last_rank = (schedule.stages.routes[route][s] for s in (0, last))
        if not isinstance(module, Transformer) or not module.dims.tied_embeddings:
            continue
        if first_rank == last_rank or stage not in (0, last) or schedule.vocabulary:
            continue
        if stage == 0:
            assert module.embedding is not None
            parameter, peer = module.embedding.tokens.weight, last_rank
        else:
            assert module.head is not None
            parameter, peer = module.head.weight, first_rank
        found.append(SummedCopies([cast(nn.Parameter, parameter)], peer, TIED))
    return found


def _waiting(context: RankContext) -> Callable[[], AbstractContextManager[None]]:
    """Around waits for messages: noted as time of the pipeline axis, on processors.

    On a GPU a wait only orders streams and takes no time.
    """
    if context.device.type != "cpu":
        return contextlib.nullcontext
    counter, name = context.communicators.counter, context.communicators.along("pp").name
    return lambda: counter.during(name)
