"""Measure every node before the first step: seconds of all ranks against a night of one.

Processor and memory of each device, a collective over all ranks, messages between nodes, the
paths that checkpoints go to, clocks and free space. Each number is compared with those of the
other nodes of the job, which needs no table of what is normal.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.health.straggler import slow_links
from hpctrain.runtime.context import RankContext
from hpctrain.units import format_bytes

_COMPUTE_SECONDS = 0.4
_FILE_BYTES = 4 << 20
_MESSAGE_BYTES = 1 << 20
_MESSAGES = 4
_TRIALS = 3
"""The best counts: others may be using the same links."""
_PINGS = 5
_SKEW_SECONDS = 1.0
_MOST_PAIRS = 8
"""Rounds of messages: with more nodes than this not every pair is measured."""


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """What was measured on a node; None where it could not be.

    Attributes:
        name: Slurm's name, or the host's.
        ranks: of the job on this node.
        flops: rate of matrix products, FLOP/s, slowest device.
        memory: bytes/s of copies, slowest device.
        link: bytes/s of messages to the best of the other nodes.
        write, read: bytes/s of a file in the directory of checkpoints.
        skew: seconds that its clock is ahead of rank 0's node.
        problems: what does not work at all.
    """

    name: str
    ranks: int
    flops: float
    memory: float
    link: float | None = None
    write: float | None = None
    read: float | None = None
    skew: float = 0.0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Preflight:
    """Attributes:
    seconds: that it took.
    allreduce: seconds of an all-reduce of 1 MiB over all ranks by MPI.
    nodes: in the order of the job.
    bad_nodes: those that fall far below the others or cannot work.
    findings: why, and what else a person should know, one line each.
    """

    seconds: float
    allreduce: float
    nodes: tuple[NodeHealth, ...]
    bad_nodes: tuple[str, ...] = ()
    findings: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def preflight(
    context: RankContext,
    paths: Sequence[Path],
    *,
    needed_bytes: int,
    bad_below: float,
) -> Preflight:
    """Measure all nodes; collective, the same answer on every rank.

    Args:
        context: of this rank.
        paths: directories of checkpoints, the first one shared by all nodes.
        needed_bytes: that planned checkpoints take in the first of them.
        bad_below: a node is bad where it reaches less than this part of the median.
    """
    comm = context.comm
    comm.Barrier()
    began = time.perf_counter()
    flops, memory = _compute(context.device)
    rates = comm.allgather((context.node, flops, memory))
    allreduce = _allreduce(comm)
    leader = context.local_rank == 0
    leaders = comm.Split(0 if leader else 1, comm.rank)
    mine: dict[str, Any] = {}
    pairs: list[tuple[str, str, float]] = []
    if leader:
        names = leaders.allgather(context.host)
        pairs = node_links(leaders, names)
        mine = {**_files(paths, needed_bytes), "skew": _skew(leaders)}
    leaders.Free()
    parts = comm.allgather((context.node, context.host, context.local_size, mine, pairs))
    nodes = []
    every_pair = [pair for *_, listed in parts for pair in listed]
    for node, host, ranks, measured, _ in parts:
        if not measured:
            continue
        own = [rate for one, other, rate in every_pair if host in (one, other)]
        nodes.append(
            NodeHealth(
                name=host,
                ranks=ranks,
                flops=min(f for n, f, _ in rates if n == node),
                memory=min(m for n, _, m in rates if n == node),
                link=max(own, default=None),
                **measured,
            )
        )
    bad, findings = judge(nodes, every_pair, bad_below)
    return Preflight(
        time.perf_counter() - began, allreduce, tuple(nodes), tuple(bad), tuple(findings)
    )


def judge(
    nodes: Sequence[NodeHealth], pairs: Sequence[tuple[str, str, float]], bad_below: float
) -> tuple[list[str], list[str]]:
    """Bad nodes, and all that a person should know; pure."""
    bad: list[str] = []
    findings: list[str] = []

    def blame(name: str, why: str) -> None:
        findings.append(f"{name}: {why}")
        if name not in bad:
            bad.append(name)

    for key, what, unit in (
        ("flops", "computes", "FLOP/s"),
        ("memory", "copies memory", "B/s"),
        ("write", "writes checkpoints", "B/s"),
        ("read", "reads checkpoints", "B/s"),
    ):
        values = [value for node in nodes if (value := getattr(node, key)) is not None]
        if len(values) < 2:
            continue
        usual = statistics.median_high(values)  # of two nodes the better one
        for node in nodes:
            value = getattr(node, key)
            # Files are shared: others may just have been quicker. A word, no verdict.
            limit = bad_below if key in ("flops", "memory") else bad_below / 4
            if value is not None and value < limit * usual:
                text = f"{what} at {_si(value)}{unit}, {_si(usual)}{unit} is usual"
                if key in ("flops", "memory"):
                    blame(node.name, text)
                else:
                    findings.append(f"{node.name}: {text}")
    for name in slow_links(pairs, bad_below):
        rate = max(rate for one, other, rate in pairs if name in (one, other))
        blame(name, f"its messages to other nodes go at {_si(rate)}B/s at most")
    failing = [node for node in nodes if node.problems]
    for node in failing:
        for problem in node.problems:
            if len(failing) < len(nodes):
                blame(node.name, problem)
            else:
                findings.append(f"{node.name}: {problem}")
    skewed = [node for node in nodes if abs(node.skew) > _SKEW_SECONDS]
    findings += [f"{node.name}: its clock is {node.skew:+.1f} s off" for node in skewed]
    return bad, findings


def _si(value: float) -> str:
    """A number and the prefix of its unit: ``33.2 G``."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


# ---- what is measured ----------------------------------------------------------------------


def _compute(device: torch.device) -> tuple[float, float]:
    """FLOP/s of matrix products and bytes/s of copies.

    Work over time and not the best of several: a device that is slow now and then is slow.
    """
    size = 4096 if device.type == "cuda" else 256
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.ones((256 << 20 if device.type == "cuda" else 8 << 20) // 4, device=device)
    target = torch.empty_like(source)
    flops = 2.0 * size**3 * _rate(lambda: torch.mm(a, b, out=out), device)
    return flops, 2.0 * source.nbytes * _rate(lambda: target.copy_(source), device)


def _rate(run: Any, device: torch.device) -> float:
    """Calls a second."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    wait()
    began, calls = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < _COMPUTE_SECONDS / 2:
        for _ in range(4):
            run()
        wait()
        calls += 4
    return calls / passed


def _allreduce(comm: Any) -> float:
    data = np.ones(_MESSAGE_BYTES // 8)
    result = np.empty_like(data)
    comm.Allreduce(data, result)
    began = time.perf_counter()
    comm.Allreduce(data, result)
    return time.perf_counter() - began


def node_links(leaders: Any, names: Sequence[str]) -> list[tuple[str, str, float]]:
    """Bytes/s between this node and others: every pair in turn, as in a tournament (circle
    method); with many nodes only the first rounds of it."""
    me, count = leaders.rank, leaders.size
    slots = count + count % 2
    out = np.ones(_MESSAGE_BYTES, dtype=np.uint8)
    back = np.empty_like(out)
    found = []
    for turn in range(min(slots - 1, _MOST_PAIRS)):
        other = _partner(me, turn, slots)
        leaders.Barrier()
        if other >= count:
            continue
        leaders.Sendrecv(out, other, recvbuf=back, source=other)
        seconds = []
        for _ in range(_TRIALS):
            began = time.perf_counter()
            for _ in range(_MESSAGES):
                leaders.Sendrecv(out, other, recvbuf=back, source=other)
            seconds.append(time.perf_counter() - began)
        rate = _MESSAGES * _MESSAGE_BYTES / min(seconds)
        if me < other:
            found.append((names[me], names[other], rate))
    return found


def _partner(me: int, turn: int, slots: int) -> int:
    """Whom a player meets in a turn of a tournament of an even number of players."""
    last = slots - 1
    if me == last:
        return turn
    if me == turn:
        return last
    return (2 * turn - me) % last


def _files(paths: Sequence[Path], needed_bytes: int) -> dict[str, Any]:
    """Write, read and free space of this node's view of the directories."""
    problems: list[str] = []
    rates: dict[str, Any] = {}
    for index, path in enumerate(paths):
        try:
            path.mkdir(parents=True, exist_ok=True)
            write, read = _write_and_read(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
            continue
        if index == 0:
            rates = {"write": write, "read": read}
            status = os.statvfs(path)
            free = status.f_bavail * status.f_frsize
            if free < needed_bytes:
                problems.append(
                    f"{path}: {format_bytes(free)} are free, planned checkpoints take "
                    f"{format_bytes(needed_bytes)}"
                )
    return {**rates, "problems": tuple(problems)}


def _write_and_read(directory: Path) -> tuple[float, float]:
    name = directory / f".preflight-{os.uname().nodename}-{os.getpid()}"
    data = os.urandom(1 << 16) * (_FILE_BYTES >> 16)
    try:
        began = time.perf_counter()
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(descriptor, data)
            os.fsync(descriptor)
            write = time.perf_counter() - began
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            back = os.pread(descriptor, len(data), 0)
            read = time.perf_counter() - began
        finally:
            os.close(descriptor)
    finally:
        with contextlib.suppress(OSError):
            name.unlink()
    if back != data:
        raise OSError(0, "reads back something else than was written")
    return len(data) / write, len(data) / read


def _skew(leaders: Any) -> float:
    """Seconds that this node's clock is ahead of the first node's: half of the round trip is
    taken for the way there (Cristian 1989); the shortest of a few."""
    if leaders.rank == 0:
        for other in range(1, leaders.size):
            for _ in range(_PINGS):
                leaders.recv(source=other)
                leaders.send(time.time(), other)
        return 0.0
    best = (float("inf"), 0.0)
    for _ in range(_PINGS):
        sent = time.time()
        leaders.send(None, 0)
        theirs = leaders.recv(source=0)
        got = time.time()
        best = min(best, (got - sent, (sent + got) / 2 - theirs))
    return best[1]
