"""What all ranks agree on at a step boundary, in one small MPI exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.runtime.waiting import wait_all


@dataclass(frozen=True, slots=True)
class Agreement:
    """Attributes:
    loss: mean over the ranks.
    seconds: the slowest rank's.
    stop: largest reason of all ranks, see runtime.stopping.REASONS; 0 is none.
    """

    loss: float
    seconds: float
    stop: int


def agree(comm: Any, loss: float, seconds: float, stop: int) -> Agreement:
    """Collective over ``comm``: mean of the losses, maximum of the rest."""
    if comm.size == 1:
        return Agreement(loss, seconds, stop)
    from mpi4py import MPI

    mine = np.array([loss / comm.size])
    worst = np.array([seconds, float(stop)])
    mean, largest = np.empty_like(mine), np.empty_like(worst)
    wait_all([comm.Iallreduce(mine, mean, op=MPI.SUM), comm.Iallreduce(worst, largest, op=MPI.MAX)])
    return Agreement(float(mean[0]), float(largest[0]), int(largest[1]))


def agree_on_loads(comm: Any, seen: Any) -> dict[str, float]:
    """How evenly experts were wanted; collective over ``comm``.

    Args:
        comm: of all ranks.
        seen: (layers, experts + 1) int64 tensor of this rank: choices of each expert, and dropped
            ones. Layers without experts are zeros.

    Returns:
        ``busiest``, ``idle`` and ``dropped`` as in
        :class:`~hpctrain.records.StepRecord`; nothing where nobody chose.
    """
    mine = np.ascontiguousarray(seen.numpy())
    total = mine
    if comm.size > 1:
        from mpi4py import MPI

        total = np.empty_like(mine)
        wait_all([comm.Iallreduce(mine, total, op=MPI.SUM)])
    loads, dropped = total[:, :-1], total[:, -1]
    loads = loads[loads.sum(axis=1) > 0]
    if not len(loads):
        return {}
    return {
        "busiest": float((loads.max(axis=1) / loads.mean(axis=1)).max()),
        "idle": float((loads == 0).mean(axis=1).max()),
        "dropped": float(dropped.sum() / loads.sum()),
    }
