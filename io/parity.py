"""A set of nodes that can lose one of them: each keeps its own share and parity of the others'.

The exclusive or of SCR's XOR scheme (Moody et al., SC 2010, section IV.B), which is RAID 5's laid
over nodes. In a set of m nodes the ranks of the same place on each form a line. A share is cut
into m - 1 chunks; chunk k of member i goes to member (i + 1 + k) mod m, which keeps the exclusive
or of what the m - 1 others send it. So a node stores 1/(m - 1) of a share beside its own, where a
partner's copy takes a whole one, and of any one lost node everything can be worked out again.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hpctrain.errors import CheckpointError
from hpctrain.io.comm import Communicator, fault_text
from hpctrain.io.directory import replace_durably
from hpctrain.io.flush import Abandoned, OutputFile, Pace, WriteOptions, write_block
from hpctrain.io.links import LARGEST_MESSAGE, Links, fill, hear, receive, send
from hpctrain.io.parts import Part
from hpctrain.io.snapshot import Snapshot
from hpctrain.io.tiers import PARITY, NodeTier, folder_name

_BLOCK = 4 << 20
_PAGE = 4096
_PATIENCE = 60.0
_NOTE = "set-"


@dataclass(frozen=True, slots=True)
class ParityNote:
    """What a member of a line holds, as it stands in a file beside the parity.

    Attributes:
        rank: the member.
        members: ranks of the line, in the order of their nodes.
        step, sequence, plan: of the save.
        chunk: bytes of each chunk, and of the parity.
        xxh3: XXH3-64 of the parity.
        parts: the others' parts, by rank: what their bytes are.
    """

    rank: int
    members: tuple[int, ...]
    step: int
    sequence: int
    plan: str
    chunk: int
    xxh3: str
    parts: dict[int, str]

    def to_bytes(self) -> bytes:
        text = json.dumps(asdict(self)).encode()
        return xxhash.xxh3_64_hexdigest(text).encode() + b"\n" + text

    @classmethod
    def from_bytes(cls, data: bytes) -> ParityNote:
        """Raises ValueError where it is damaged."""
        seal, _, text = data.partition(b"\n")
        if seal != xxhash.xxh3_64_hexdigest(text).encode():
            raise ValueError("does not match its checksum")
        found: dict[str, Any] = json.loads(text)
        found["members"] = tuple(found["members"])
        found["parts"] = {int(rank): part for rank, part in found["parts"].items()}
        return cls(**found)


def parity_name(rank: int) -> str:
    return f"parity-{rank:05d}"


def held_notes(root: Path) -> Iterator[tuple[Path, ParityNote]]:
    """Every note below the level's directory, with the directory that it lies in; damaged ones
    are left out."""
    if not root.is_dir():
        return
    for path in sorted(root.glob(f"*/{_NOTE}*")):
        try:
            yield path.parent, ParityNote.from_bytes(path.read_bytes())
        except (OSError, ValueError, KeyError, TypeError):
            continue


def lines_of(nodes: Sequence[int], size: int) -> dict[int, tuple[int, ...]]:
    """The line of every rank.

    Args:
        nodes: number of each rank's node.
        size: nodes of a set; where they do not divide evenly, some sets have one more.

    Raises:
        CheckpointError: a rank would be alone in its line.
    """
    order = sorted(set(nodes))
    places: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        places.setdefault(node, []).append(rank)
    sets = max(1, len(order) // size)
    found: dict[int, tuple[int, ...]] = {}
    for number in range(sets):
        own = order[number * len(order) // sets : (number + 1) * len(order) // sets]
        for place in range(max(len(places[node]) for node in own)):
            line = tuple(places[node][place] for node in own if place < len(places[node]))
            if len(line) < 2:
                raise CheckpointError(
                    f"checkpoint.parity: rank {line[0]} has no counterpart on another node",
                    hint="parity over nodes needs two nodes or more with as many ranks on each",
                )
            found.update(dict.fromkeys(line, line))
    return found


def chunk_of(member: int, holder: int, count: int) -> int:
    """Which chunk of a member a holder gets, both by their place in a line of ``count``."""
    return (holder - member - 1) % count


class _Gathering:
    """Parity of one save that is being put together from what the others send."""

    def __init__(self, chunk: int, others: Sequence[int]) -> None:
        self.parity = np.frombuffer(mmap.mmap(-1, chunk), np.uint8)
        self.parts: dict[int, str] = {}
        self.fault: str | None = None
        self.complete = threading.Event()
        self.stored = threading.Event()
        self._missing = set(others)
        self._lock = threading.Lock()

    def add(self, first: int, block: np.ndarray) -> None:
        with self._lock:
            place = self.parity[first : first + block.size]
            np.bitwise_xor(place, block, out=place)

    def arrived(self, rank: int, part: str) -> None:
        with self._lock:
            self.parts[rank] = part
            self._missing.discard(rank)
            if not self._missing:
                self.complete.set()


class ParityTier(NodeTier):
    """A node's own share and its parity of the others of its set. Made by all ranks at once.

    Args:
        root: the run's directory for it, on this node.
        comm: all ranks; used here and never again.
        node: number of this rank's node.
        size: nodes of a set.
        leads: this rank removes old ones for its node.
        keep: newest ones kept.
        options: how to write.

    Raises:
        CheckpointError: there is only one node, or one has more ranks than the others.
    """

    def __init__(
        self,
        root: Path,
        comm: Communicator,
        node: int,
        *,
        size: int,
        leads: bool,
        keep: int,
        options: WriteOptions,
    ) -> None:
        super().__init__(root, comm.rank, leads=leads, keep=keep, options=options, name=PARITY)
        self._links = Links(comm, node, self._take)
        nodes = [peer.node for peer in self._links.peers]
        try:
            self._line = lines_of(nodes, size)[comm.rank]
        except CheckpointError:
            self._links.close()
            raise
        self._place = self._line.index(comm.rank)
        self._others = [rank for rank in self._line if rank != comm.rank]
        self._gathering: dict[str, _Gathering] = {}
        self._over: deque[str] = deque(maxlen=16)
        self._guard = threading.Lock()

    def write(self, snapshot: Snapshot, hurry: Callable[[], bool]) -> None:
        """Store the share, send its chunks, and keep the parity of the others'.

        Raises:
            OSError, CheckpointError, Abandoned: it could not be stored or sent.
        """
        where = folder_name(snapshot.step, snapshot.sequence)
        chunk = chunk_bytes(snapshot.staging.plan.largest_share, len(self._line))
        gathering = self._gather(where, chunk)
        links: list[tuple[int, socket.socket]] = []
        try:
            super().write(snapshot, hurry)
            for rank in self._others:
                links.append((rank, self._links.connect(rank)))
                self._send_chunk(snapshot, links[-1], where, chunk, hurry)
            self._wait(gathering, snapshot)
            self._keep(gathering, snapshot, where, chunk)
            gathering.stored.set()
            for rank, link in links:
                fault = hear(link)
                if fault is not None:
                    raise CheckpointError(f"rank {rank}: {fault}")
        except BaseException as error:
            gathering.fault = f"rank {self._rank} has no parity: {fault_text(error)}"
            if isinstance(error, OSError) and error.filename is None:
                ranks = ", ".join(map(str, self._line))
                raise CheckpointError(f"set of ranks {ranks}: {fault_text(error)}") from error
            raise
        finally:
            gathering.stored.set()
            for _, link in links:
                link.close()
            with self._guard:
                self._gathering.pop(where, None)
                self._over.append(where)

    def _send_chunk(
        self,
        snapshot: Snapshot,
        to: tuple[int, socket.socket],
        where: str,
        chunk: int,
        hurry: Callable[[], bool],
    ) -> None:
        rank, link = to
        pace = Pace(self._options.bandwidth, hurry)
        first = chunk * chunk_of(self._place, self._line.index(rank), len(self._line))
        head = {"rank": self._rank, "folder": where, "chunk": chunk, "first": first}
        send(link, json.dumps(head).encode())
        send(link, snapshot.wait_sealed().to_bytes())
        images = snapshot.staging.images
        for _, block in blocks_of([image.data for image in images], first, chunk):
            if not snapshot.wanted():
                raise Abandoned
            link.sendall(block)
            pace.wrote(len(block))

    def _wait(self, gathering: _Gathering, snapshot: Snapshot) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not gathering.complete.wait(0.1):
            if not snapshot.wanted():
                raise Abandoned
            if time.monotonic() > deadline:
                raise CheckpointError(f"others of the set sent nothing for {_PATIENCE:.0f} s")

    def _keep(self, gathering: _Gathering, snapshot: Snapshot, where: str, chunk: int) -> None:
        folder = self.root / where
        path = folder / parity_name(self._rank)
        view = gathering.parity.data
        try:
            with OutputFile(path, self._options.direct) as descriptor:
                for first in range(0, chunk, _BLOCK):
                    part = view[first : first + _BLOCK]
                    write_block(descriptor, part, first, self._options.pwrite)
                os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        note = ParityNote(
            rank=self._rank,
            members=self._line,
            step=snapshot.step,
            sequence=snapshot.sequence,
            plan=snapshot.staging.plan.digest,
            chunk=chunk,
            xxh3=xxhash.xxh3_64_hexdigest(view),
            parts=gathering.parts,
        )
        replace_durably(folder / f"{_NOTE}{self._rank:05d}", note.to_bytes())

    def _gather(self, where: str, chunk: int) -> _Gathering:
        with self._guard:
            if where in self._over:
                raise CheckpointError(f"rank {self._rank} is done with {where}")
            if where not in self._gathering:
                self._gathering[where] = _Gathering(chunk, self._others)
            return self._gathering[where]

    def _take(self, link: socket.socket) -> None:
        head: dict[str, Any] = json.loads(receive(link, LARGEST_MESSAGE))
        chunk = int(head["chunk"])
        gathering = self._gather(str(head["folder"]), chunk)
        part = receive(link, LARGEST_MESSAGE).decode()
        buffer = np.empty(_BLOCK, np.uint8)
        # Zeros beyond the end of a share are not sent.
        sent = min(chunk, max(0, _size(part) - int(head["first"])))
        for first in range(0, sent, _BLOCK):
            block = buffer[: min(_BLOCK, sent - first)]
            fill(link, block.data)
            gathering.add(first, block)
        gathering.arrived(int(head["rank"]), part)
        if not gathering.stored.wait(2 * _PATIENCE):
            raise CheckpointError(f"rank {self._rank} did not store its parity")
        if gathering.fault is not None:
            raise CheckpointError(gathering.fault)

    def close(self, *, forget: bool) -> None:
        self._links.close()
        super().close(forget=forget)


def _size(part: str) -> int:
    """Bytes of a share."""
    return sum(size for _, _, size in Part.from_bytes(part.encode()).pieces)


def chunk_bytes(largest: int, members: int) -> int:
    """Bytes of a chunk of a line, in which no share is larger than ``largest``."""
    return math.ceil(largest / (members - 1) / _PAGE) * _PAGE


def blocks_of(
    images: Sequence[memoryview], first: int, count: int
) -> Iterator[tuple[int, memoryview]]:
    """The bytes of several buffers, as if they were one, from ``first`` on and at most ``count``,
    in blocks; with where each lies. There are fewer where the buffers end."""
    at = 0
    for image in images:
        low, high = max(first, at), min(first + count, at + len(image))
        while low < high:
            size = min(_BLOCK, high - low)
            yield low, image[low - at : low - at + size]
            low += size
        at += len(image)
