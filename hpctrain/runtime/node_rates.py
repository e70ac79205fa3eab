"""Short measurements of a node: matrix products, attention, memory, launches, collectives, files.

Each returns plain numbers; hpctrain.plan.measured turns them into a calibration. Collectives run
in processes of their own, one a rank, over gloo on processors and NCCL or RCCL on devices.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hpctrain.runtime.hierarchical import all_gather_op

_REPEATS = 7
_TIMEOUT = timedelta(seconds=120)


def clock(run: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median seconds of a call, once warmed up."""
    run()
    wait(device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """As the driver names it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU"


def products(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int, float]]:
    """Seconds of (m, k) by (k, n) products: each as (m, n, k, seconds)."""
    found = []
    for m, n, k in shapes:
        a = torch.randn(m, k, device=device).to(dtype)
        b = torch.randn(k, n, device=device).to(dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        found.append((m, n, k, clock(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)))  # type: ignore[misc]
    return found


def attention(
    device: torch.device, dtype: torch.dtype, sequence: int, heads: int, head_dim: int
) -> tuple[float, float]:
    """Seconds of causal attention on one sample: forward, and forward with backward."""
    shape = (1, heads, sequence, head_dim)
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    grad = torch.ones(shape, device=device, dtype=dtype)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)  # type: ignore[no-untyped-call]

    return clock(forward, device), clock(both, device)


def copy(device: torch.device, size: int) -> float:
    """Seconds to copy ``size`` bytes within memory; twice that many are moved."""
    source = torch.empty(size // 4, dtype=torch.float32, device=device).fill_(1.0)
    target = torch.empty_like(source)
    return clock(lambda: target.copy_(source), device)


def elementwise(device: torch.device, dtype: torch.dtype, size: int) -> tuple[float, float]:
    """Seconds and bytes of a residual addition on ``size`` elements."""
    a, b = (torch.ones(size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = clock(lambda: torch.add(a, b, out=out), device)
    return seconds, 3.0 * size * a.element_size()


def launches(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of a tiny block's forward and backward pass: nothing but launching counts."""
    from torch import nn

    width, heads = 64, 2
    query, key, value, output = (nn.Linear(width, width) for _ in range(4))
    up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    norms = [nn.LayerNorm(width) for _ in range(2)]
    for layer in (query, key, value, output, up, down, *norms):
        layer.to(device, dtype)
    x = torch.randn(1, 8, width, device=device).to(dtype).requires_grad_()

    def both() -> None:
        y = norms[0](x)
        q, k, v = (p(y).unflatten(-1, (heads, -1)).transpose(1, 2) for p in (query, key, value))
        core = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        z = x + output(core.transpose(1, 2).flatten(2))
        z = z + down(F.gelu(up(norms[1](z))))
        z.sum().backward()

    return clock(both, device, 3 * _REPEATS)


def write_rate(directory: Path, size: int) -> float:
    """Bytes/s of one file of ``size`` bytes, until it is durable."""
    data = os.urandom(min(size, 1 << 24))
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".hpctrain-measure-") as stream:
        start = time.perf_counter()
        for _ in range(max(1, size // len(data))):
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
        return size / (time.perf_counter() - start)


def gathers(device_type: str, ranks: int, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Seconds of all-gathers whose result has the given sizes in bytes, between ``ranks``
    processes of this host."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="hpctrain-measure-") as directory:
        queue = context.SimpleQueue()
        members = [
            context.Process(
                target=_gather_rank, args=(rank, ranks, device_type, tuple(sizes), directory, queue)
            )
            for rank in range(ranks)
        ]
        for member in members:
            member.start()
        for member in members:
            member.join()
        failed = [member.exitcode for member in members if member.exitcode]
        if failed:
            raise RuntimeError(f"a rank that measures collectives left with {failed[0]}")
        found = queue.get()
    return [(int(size), float(seconds)) for size, seconds in found]


def _gather_rank(
    rank: int,
    ranks: int,
    device_type: str,
    sizes: Sequence[int],
    directory: str,
    queue: torch.multiprocessing.SimpleQueue,  # type: ignore[type-arg]
) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=_TIMEOUT,
    )
    found = []
    for size in sizes:
        part = torch.ones(max(1, size // ranks // 4), device=device)
        whole = torch.empty(ranks * part.numel(), device=device)

        def once(whole: torch.Tensor = whole, part: torch.Tensor = part) -> None:
            all_gather_op(whole, part)

        dist.barrier()
        found.append((size, clock(once, device)))
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()
