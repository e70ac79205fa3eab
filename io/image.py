"""HDF5 files built in memory and written by ourselves.

HDF5 that cannot write (no space, quota, a file-size limit) raises in the middle of its own
clean-up, says nothing at all on closing, or takes the whole process down with a segmentation
fault. It is therefore never let near a disk for writing: it writes headers into a sparse image
here, and plain ``pwrite`` calls, whose errors are exact, bring them to disk.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.io.extents import write_bytes

ALIGNMENT = 4096
_PAGE = 4096


class SparseFile(io.RawIOBase):
    """A file in memory that holds only pages with something in them; the rest reads as zeros."""

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
            done = page * _PAGE + start - self._position
            piece = bytes(view[done : done + part])
            if page in self._pages or any(piece):
                held = self._pages.setdefault(page, bytearray(_PAGE))
                held[start : start + part] = piece
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


@dataclass(frozen=True, slots=True)
class Reserved:
    """A data set whose bytes are allocated and not written.

    Attributes:
        shape: of the data set.
        kind: HDF5 type of its elements.
        attributes: by name.
    """

    shape: tuple[int, ...]
    kind: h5py.h5t.TypeID
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Virtual:
    """A data set put together from others, HDF5's virtual data set.

    Attributes:
        shape, kind, attributes: as of :class:`Reserved`.
        parts: file (``.`` for this one), data set in it, offsets and shape of the box it fills.
        missing: what HDF5 shall give where a source is not there; it says so in no other way.
    """

    shape: tuple[int, ...]
    kind: h5py.h5t.TypeID
    attributes: Mapping[str, Any]
    parts: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...]], ...]
    missing: float | None = None


def build_hdf5(
    small: Callable[[h5py.File], None],
    reserved: Mapping[str, Reserved],
    virtual: Mapping[str, Virtual] | None = None,
) -> tuple[dict[str, int], SparseFile]:
    """A new HDF5 file in memory: headers and small data sets in front, room for large ones.

    Each reserved data set starts at a multiple of ALIGNMENT, in the order given, behind
    everything else.

    Args:
        small: creates attributes and small data sets.
        reserved: large data sets by name, in the order in which their bytes shall lie.
        virtual: data sets made of others.

    Returns:
        Byte offset of each reserved data set that is not empty, and the closed file's image.
    """
    image = SparseFile()
    # Headers are packed; aligned ones would take a page each.
    with _open(image, alignment=1, create=True) as file:
        small(file)
        for name, wanted in reserved.items():
            _declare(file, name, wanted)
        for name, made in (virtual or {}).items():
            _put_together(file, name, made)
    with _open(image, alignment=ALIGNMENT, create=False) as file:
        filled = [name for name, wanted in reserved.items() if math.prod(wanted.shape)]
        offsets = {name: _allocate(file[name]) for name in filled}
    return offsets, image


def _open(image: SparseFile, *, alignment: int, create: bool) -> h5py.File:
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_LATEST)
    access.set_alignment(1, alignment)
    access.set_sieve_buf_size(1)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, image)
    name = repr(image).encode()
    if create:
        return h5py.File(h5py.h5f.create(name, h5py.h5f.ACC_TRUNC, fapl=access))
    return h5py.File(h5py.h5f.open(name, h5py.h5f.ACC_RDWR, fapl=access))


def _space(shape: tuple[int, ...]) -> h5py.h5s.SpaceID:
    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


def _make(
    file: h5py.File, name: str, wanted: Reserved | Virtual, create: h5py.h5p.PropDCID
) -> None:
    create.set_obj_track_times(False)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    made = h5py.h5d.create(file.id, name.encode(), wanted.kind, _space(wanted.shape), create, links)
    attributes = h5py.Dataset(made).attrs
    for key, value in wanted.attributes.items():
        attributes[key] = value


def _declare(file: h5py.File, name: str, wanted: Reserved) -> None:
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_layout(h5py.h5d.CONTIGUOUS)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    _make(file, name, wanted, create)


def _put_together(file: h5py.File, name: str, wanted: Virtual) -> None:
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if wanted.missing is not None:
        create.set_fill_value(np.array(wanted.missing, np.float32))
    whole = _space(wanted.shape)
    for source, dataset, offsets, shape in wanted.parts:
        if shape:
            whole.select_hyperslab(offsets, shape)
        create.set_virtual(whole, source.encode(), dataset.encode(), _space(shape))
    _make(file, name, wanted, create)


def _allocate(dataset: h5py.Dataset) -> int:
    """Allocate all of a data set's bytes, by writing one zero; the byte offset of the first."""
    space = dataset.id.get_space()
    if space.get_simple_extent_ndims():
        space.select_hyperslab((0,) * dataset.ndim, (1,) * dataset.ndim)
    kind = dataset.id.get_type()
    zero = np.zeros(1, f"V{kind.get_size()}")
    dataset.id.write(h5py.h5s.create_simple((1,)), space, zero, kind)
    return int(dataset.id.get_offset())


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


def open_hdf5(path: Path) -> h5py.File:
    """Open a finished file for reading; nobody changes it any more, so no lock is needed.

    The default comes first all the same: within a process HDF5 refuses to open a file twice
    with different locking, and a user may have it open.
    """
    try:
        return h5py.File(path, "r")
    except OSError:
        return h5py.File(path, "r", locking=False)
