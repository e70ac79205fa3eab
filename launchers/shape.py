"""What all launchers share: the protocol, the number of ranks, the program of a rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.rundir import RunDir
    from hpctrain.spec import JobSpec


class Launcher(Protocol):
    """Turns a resolved job into the command that starts all of its ranks."""

    def command(self, spec: JobSpec, program: Sequence[str]) -> list[str]:
        """Argument tokens.

        Args:
            spec: a resolved job.
            program: what every rank executes, its arguments included.
        """
        ...


def ranks_per_node(spec: JobSpec) -> int:
    """Ranks a node of a resolved job.

    Raises:
        ValueError: the job was not resolved.
    """
    if not isinstance(spec.ranks_per_node, int):
        raise ValueError("the job is not resolved: ranks_per_node is auto")
    return spec.ranks_per_node


def world_size(spec: JobSpec) -> int:
    """Ranks of a resolved job."""
    return spec.nodes * ranks_per_node(spec)


def cores_per_rank(spec: JobSpec, machine: Machine) -> int:
    """What ``--cpus-per-task`` gets: the job's word, else the machine's."""
    return spec.slurm.cpus_per_task or machine.cores_for(ranks_per_node(spec))


def rank_program(run: RunDir) -> list[str]:
    """``/abs/path/hpctrain run RUNDIR`` of the hpctrain that is running now.

    The path is absolute and not resolved: the interpreter of a virtual environment is often a
    link, and what it links to knows nothing of the environment.

    Raises:
        UsageError: this Python has no installed ``hpctrain`` beside it.
    """
    return [_hpctrain(), "run", str(run.root)]


def batch_hook() -> list[str]:
    """``/abs/path/hpctrain batch``: what a batch script calls before and after its ranks.

    Raises:
        UsageError: see rank_program.
    """
    return [_hpctrain(), "batch"]


def _hpctrain() -> str:
    program = Path(sys.executable).absolute().parent / "hpctrain"
    if not program.is_file():
        raise UsageError(
            f"{program} does not exist: ranks are started by the hpctrain beside their Python",
            hint=f"install it there: {sys.executable} -m pip install hpctrain",
        )
    return str(program)
