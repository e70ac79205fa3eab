#!/usr/bin/env python3
"""Bytes a second of whole checkpoints, checksums on, against the same bytes written raw.

Saving is timed from the call until the checkpoint is committed, with buffers that are there
already, as in a training run; its checksums, manifest, fsyncs and renames are all in it. Raw is
the best that a program can do with the same bytes: O_DIRECT pwrite of 16 MiB blocks and fsync,
one file a rank. Restoring is timed from opening the checkpoint until every number is in its
tensor, each checked against its checksum. Raw reading brings as many bytes into the same arrays
and checks nothing, the faster one of two ways: straight through the page cache, or past it into
an aligned block and from there to the arrays, for O_DIRECT does not read to where arrays lie.
Reading past the page cache into that block alone, so that the bytes are nowhere in the end, is
given beside it as raw_disk. The other layout has one rank less and columns in place of rows. All
on files that are not in the page cache.

Beside them, in the same run and on one rank: torch.save, safetensors and DCP of the same state,
fsynced. Exit code 1 where a target is missed.

    benchmarks/checkpoint_bandwidth.py [--json] [--megabytes N] [--repeat N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.testing.ranks import run_ranks

TARGETS = {
    "save_ratio_1_rank": 0.90,
    "save_ratio_4_ranks": 0.90,
    "restore_ratio_1_rank": 0.90,
    "restore_ratio_4_ranks": 0.90,
    "reshard_ratio": 0.80,
}
BLOCK = 16 << 20
RAW_READS = ("raw_cached", "raw_direct")


def shapes_of(megabytes: int) -> list[tuple[str, tuple[int, int]]]:
    """Matrices like those of a transformer's state: 200 in all, of three sizes."""
    unit = megabytes * (1 << 20) // 4 // 200
    found = []
    for number in range(200):
        scale = (0.25, 0.75, 2.0)[number % 3]
        columns = 1024 if number % 2 else 768
        found.append((f"model/layer{number:03d}.weight", (int(unit * scale) // columns, columns)))
    return found


def share(count: int, rank: int, size: int) -> slice:
    """Rows or columns of a rank, as FSDP2 cuts them."""
    chunk = -(-count // size)
    return slice(min(rank * chunk, count), min((rank + 1) * chunk, count))


def drop(folder: Path) -> None:
    """Take the files of a directory out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(comm: Any, work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    comm.Barrier()
    began = time.perf_counter()
    work()
    return float(max(comm.allgather(time.perf_counter() - began)))


def raw_buffer(size: int) -> Any:
    """Memory in huge pages, into and out of which a disk's transfers are fastest."""
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(room)
    view[:] = os.urandom(1 << 20) * (size >> 20) + bytes(size & ((1 << 20) - 1))
    return view


def raw_write(path: Path, image: Any) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
    for first in range(0, len(image), BLOCK):
        os.pwrite(descriptor, image[first : first + BLOCK], first)
    os.fsync(descriptor)
    os.close(descriptor)


def raw_cached(path: Path, arrays: Sequence[Any]) -> None:
    """Into arrays, through the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    position = 0
    for array in arrays:
        view = memoryview(array).cast("B")
        while view:
            count = os.preadv(descriptor, [view[:BLOCK]], position)
            view, position = view[count:], position + count
    os.close(descriptor)


def raw_direct(path: Path, arrays: Sequence[Any], block: Any) -> None:
    """Into arrays, past the page cache by way of a block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    position, filled, used = 0, 0, 0
    for array in arrays:
        view = memoryview(array).cast("B")
        while view:
            if used == filled:
                filled = os.preadv(descriptor, [block], position)
                position, used = position + filled, 0
            count = min(len(view), filled - used)
            np.copyto(np.frombuffer(view[:count], np.uint8),
                      np.frombuffer(block[used : used + count], np.uint8))  # fmt: skip
            view, used = view[count:], used + count
    os.close(descriptor)


def raw_disk(path: Path, block: Any) -> None:
    """Past the page cache into a block, and no further."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    position = 0
    while count := os.preadv(descriptor, [block], position):
        position += count
    os.close(descriptor)


def raw_reads(path: Path, arrays: Sequence[Any]) -> list[tuple[str, Callable[[], None]]]:
    """The ways to read a file, by name."""
    block = raw_buffer(BLOCK)
    return [
        ("raw_cached", lambda: raw_cached(path, arrays)),
        ("raw_direct", lambda: raw_direct(path, arrays, block)),
        ("raw_disk", lambda: raw_disk(path, block)),
    ]


def measure(folder: str, megabytes: int, repeat: int, files: str) -> dict[str, list[float]]:
    """On every rank: seconds of raw and of ours, alternating."""
    from mpi4py import MPI

    from hpctrain.io.buffers import SaveOptions
    from hpctrain.io.checkpoint import CheckpointStore
    from hpctrain.io.saver import Saver
    from hpctrain.io.shards import TensorShard
    from hpctrain.io.sources import HostSources

    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    root = Path(folder) / f"checkpoints{size}"
    shards = []
    dice = np.random.default_rng(rank)
    for name, shape in shapes_of(megabytes):
        rows = share(shape[0], rank, size)
        array = dice.random((rows.stop - rows.start, shape[1]), np.float32)
        shards.append(TensorShard(name, shape, (rows.start, 0), array, "float32"))
    sources = HostSources(shards)
    store = CheckpointStore(root, comm)
    saver = Saver(
        root,
        comm,
        keep=1,
        options=SaveOptions(files=files, buffers=1),  # type: ignore[arg-type]
    )
    total = sum(comm.allgather(sum(shard.array.nbytes for shard in shards)))
    raw = raw_buffer(-(-sum(shard.array.nbytes for shard in shards) // 4096) * 4096)
    raw_path = Path(folder) / f"raw{size}.{rank}"
    found: dict[str, list[float]] = {"bytes": [float(total)]}
    step = 0

    def save() -> None:
        saver.save(step, sources, scalars={}, per_rank=dict)
        while not (outcomes := saver.poll()):
            time.sleep(0.001)
        if outcomes[0].error is not None:
            raise outcomes[0].error

    def restore() -> None:
        from hpctrain.io.restore import Request

        # As a run does it, all ranks together.
        with store.open(step, together=True) as reader:
            reader.read_all([Request(s.name, s.offsets, s.array) for s in shards])

    def take(key: str, work: Callable[[], None]) -> None:
        found.setdefault(key, []).append(timed(comm, work))

    def write_both(number: int) -> None:
        works = [("raw_write", lambda: raw_write(raw_path, raw)), ("save", save)]
        for key, work in works if number % 2 else reversed(works):
            take(key, work)
        saver.drain()  # the one before is removed

    def read_both(number: int, expected: list[Any]) -> None:
        works = [*raw_reads(raw_path, [shard.array for shard in shards]), ("restore", restore)]
        for key, work in works if number % 2 else reversed(works):
            if rank == 0:
                drop(Path(folder))
            comm.Barrier()
            for shard in shards:
                shard.array.fill(0)
            take(key, work)
            sums = [int(shard.array.view(np.uint32).sum(dtype=np.uint64)) for shard in shards]
            if key == "restore" and sums != expected:
                raise AssertionError("what came back is not what was saved")

    for number in range(repeat + 1):
        step += 1
        write_both(number)
        read_both(
            number, [int(shard.array.view(np.uint32).sum(dtype=np.uint64)) for shard in shards]
        )
        raw_path.unlink()
        if number == 0:  # the first made buffers and warmed everything up
            found = {"bytes": found["bytes"]}
    saver.close()
    return found


def measure_reshard(folder: str, megabytes: int, repeat: int, writers: int) -> dict[str, Any]:
    """On another number of ranks: columns of what ``measure`` left, beside a raw read."""
    from mpi4py import MPI

    from hpctrain.io.checkpoint import CheckpointStore
    from hpctrain.io.restore import Request

    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    store = CheckpointStore(Path(folder) / f"checkpoints{writers}", comm)
    (step,) = store.steps()
    requests = []
    for name, shape in shapes_of(megabytes):
        columns = share(shape[1], rank, size)
        out = np.zeros((shape[0], columns.stop - columns.start), np.float32)
        requests.append(Request(name, (0, columns.start), out))
    raw = raw_buffer(-(-sum(request.out.nbytes for request in requests) // 4096) * 4096)
    raw_path = Path(folder) / f"raw.{rank}"
    raw_write(raw_path, raw)
    found: dict[str, Any] = {}

    def restore() -> None:
        # As a run does it: every byte is verified by some rank on the way.
        with store.open(step, together=True) as reader:
            reader.read_all(requests)

    # As many bytes, in rows.
    flat = [np.zeros(request.out.size, np.float32) for request in requests]
    works = [*raw_reads(raw_path, flat), ("reshard", restore)]
    for number in range(repeat + 1):
        for key, work in works if number % 2 else reversed(works):
            if rank == 0:
                drop(Path(folder))
            comm.Barrier()
            seconds = timed(comm, work)
            if number:
                found.setdefault(key, []).append(seconds)
    return found


def measure_others(folder: str, megabytes: int, repeat: int) -> dict[str, list[float]]:
    """One rank, whole state: seconds of saving with other programs, fsynced."""
    import torch
    import torch.distributed.checkpoint as dcp

    torch.set_num_threads(1)
    state = {name: torch.rand(shape) for name, shape in shapes_of(megabytes)}
    root = Path(folder) / "others"
    root.mkdir()

    def fsync_all() -> None:
        for path in root.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

    def torch_save() -> None:
        torch.save(state, root / "state.pt")

    def dcp_save() -> None:
        dcp.save(state, checkpoint_id=root / "dcp", no_dist=True)

    works: dict[str, Callable[[], Any]] = {"torch_save": torch_save, "dcp_save": dcp_save}
    try:
        from safetensors.torch import save_file
    except ImportError:
        pass
    else:
        works["safetensors"] = lambda: save_file(state, root / "state.safetensors")
    found: dict[str, list[float]] = {}
    for number in range(repeat + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            fsync_all()
            if number:
                found.setdefault(name, []).append(time.perf_counter() - began)
    shutil.rmtree(root)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--megabytes", type=int, default=1024, help="of the state, all ranks")
    parser.add_argument("--repeat", type=int, default=6, help="times each is measured, even")
    parser.add_argument("--folder", type=Path, help="where it goes; a real disk")
    parser.add_argument("--files", choices=("one", "rank"), default="one")
    options = parser.parse_args()
    env = {"OMP_NUM_THREADS": "1"}
    size, repeat = options.megabytes, options.repeat
    answer: dict[str, Any] = {"schema_version": 1, "targets": TARGETS, "files": options.files}
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="hpctrain-bandwidth-", dir=options.folder) as folder:
        for ranks, words in ((1, "1_rank"), (4, "4_ranks")):
            found = run_ranks(
                ranks, measure, folder, size, repeat, options.files, timeout=1800, env=env
            )[0]
            answer["bytes"] = found["bytes"][0]
            for key in found:
                if key != "bytes":
                    rates[f"{key}_{words}"] = answer["bytes"] / statistics.median(found[key])
            answer[f"save_ratio_{words}"] = _ratio(found, "save", "raw_write")
            answer[f"restore_ratio_{words}"] = _ratio(found, "restore", *RAW_READS)
            answer[f"restore_of_disk_{words}"] = _ratio(found, "restore", "raw_disk")
        found = run_ranks(3, measure_reshard, folder, size, repeat, 4, timeout=1800, env=env)[0]
        rates["reshard"] = answer["bytes"] / statistics.median(found["reshard"])
        answer["reshard_ratio"] = _ratio(found, "reshard", *RAW_READS)
        answer["reshard_of_disk"] = _ratio(found, "reshard", "raw_disk")
        shutil.rmtree(Path(folder) / "checkpoints4")
        others = run_ranks(1, measure_others, folder, size, repeat, timeout=1800, env=env)[0]
        for name, seconds in others.items():
            rates[name] = answer["bytes"] / statistics.median(seconds)
    answer["bytes_per_second"] = rates
    answer["passed"] = {key: answer[key] >= target for key, target in TARGETS.items()}
    out = sys.stderr if options.json else sys.stdout
    for key, value in rates.items():
        print(f"{key:18} {value / 1e9:6.2f} GB/s", file=out)
    for key in ("restore_of_disk_1_rank", "restore_of_disk_4_ranks", "reshard_of_disk"):
        print(f"{key} {answer[key]:.3f}", file=out)
    for key, target in TARGETS.items():
        word = "ok" if answer["passed"][key] else "MISSED"
        print(f"{key} {answer[key]:.3f} (target >= {target}): {word}", file=out)
    if options.json:
        print(json.dumps(answer))
    return 0 if all(answer["passed"].values()) else 1


def _ratio(found: dict[str, Any], ours: str, *raw: str) -> float:
    """Rate over that of the fastest raw way, of the times of all repetitions together. Either
    goes first in half of them: disks of virtual machines let a burst through and then slow
    down."""
    return float(min(sum(found[key]) for key in raw) / sum(found[ours]))


if __name__ == "__main__":
    sys.exit(main())
