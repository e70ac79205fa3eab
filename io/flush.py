"""From a buffer to a file: large writes past the page cache, with the buffer's own copying,
a bandwidth cap and other ranks' failures watched between them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.io.plan import RankPlan
from hpctrain.io.staging import Staging

BLOCK_BYTES = 16 << 20
"""One write; above this no storage that was measured gained anything."""

_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}
Pwrite = Callable[[int, memoryview, int], int]


class Abandoned(Exception):
    """Another rank failed; what was being written is not wanted any more."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write.

    Attributes:
        direct: past the page cache (O_DIRECT) where the file system can.
        bandwidth: bytes a second at most, None for no cap.
        check_space: hold what is planned against the free space before writing.
        pwrite: the system call, for tests of slow and failing storage.
    """

    direct: bool = True
    bandwidth: float | None = None
    check_space: bool = True
    pwrite: Pwrite = os.pwrite


def write_pieces(
    folder: Path,
    plan: RankPlan,
    staging: Staging,
    options: WriteOptions,
    *,
    ready: Callable[[int, int], None] = lambda piece, end: None,
    wanted: Callable[[], bool] = lambda: True,
    hurry: Callable[[], bool] = lambda: False,
) -> None:
    """Write a rank's pieces into files of ``folder`` and make them durable.

    Args:
        folder: is made where it is missing.
        plan: whose pieces.
        staging: the buffer.
        options: see there.
        ready: returns when the piece's bytes before ``end`` may be read.
        wanted: false where another rank failed.
        hurry: true where the cap no longer counts, because the job waits.

    Raises:
        OSError: names the file; it may be left behind in part.
        Abandoned: ``wanted`` said so.
    """
    folder.mkdir(exist_ok=True)
    pace = Pace(options.bandwidth, hurry)
    for index, piece in enumerate(plan.pieces):
        path = folder / piece.name
        try:
            with OutputFile(path, options.direct) as descriptor:
                view = staging.images[index].data
                for first in range(0, piece.bytes, BLOCK_BYTES):
                    end = min(first + BLOCK_BYTES, piece.bytes)
                    ready(index, end)
                    if not wanted():
                        raise Abandoned
                    write_block(descriptor, view[first:end], piece.start + first, options.pwrite)
                    pace.wrote(end - first)
                os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error


class OutputFile:
    """A file open for writing in blocks, as a context that gives the descriptor.

    Args:
        path: made where it is missing.
        direct: past the page cache, where the file system can.
    """

    def __init__(self, path: Path, direct: bool) -> None:
        self._path = path
        self._direct = direct
        self._descriptor = -1

    def __enter__(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        if self._direct:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(self._path, flags | os.O_DIRECT, 0o644)
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, flags, 0o644)
        return self._descriptor

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)


def write_block(descriptor: int, view: memoryview, offset: int, pwrite: Pwrite) -> None:
    """Write all of a block; through the page cache from the first refusal on.

    Raises:
        OSError: the write failed.
    """
    while view:
        try:
            written = pwrite(descriptor, view, offset)
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if error.errno not in _REFUSED or not flags & os.O_DIRECT:
                raise
            # Some file systems take the flag and refuse the write, or want wider alignment.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view, offset = view[written:], offset + written


class Pace:
    """Holds an average below a cap."""

    def __init__(self, bandwidth: float | None, hurry: Callable[[], bool]) -> None:
        self._bandwidth = bandwidth
        self._hurry = hurry
        self._began = time.monotonic()
        self._bytes = 0

    def wrote(self, count: int) -> None:
        self._bytes += count
        if self._bandwidth is None:
            return
        due = self._began + self._bytes / self._bandwidth
        while (left := due - time.monotonic()) > 0 and not self._hurry():
            time.sleep(min(left, 0.05))


def allocated_bytes(folder: Path) -> int:
    """Bytes on disk of the files of a directory, 0 where it is not there."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            total += entry.stat().st_blocks * 512
    return total
