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
