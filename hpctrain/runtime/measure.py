"""What the links between ranks really do: latency and bandwidth of pairs, cost of groups.

Started as MPI ranks by ``hpctrain topo --measure``::

    mpiexec -n 8 python -m mpi4py -m hpctrain.runtime.measure REQUEST ANSWER

REQUEST and ANSWER are JSON files; rank 0 writes the answer. Messages go where a training's
gradients go, through torch.distributed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.runtime.context import RankContext

MOST_RANKS = 16
"""Up to here all pairs of ranks are measured, above one rank of each node with each other."""
MOST_NODES = 64
_LEAST_SECONDS = 0.03
_LARGEST = 2**26
_ROUND_TRIPS = 20


def chosen_ranks(nodes: Sequence[int]) -> list[int]:
    """Ranks whose pairs are measured: all, or the first of each node and all of node 0.

    Args:
        nodes: node number of each rank.
    """
    if len(nodes) <= MOST_RANKS:
        return list(range(len(nodes)))
    first: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        first.setdefault(node, rank)
    leaders = list(first.values())[:MOST_NODES]
    near = [rank for rank, node in enumerate(nodes) if node == nodes[0]][:MOST_RANKS]
    return sorted({*leaders, *near})


def measure_links(context: RankContext) -> dict[str, Any]:
    """Latency and bandwidth between pairs of ranks, one pair at a time; collective.

    Returns:
        On rank 0 ``ranks`` (those measured), ``latency`` (seconds one way) and ``bandwidth``
        (bytes/s from the row's rank to the column's), null where not measured; empty elsewhere.
    """
    import torch
    import torch.distributed as dist

    rank, device = context.rank, context.device
    chosen = chosen_ranks(context.communicators.nodes)
    nodes = context.communicators.nodes
    mine: list[tuple[int, int, float, float]] = []
    signal = torch.zeros(1, device=device)
    for i, a in enumerate(chosen):
        for b in chosen[i + 1 :]:
            if len(nodes) > MOST_RANKS and nodes[a] == nodes[b] and nodes[a] != nodes[0]:
                continue
            # Nobody else may be on the link; gloo's barrier sleeps, MPI's would burn cores.
            dist.barrier()
            if rank in (a, b):
                other = b if rank == a else a
                latency = _latency(signal, other, rank == a)
                there = _bandwidth(other, rank == a, latency, device)
                back = _bandwidth(other, rank == b, latency, device)
                mine.append((rank, other, latency, there if rank == a else back))
    dist.barrier()
    everyone = context.comm.gather(mine)
    if everyone is None:
        return {}
    place = {rank: number for number, rank in enumerate(chosen)}
    empty: list[list[float | None]] = [[None] * len(chosen) for _ in chosen]
    latencies, rates = empty, [list(row) for row in empty]
    for rows in everyone:
        for source, to, latency, rate in rows:
            latencies[place[source]][place[to]] = latency
            rates[place[source]][place[to]] = rate
    return {"ranks": chosen, "latency": latencies, "bandwidth": rates}


def _latency(signal: Any, other: int, first: bool) -> float:
    """Half of the median round trip of a message of four bytes, seconds."""
    import torch.distributed as dist

    times = []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        if first:
            dist.send(signal, other)
            dist.recv(signal, other)
        else:
            dist.recv(signal, other)
            dist.send(signal, other)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:]) / 2


def _bandwidth(other: int, sends: bool, latency: float, device: Any) -> float:
    """Bytes/s of messages one way, of a size that takes long enough to be timed."""
    import torch
    import torch.distributed as dist

    size = 2**16
    while True:
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        answer = torch.zeros(1, device=device)
        for _ in range(2):  # the first one opens windows and touches memory
            began = time.perf_counter()
            if sends:
                dist.send(message, other)
                dist.recv(answer, other)
            else:
                dist.recv(message, other)
                dist.send(answer, other)
            seconds = time.perf_counter() - began
        # Both sides have to agree on going on: the sender's clock decides.
        verdict = torch.tensor([seconds], dtype=torch.float64, device=device)
        if sends:
            dist.send(verdict, other)
        else:
            dist.recv(verdict, other)
        seconds = float(verdict)
        if seconds >= _LEAST_SECONDS or size >= _LARGEST:
            return size / max(seconds - latency, 1e-9)
        size = min(_LARGEST, size * max(2, min(64, int(1.5 * _LEAST_SECONDS / seconds))))


def describe_rank(context: RankContext, profile: Any, ranks_per_node: int) -> dict[str, Any]:
    """Where this rank is, and where that differs from what the profile plans."""
    from hpctrain.machine.compare import compare, compare_rank
    from hpctrain.machine.cpuset import format_cpuset
    from hpctrain.machine.probe import probe_node

    node = probe_node()
    warnings = compare(profile, node) if context.local_rank == 0 else []
    warnings += compare_rank(profile, node, context.local_rank, ranks_per_node)
    return {
        "rank": context.rank,
        "host": context.host,
        "node": context.node,
        "cores": format_cpuset(node.allowed),
        "device": str(context.device),
        "topology": context.environment.topology,
        "warnings": warnings,
    }


def run(request: dict[str, Any]) -> dict[str, Any]:
    """On every rank: bootstrap as a training would, measure, and gather; the answer on rank 0."""
    from hpctrain.layout import RankGrid
    from hpctrain.machine import get_machine
    from hpctrain.runtime.bootstrap import bootstrap, shut_down, start_mpi
    from hpctrain.runtime.environment import RankEnvironment

    comm = start_mpi()
    grid = RankGrid.from_sizes(request["sizes"], request["order"], request["permutation"])
    context = bootstrap(comm, grid, RankEnvironment.read())
    profile = get_machine(request["machine"])
    ranks = context.comm.gather(describe_rank(context, profile, request["ranks_per_node"]))
    links = measure_links(context)
    costs = context.comm.gather([asdict(cost) for cost in context.communicators.costs])
    answer: dict[str, Any] = {}
    if ranks is not None and costs is not None:
        answer = {
            "ranks": ranks,
            "links": links,
            "groups": {
                "count": len(costs[0]),
                "seconds": max(sum(one["seconds"] for one in rank) for rank in costs),
                "rss_bytes": max(sum(one["rss_bytes"] for one in rank) for rank in costs),
                "each": costs[0],
            },
        }
    shut_down(context)
    return answer


def main(arguments: Sequence[str]) -> None:
    """``measure REQUEST ANSWER``, on every rank."""
    request, answer = map(Path, arguments)
    found = run(json.loads(request.read_text()))
    if found:
        aside = answer.with_suffix(".tmp")
        aside.write_text(json.dumps(found))
        aside.replace(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
