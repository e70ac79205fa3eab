"""Which checkpoint to go on from, when shares of several lie at several levels.

Every rank's share is looked for at all levels of all nodes and in the committed checkpoints.
The newest save of which every share is somewhere, whole, is taken, and each share from the
nearest place that has it: memory, the node's storage, a partner's copy, the parallel file
system. Shares that a node's ranks need and nobody there has are sent over, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.errors import CheckpointError
from hpctrain.io import directory
from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.comm import on_root
from hpctrain.io.levelreader import LevelReader, Whole
from hpctrain.io.parity import held_notes
from hpctrain.io.parts import Part, merge, part_name, read_part
from hpctrain.io.rebuild import NoteAt, ShareAt, notes_for, rebuild
from hpctrain.io.restore import CheckpointReader, tensor_problems
from hpctrain.io.tiers import MEMORY, NODE, PARITY, PARTNER, held_parts

_ORDER = {MEMORY: 0, NODE: 1, PARITY: 2, PARTNER: 3}
_WORDS = {
    MEMORY: "the nodes' memory",
    NODE: "the nodes' storage",
    PARITY: "the sets of nodes",
    PARTNER: "the partner nodes' copies",
}


@dataclass(frozen=True, slots=True)
class Level:
    """A level's directory on this rank's node."""

    name: str
    root: Path


@dataclass(frozen=True, slots=True)
class Share:
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
        verified: whether every byte has been read and is good. Otherwise that is found out when
            it is read, by all ranks together unless each reads what it wrote ``itself``.
        shares: of every writing rank, where it is not taken from there alone.
    """

    step: int
    sequence: float
    source: str
    stored: bool
    verified: bool = True
    itself: bool = False
    shares: tuple[tuple[Share, ...], ...] = field(default=(), repr=False)


class Recovery:
    """Finds and opens the best checkpoint; every method is collective.

    Args:
        store: the committed checkpoints.
        levels: the near levels of this rank's node, as the job has them now.
        node: number of this rank's node.
        layout: of the ranks, as the checkpoints' scalars have it; given by who calls
            :meth:`reject` where a checkpoint turns out to be damaged when it is read. Nothing is
            then read twice, once to verify it and once by who wants it.
    """

    def __init__(
        self,
        store: CheckpointStore,
        levels: Sequence[Level],
        node: int,
        layout: Mapping[str, int] | None = None,
    ) -> None:
        self.store = store
        self.comm = store.comm
        self.levels = tuple(levels)
        self.node = node
        self.skipped: list[tuple[int, str]] = []
        self._layout = layout
        self._rejected: dict[float, tuple[int, str]] = {}
        self._nodes: list[int] = self.comm.allgather(node)
        self._notes: list[NoteAt] = []

    @property
    def _leader(self) -> int:
        return self._nodes.index(self.node)

    def find(self, wanted: int = -1) -> Choice | None:
        """The newest save that is whole, or that of step ``wanted``; None where there is none.

        What is passed over is left in ``skipped``, as step and reason.
        """
        self.skipped = list(self._rejected.values())
        saves: dict[float, list[Share]] = {}
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
            if number in self._rejected:
                continue
            choice = self._try_shares(number, saves.get(number, []), stored=step >= 0)
            if choice is None and step >= 0:
                choice = self._try_stored(step, number)
            if choice is not None:
                return choice
        return None

    def _survey(self) -> list[Share]:
        mine: list[Share] = []
        if self.comm.rank == self._leader:
            for level in self.levels:
                mine += [
                    Share(
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

    def _rebuilt(self, rank: int, like: Share, left: dict[int, list[Share]]) -> Share | None:
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

    def reject(self, choice: Choice, reason: str) -> None:
        """A choice turned out to be damaged when it was read; :meth:`find` takes another."""
        self._rejected[choice.sequence] = (choice.step, reason)

    def _try_stored(self, step: int, number: float) -> Choice | None:
        later = self._layout is not None
        problems = self.store.verify(step, deep=not later)
        if problems:
            more = f" (and {len(problems) - 1} more faults)" if len(problems) > 1 else ""
            self.skipped.append((step, problems[0] + more))
            return None
        return Choice(
            step,
            number,
            "the parallel file system",
            True,
            verified=not later,
            itself=later and self._same_layout(step),
        )

    def _same_layout(self, step: int) -> bool:
        """Whether the ranks of a checkpoint stood as they do now."""
        with self.store.open(step) as reader:
            then = reader.scalars.get("layout")
            return reader.world_size == self.comm.size and then == self._layout

    def _try_shares(self, number: float, found: list[Share], *, stored: bool) -> Choice | None:
        if not found:
            return None
        first = found[0]
        holders: dict[int, list[Share]] = {}
        for share in found:
            if (share.plan, share.world_size, share.step) == (
                first.plan,
                first.world_size,
                first.step,
            ):
                holders.setdefault(share.rank, []).append(share)
        bad: set[Share] = set()
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
        return Choice(first.step, number, source, stored, shares=shares)

    @staticmethod
    def _distance(share: Share) -> tuple[int, int]:
        return _ORDER[share.level], share.node

    def _verify(self, chosen: list[Share]) -> list[tuple[Share, str]]:
        """Read and check shares, each by a rank of the node it lies on."""
        ranks_on: dict[int, list[int]] = {}
        for rank, node in enumerate(self._nodes):
            ranks_on.setdefault(node, []).append(rank)
        mine: list[tuple[Share, str]] = []
        for number, share in enumerate(chosen):
            on = ranks_on[share.node]
            if on[number % len(on)] == self.comm.rank:
                fault = _share_fault(share)
                if fault is not None:
                    mine.append((share, fault))
        return [fault for faults in self.comm.allgather(mine) for fault in faults]

    def open(self, choice: Choice) -> CheckpointReader:
        """Open what :meth:`find` chose. Where its bytes have not been verified they are when they
        are read.

        Raises:
            CheckpointError: it is gone meanwhile.
        """
        if not choice.shares:
            return self.store.open(
                choice.step,
                verify=choice.itself,
                together=not (choice.verified or choice.itself),
            )
        mine = {
            share.rank: _text(share)
            for shares in choice.shares
            for share in shares[:1]
            if share.node == self.node and self.comm.rank == self._leader
        }
        gathered = self.comm.gather(mine)

        def put_together() -> Whole:
            texts = {rank: text for some in gathered or () for rank, text in some.items()}
            parts = [Part.from_bytes(texts[rank]) for rank in range(len(choice.shares))]
            pieces = [(part.rank, *piece) for part in parts for piece in part.pieces]
            return Whole(merge(parts), dict(parts[0].scalars), tuple(pieces))

        return LevelReader(self, choice, on_root(self.comm, put_together))

    def leader_of(self, node: int) -> int:
        """The lowest rank of a node."""
        return self._nodes.index(node)


def _text(share: Share) -> bytes:
    return (Path(share.folder) / part_name(share.rank)).read_bytes()


def _share_fault(share: Share) -> str | None:
    """What is wrong with a share's bytes; None where they are whole."""
    folder = Path(share.folder)
    try:
        part = read_part(folder / part_name(share.rank))
    except CheckpointError as error:
        return error.message
    if part.sequence != share.sequence:
        return f"{folder}: overwritten by a later one"
    return next(iter(tensor_problems(folder, part.names, part.tensors)), None)
