"""THE one place where parallelism is applied to a model, in this order:

1. build what this rank runs, on its device;
2. data parallelism: DDP, or FSDP2 a block at a time.

The order is part of correctness: what cuts single tensors comes before what shards the set of
them, and weights are drawn last, for the boxes that are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.model.build import build_model
from hpctrain.parallel.data import replicate, shard
from hpctrain.parallel.model import ParallelModel

if TYPE_CHECKING:
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec


def parallelize(spec: JobSpec, context: RankContext) -> ParallelModel:
    """The model of a job as this rank holds and calls it; float32, initialised.

    Args:
        spec: resolved job.
        context: of this rank.

    Raises:
        UsageError: the user's model cannot be built.
    """
    model = build_model(spec, context.device)
    mode, precision = spec.parallel.sharding, spec.train.precision
    if mode == "none":
        model = replicate(model, context.mesh["dp_replicate"])
    else:
        axes = ("dp_replicate", "dp_shard") if context.size("dp_replicate") > 1 else ("dp_shard",)
        mesh = context.mesh[axes]
        model = shard(model, mesh, precision, reshard_after_forward=mode == "zero3")
    return ParallelModel([model], context)
