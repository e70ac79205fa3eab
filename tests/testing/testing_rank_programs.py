"""What MPI ranks run in the tests of hosts and clusters."""

from __future__ import annotations

import socket
import time


def bandwidth(peer: int, size: int, messages: int) -> float:
    """Bits a second from rank 0 to rank ``peer`` through MPI; 0 on the other ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    buffer = bytearray(size)
    world.Barrier()
    start = time.perf_counter()
    for _ in range(messages):
        if world.rank == 0:
            world.Send(buffer, dest=peer)
        elif world.rank == peer:
            world.Recv(buffer, source=0)
    if world.rank == peer:
        world.send(None, dest=0)
    elif world.rank == 0:
        world.recv(source=peer)
        return 8 * size * messages / (time.perf_counter() - start)
    return 0.0


def host_and_peers() -> tuple[str, int]:
    from mpi4py import MPI

    return socket.gethostname(), MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).size
