"""Which checkpoint to go on from, when shares of several lie at several levels.

Every rank's share is looked for at all levels of all nodes and in the committed checkpoints.
The newest save of which every share is somewhere, whole, is taken, and each share from the
nearest place that has it: memory, the node's storage, a partner's copy, the parallel file
system. Shares that a node's ranks need and nobody there has are sent over, once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.errors import CheckpointError
from hpctrain.io import directory
from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.comm import Communicator, on_root
from hpctrain.io.directory import step_name
from hpctrain.io.extents import read_bytes, write_bytes
from hpctrain.io.manifest import Manifest
from hpctrain.io.parity import held_notes
from hpctrain.io.parts import Part, merge, part_name, read_part
from hpctrain.io.rebuild import NoteAt, ShareAt, notes_for, rebuild
from hpctrain.io.restore import CheckpointReader, Place, Request, tensor_problems
from hpctrain.io.tiers import MEMORY, NODE, PARITY, PARTNER, held_parts, private_folder

_ORDER = {MEMORY: 0, NODE: 1, PARITY: 2, PARTNER: 3}
_WORDS = {
    MEMORY: "the nodes' memory",
    NODE: "the nodes' storage",
    PARITY: "the sets of nodes",
    PARTNER: "the partner nodes' copies",
}
_CHUNK = 64 << 20


@dataclass(frozen=True, slots=True)
class Level:
    """A level's directory on this rank's node."""

    name: str
    root: Path


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's share of a save, where it lies: on which node, at which level."""

    rank: int
    step: int
    sequence: int
    plan: str
    world_size: int
    node: int
    level: str
    folder: str
    pieces: tuple[tuple[str, int, int], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """What to restore from.

    Attributes:
        step: optimizer steps done.
        sequence: number of the save.
        source: levels it comes from, in words.
        stored: whether it is committed on the parallel file system.
        shares: of every writing rank, where it is not taken from there alone.
    """

    step: int
    sequence: float
    source: str
    stored: bool
    shares: tuple[tuple[_Share, ...], ...] = field(default=(), repr=False)


class Recovery:
    """Finds and opens the best checkpoint; every method is collective.

    Args:
        store: the committed checkpoints.
        levels: the near levels of this rank's node, as the job has them now.
        node: number of this rank's node.
    """

    def __init__(self, store: CheckpointStore, levels: Sequence[Level], node: int) -> None:
        self.store = store
        self.comm = store.comm
        self.levels = tuple(levels)
        self.node = node
        self.skipped: list[tuple[int, str]] = []
        self._nodes: list[int] = self.comm.allgather(node)
        self._notes: list[NoteAt] = []

    @property
    def _leader(self) -> int:
        return self._nodes.index(self.node)

    def find(self, wanted: int = -1) -> Choice | None:
        """The newest save that is whole, or that of step ``wanted``; None where there is none.

        What is passed over is left in ``skipped``, as step and reason.
        """
        self.skipped = []
        saves: dict[float, list[_Share]] = {}
        self._notes = self._survey_notes()
        for share in self._survey():
            if wanted in (-1, share.step):
                saves.setdefault(share.sequence, []).append(share)
        stored = [
            (number, step)
            for step, number in on_root(self.comm, lambda: directory.commits(self.store.root))
            if wanted in (-1, step)
        ]
        held = {number for number, _ in stored}
        candidates: list[tuple[float, int]] = [*stored, *((n, -1) for n in saves if n not in held)]
        for number, step in sorted(candidates, reverse=True):
            choice = self._try_shares(number, saves.get(number, []), stored=step >= 0)
            if choice is None and step >= 0:
                choice = self._try_stored(step, number)
            if choice is not None:
                return choice
        return None

    def _survey(self) -> list[_Share]:
        mine: list[_Share] = []
        if self.comm.rank == self._leader:
            for level in self.levels:
                mine += [
                    _Share(
                        part.rank,
                        part.step,
                        part.sequence,
                        part.plan,
                        part.world_size,
                        self.node,
                        level.name,
                        str(folder),
                        part.pieces,
                    )
                    for folder, part in held_parts(level.root)
                ]
        return [share for shares in self.comm.allgather(mine) for share in shares]

    def _survey_notes(self) -> list[NoteAt]:
        mine: list[NoteAt] = []
        if self.comm.rank == self._leader:
            for level in self.levels:
                mine += [NoteAt(note, self.node, str(at)) for at, note in held_notes(level.root)]
        return [note for notes in self.comm.allgather(mine) for note in notes]

    def _rebuilt(self, rank: int, like: _Share, left: dict[int, list[_Share]]) -> _Share | None:
        """A lost share of a save, worked out from the parity of its set where that is there."""
        own = next((level.root for level in self.levels if level.name == PARITY), None)
        of_save = [
            at
            for at in self._notes
            if (at.note.sequence, at.note.plan) == (like.sequence, like.plan)
        ]
        notes = notes_for(rank, of_save)
        if own is None or notes is None or not all(left.get(other) for other in notes):
            return None
        nearest = {other: min(left[other], key=self._distance) for other in notes}
        shares = {r: ShareAt(s.node, s.folder, s.pieces) for r, s in nearest.items()}
        made = rebuild(self.comm, rank, notes, shares, self.leader_of, own)
        if made is None:
            return None
        node, folder = made
        pieces = Part.from_bytes(next(iter(notes.values())).note.parts[rank].encode()).pieces
        return dataclasses.replace(
            like, rank=rank, node=node, level=PARITY, folder=folder, pieces=pieces
        )

    def _try_stored(self, step: int, number: float) -> Choice | None:
        problems = self.store.verify(step)
        if problems:
            more = f" (and {len(problems) - 1} more faults)" if len(problems) > 1 else ""
            self.skipped.append((step, problems[0] + more))
            return None
        return Choice(step, number, "the parallel file system", True)

    def _try_shares(self, number: float, found: list[_Share], *, stored: bool) -> Choice | None:
        if not found:
            return None
        first = found[0]
        holders: dict[int, list[_Share]] = {}
        for share in found:
            if (share.plan, share.world_size, share.step) == (
                first.plan,
                first.world_size,
                first.step,
            ):
                holders.setdefault(share.rank, []).append(share)
        bad: set[_Share] = set()
        tried: set[int] = set()
        while True:
            left = {
                rank: [share for share in shares if share not in bad]
                for rank, shares in holders.items()
            }
            missing = [r for r in range(first.world_size) if not left.get(r)]
            lost = next((r for r in missing if r not in tried), None)
            if lost is not None:
                # What it is worked out from is verified with the result.
                tried.add(lost)
                made = self._rebuilt(lost, first, left)
                if made is not None:
                    holders.setdefault(lost, []).append(made)
                    continue
            if missing:
                if not stored:
                    ranks = ", ".join(map(str, missing[:5]))
                    self.skipped.append(
                        (first.step, f"no whole share of rank {ranks} at any level near by")
                    )
                return None
            chosen = [min(left[r], key=self._distance) for r in range(first.world_size)]
            faults = self._verify(chosen)
            if not faults:
                break
            for share, fault in faults:
                bad.add(share)
                self.skipped.append((first.step, f"share of rank {share.rank}: {fault}"))
        names = sorted({share.level for share in chosen}, key=lambda name: _ORDER[name])
        shares = tuple(tuple(left[rank]) for rank in range(first.world_size))
        source = " and ".join(_WORDS[name] for name in names)
        return Choice(first.step, number, source, stored, shares)

    @staticmethod
    def _distance(share: _Share) -> tuple[int, int]:
        return _ORDER[share.level], share.node

    def _verify(self, chosen: list[_Share]) -> list[tuple[_Share, str]]:
        """Read and check shares, each by a rank of the node it lies on."""
        ranks_on: dict[int, list[int]] = {}
        for rank, node in enumerate(self._nodes):
            ranks_on.setdefault(node, []).append(rank)
        mine: list[tuple[_Share, str]] = []
        for number, share in enumerate(chosen):
            on = ranks_on[share.node]
            if on[number % len(on)] == self.comm.rank:
                fault = _share_fault(share)
                if fault is not None:
                    mine.append((share, fault))
        return [fault for faults in self.comm.allgather(mine) for fault in faults]

    def open(self, choice: Choice) -> CheckpointReader:
        """Open what :meth:`find` chose; its bytes have been verified.

        Raises:
            CheckpointError: it is gone meanwhile.
        """
        if not choice.shares:
            return self.store.open(choice.step, verify=False)
        mine = {
            share.rank: _text(share)
            for shares in choice.shares
            for share in shares[:1]
            if share.node == self.node and self.comm.rank == self._leader
        }
        gathered = self.comm.gather(mine)

        def put_together() -> _Whole:
            texts = {rank: text for some in gathered or () for rank, text in some.items()}
            parts = [Part.from_bytes(texts[rank]) for rank in range(len(choice.shares))]
            pieces = [(part.rank, *piece) for part in parts for piece in part.pieces]
            return _Whole(merge(parts), dict(parts[0].scalars), tuple(pieces))

        return LevelReader(self, choice, on_root(self.comm, put_together))

    def leader_of(self, node: int) -> int:
        """The lowest rank of a node."""
        return self._nodes.index(node)


@dataclass(frozen=True, slots=True)
class _Whole:
    """All shares put together: manifest, scalars, and (rank, file, start, bytes) of each piece."""

    manifest: Manifest
    scalars: dict[str, Any]
    pieces: tuple[tuple[int, str, int, int], ...]


class LevelReader(CheckpointReader):
    """Reads shares from wherever they lie on this node; made by :meth:`Recovery.open`."""

    def __init__(self, recovery: Recovery, choice: Choice, whole: _Whole) -> None:
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

    def _send_over(self, share: _Share, node: int) -> str | None:
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


def _places(whole: _Whole, rank: int, folder: Path) -> list[Place]:
    names = [entry.name for entry in whole.manifest.files]
    return [
        Place(names.index(name), start, start + size, folder)
        for owner, name, start, size in whole.pieces
        if owner == rank
    ]


def _text(share: _Share) -> bytes:
    return (Path(share.folder) / part_name(share.rank)).read_bytes()


def _share_fault(share: _Share) -> str | None:
    """What is wrong with a share's bytes; None where they are whole."""
    folder = Path(share.folder)
    try:
        part = read_part(folder / part_name(share.rank))
    except CheckpointError as error:
        return error.message
    if part.sequence != share.sequence:
        return f"{folder}: overwritten by a later one"
    return next(iter(tensor_problems(folder, part.names, part.tensors)), None)


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
