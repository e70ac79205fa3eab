"""THE one place where parallelism is applied to a model, in this order:

1. move it to the rank's device;
2. data parallelism: DDP, or FSDP2 a block at a time.

The order is part of correctness: what shards a single tensor comes before what shards the
set of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.parallel.data import replicate, shard

if TYPE_CHECKING:
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec


def parallelize(model: nn.Module, spec: JobSpec, context: RankContext) -> nn.Module:
    """The model as this rank calls it.

    Args:
        model: whole, with its parameters initialised alike on every rank, in fp32.
        spec: resolved job.
        context: of this rank.
    """
    model = model.to(context.device)
    mode, precision = spec.parallel.sharding, spec.train.precision
    if mode == "none":
        return replicate(model, context.mesh["dp_replicate"], precision)
    layout = context.grid.layout
    mesh = context.mesh[("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)]
    return shard(model, mesh, precision, reshard_after_forward=mode == "zero3")


def unwrapped(model: nn.Module) -> nn.Module:
    """The module whose parameter names are the model's own (DDP puts ``module.`` before)."""
    from torch.nn.parallel import DistributedDataParallel

    return model.module if isinstance(model, DistributedDataParallel) else model


def sum_over(context: RankContext) -> Callable[[Tensor, tuple[str, ...]], Tensor]:
    """Sums a scalar over the ranks of some axes: what a global norm needs."""

    def reduce(value: Tensor, axes: tuple[str, ...]) -> Tensor:
        for axis in axes:
            if context.size(axis) > 1:
                dist.all_reduce(value, group=context.mesh[axis].get_group())
        return value

    return reduce
