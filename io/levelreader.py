"""Reading shares from wherever they lie: on this node, fetched from another, or committed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import CheckpointError
from hpctrain.io.comm import Communicator
from hpctrain.io.directory import step_name
from hpctrain.io.extents import read_bytes, write_bytes
from hpctrain.io.manifest import Manifest
from hpctrain.io.restore import CheckpointReader, Place, Request
from hpctrain.io.tiers import private_folder

if TYPE_CHECKING:
    from hpctrain.io.recover import Choice, Recovery, Share

_CHUNK = 64 << 20


@dataclass(frozen=True, slots=True)
class Whole:
    """All shares put together: manifest, scalars, and (rank, file, start, bytes) of each piece."""

    manifest: Manifest
    scalars: dict[str, Any]
    pieces: tuple[tuple[int, str, int, int], ...]


class LevelReader(CheckpointReader):
    """Reads shares from wherever they lie on this node; made by :meth:`Recovery.open`."""

    def __init__(self, recovery: Recovery, choice: Choice, whole: Whole) -> None:
        self._recovery = recovery
        self._choice = choice
        self._pieces = whole.pieces
        self._fetched = recovery.levels[-1].root / "fetched"
        self._owner: dict[tuple[int, int], int] = {}
        near = {
            rank: share
            for rank, shares in enumerate(choice.shares)
            for share in reversed(shares)
            if share.node == recovery.node
        }
        places = [
            place
            for rank, share in near.items()
            for place in _places(whole, rank, Path(share.folder))
        ]
        folder = Path(next(iter(near.values())).folder) if near else recovery.levels[-1].root
        super().__init__(folder, whole.manifest, verify=False, places=places, scalars=whole.scalars)
        self._whole = whole

    def require(self, requests: Sequence[Request]) -> None:
        comm, node = self._recovery.comm, self._recovery.node
        wanted = comm.allgather((node, sorted(self._absent(requests))))
        by_node: dict[int, set[int]] = {}
        for where, ranks in wanted:
            by_node.setdefault(where, set()).update(ranks)
        fault: str | None = None
        for where in sorted(by_node):
            for rank in sorted(by_node[where]):
                if self._choice.stored:
                    store = self._recovery.store.root / step_name(self._choice.step)
                    self._add(where, rank, store)
                    continue
                fault = self._send_over(self._choice.shares[rank][0], where) or fault
                self._add(where, rank, self._fetched)
        faults = [text for text in comm.allgather(fault) if text is not None]
        if faults:
            raise CheckpointError(f"a share could not be sent to where it is needed: {faults[0]}")

    def _absent(self, requests: Sequence[Request]) -> set[int]:
        """Ranks whose shares are wanted here and are not on this node."""
        names = [entry.name for entry in self.manifest.files]
        found = set()
        for request in requests:
            for job in self._jobs(request):
                extent = job.extent
                if self._folder_of(extent) is None:
                    name = names[extent.file]
                    found.add(
                        next(
                            rank
                            for rank, file, start, size in self._pieces
                            if file == name and start <= extent.start < start + size
                        )
                    )
        return found

    def _add(self, node: int, rank: int, folder: Path) -> None:
        if node == self._recovery.node:
            self._places = [*(self._places or ()), *_places(self._whole, rank, folder)]

    def _send_over(self, share: Share, node: int) -> str | None:
        """From the node that has it to the one that wants it; what went wrong here."""
        comm = self._recovery.comm
        source, target = self._recovery.leader_of(share.node), self._recovery.leader_of(node)
        pieces = [piece[1:] for piece in self._pieces if piece[0] == share.rank]
        if comm.rank == source:
            return _send_pieces(comm, Path(share.folder), pieces, target)
        if comm.rank == target:
            return _take_pieces(comm, self._fetched, pieces, source)
        return None

    def close(self) -> None:
        """Close the files and remove what was fetched."""
        super().close()
        if self._recovery.comm.rank == self._recovery.leader_of(self._recovery.node):
            shutil.rmtree(self._fetched, ignore_errors=True)


def _places(whole: Whole, rank: int, folder: Path) -> list[Place]:
    names = [entry.name for entry in whole.manifest.files]
    return [
        Place(names.index(name), start, start + size, folder)
        for owner, name, start, size in whole.pieces
        if owner == rank
    ]


def _send_pieces(
    comm: Communicator, folder: Path, pieces: Sequence[tuple[str, int, int]], target: int
) -> str | None:
    fault = None
    for name, start, size in pieces:
        for first in range(0, size, _CHUNK):
            data: bytes | None = None
            if fault is None:
                try:
                    data = _read(folder / name, start + first, min(_CHUNK, size - first))
                except (OSError, EOFError) as error:
                    fault = f"{folder / name}: {error}"
            comm.send(data, target)
    return fault


def _read(path: Path, start: int, count: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return bytes(read_bytes(descriptor, start, count))
    finally:
        os.close(descriptor)


def _take_pieces(
    comm: Communicator, folder: Path, pieces: Sequence[tuple[str, int, int]], source: int
) -> str | None:
    fault = None
    with contextlib.suppress(CheckpointError):
        private_folder(folder.parent)
        private_folder(folder)
    for name, start, size in pieces:
        for first in range(0, size, _CHUNK):
            data: bytes | None = comm.recv(source=source)
            if data is None or fault is not None:
                continue
            try:
                descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
                try:
                    write_bytes(descriptor, data, start + first)
                finally:
                    os.close(descriptor)
            except OSError as error:
                fault = f"{folder / name}: {error.strerror}"
    return fault
