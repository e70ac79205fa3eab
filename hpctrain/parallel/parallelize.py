"""THE one place where parallelism is applied to a model, in this order:

1. build what this rank runs, on the meta device (a user's own model: whole, with its weights):
   the model, or its stages in a pipeline;
2. tensor and sequence parallelism cut each layer, expert parallelism the layers of experts, and
   attention and routers reach the tokens of other context-parallel ranks;
3. layers learn to leave their weight gradient for later, to sleep, to be computed again;
4. data parallelism: FSDP2 shards what is left a block at a time, or DDP replicates it (in a
   pipeline its executor reduces gradients instead of DDP); across nodes either goes in two levels
   where that was measured to pay;
5. weights are drawn, on the device, for the boxes that this rank holds.

The order is part of correctness: what cuts single tensors comes before what shards the set of
them, and no rank ever holds more than its part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hpctrain.model.build import build_model
from hpctrain.model.init import init_parameters
from hpctrain.model.moe_experts import Experts
from hpctrain.model.transformer import Transformer, next_token_loss
from hpctrain.parallel.context import context_groups, share_sequence
from hpctrain.parallel.data import (
    REPLICA_AXES,
    SHARD_AXES,
    SHARDS,
    gather_ahead,
    replicate,
    shard,
    through_dispatcher,
)
from hpctrain.parallel.emulate import Passes, emulate
from hpctrain.parallel.expert import (
    Place,
    cut_experts,
    expert_group,
    folds,
    routers,
    spread_experts,
)
from hpctrain.parallel.model import Cut, ParallelModel, unwrapped
from hpctrain.parallel.pipeline_build import build_pipeline, wire_of
from hpctrain.parallel.pipeline_stages import (
    Stages,
    lend_embedding,
    sequential_stages,
    transformer_stages,
)
from hpctrain.parallel.pipeline_vocabulary import spread_vocabulary
from hpctrain.parallel.recompute import recompute
from hpctrain.parallel.regions import TensorGroup, share
from hpctrain.parallel.split_backward import WeightGrads, split_linears
from hpctrain.parallel.tensor import cut_linears, cut_transformer
from hpctrain.parallel.vocabulary import parallel_cross_entropy
from hpctrain.runtime.gradients import replicate_in_levels, shard_in_levels
from hpctrain.schedule.job import plan_pipeline

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec


def parallelize(spec: JobSpec, context: RankContext, passes: Passes | None = None) -> ParallelModel:
    """The model of a job as this rank holds and calls it; float32, initialised.

    Args:
        spec: resolved job.
        context: of this rank.
        passes: seconds that an emulated machine gives each block.

    Raises:
        UsageError: the user's model cannot be built, or its plan does not fit it.
        ImpossibleError: a layer or the model cannot be cut so.
    """
    schedule = plan_pipeline(spec)
    if spec.parallel.emulate:
        passes = Passes(spec.parallel.emulate, spec.parallel.emulate, spec.parallel.emulate)
    store = WeightGrads() if schedule is not None and schedule.split_backward else None
    group = _tensor_group(spec, context, store)
    contexts = context_groups(spec, context)
    own = spec.model.module is not None
    rank = context.coordinate("pp")
    cuts: dict[str, Cut] = {}
    wire = None
    folded = not own and bool(spec.model.moe.experts) and folds(context)
    if own:
        model = build_model(spec, context.device)
        if group is not None:
            cuts = cut_linears(model, spec.parallel.tensor_plan.model_dump(), group)
        stages = Stages([model])
        if schedule is not None:
            stages = sequential_stages(spec, model, schedule, rank)
            wire = wire_of(spec, schedule, group, model)
    else:
        stages = Stages([Transformer(spec.model.transformer(), device="meta")])
        if schedule is not None:
            stages = transformer_stages(spec, schedule, rank)
            wire = wire_of(spec, schedule, group)
        for module in stages.modules:
            assert isinstance(module, Transformer)
            if group is not None:
                cuts |= cut_transformer(module, group)
        if folded:
            cuts |= _fold_experts(stages, spec, context, group)
        if contexts is not None:
            for module in stages.modules:
                share_sequence(module, contexts)
        if schedule is not None and schedule.vocabulary:
            cuts |= spread_vocabulary(stages, spec.model.transformer(), schedule, rank, group)
        elif schedule is not None:
            lend_embedding(stages, schedule, rank)
    token_loss: Callable[[Tensor, Tensor], Tensor] = next_token_loss
    if group is not None and not own:
        first, _ = share(spec.model.transformer().vocab_size, group.size, group.rank)
        token_loss = functools.partial(parallel_cross_entropy, first=first, group=group)
    for module in stages.modules:
        if spec.parallel.stream is not None:
            assert isinstance(module, Transformer), "check() has refused others"
            module.stream(spec.parallel.stream, token_loss)
        if store is not None:
            split_linears(module, store)
            for experts in module.modules():
                if isinstance(experts, Experts):
                    experts.deferral = store
        if passes is not None:
            emulate(module, passes, store)
        recompute(module, spec.parallel.recompute, own=own)
    sharded = spec.parallel.fsdp
    modules = [_shard(m, spec, context, folded) if sharded else m for m in stages.modules]
    if not own:
        modules = [module.to_empty(device=context.device) for module in modules]
    parallel = ParallelModel(modules, context, cuts, frozenset(stages.copies))
    if not own:
        _draw_weights(parallel, spec.train.seed)
        _scale_balance_losses(parallel, spec)
    if schedule is None and folded and not sharded:
        parallel.expert_divisor = context.size("dp") * context.size("cp")
    copies = context.communicators.along(*REPLICA_AXES)
    if schedule is None and not sharded and copies.size > 1:
        ignored = [name for name, _ in modules[0].named_buffers() if ".router." in name]
        ignored += [n for n, _ in modules[0].named_parameters() if parallel.is_expert(n)]
        links = context.communicators.counter.links
        buckets = None if links is None else links.buckets
        replicated = replicate(modules[0], copies.group, ignored, buckets)
        replicate_in_levels(replicated, context.communicators.prepare(*REPLICA_AXES))
        parallel.chunks[0] = replicated
        if links is not None:
            through_dispatcher(replicated)
    parallel.token_loss = token_loss
    parallel.contexts = contexts
    if schedule is not None:
        assert wire is not None
        parallel.pipeline = build_pipeline(spec, parallel, schedule, stages, wire, group, store)
        if passes is not None and parallel.pipeline.vocabulary is not None:
            parallel.pipeline.vocabulary.take = passes.take
    return parallel


def _fold_experts(
    stages: Stages, spec: JobSpec, context: RankContext, tensor: TensorGroup | None
) -> dict[str, Cut]:
    """Routed experts onto the expert mesh; every rank of the job comes here together."""
    place = Place(
        context.coordinate("ep"),
        context.size("ep"),
        context.coordinate("etp"),
        context.size("etp"),
    )
    _ = context.communicators.expert_mesh  # makes the groups of its axes
    group = expert_group(spec, context, tensor)
    cuts: dict[str, Cut] = {}
    for module in stages.modules:
        assert isinstance(module, Transformer)
        cuts |= cut_experts(module, place, reduced=spec.parallel.fsdp)
        spread_experts(module, group)
    return cuts


def _scale_balance_losses(parallel: ParallelModel, spec: JobSpec) -> None:
    """Give the routers' losses the factor that the loss of a micro-batch has in backward."""
    train, context = spec.train, parallel.context
    assert isinstance(train.micro_batch, int)
    scale = train.micro_batch * context.size("dp") * context.size("cp") / train.global_batch
    if spec.parallel.pipeline > 1 and not spec.parallel.fsdp:
        scale /= context.communicators.along(*REPLICA_AXES).size
    for _, router in routers([unwrapped(chunk) for chunk in parallel.chunks]):
        router.loss_scale = scale


def _shard(model: nn.Module, spec: JobSpec, context: RankContext, folded: bool) -> nn.Module:
    pipeline = spec.parallel.pipeline > 1
    sharded = shard(
        model,
        _shard_mesh(context),
        spec.train.precision,
        # In a pipeline the schedule says when parameters are let go.
        reshard_after_forward=spec.parallel.sharding == "zero3" and not pipeline,
        prefetch=0 if pipeline else spec.parallel.prefetch,
        experts=(
            context.communicators.expert_mesh["edp"],
            float(context.size("dp") * context.size("cp")),
        )
        if folded
        else None,
    )
    if context.communicators.counter.links is not None and not pipeline:
        gather_ahead(sharded)
    if context.communicators.along(*SHARD_AXES).size > 1:
        shard_in_levels(sharded, context.communicators.prepare(*SHARD_AXES))
    return sharded


def _shard_mesh(context: RankContext) -> DeviceMesh:
    """The ranks that shard one copy of a stage, and before them those that hold other copies."""
    from torch.distributed.device_mesh import DeviceMesh

    replicas = context.size("dp_replicate")
    if context.size("cp") == 1:
        return context.mesh[("dp_replicate", "dp_shard") if replicas > 1 else ("dp_shard",)]
    shards = context.communicators.along(*SHARD_AXES)
    kind = context.device.type
    if replicas == 1:
        return DeviceMesh.from_group(shards.group, kind, mesh_dim_names=(SHARDS,))
    at = context.grid.coordinates(context.rank)
    ranks = context.grid.rank_array(("dp_replicate", "pp", "tp", *SHARD_AXES))
    ranks = ranks[:, at["pp"], at["tp"]].reshape(replicas, -1)
    return DeviceMesh.from_group(
        [context.mesh["dp_replicate"].get_group(), shards.group],
        kind,
        mesh=ranks.tolist(),
        mesh_dim_names=("dp_replicate", SHARDS),
    )


def _tensor_group(
    spec: JobSpec, context: RankContext, store: WeightGrads | None
) -> TensorGroup | None:
    size = context.size("tp")
    if size == 1:
        return None
    group = context.mesh["tp"].get_group()
    sequence = spec.parallel.sequence and spec.model.module is None
    overlap = spec.parallel.overlap
    return TensorGroup(group, context.coordinate("tp"), size, sequence, overlap, store)


def _draw_weights(model: ParallelModel, seed: int) -> None:
    """Every parameter's part of the weights that one rank alone would draw."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def local(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...], tuple[int, ...]]:
        part = model.part(names[id(parameter)], parameter)
        shape = part.local.shape
        window = tuple(slice(a, a + n) for a, n in zip(part.offsets, shape, strict=True))
        return part.local, window, part.global_shape

    for chunk in model.chunks:
        inner = unwrapped(chunk)
        assert isinstance(inner, Transformer)
        init_parameters(inner, seed, local)
