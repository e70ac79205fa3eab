"""Requests that can never run, found before they are submitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.spec import JobSpec


def check(
    spec: JobSpec,
    machine: Machine,
    client: SlurmClient | None,
    *,
    locate: Callable[[str, str], object] | None = None,
) -> list[str]:
    """Compare a resolved job with the limits of its machine and of the Slurm that answers.

    Args:
        spec: a resolved job.
        machine: its machine.
        client: None checks against the machine's file alone (local runs, dry runs).
        locate: ``Job.locate``, which puts the place in the job file before a message.

    Returns:
        Warnings: limits that are broken but not certain.

    Raises:
        ImpossibleError: every limit that is broken, each with key and source.
    """
    raise NotImplementedError
