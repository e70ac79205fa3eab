"""THE one place where parallelism is applied to a model, in this order:

1. build what this rank runs, on the meta device (a user's own model: whole, with its weights);
2. tensor and sequence parallelism cut each layer;
3. data parallelism: FSDP2 shards what is left a block at a time, or DDP replicates it;
4. weights are drawn, on the device, for the boxes that this rank holds.

The order is part of correctness: what cuts single tensors comes before what shards the set of
them, and no rank ever holds more than its part.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hpctrain.model.build import build_model
from hpctrain.model.init import init_parameters
from hpctrain.model.transformer import Transformer, next_token_loss
from hpctrain.parallel.data import replicate, shard
from hpctrain.parallel.model import Cut, ParallelModel, unwrapped
from hpctrain.parallel.regions import TensorGroup, share
from hpctrain.parallel.tensor import cut_linears, cut_transformer
from hpctrain.parallel.vocabulary import parallel_cross_entropy

if TYPE_CHECKING:
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec


def parallelize(spec: JobSpec, context: RankContext) -> ParallelModel:
    """The model of a job as this rank holds and calls it; float32, initialised.

    Args:
        spec: resolved job.
        context: of this rank.

    Raises:
        UsageError: the user's model cannot be built, or its plan does not fit it.
        ImpossibleError: a layer cannot be cut so.
    """
    group = _tensor_group(spec, context)
    own = spec.model.module is not None
    cuts: dict[str, Cut] = {}
    if own:
        model = build_model(spec, context.device)
        if group is not None:
            cuts = cut_linears(model, spec.parallel.tensor_plan.model_dump(), group)
    else:
        model = Transformer(spec.model.transformer(), device="meta")
        if group is not None:
            cuts = cut_transformer(model, group)
    if spec.parallel.sharding == "none":
        if not own:
            model = model.to_empty(device=context.device)
        parallel = ParallelModel([model], context, cuts)
        if not own:
            _draw_weights(parallel, spec.train.seed)
        if context.size("dp_replicate") > 1:
            parallel.chunks[0] = replicate(model, context.mesh["dp_replicate"])
    else:
        model = _shard(model, spec, context)
        if not own:
            model = model.to_empty(device=context.device)
        parallel = ParallelModel([model], context, cuts)
        if not own:
            _draw_weights(parallel, spec.train.seed)
    if group is not None and not own:
        first, _ = share(spec.model.transformer().vocab_size, group.size, group.rank)
        parallel.token_loss = functools.partial(parallel_cross_entropy, first=first, group=group)
    else:
        parallel.token_loss = next_token_loss
    return parallel


def _shard(model: nn.Module, spec: JobSpec, context: RankContext) -> nn.Module:
    axes = ("dp_replicate", "dp_shard") if context.size("dp_replicate") > 1 else ("dp_shard",)
    return shard(
        model,
        context.mesh[axes],
        spec.train.precision,
        reshard_after_forward=spec.parallel.sharding == "zero3",
    )


def _tensor_group(spec: JobSpec, context: RankContext) -> TensorGroup | None:
    size = context.size("tp")
    if size == 1:
        return None
    group = context.mesh["tp"].get_group()
    sequence = spec.parallel.sequence and spec.model.module is None
    return TensorGroup(group, context.coordinate("tp"), size, sequence)


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
