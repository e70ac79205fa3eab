"""Waiting for MPI without burning a core.

MPI libraries poll while they wait. Where ranks have cores to themselves that is right; where
they share cores (a laptop, a test machine) the polling rank takes time from the one that is
waited for, and gradients travel on threads of their own which need it too.
"""

from __future__ import annotations

import time
from typing import Any

_SPIN_SECONDS = 100e-6
_NAP_SECONDS = 200e-6


def wait_all(requests: list[Any]) -> None:
    """Wait for nonblocking MPI requests: poll a moment, then sleep between polls."""
    from mpi4py import MPI

    began = time.perf_counter()
    while not MPI.Request.Testall(requests):
        if time.perf_counter() - began > _SPIN_SECONDS:
            time.sleep(_NAP_SECONDS)


def barrier(comm: Any) -> None:
    """A barrier that sleeps."""
    wait_all([comm.Ibarrier()])
