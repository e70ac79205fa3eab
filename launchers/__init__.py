"""Launchers: a JobSpec becomes the command tokens that start its ranks.

Every launcher has one method, ``command(spec, program) -> list[str]``; tokens, never a shell
string. Nothing here runs Slurm commands; :mod:`hpctrain.launchers.local_run` runs local ones.
"""

from __future__ import annotations

from hpctrain.launchers.environment import check_job_env, without_leaks
from hpctrain.launchers.mpiexec import LocalLauncher, MpiexecLauncher
from hpctrain.launchers.shape import (
    Launcher,
    batch_hook,
    rank_program,
    ranks_per_node,
    world_size,
)
from hpctrain.launchers.srun import SrunLauncher, mpich_wheel

__all__ = [
    "Launcher",
    "LocalLauncher",
    "MpiexecLauncher",
    "SrunLauncher",
    "batch_hook",
    "check_job_env",
    "mpich_wheel",
    "rank_program",
    "ranks_per_node",
    "without_leaks",
    "world_size",
]
