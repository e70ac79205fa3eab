"""A lost share worked out again from its set's parity, see :mod:`hpctrain.io.parity`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from hpctrain.io.comm import Communicator
from hpctrain.io.extents import read_bytes, write_bytes
from hpctrain.io.parity import ParityNote, chunk_of, parity_name
from hpctrain.io.parts import Part, part_name
from hpctrain.io.tiers import private_folder

_BLOCK = 4 << 20
Pieces = Sequence[tuple[str, int, int]]
"""(file, start, bytes) of the ranges that hold a share."""


@dataclass(frozen=True, slots=True)
class NoteAt:
    """A parity note, and where it and the parity lie: on which node, in which folder."""

    note: ParityNote
    node: int
    folder: str


@dataclass(frozen=True, slots=True)
class ShareAt:
    """A share that is whole: on which node, in which folder, and its ranges."""

    node: int
    folder: str
    pieces: tuple[tuple[str, int, int], ...]


def notes_for(rank: int, notes: Sequence[NoteAt]) -> dict[int, NoteAt] | None:
    """The notes of everybody else in a rank's line, by rank; None where one is missing."""
    about = [at for at in notes if rank in at.note.members and at.note.rank != rank]
    if not about:
        return None
    members = about[0].note.members
    found = {at.note.rank: at for at in about if at.note.members == members}
    return found if len(found) == len(members) - 1 else None


def rebuild(
    comm: Communicator,
    rank: int,
    notes: Mapping[int, NoteAt],
    shares: Mapping[int, ShareAt],
    leader: Callable[[int], int],
    root: Path,
) -> tuple[int, str] | None:
    """Work out the share of ``rank``; collective.

    Args:
        comm: all ranks.
        rank: whose share is lost.
        notes: of all others of its line, by rank.
        shares: of all others of its line, by rank.
        leader: of a node, the rank that reads and writes there.
        root: the parity level's directory on this rank's node.

    Returns:
        Node and folder where it lies now; None where the files could not be read or written, or
        a parity did not match its checksum.
    """
    first = next(iter(notes.values()))
    target = first.node
    folder = root / f"rebuilt-{first.note.sequence}"
    lost = Part.from_bytes(first.note.parts[rank].encode())
    work = _Work(comm, leader, folder)
    whole = work.verify(notes)
    if whole:
        members, chunk = first.note.members, first.note.chunk
        size = sum(count for _, _, count in lost.pieces)
        place = members.index(rank)
        for holder, at in notes.items():
            start = chunk * chunk_of(place, members.index(holder), len(members))
            parity: Pieces = ((parity_name(holder), 0, chunk),)
            inputs: list[tuple[int, str, Pieces, int]] = [(at.node, at.folder, parity, 0)]
            for other, share in shares.items():
                if other != holder:
                    number = chunk_of(members.index(other), members.index(holder), len(members))
                    inputs.append((share.node, share.folder, share.pieces, number * chunk))
            work.combine(inputs, min(chunk, max(0, size - start)), target, lost.pieces, start)
    if comm.rank == leader(target) and work.fault is None and whole:
        (folder / part_name(rank)).write_bytes(lost.to_bytes())
    faults = [fault for fault in comm.allgather(work.fault) if fault is not None]
    if faults or not whole:
        return None
    return target, comm.bcast(str(folder), root=leader(target))


class _Work:
    """Reads, sends and writes; what goes wrong on this rank is noted, and the others go on."""

    def __init__(self, comm: Communicator, leader: Callable[[int], int], folder: Path) -> None:
        self.comm = comm
        self.leader = leader
        self.folder = folder
        self.fault: str | None = None

    def verify(self, notes: Mapping[int, NoteAt]) -> bool:
        """Whether every parity matches its checksum."""
        good = True
        for at in notes.values():
            if self.comm.rank == self.leader(at.node):
                state = xxhash.xxh3_64()
                pieces = ((parity_name(at.note.rank), 0, at.note.chunk),)
                for first in range(0, at.note.chunk, _BLOCK):
                    size = min(_BLOCK, at.note.chunk - first)
                    state.update(self._read(at.folder, pieces, first, size))
                good = good and self.fault is None and state.hexdigest() == at.note.xxh3
        return all(self.comm.allgather(good))

    def combine(
        self,
        inputs: Sequence[tuple[int, str, Pieces, int]],
        count: int,
        target: int,
        pieces: Pieces,
        start: int,
    ) -> None:
        """Write the exclusive or of ranges of several shares to the target.

        Args:
            inputs: node, folder, pieces and first byte of each.
            count: bytes.
            target: node.
            pieces: of what is written there.
            start: first byte in it.
        """
        receiver = self.leader(target)
        for first in range(0, count, _BLOCK):
            size = min(_BLOCK, count - first)
            total = np.zeros(size, np.uint8)
            for node, folder, where, offset in inputs:
                sender = self.leader(node)
                data = None
                if self.comm.rank == sender:
                    data = self._read(folder, where, offset + first, size)
                    if sender != receiver:
                        self.comm.send(data, receiver)
                if self.comm.rank == receiver:
                    if sender != receiver:
                        data = self.comm.recv(source=sender)
                    assert data is not None
                    total ^= np.frombuffer(data, np.uint8)
            if self.comm.rank == receiver:
                self._write(pieces, start + first, total.data)

    def _read(self, folder: str, pieces: Pieces, first: int, count: int) -> bytes:
        """Bytes of a share; zeros behind its end, and where it cannot be read."""
        found = bytearray()
        try:
            for name, at, size in _ranges(pieces, first, count):
                descriptor = os.open(Path(folder) / name, os.O_RDONLY)
                try:
                    found += read_bytes(descriptor, at, size)
                finally:
                    os.close(descriptor)
        except (OSError, EOFError) as error:
            self.fault = f"{folder}: {error}"
        return bytes(found).ljust(count, b"\0")

    def _write(self, pieces: Pieces, first: int, data: memoryview) -> None:
        done = 0
        try:
            private_folder(self.folder)
            for name, at, size in _ranges(pieces, first, len(data)):
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
                descriptor = os.open(self.folder / name, flags, 0o600)
                try:
                    write_bytes(descriptor, data[done : done + size], at)
                finally:
                    os.close(descriptor)
                done += size
        except OSError as error:
            self.fault = f"{self.folder}: {error}"


def _ranges(pieces: Pieces, first: int, count: int) -> list[tuple[str, int, int]]:
    """Where a range of a share lies: file, offset in it, bytes."""
    found, at = [], 0
    for name, start, size in pieces:
        low, high = max(first, at), min(first + count, at + size)
        if low < high:
            found.append((name, start + low - at, high - low))
        at += size
    return found
