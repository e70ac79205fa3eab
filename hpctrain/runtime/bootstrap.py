"""From a process started by MPI to a rank that knows its place: sizes agreed, node found,
device owned, meeting point shared, one process group and one DeviceMesh over our rank grid.

mpi4py is imported before torch: on Cray machines the other order makes MPI_Init fail with a
NIC policy error (OLCF user guide, PyTorch page).
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpctrain.errors import ImpossibleError, UsageError
from hpctrain.runtime.context import RankContext
from hpctrain.runtime.environment import RankEnvironment
from hpctrain.runtime.waiting import barrier

if TYPE_CHECKING:
    import torch

    from hpctrain.layout import RankGrid

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def start_mpi() -> Any:
    """Initialise MPI and return a communicator of our own over all ranks.

    Raises:
        UsageError: no MPI library can be loaded.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"no MPI library can be loaded: {error}",
            hint="on a cluster load the site's MPI module; elsewhere pip install 'hpctrain[local]'",
        ) from None
    return MPI.COMM_WORLD.Dup()


def check_world(comm: Any, planned: int, environment: RankEnvironment) -> None:
    """Every rank compares MPI's size with the plan and with the Slurm step.

    Raises:
        ImpossibleError: MPI sees another number of ranks than were started or planned.
    """
    size, tasks = comm.size, environment.step_tasks
    # Under mpiexec inside a batch script the step is the launcher's own daemon, one a node.
    started_by_srun = tasks is not None and tasks == planned
    if started_by_srun and size != tasks:
        raise ImpossibleError(
            f"srun started {tasks} tasks, but MPI sees {size} rank{'s' * (size != 1)}: "
            "srun and the MPI library do not speak the same PMI",
            hint="set slurm.mpi to one that both know (srun --mpi=list): pmi2 for MPICH, pmix "
            "for Open MPI, cray_shasta for Cray MPICH; hpctrain doctor names them",
        )
    if size != planned:
        raise ImpossibleError(
            f"the job is planned for {planned} ranks, but MPI started {size}",
            hint="start the run with hpctrain submit or resume, which use the planned number"
            + ("" if tasks is None else "; or set slurm.mpi (see hpctrain doctor)"),
        )


def bootstrap(
    comm: Any, grid: RankGrid, environment: RankEnvironment, *, device: str = "auto"
) -> RankContext:
    """Build the RankContext; collective over ``comm``.

    Args:
        comm: from :func:`start_mpi`.
        grid: the layout of the ranks.
        environment: of this rank.
        device: ``auto`` or ``cpu``.

    Raises:
        ImpossibleError: sizes differ, no meeting point, or two ranks on one device.
    """
    check_world(comm, grid.size, environment)
    nodes = node_of_each_rank(comm, environment)
    node = nodes[comm.rank]
    mates = [rank for rank, other in enumerate(nodes) if other == node]
    local_rank = mates.index(comm.rank)
    host = environment.node_name or socket.gethostname()

    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from hpctrain.runtime.rendezvous import meet

    own = _device(device, local_rank)
    _check_devices(comm, nodes, own, host)
    meeting = meet(comm, host, environment.socket_interface)
    if environment.socket_interface is None:
        # gloo looks its own host name up, which is 127.0.0.1 on many machines; it takes the
        # interface from the environment and nowhere else.
        os.environ["GLOO_SOCKET_IFNAME"] = meeting.interface
    backend = "gloo" if own.type == "cpu" else f"cpu:gloo,{own.type}:nccl"
    dist.init_process_group(
        backend,
        store=PrefixStore("world", meeting.store),
        rank=comm.rank,
        world_size=comm.size,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=None if own.type == "cpu" else own,
    )
    from hpctrain.runtime.communicators import Communicators
    from hpctrain.runtime.counting import Counter
    from hpctrain.runtime.mpi_counting import counted_comm

    counter = Counter()
    counter.install(own.type)
    communicators = Communicators(comm, grid, nodes, own, counter)
    return RankContext(
        rank=comm.rank,
        world_size=comm.size,
        node=node,
        nodes=max(nodes) + 1,
        local_rank=local_rank,
        local_size=len(mates),
        host=host,
        device=own,
        comm=counted_comm(comm, counter, "control"),
        grid=grid,
        mesh=communicators.mesh,
        environment=environment,
        communicators=communicators,
    )


def shut_down(context: RankContext) -> None:
    """Leave the process group together; MPI is finalised at exit."""
    import torch.distributed as dist

    barrier(context.comm)
    context.communicators.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def node_of_each_rank(comm: Any, environment: RankEnvironment) -> list[int]:
    """Node number of every rank, numbered by their lowest rank.

    Ranks that share memory (MPI_Comm_split_type) share a node. Where srun started every rank
    its node number decides instead: several slurmd on one host are several nodes.
    """
    from mpi4py import MPI

    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    leader = shared.bcast(comm.rank)
    shared.Free()
    by_srun = environment.nodeid is not None and environment.procid == comm.rank
    words = comm.allgather((leader, environment.nodeid if by_srun else None))
    use_slurm = all(nodeid is not None for _, nodeid in words)
    keys = [nodeid if use_slurm else leader for leader, nodeid in words]
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [order[key] for key in keys]


def _device(wanted: str, local_rank: int) -> torch.device:
    """The device of this rank: the visible one, or the one of its local rank among several."""
    import torch

    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # With --gpus-per-task every rank sees its own device as number 0.
    visible = torch.cuda.device_count()
    device = torch.device("cuda", 0 if visible == 1 else local_rank % visible)
    torch.cuda.set_device(device)
    return device


def _check_devices(comm: Any, nodes: list[int], device: torch.device, host: str) -> None:
    """Two ranks on one device are an error, found on all ranks at once."""
    import torch

    identity = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        identity = str(getattr(properties, "uuid", "") or f"index {device.index}")
    found = comm.allgather((host, identity))
    kinds = {identity is None for _, identity in found}
    if len(kinds) > 1:
        without = sorted({h for h, identity in found if identity is None})
        raise ImpossibleError(
            f"some ranks have a GPU and some have none; none on {', '.join(without)}",
            hint="ask for GPUs on every node (slurm.sbatch_options, or the machine's site file)",
        )
    owners: dict[tuple[int, str], int] = {}
    for rank, (where, identity) in enumerate(found):
        if identity is None:
            continue
        other = owners.setdefault((nodes[rank], identity), rank)
        if other != rank:
            raise ImpossibleError(
                f"ranks {other} and {rank} own the same GPU ({identity}) on {where}",
                hint="ask for as many GPUs a node as ranks_per_node, bound one to a task",
            )
