"""What a directory's storage likes: one file or many, past the page cache or through it.

A short measurement with as many writers as asked for, each writing its part of the same number
of bytes and making it durable. Where ``lfs`` is there, the stripe counts of a Lustre directory
are tried too.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import CheckpointError
from hpctrain.io.flush import BLOCK_BYTES, OutputFile, write_block
from hpctrain.io.plan import FileKind
from hpctrain.io.storage import file_system


@dataclass(frozen=True, slots=True)
class Measurement:
    """One way of writing, as measured.

    Attributes:
        files: ``one`` shared by all writers, or ``rank`` for one each.
        direct: past the page cache.
        stripes: of Lustre, None elsewhere.
        bytes_per_second: median of the repetitions, all writers together, durable.
    """

    files: FileKind
    direct: bool
    stripes: int | None
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Advice:
    """What was found out about a directory.

    Attributes:
        kind: of file system.
        measurements: all of them.
        files, direct, stripes: what to choose; the simplest within a fifth of the best.
    """

    kind: str
    measurements: tuple[Measurement, ...]
    files: FileKind
    direct: bool
    stripes: int | None


def tune(
    path: Path,
    *,
    writers: int = 4,
    total: int = 256 << 20,
    repeat: int = 3,
    tell: Callable[[Measurement], None] = lambda measurement: None,
) -> Advice:
    """Measure and choose.

    Args:
        path: a directory, which must exist.
        writers: threads that write at a time, as the ranks of a node will.
        total: bytes of each measurement; more where there is a large write cache.
        repeat: times each is measured.
        tell: called with each result.

    Raises:
        CheckpointError: the directory is not there, or cannot hold so much.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: is no directory")
    free = shutil.disk_usage(path).free
    if total * 2 > free:
        raise CheckpointError(f"{path}: {free} bytes free, {2 * total} wanted to measure")
    kind = file_system(path)
    share = max(BLOCK_BYTES, total // writers // BLOCK_BYTES * BLOCK_BYTES)
    found = []
    for stripes in _stripe_counts(kind):
        for files in ("one", "rank") if writers > 1 else ("one",):
            for direct in (True, False):
                speeds = []
                for _ in range(repeat):
                    with _folder(path, stripes) as folder:
                        speeds.append(_measure(folder, files, direct, writers, share))
                speed = sorted(speeds)[len(speeds) // 2]
                found.append(Measurement(files, direct, stripes, speed))
                tell(found[-1])
    best = max(m.bytes_per_second for m in found)
    good = [m for m in found if m.bytes_per_second >= 0.8 * best]
    # Direct writes leave the page cache and a core to the training, one file is easiest to
    # handle, and few stripes disturb others least.
    choice = min(good, key=lambda m: (not m.direct, m.files != "one", m.stripes or 0))
    return Advice(kind, tuple(found), choice.files, choice.direct, choice.stripes)


def _stripe_counts(kind: str) -> tuple[int | None, ...]:
    return (1, 4, -1) if kind == "lustre" and shutil.which("lfs") else (None,)


@contextlib.contextmanager
def _folder(path: Path, stripes: int | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=".hpctrain-tune-", dir=path))
    try:
        if stripes is not None:
            command = ["lfs", "setstripe", "-c", str(stripes), str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise CheckpointError(f"lfs setstripe: {done.stderr.strip()}")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(folder: Path, files: str, direct: bool, writers: int, share: int) -> float:
    # As the savers' own: in huge pages a transfer is twice as fast.
    buffer = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer.write(os.urandom(1 << 20) * (BLOCK_BYTES >> 20))
    view = memoryview(buffer)
    faults: list[OSError] = []
    start = threading.Barrier(writers + 1)

    def write(number: int) -> None:
        name = "shared" if files == "one" else f"rank{number}"
        first = number * share if files == "one" else 0
        try:
            with OutputFile(folder / name, direct) as descriptor:
                start.wait()
                for offset in range(0, share, BLOCK_BYTES):
                    write_block(descriptor, view, first + offset, os.pwrite)
                os.fsync(descriptor)
        except OSError as error:
            faults.append(error)
            start.abort()
        except threading.BrokenBarrierError:
            return

    threads = [threading.Thread(target=write, args=(n,)) for n in range(writers)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if faults:
        raise CheckpointError(f"{folder}: {faults[0].strerror or faults[0]}")
    return writers * share / seconds
