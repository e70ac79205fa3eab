"""What MPI ranks do in the checkpoint tests; each function is called by run_ranks."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import CheckpointError
from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.comm import SoloCommunicator
from hpctrain.io.flush import WriteOptions
from hpctrain.io.shards import TensorShard


def numbers(shape: list[int], salt: int = 0) -> np.ndarray:
    """Float32 numbers that say where they stand: element k of the flattened tensor is k + salt."""
    return (np.arange(np.prod(shape), dtype=np.float64) + salt).astype(np.float32).reshape(shape)


def whole(name: str, array: np.ndarray, torch_dtype: str = "float32") -> TensorShard:
    return TensorShard(name, array.shape, (0,) * array.ndim, array, torch_dtype)


def part(name: str, full: np.ndarray, axis: int, start: int, stop: int) -> TensorShard:
    offsets = [0] * full.ndim
    offsets[axis] = start
    index = [slice(None)] * full.ndim
    index[axis] = slice(start, stop)
    return TensorShard(name, full.shape, tuple(offsets), full[tuple(index)], "float32")


def fsdp_range(count: int, rank: int, size: int) -> tuple[int, int]:
    """Rows of a rank as torch.chunk gives them: 6 over 4 is 2, 2, 2, 0."""
    chunk = -(-count // size)
    return min(rank * chunk, count), min((rank + 1) * chunk, count)


def small(step: int) -> list[TensorShard]:
    """A few tensors of one rank whose numbers tell the step."""
    return [
        whole("model/w", numbers([40, 30], step)),
        whole("model/b", numbers([30], step)),
        whole("optimizer/exp_avg/w", numbers([40, 30], 2 * step)),
    ]


def save_small(root: str, files: Any) -> None:
    """Steps 1 and 2 of a small state, in shares."""
    comm = _comm()
    store = CheckpointStore(Path(root), comm, keep=5, files=files)
    for step in (1, 2):
        full = numbers([40, 30], step)
        shards = [part("model/w", full, 0, *fsdp_range(40, comm.rank, comm.size))]
        if comm.rank == comm.size - 1:
            shards.append(whole("model/b", numbers([30], step)))
        generator = np.arange(100, dtype=np.uint8)
        store.save(step, shards, scalars={"step": step}, per_rank={"generator": generator})


def _comm() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def save_sharded(root: str) -> dict[str, Any]:
    """Rows, ragged rows, columns, blocks, one owner, all in one checkpoint."""
    comm = _comm()
    rank, size = comm.rank, comm.size
    rows, columns, wide = numbers([6, 5]), numbers([8, 12], 1000), numbers([2000, 3001], 7)
    shards = [
        part("model/rows", rows, 0, *fsdp_range(6, rank, size)),
        part("model/columns", columns, 1, *fsdp_range(12, rank, size)),
        part("optimizer/exp_avg/wide", wide, 0, *fsdp_range(2000, rank, size)),
    ]
    if rank == size - 1:
        shards.append(whole("model/replicated", numbers([3])))
    store = CheckpointStore(Path(root), comm)
    report = store.save(
        7,
        shards,
        scalars={"step": 7, "tokens": 123},
        per_rank={"generator": np.full(4, rank, np.uint8)},
    )
    step, skipped = store.latest_good()
    return {"bytes": report.bytes, "step": step, "skipped": skipped, "clean": store.clean()}


def read_columns(root: str) -> bool:
    """Every tensor as column shards of this (other) world equals the numbers it was made of."""
    comm = _comm()
    with CheckpointStore(Path(root), comm).open(7, verify=comm.size % 2 == 1) as reader:
        for name, full in (
            ("model/rows", numbers([6, 5])),
            ("model/columns", numbers([8, 12], 1000)),
            ("optimizer/exp_avg/wide", numbers([2000, 3001], 7)),
        ):
            start, stop = fsdp_range(full.shape[1], comm.rank, comm.size)
            found = reader.read(name, (0, start), (full.shape[0], stop - start))
            if not np.array_equal(found, full[:, start:stop]):
                return False
        state = reader.rank_state(comm.rank)
        if (state is None) != (comm.rank >= reader.world_size):
            return False
        return state is None or bool(np.all(state["generator"] == comm.rank))


def save_badly(root: str, how: str) -> dict[str, Any]:
    """A good checkpoint, then one that a single rank spoils; what each rank was told."""
    comm = _comm()
    store = CheckpointStore(Path(root), comm, keep=5)
    full = numbers([400, 1000])
    good = [part("model/w", full, 0, *fsdp_range(400, comm.rank, comm.size))]
    store.save(1, good, scalars={}, per_rank={})
    shards, per_rank, scalars = list(good), {}, {}
    if how == "file size limit" and comm.rank == 1:
        _limit_file_size(1 << 20)
    if how == "file size limit of rank 0" and comm.rank == 0:
        _limit_file_size(1 << 10)
    if how == "gap" and comm.rank == 1:
        shards = []
    if how == "overlap" and comm.rank == 1:
        shards = [part("model/w", full, 0, 150, 400)]
    if how == "shape" and comm.rank == 1:
        shards = [part("model/w", full[:, :999], 0, 200, 400)]
    if how == "per_rank" and comm.rank == 1:
        per_rank = {"generator": np.zeros(3)}
    if how == "scalars":
        scalars = {"loss": float("nan")}
    try:
        store.save(2, shards, scalars=scalars, per_rank=per_rank)
    except (CheckpointError, ValueError) as error:
        told = f"{type(error).__name__}: {error}"
    else:
        told = "saved"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    step, skipped = store.latest_good()
    left = sorted(path.name for path in Path(root).iterdir())
    store.save(3, good, scalars={}, per_rank={})
    return {"told": told, "step": step, "skipped": skipped, "left": left, "then": store.steps()}


def _limit_file_size(limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def find_damaged(root: str) -> dict[str, Any]:
    """Which checkpoint all ranks agree on, where the newest is damaged."""
    comm = _comm()
    store = CheckpointStore(Path(root), comm)
    step, skipped = store.latest_good()
    message = ""
    try:
        with store.open(7) as reader:
            reader.read("optimizer/exp_avg/wide", (0, 0), (2000, 3001))
    except CheckpointError as error:
        message = error.message
    return {"step": step, "skipped": skipped, "read": message}


def read_together(root: str, damage: str) -> dict[str, Any]:
    """Columns and rows of what rank 0 saved, read by all: what differs, what is reported and
    how many bytes this rank asked the operating system for."""
    from hpctrain.io.restore import Request

    comm = _comm()
    rank, size = comm.rank, comm.size
    wide, tall, many = numbers([700, 9001], 3), numbers([4001, 11], 5), numbers([33])
    if rank == 0:
        shards = [whole("model/wide", wide), whole("model/tall", tall), whole("model/many", many)]
        shards.append(whole("optimizer/unread", numbers([3000, 1000], 9)))
        solo = CheckpointStore(Path(root), SoloCommunicator())
        path = solo.save(1, shards, scalars={}, per_rank={}).path
        if damage:
            with solo.open(1) as reader:
                extents = reader.manifest.tensors[damage].extents
            with (path / "tensors.h5").open("r+b") as stream:
                stream.seek(extents[-1].start + 5)
                stream.write(b"\x77")
    comm.Barrier()
    columns, rows = fsdp_range(9001, rank, size), fsdp_range(4001, rank, size)
    outs = {
        "model/wide": (wide[:, slice(*columns)], (0, columns[0])),
        "model/tall": (tall[slice(*rows)], (rows[0], 0)),
        "model/many": (many, (0,)),
    }
    requests = [Request(n, at, np.zeros_like(array)) for n, (array, at) in outs.items()]
    before = _bytes_read()
    message = ""
    try:
        with CheckpointStore(Path(root), comm).open(1, together=True) as reader:
            reader.read_all(requests)
    except CheckpointError as error:
        message = error.message
    differ = [r.name for r in requests if not np.array_equal(r.out, outs[r.name][0])]
    left = [path.name for path in Path("/dev/shm").glob("hpctrain-read-*")]
    return {"differ": differ, "told": message, "read": _bytes_read() - before, "left": left}


def _bytes_read() -> int:
    """Bytes that this process had from read calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def save_on_full_disk(root: str, unchecked: bool, megabytes: int) -> dict[str, Any]:
    """A small checkpoint, then one that does not fit."""
    write = WriteOptions(check_space=not unchecked)
    store = CheckpointStore(Path(root), SoloCommunicator(), keep=1, write=write)
    small = [whole("model/w", numbers([1000]))]
    large = [*small, whole("model/x", np.zeros(megabytes << 18, np.float32))]
    store.save(1, small, scalars={}, per_rank={})
    try:
        store.save(2, large, scalars={}, per_rank={})
        told = "saved"
    except CheckpointError as error:
        told = str(error)
    step, skipped = store.latest_good()
    left = sorted(path.name for path in Path(root).iterdir())
    return {"told": told, "step": step, "skipped": skipped, "left": left}


def save_for_ever(root: str) -> None:
    """Checkpoints until killed; a line on stdout after each commit."""
    store = CheckpointStore(Path(root), SoloCommunicator(), keep=2)
    array = numbers([3000, 1000])
    step = 0
    while True:
        step += 1
        array[0, 0] = step
        store.save(step, [whole("model/w", array)], scalars={"step": step}, per_rank={})
        print(step, flush=True)


if __name__ == "__main__":
    import sys

    save_for_ever(sys.argv[1])
