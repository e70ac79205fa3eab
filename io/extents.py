"""Extents: boxes of at most 16 MiB, at a place in a file, under one checksum each.

An extent is a strided block: element (i, j, …) lies at ``start + i * strides[0] + j *
strides[1] + …``. That one description holds for whole tensors, rows, columns of a larger
tensor, and chunks, so that reading needs the manifest and ``pread`` alone.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpctrain.io.shards import Box, Shape

EXTENT_BYTES = 16 << 20
"""Largest extent: what a reader of a few rows has to read to verify them."""

_BAND_BYTES = 16 << 20
_BAND_WASTE = 8
"""Rows with gaps are read in one piece where at most 7 of 8 bytes are thrown away."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A box of a tensor in a file.

    Attributes:
        box: which elements.
        file: index into the manifest's files.
        start: byte offset of the first element in the file.
        strides: bytes between neighbours, one a dimension.
        xxh3: XXH3-64 of the elements' bytes in row-major order, 16 hexadecimal digits.
    """

    box: Box
    file: int
    start: int
    strides: Shape
    xxh3: str


def dense_strides(shape: Shape, itemsize: int) -> Shape:
    """Strides in bytes of a row-major array with no gaps."""
    strides = []
    step = itemsize
    for count in reversed(shape):
        strides.append(step)
        step *= count
    return tuple(reversed(strides))


def distance(offsets: Shape, strides: Shape) -> int:
    """Bytes from the first element to the one at ``offsets``."""
    return sum(index * stride for index, stride in zip(offsets, strides, strict=True))


def split(box: Box, itemsize: int, limit: int = EXTENT_BYTES) -> Iterator[Box]:
    """The box in pieces of at most ``limit`` bytes, cut along the outermost dimensions."""
    if not box.elements:
        return
    if box.elements * itemsize <= limit:
        yield box
        return
    axis = next(axis for axis, count in enumerate(box.shape) if count > 1)
    inner = math.prod(box.shape[axis + 1 :]) * itemsize
    rows = max(1, limit // inner)
    for first in range(0, box.shape[axis], rows):
        offsets, shape = list(box.offsets), list(box.shape)
        offsets[axis] += first
        shape[axis] = min(rows, box.shape[axis] - first)
        yield from split(Box(tuple(offsets), tuple(shape)), itemsize, limit)


def write_bytes(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at ``offset``.

    Raises:
        OSError: the write failed.
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view, offset = view[written:], offset + written


def read_into(descriptor: int, start: int, strides: Shape, out: np.ndarray) -> None:
    """Fill ``out`` (any strides) from a strided block: one read of the whole span where little
    of it is thrown away, halves of it otherwise.

    Raises:
        OSError: the read failed.
        EOFError: the file ends before the block does.
    """
    if out.size == 0:
        return
    span = distance(tuple(count - 1 for count in out.shape), strides) + out.itemsize
    dense = span == out.nbytes
    if dense and out.flags.c_contiguous:
        _pread(descriptor, out.reshape(-1).view(np.uint8).data, start)
        return
    if span <= _BAND_BYTES and (dense or span <= _BAND_WASTE * out.nbytes):
        band = np.empty(span, np.uint8)
        _pread(descriptor, band.data, start)
        out[...] = np.ndarray(out.shape, out.dtype, buffer=band, strides=strides)
        return
    axis = next(axis for axis, count in enumerate(out.shape) if count > 1)
    half = out.shape[axis] // 2
    lead = (slice(None),) * axis
    read_into(descriptor, start, strides, out[(*lead, slice(None, half))])
    second = start + half * strides[axis]
    read_into(descriptor, second, strides, out[(*lead, slice(half, None))])


def _pread(descriptor: int, into: memoryview, offset: int) -> None:
    while into:
        count = os.preadv(descriptor, [into], offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}")
        into, offset = into[count:], offset + count


def read_bytes(descriptor: int, start: int, count: int) -> bytearray:
    """``count`` bytes from ``start``.

    Raises:
        OSError: the read failed.
        EOFError: the file ends before.
    """
    data = bytearray(count)
    _pread(descriptor, memoryview(data), start)
    return data
