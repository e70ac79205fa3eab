"""Data parallelism: DDP where every rank holds everything, FSDP2 where ranks share it.

::

    sharding      parameters          gradients        optimizer states
    none (DDP)    everywhere          all-reduced      everywhere
    zero1 (DDP)   everywhere,         all-reduced      sharded in
                  gathered once a                      whole blocks
                  step
    zero2         gathered till       reduce-           sharded
                  backward is done    scattered
    zero3         gathered a block    reduce-           sharded
                  at a time           scattered

The stages are those of ZeRO (Rajbhandari et al. 2020, section 5); zero2 and zero3 are FSDP2
with and without keeping the gathered parameters between forward and backward; zero1's optimizer is
:class:`~hpctrain.parallel.optimizer.BlockOptimizer`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.model.moe_experts import Experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


REPLICA_AXES = ("dp_replicate", "cp")
"""Ranks that hold the same parameters without sharding, and see different tokens."""
SHARD_AXES = ("dp_shard", "cp")
"""Ranks over which FSDP2 shards one copy: it makes no difference whose tokens a gradient is of."""
SHARDS = "dp_shard_cp"
"""Name of these axes taken together, in a mesh."""


def replicate(
    model: nn.Module, group: Any, ignored: Iterable[str] = (), buckets: int | None = None
) -> DistributedDataParallel:
    """DDP over a process group; gradients are averaged in buckets while backward runs.

    Parameters and buffers named in ``ignored`` are left to others. ``buckets`` is about how many
    there are, for a model so small that all of it went into one; without, they have 25 MiB.

    After its first backward DDP would put the buckets together anew, in the order in which
    gradients came. Among three ranks or more a sum's rounding depends on its place in a bucket,
    so a run that starts from a checkpoint would drift from one that went on. Looking for
    parameters that took no part keeps the first buckets, and such parameters do no harm.
    """
    # What DistributedDataParallel's setter for this, which is not public either, does.
    model._ddp_params_and_buffers_to_ignore = list(ignored)  # type: ignore[assignment]
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    size = sum(p.nbytes for p in model.parameters() if p.requires_grad) / 2**20
    return DistributedDataParallel(
        model,
        process_group=group,
        bucket_cap_mb=None if buckets is None else size / buckets,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )


def through_dispatcher(model: nn.Module) -> None:
    """Let DDP reduce its buckets by torch.distributed's own call, which emulated links can hold.

    Its C++ reducer reads the tensors out of the work's future, which a held work does not have.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    assert isinstance(model, DistributedDataParallel)
    group = model.process_group

    def reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer().div_(group.size())
        work = dist.all_reduce(buffer, group=group, async_op=True)
        assert work is not None
        done: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: buffer)
        return done

    # DDP compares annotations with types, and those of a module like this one are strings.
    model.register_comm_hook(None, lambda _, bucket: reduce(bucket))


def gather_ahead(model: nn.Module) -> None:
    """Let FSDP2 wait for parameters where it needs them, as on a device, and not where it asks
    for them, so that emulated links can gather while others compute."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._set_unshard_async_op(True)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    precision: str,
    *,
    reshard_after_forward: bool,
    prefetch: int = 0,
    experts: tuple[DeviceMesh, float] | None = None,
) -> nn.Module:
    """FSDP2 over the mesh, one unit a block and one for the rest; in place.

    Args:
        model: parameters in fp32.
        mesh: one axis (shard), or two (replicate, shard) for hybrid sharding.
        precision: ``bf16`` gathers and computes in bf16 and reduces in fp32.
        reshard_after_forward: free the gathered parameters between forward and backward.
        prefetch: blocks whose gathering starts before the current one computes, forward and
            backward, in the order of the model; 0 leaves it to FSDP2, which looks one block
            ahead in backward and, where the device is faster than the host, in forward.
        experts: where routed experts lie on a mesh of their own: its axis of copies, and what
            their summed gradients are divided by.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if precision == "bf16"
        else MixedPrecisionPolicy()
    )
    blocks: list[Any] = list(blocks_of(model))
    if experts is not None:
        for module in model.modules():
            if isinstance(module, Experts):
                _shard_experts(module, *experts, mp_policy=policy, reshard=reshard_after_forward)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The root unit is needed at the start of backward: freeing it would gather it twice.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if prefetch:
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - prefetch) : index][::-1])
    return model


def _shard_experts(
    module: Experts, mesh: DeviceMesh, divisor: float, *, mp_policy: Any, reshard: bool
) -> None:
    """Experts as a unit of their own, over the ranks that have copies of them."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    ranks = mesh.size()

    def placement(parameter: nn.Parameter) -> Shard | None:
        # Whole experts where there are enough of them, else some rows of each.
        experts, rows = parameter.shape[:2]
        return Shard(1) if experts < ranks and rows % ranks == 0 else None

    unit: Any = fully_shard(
        module,
        mesh=mesh,
        mp_policy=mp_policy,
        reshard_after_forward=reshard,
        shard_placement_fn=placement,
    )
    unit.set_gradient_divide_factor(divisor)
    # FSDP2 would let the collective divide, which gloo cannot; with one rank there is none.
    unit.set_force_sum_reduction_for_comms(ranks > 1)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks of a model: the parts of a sequential one, else the members of its
    lists and dictionaries of modules."""
    if isinstance(model, nn.Sequential):
        yield from _with_parameters(model.children())
    else:
        yield from _members(model)


def _members(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _with_parameters(child.children())
        else:
            yield from _members(child)


def _with_parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    return (m for m in modules if any(True for _ in m.parameters()))


def accumulating(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Around forward and backward of a micro-batch: communicate only in the last one."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        return contextlib.nullcontext()
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()
