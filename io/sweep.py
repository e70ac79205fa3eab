"""What several ranks of a node want of a checkpoint, read once for all of them.

On another layout than it was saved on, most extents are wanted by many ranks, a part by each.
Read by each they would come from the file system as often as there are ranks, or once and then
by way of the page cache, which takes a processor longer than the disk. Here the ranks of a node
sweep through the files together: in rounds, in each of which every reader brings extents past
the page cache into memory that all of them see and checks them there, and then every rank takes
its parts. While they do, threads read for the rounds to come.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.io.comm import Communicator, summed

_SHARED = Path("/dev/shm")  # noqa: S108 - mkstemp makes a name of its own there
_DEPTH = 3
"""Rounds whose extents are in memory: one is taken from, two are being read."""
_READERS = 8
"""Ranks of a node that read: more make no disk faster, and each costs memory."""
_CHUNK_BYTES = 4 << 20
"""Read in one go, where an extent is not larger: enough for a disk, and little memory."""
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Extents, by number, that are read in one go, and where each lies in a slot."""

    numbers: tuple[int, ...]
    places: tuple[int, ...]


class SharedSlots:
    """Memory of a node in slots, seen by all of its ranks; collective.

    Args:
        mates: the ranks of the node.
        slots: how many.
        slot_bytes: of each.

    Attributes:
        memory: one row a slot; None on every rank where one has no room for it or cannot see it.
    """

    def __init__(self, mates: Communicator, slots: int, slot_bytes: int) -> None:
        size = slots * slot_bytes
        path: Path | None = None
        if mates.rank == 0:
            with contextlib.suppress(OSError):
                descriptor, name = tempfile.mkstemp(prefix="hpctrain-read-", dir=_SHARED)
                path = Path(name)
                with os.fdopen(descriptor, "r+b") as stream:
                    # Reserved: a page that cannot be had later would end the process by SIGBUS.
                    os.posix_fallocate(stream.fileno(), 0, size)
        path = mates.bcast(path)
        mapped: mmap.mmap | None = None
        if path is not None:
            with contextlib.suppress(OSError, ValueError), path.open("r+b") as stream:
                mapped = mmap.mmap(stream.fileno(), size)
        everywhere = all(mates.allgather(mapped is not None))
        if mates.rank == 0 and path is not None:
            path.unlink(missing_ok=True)
        self.memory: np.ndarray | None = None
        if mapped is not None and everywhere:
            self.memory = np.frombuffer(mapped, np.uint8).reshape(slots, slot_bytes)


def sweep(
    mates: Communicator,
    sizes: Sequence[int],
    read: Callable[[Sequence[int], Sequence[np.ndarray]], str | None],
    take: Callable[[int, np.ndarray], None],
    *,
    threads: int = 2,
) -> str | None:
    """Read extents once on a node and let each of its ranks take of them; collective.

    Args:
        mates: the ranks of the node.
        sizes: bytes of each extent, the same on every rank, in the order they are read in.
        read: fill arrays of bytes from extents given by their numbers; what was wrong with them,
            if anything. Called in threads, several at a time.
        take: what this rank wants of an extent, given its number and bytes; called on every rank
            for every extent.
        threads: of this rank that read.

    Returns:
        What ``read`` said of the first extents that were wrong, on the rank that read them;
        nothing was taken of them.

    Raises:
        MemoryError: on every rank: there is no memory that all of them see.
    """
    slot_bytes = max(_CHUNK_BYTES, *sizes)
    chunks = _chunks(sizes, slot_bytes)
    readers = min(mates.size, _READERS, max(1, len(chunks)))
    rounds = -(-len(chunks) // readers)
    memory = SharedSlots(mates, min(_DEPTH, rounds) * readers, slot_bytes).memory
    if memory is None:
        raise MemoryError(f"{_SHARED} has no room that all ranks of the node see")

    def extents(number: int) -> list[np.ndarray]:
        """Of a chunk, in its slot."""
        slot = memory[number % len(memory)]
        chunk = chunks[number]
        ends = zip(chunk.numbers, chunk.places, strict=True)
        return [slot[at : at + sizes[index]] for index, at in ends]

    fault: str | None = None
    with ThreadPoolExecutor(threads) as pool:

        def begin(turn: int) -> Future[str | None] | None:
            number = turn * readers + mates.rank
            if mates.rank >= readers or turn >= rounds or number >= len(chunks):
                return None
            return pool.submit(read, chunks[number].numbers, extents(number))

        under_way = [begin(turn) for turn in range(_DEPTH - 1)]
        for turn in range(rounds):
            mine = under_way.pop(0)
            found = None if mine is None else mine.result()
            fault = fault or found
            # All have read for this round, and have taken what they want of the one before.
            bad = np.zeros(readers, np.int64)
            if found is not None:
                bad[mates.rank] = 1
            bad = summed(mates, bad)
            under_way.append(begin(turn + _DEPTH - 1))
            for reader in range(min(readers, len(chunks) - turn * readers)):
                number = turn * readers + reader
                if bad[reader]:
                    continue
                for index, block in zip(chunks[number].numbers, extents(number), strict=True):
                    take(index, block)
    return fault


def _chunks(sizes: Sequence[int], slot_bytes: int) -> list[_Chunk]:
    """Extents in the order given, as many together as a slot holds."""
    chunks = []
    numbers: list[int] = []
    places: list[int] = []
    end = 0
    for number, size in enumerate(sizes):
        start = -(-end // _ALIGN) * _ALIGN
        if numbers and start + size > slot_bytes:
            chunks.append(_Chunk(tuple(numbers), tuple(places)))
            numbers, places, start = [], [], 0
        numbers.append(number)
        places.append(start)
        end = start + size
    if numbers:
        chunks.append(_Chunk(tuple(numbers), tuple(places)))
    return chunks
