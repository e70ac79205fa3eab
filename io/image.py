"""HDF5 files built in memory and written by ourselves.

HDF5 that cannot write (no space, quota, a file-size limit) raises in the middle of its own
clean-up, says nothing at all on closing, or takes the whole process down with a segmentation
fault. It is therefore never let near a disk for writing: it writes headers into a sparse image
here, and plain ``pwrite`` calls, whose errors are exact, bring them to disk.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import h5py

from hpctrain.io.extents import write_bytes

T = TypeVar("T")

ALIGNMENT = 4096
_PAGE = 4096


class SparseFile(io.RawIOBase):
    """A file in memory that holds only the pages that were written; the rest reads as zeros."""

    def __init__(self) -> None:
        self.size = 0
        self._position = 0
        self._pages: dict[int, bytearray] = {}

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for page, start, part in self._spans(len(view)):
            held = self._pages.setdefault(page, bytearray(_PAGE))
            done = page * _PAGE + start - self._position
            held[start : start + part] = view[done : done + part]
        self._position += len(view)
        self.size = max(self.size, self._position)
        return len(view)

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        for page, start, part in self._spans(len(view)):
            done = page * _PAGE + start - self._position
            held = self._pages.get(page)
            view[done : done + part] = bytes(part) if held is None else held[start : start + part]
        self._position += len(view)
        return len(view)

    def _spans(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Page, start in it, bytes, for ``count`` bytes from the position."""
        position, end = self._position, self._position + count
        while position < end:
            page, start = divmod(position, _PAGE)
            part = min(_PAGE - start, end - position)
            yield page, start, part
            position += part

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """What was written: byte offset and bytes of runs of neighbouring pages."""
        run: list[int] = []
        for page in [*sorted(self._pages), -1]:
            if run and page != run[-1] + 1:
                data = b"".join(self._pages[number] for number in run)
                start = run[0] * _PAGE
                yield start, data[: max(0, self.size - start)]
                run = []
            run.append(page)


def build_hdf5(build: Callable[[h5py.File], T], metadata_bytes: int) -> tuple[T, SparseFile]:
    """Run ``build`` on a new HDF5 file in memory; its result, and the closed file's image.

    Args:
        build: creates groups, attributes and data sets. Data sets that are allocated early and
            never filled take no memory.
        metadata_bytes: room kept for headers at the front, a multiple of 4096, so that none
            lies between large data sets, which are aligned to 4096.
    """
    image = SparseFile()
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_LATEST)
    access.set_alignment(ALIGNMENT, ALIGNMENT)
    access.set_meta_block_size(metadata_bytes)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, image)
    handle = h5py.h5f.create(repr(image).encode(), h5py.h5f.ACC_TRUNC, fapl=access)
    with h5py.File(handle) as file:
        result = build(file)
    return result, image


def write_image(path: Path, image: SparseFile) -> None:
    """Create a file from an image, sparse where nothing was written.

    Raises:
        OSError: names the file; it may be left behind in part.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(descriptor, image.size)
        for start, data in image.blocks():
            write_bytes(descriptor, data, start)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
