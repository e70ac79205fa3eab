"""Host buffers that hold the bytes of a checkpoint before they are written.

A buffer is the byte image of a rank's pieces: HDF5 headers, tensors at their offsets, zeros
between. It is made once for a layout and used again by every save. With a folder in
``/dev/shm`` the image is a file that outlives the process, at the same offsets and under the
same names as in the checkpoint; without one it is anonymous memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import numpy as np

from hpctrain.io.plan import RankPlan

COPY_BYTES = 8 << 20
"""Largest part of a shard that is copied in one go, which is what a wait can be late by."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Copy rows of a shard to their place in the buffer.

    Attributes:
        index: of the shard.
        rows: of its first dimension.
        out: where to, a view of the buffer.
    """

    index: int
    rows: slice | EllipsisType
    out: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What is copied in one go: neighbours in the buffer, of COPY_BYTES together or one item.

    Attributes:
        items: in the order of the buffer.
        piece, start: where the first one lies.
    """

    items: tuple[Item, ...]
    piece: int
    start: int


class Staging:
    """One buffer: an image of each of a rank's pieces.

    Args:
        plan: of the rank.
        folder: directory for the images; None for anonymous memory. It is made by the caller.
        keep: the folder holds images of this very plan, whose contents shall stay.

    Raises:
        OSError: the folder's file system has no room for them.
    """

    def __init__(self, plan: RankPlan, folder: Path | None = None, *, keep: bool = False) -> None:
        self.plan = plan
        self.folder = folder
        self._maps: list[mmap.mmap] = []
        self.images: list[np.ndarray] = []
        try:
            for piece in plan.pieces:
                path = None if folder is None else folder / piece.name
                self._maps.append(_map(path, piece.start, piece.bytes))
                image = np.frombuffer(self._maps[-1], np.uint8)
                self.images.append(image)
                if keep:
                    continue
                image.fill(0)  # every page is there before the first save
                for offset, data in piece.header:
                    image[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        except BaseException:
            self.close()
            raise
        self._views = [self._view(index) for index in range(len(plan.specs))]

    def _view(self, index: int) -> np.ndarray | None:
        where, spec = self.plan.places[index], self.plan.specs[index]
        if where is None:
            return None
        piece, start = where
        return np.ndarray(spec.shape, spec.dtype, self.images[piece].data, start)

    def view(self, index: int) -> np.ndarray:
        """The place of a shard, of its shape and dtype."""
        found = self._views[index]
        assert found is not None
        return found

    def batches(self, left_out: frozenset[int] = frozenset()) -> tuple[Batch, ...]:
        """Everything to be copied, in the order of the buffer.

        Args:
            left_out: shards that are copied otherwise.
        """
        return tuple(self._group(left_out))

    def _group(self, left_out: frozenset[int]) -> Iterator[Batch]:
        items = [
            i for n in range(len(self.plan.specs)) if n not in left_out for i in self._items(n)
        ]
        group: list[Item] = []
        first, filled = (0, 0), 0
        for place, item in sorted(items, key=lambda pair: pair[0]):
            if group and (filled + item.out.nbytes > COPY_BYTES or place[0] != first[0]):
                yield Batch(tuple(group), *first)
                group, filled = [], 0
            if not group:
                first = place
            group.append(item)
            filled += item.out.nbytes
        if group:
            yield Batch(tuple(group), *first)

    def _items(self, index: int) -> list[tuple[tuple[int, int], Item]]:
        out, where = self._views[index], self.plan.places[index]
        if out is None or where is None:
            return []
        piece, start = where
        if out.nbytes <= COPY_BYTES or out.ndim == 0 or out.shape[0] == 1:
            return [((piece, start), Item(index, ..., out))]
        row = out.nbytes // out.shape[0]
        step = max(1, COPY_BYTES // row)
        return [
            ((piece, start + a * row), Item(index, slice(a, a + step), out[a : a + step]))
            for a in range(0, out.shape[0], step)
        ]

    @property
    def scalars_room(self) -> int:
        """Bytes that the JSON scalars may have; 0 where another rank writes them."""
        return 0 if self.plan.scalars is None else self.plan.scalars[2] - 1

    def set_scalars(self, text: bytes) -> None:
        """Write the JSON scalars at their place, NUL-padded.

        Raises:
            ValueError: they do not fit.
        """
        assert self.plan.scalars is not None
        piece, start, room = self.plan.scalars
        if len(text) >= room:  # a NUL ends them
            raise ValueError(f"scalars of {len(text)} bytes; there is room for {room - 1}")
        place = self.images[piece][start : start + room]
        place[: len(text)] = np.frombuffer(text, np.uint8)
        place[len(text) :] = 0

    def close(self) -> None:
        """Free the memory; a folder's files stay."""
        self._views = []
        self.images = []
        for mapped in self._maps:
            # A view that somebody still holds keeps the mapping until it goes.
            with contextlib.suppress(BufferError):
                mapped.close()
        self._maps = []


def _map(path: Path | None, start: int, size: int) -> mmap.mmap:
    if path is None:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return mapped
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        # Reserved now: a page that cannot be had later would end the process with SIGBUS.
        os.posix_fallocate(descriptor, start, size)
        return mmap.mmap(descriptor, size, offset=start)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
