"""Files open for reading: past the page cache where their pages are not in it already.

Reading through the page cache costs a processor several times what the disk's own transfer
does, and a checkpoint is read once. So large reads go by O_DIRECT into a buffer of the thread's
own, are taken from there to where they belong, and are hashed on the way while they are in the
processor's cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from hpctrain.io.extents import Extent, dense_strides, read_into

_PAGE = 4096
_BLOCK_BYTES = 2 << 20
_PART_BYTES = 512 << 10
"""Hashed and copied in turn, so that the second finds it in the processor's cache."""
_HUGE = 2 << 20
"""Size of a huge page: in small ones a transfer falls apart into many, at half the speed."""
_DIRECT_BYTES = 256 << 10
"""Smaller reads go through the page cache, whose read-ahead serves their neighbours too."""
_NOT_CACHED = {errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class _Own(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        room = mmap.mmap(-1, _BLOCK_BYTES + _HUGE, flags=flags)
        with contextlib.suppress(OSError):
            room.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(room, np.uint8)
        self.block = whole[-whole.ctypes.data % _HUGE :][:_BLOCK_BYTES]
        self.scratch = np.empty(0, np.uint8)


class _Range:
    """Bytes of a file that are wanted.

    Args:
        start, count: which.
        out: where to; None where only their hash is wanted.
    """

    def __init__(self, start: int, count: int, out: np.ndarray | None) -> None:
        self.start = start
        self.count = count
        self.out = out
        self.state = xxhash.xxh3_64()

    def take(self, at: int, block: np.ndarray) -> bool:
        """Take what a block of the file has of it; whether that was the last of it."""
        low = max(self.start, at)
        high = min(self.start + self.count, at + block.size)
        for first in range(low, high, _PART_BYTES):
            end = min(first + _PART_BYTES, high)
            part = block[first - at : end - at]
            self.state.update(part.data)
            if self.out is not None:
                np.copyto(self.out[first - self.start : end - self.start], part)
        return self.start + self.count <= at + block.size


class InputFile:
    """A file to read extents from; several threads may at once.

    Args:
        path: of the file.
        direct: read past the page cache what is not in it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct = -1
        if direct:
            with contextlib.suppress(OSError):
                self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._own = _Own()

    def close(self) -> None:
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1

    def read(self, start: int, strides: tuple[int, ...], out: np.ndarray) -> None:
        """Fill an array from a strided block, see :func:`~hpctrain.io.extents.read_into`.

        Raises:
            OSError, EOFError: see there.
        """
        read_into(self._descriptor, start, strides, out)

    def read_run(self, parts: Sequence[tuple[Extent, np.ndarray]]) -> list[str]:
        """Read whole extents that follow one another in the file, by large transfers.

        Args:
            parts: extents in ascending order, and a row-major array of its shape for each.

        Returns:
            XXH3-64 of each.

        Raises:
            OSError: the read failed.
            EOFError: the file ends before the last extent does.
        """
        ranges = []
        for extent, out in parts:
            if extent.strides != dense_strides(extent.box.shape, out.itemsize):
                return [self._read_gapped(*part) for part in parts]
            ranges.append(_Range(extent.start, out.nbytes, out.reshape(-1).view(np.uint8)))
        self._stream(ranges)
        return [found.state.hexdigest() for found in ranges]

    def _read_gapped(self, extent: Extent, out: np.ndarray) -> str:
        read_into(self._descriptor, extent.start, extent.strides, out)
        return xxhash.xxh3_64_hexdigest(out.reshape(-1).view(np.uint8).data)

    def digest(self, extent: Extent, dtype: np.dtype) -> str:
        """XXH3-64 of an extent.

        Raises:
            OSError, EOFError: see :meth:`read_run`.
        """
        if extent.strides != dense_strides(extent.box.shape, dtype.itemsize):
            return self._read_gapped(extent, self.scratch(extent, dtype))
        found = _Range(extent.start, extent.box.elements * dtype.itemsize, None)
        self._stream([found])
        return found.state.hexdigest()

    def scratch(self, extent: Extent, dtype: np.dtype) -> np.ndarray:
        """An array for an extent, this thread's until it asks for the next one."""
        own, size = self._own, extent.box.elements * dtype.itemsize
        if own.scratch.nbytes < size:
            own.scratch = np.empty(size, np.uint8)
        return np.ndarray(extent.box.shape, dtype, own.scratch.data)

    def _stream(self, ranges: Sequence[_Range]) -> None:
        """Bytes of the file, hashed, and kept where there is something to keep them in."""
        first, end = ranges[0].start, ranges[-1].start + ranges[-1].count
        if end - first < _DIRECT_BYTES or self._direct < 0 or self._cached(first):
            self._stream_cached(ranges)
            return
        block, left = self._own.block, list(reversed(ranges))
        position = first // _PAGE * _PAGE
        while left:
            wanted = min(_BLOCK_BYTES, -(-(end - position) // _PAGE) * _PAGE)
            try:
                found = os.preadv(self._direct, [block[:wanted].data], position)
            except OSError as error:
                if error.errno != errno.EINVAL or position > first:
                    raise
                # Some file systems take the flag and refuse the read.
                self._direct = -1
                self._stream_cached(ranges)
                return
            reached = position + found
            while left and left[-1].take(position, block[:found]):
                left.pop()
            if left and found < wanted:
                raise EOFError(f"the file ends at byte {reached}")
            position = reached

    def _stream_cached(self, ranges: Sequence[_Range]) -> None:
        block = self._own.block
        for wanted in ranges:
            if wanted.count >= _DIRECT_BYTES:
                # Read-ahead on its own goes in small steps.
                will = os.POSIX_FADV_WILLNEED
                os.posix_fadvise(self._descriptor, wanted.start, wanted.count, will)
            for first in range(0, wanted.count, _BLOCK_BYTES):
                size = min(_BLOCK_BYTES, wanted.count - first)
                out = wanted.out
                part = block[:size] if out is None else out[first : first + size]
                self._fill(part, wanted.start + first)
                wanted.state.update(part.data)

    def _fill(self, part: np.ndarray, offset: int) -> None:
        view = part.data
        while view:
            count = os.preadv(self._descriptor, [view], offset)
            if count == 0:
                raise EOFError(f"the file ends at byte {offset}")
            view, offset = view[count:], offset + count

    def _cached(self, start: int) -> bool:
        """Whether the page cache holds the first page."""
        try:
            page = self._own.block[:_PAGE].data
            return os.preadv(self._descriptor, [page], start, os.RWF_NOWAIT) > 0
        except OSError as error:
            if error.errno not in _NOT_CACHED:
                raise
            return False
