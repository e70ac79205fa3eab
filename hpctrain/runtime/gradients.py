"""Collectives in two levels for DDP's gradients and FSDP2's parameters and gradients.

Both are asked for by whoever builds the model, on every rank alike, after
:meth:`~hpctrain.runtime.communicators.Communicators.prepare`; both leave the model as it was where
two levels cannot gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.errors import ImpossibleError
from hpctrain.runtime import collectives
from hpctrain.runtime.collectives import MEASURED, Algorithm, Crossover
from hpctrain.runtime.communicators import Communicator
from hpctrain.runtime.hierarchical import all_gather_op, reduce_scatter_op


@dataclass(frozen=True)
class Choice:
    """How collectives of a communicator are done."""

    communicator: Communicator
    algorithm: Algorithm
    table: Sequence[Crossover]

    def may_gain(self, *operations: str) -> bool:
        """Whether any message of these operations can go through two levels."""
        levels = self.communicator.levels
        if self.algorithm == "flat" or levels is None:
            return False
        return self.algorithm == "hierarchical" or any(
            (row.operation in operations) and row.backend == levels.backend for row in self.table
        )


def replicate_in_levels(
    model: nn.parallel.DistributedDataParallel,
    communicator: Communicator,
    *,
    algorithm: Algorithm = "auto",
    table: Sequence[Crossover] = MEASURED,
) -> bool:
    """Let DDP average its gradients in two levels where that pays.

    Each bucket is reduced while backward goes on, as without it.

    Args:
        model: before its first backward.
        communicator: over DDP's ranks.
        algorithm, table: as for collectives.all_reduce.

    Returns:
        Whether anything was changed.

    Raises:
        ValueError: DDP works on other ranks than ``communicator``.
        ImpossibleError: ``hierarchical`` is asked for and the group has no two levels.
    """
    ranks = dist.get_process_group_ranks(model.process_group)
    if set(ranks) != set(communicator.ranks):
        raise ValueError(f"DDP works on the ranks {ranks}, not on {list(communicator.ranks)}")
    choice = Choice(communicator, algorithm, table)
    _check(choice)
    if not choice.may_gain("all_reduce"):
        return False
    # Without annotations: DDP refuses those that are not evaluated.
    model.register_comm_hook(choice, lambda choice, bucket: _average_bucket(choice, bucket))
    return True


def _average_bucket(choice: Choice, bucket: Any) -> torch.futures.Future[Tensor]:
    """A communication hook of DDP: divide, then sum over the ranks, as DDP itself does."""
    gradients = bucket.buffer().div_(choice.communicator.size)
    return collectives.all_reduce_async(
        choice.communicator, gradients, algorithm=choice.algorithm, table=choice.table
    )


def shard_in_levels(
    model: nn.Module,
    communicator: Communicator,
    *,
    algorithm: Algorithm = "auto",
    table: Sequence[Crossover] = MEASURED,
) -> bool:
    """Let every FSDP2 unit of ``model`` gather and reduce-scatter in two levels where that pays.

    Args:
        model: after fully_shard, with one-dimensional sharding over the communicator's ranks.
        communicator: over the ranks that share the parameters.
        algorithm, table: as for collectives.all_gather.

    Returns:
        Whether anything was changed.

    Raises:
        ImpossibleError: as replicate_in_levels; also where this PyTorch's FSDP2 takes no
            collectives of others.
    """
    from torch.distributed.fsdp import FSDPModule

    choice = Choice(communicator, algorithm, table)
    _check(choice)
    levels = communicator.levels
    if levels is None or not levels.even or not choice.may_gain("all_gather", "reduce_scatter"):
        return False
    units: list[Any] = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        if not hasattr(unit, "set_custom_all_gather"):
            raise ImpossibleError(
                f"FSDP2 of PyTorch {torch.__version__} takes no collectives of others",
                hint='take algorithm="flat", or a PyTorch with set_custom_all_gather',
            )
        unit.set_custom_all_gather(_Gather(choice))
        unit.set_custom_reduce_scatter(_ReduceScatter(choice))
    return bool(units)


def _check(choice: Choice) -> None:
    if choice.algorithm == "hierarchical" and choice.communicator.levels is None:
        name = choice.communicator.name
        raise ImpossibleError(
            f"hierarchical collectives over {name}: the group has one level, or its halves were "
            "not made",
            hint=f'call communicators.prepare("{name}") on every rank first, or take '
            'algorithm="auto"',
        )


class _Comm:
    """What FSDP2 asks of collectives that replace its own (its ``Comm`` interface)."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def serves(self, group: dist.ProcessGroup) -> bool:
        """Whether FSDP2 asks for the group that the communicator is of."""
        return group.group_name == self.choice.communicator.group.group_name


class _Gather(_Comm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if async_op or not self.serves(group):
            found: dist.Work | None = all_gather_op(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
            return found
        collectives.all_gather(
            self.choice.communicator,
            output_tensor,
            input_tensor,
            algorithm=self.choice.algorithm,
            table=self.choice.table,
        )
        return None


class _ReduceScatter(_Comm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        kind: Literal["sum", "avg"] | None = (
            "sum" if op == dist.ReduceOp.SUM else "avg" if op == dist.ReduceOp.AVG else None
        )
        if async_op or kind is None or not self.serves(group):
            found: dist.Work | None = reduce_scatter_op(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            return found
        collectives.reduce_scatter(
            self.choice.communicator,
            output_tensor,
            input_tensor,
            kind,
            algorithm=self.choice.algorithm,
            table=self.choice.table,
        )
        return None
