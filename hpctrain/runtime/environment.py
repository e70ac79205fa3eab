"""What a rank reads from its environment: the only place below the command line that does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import UsageError

_UCX_DEVICES = "UCX_NET_DEVICES"


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Launcher's and scheduler's words about this rank.

    Attributes:
        deadline: seconds since the epoch at which ranks must have agreed to stop, or None.
        step_tasks: ranks of this Slurm step, or None outside srun.
        procid: this task's number in the Slurm step; under mpiexec inside a batch script it
            is the daemon's, which is why MPI's rank is trusted instead.
        nodeid: number of the node in the Slurm step.
        node_name: Slurm's name of the node.
        job_id: Slurm's job.
        restart: how often Slurm requeued the job.
        topology: Slurm's topology address of the node, for example ``s0.s4.node17``.
        socket_interface: ``GLOO_SOCKET_IFNAME`` as the user set it.
    """

    deadline: float | None = None
    step_tasks: int | None = None
    procid: int | None = None
    nodeid: int | None = None
    node_name: str | None = None
    job_id: str | None = None
    restart: int = 0
    topology: str | None = None
    socket_interface: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> RankEnvironment:
        """Raises UsageError where a variable that should be a number is not one."""
        variables = os.environ if environ is None else environ
        in_step = "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables
        return cls(
            deadline=_number(variables, "HPCTRAIN_DEADLINE"),
            step_tasks=_integer(variables, "SLURM_STEP_NUM_TASKS") if in_step else None,
            procid=_integer(variables, "SLURM_PROCID") if in_step else None,
            nodeid=_integer(variables, "SLURM_NODEID") if in_step else None,
            node_name=variables.get("SLURMD_NODENAME"),
            job_id=variables.get("SLURM_JOB_ID"),
            restart=_integer(variables, "SLURM_RESTART_COUNT") or 0,
            topology=variables.get("SLURM_TOPOLOGY_ADDR"),
            socket_interface=variables.get("GLOO_SOCKET_IFNAME"),
        )


def within_one_machine(environ: Mapping[str, str]) -> dict[str, str]:
    """What the MPI of ranks that are all on this machine shall know, unless told otherwise.

    UCX, which carries the messages of MPICH and often of Open MPI, opens every network device of
    the machine at start, and a rank is lost where one goes just then, as the links of containers
    do. Such ranks talk through shared memory; the one device that they are left with stays.

    Args:
        environ: of the ranks so far.

    Returns:
        Variables to add; none where ``environ`` chooses devices itself.
    """
    return {} if _UCX_DEVICES in environ else {_UCX_DEVICES: "lo"}


def _number(variables: Mapping[str, str], name: str) -> float | None:
    text = variables.get(name, "")
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"environment variable {name}: found {text!r}, a number is due") from None


def _integer(variables: Mapping[str, str], name: str) -> int | None:
    value = _number(variables, name)
    return None if value is None else int(value)
