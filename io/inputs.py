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
from pathlib import Path

import numpy as np
import xxhash

from hpctrain.io.extents import Extent, dense_strides, read_into

_PAGE = 4096
_BLOCK_BYTES = 4 << 20
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

    def read_whole(self, extent: Extent, out: np.ndarray) -> str:
        """Read all of an extent into a row-major array of its shape; its XXH3-64.

        Raises:
            OSError: the read failed.
            EOFError: the file ends before the extent does.
        """
        state = xxhash.xxh3_64()
        if extent.strides == dense_strides(extent.box.shape, out.itemsize):
            self._stream(extent.start, out.reshape(-1).view(np.uint8), out.nbytes, state)
        else:
            read_into(self._descriptor, extent.start, extent.strides, out)
            state.update(out.reshape(-1).view(np.uint8).data)
        return state.hexdigest()

    def digest(self, extent: Extent, dtype: np.dtype) -> str:
        """XXH3-64 of an extent.

        Raises:
            OSError, EOFError: see :meth:`read_whole`.
        """
        if extent.strides != dense_strides(extent.box.shape, dtype.itemsize):
            return self.read_whole(extent, self.scratch(extent, dtype))
        state = xxhash.xxh3_64()
        self._stream(extent.start, None, extent.box.elements * dtype.itemsize, state)
        return state.hexdigest()

    def scratch(self, extent: Extent, dtype: np.dtype) -> np.ndarray:
        """An array for an extent, this thread's until it asks for the next one."""
        own, size = self._own, extent.box.elements * dtype.itemsize
        if own.scratch.nbytes < size:
            own.scratch = np.empty(size, np.uint8)
        return np.ndarray(extent.box.shape, dtype, own.scratch.data)

    def _stream(
        self, start: int, out: np.ndarray | None, count: int, state: xxhash.xxh3_64
    ) -> None:
        """Bytes of the file, hashed, and kept where there is something to keep them in."""
        if count < _DIRECT_BYTES or self._direct < 0 or self._cached(start):
            if count >= _DIRECT_BYTES:
                # Read-ahead on its own goes in small steps.
                os.posix_fadvise(self._descriptor, start, count, os.POSIX_FADV_WILLNEED)
            for first in range(0, count, _BLOCK_BYTES):
                size = min(_BLOCK_BYTES, count - first)
                part = self._own.block[:size] if out is None else out[first : first + size]
                self._fill(part, start + first)
                state.update(part.data)
            return
        block = self._own.block
        position, end = start, start + count
        while position < end:
            base = position // _PAGE * _PAGE
            wanted = min(_BLOCK_BYTES, -(-(end - base) // _PAGE) * _PAGE)
            try:
                found = os.preadv(self._direct, [block[:wanted].data], base)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems take the flag and refuse the read.
                self._direct = -1
                rest = None if out is None else out[position - start :]
                self._stream(position, rest, end - position, state)
                return
            part = block[position - base : min(found, end - base)]
            if not part.size:
                raise EOFError(f"the file ends at byte {base + found}")
            state.update(part.data)
            if out is not None:
                np.copyto(out[position - start : position - start + part.size], part)
            position += part.size

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
