"""Where each rank stands, in memory that the ranks of a node share, and now and then on disk.

A rank's mark is one store into a mapped page: no system call, no message, and readable by its
neighbours when the rank itself is stopped or dead. The first rank of each node copies its node's
marks into one file of the run directory, with one write, as often as the job says.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.rundir import RunDir

_SLOT = struct.Struct("<qqqd24s")  # rank, pid, step, time, phase: 56 bytes
_SIZE = 64
_SHARED = Path("/dev/shm")  # noqa: S108


@dataclass(frozen=True, slots=True)
class Beat:
    """Where a rank stood.

    Attributes:
        rank, pid: who.
        step: the step that it works on.
        time: when it came there, seconds since the epoch.
        phase: what it does, for example ``forward_backward``.
    """

    rank: int
    pid: int
    step: int
    time: float
    phase: str


def heartbeat_file(run: RunDir) -> Path:
    """All ranks' last copied marks, 64 bytes a rank."""
    return run.health / "heartbeats"


class Heartbeat:
    """The marks of this rank, and a look at those of its node.

    Args:
        run: run directory.
        attempt: number of the incarnation.
        rank: global.
        node: number of the node.
        mates: ranks of this node, in order, this one among them.
    """

    def __init__(
        self, run: RunDir, attempt: int, rank: int, node: int, mates: Sequence[int]
    ) -> None:
        self.run, self.rank, self.mates = run, rank, list(mates)
        key = hashlib.blake2b(os.fsencode(run.root), digest_size=8).hexdigest()
        folder = _SHARED if os.access(_SHARED, os.W_OK) else run.health
        self.path = folder / f"hpctrain-{os.getuid()}-{key}-{attempt}-node{node}"
        self._offset = self.mates.index(rank) * _SIZE
        if self.leads:  # incarnations that were killed have left theirs
            for old in folder.glob(f"hpctrain-{os.getuid()}-{key}-*-node{node}"):
                if old != self.path:
                    old.unlink(missing_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = _SIZE * len(self.mates)
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.step, self.phase, self.since = 0, "start", time.monotonic()
        self.mark("start")

    @property
    def leads(self) -> bool:
        """Whether this rank copies the marks of its node."""
        return self._offset == 0

    def mark(self, phase: str, step: int | None = None) -> None:
        """This rank is at ``phase`` of a step from now on."""
        if step is not None:
            self.step = step
        self.phase, self.since = phase, time.monotonic()
        _SLOT.pack_into(
            self._map, self._offset, self.rank, os.getpid(), self.step, time.time(),
            phase.encode()[:24],
        )  # fmt: skip

    def node_beats(self) -> list[Beat]:
        """The marks of all ranks of this node."""
        return parse(bytes(self._map))

    def publish(self) -> None:
        """Copy the node's marks into the run directory; ranks in a row with one write."""
        data = bytes(self._map)
        descriptor = os.open(heartbeat_file(self.run), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            for first, count in _rows(self.mates):
                at = self.mates.index(first) * _SIZE
                os.pwrite(descriptor, data[at : at + count * _SIZE], first * _SIZE)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Take the shared memory away; the last marks stay in the run directory."""
        with contextlib.suppress(OSError):
            if self.leads:
                self.publish()
            self.path.unlink(missing_ok=True)


def _rows(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of the stretches of consecutive ranks."""
    found: list[tuple[int, int]] = []
    for rank in ranks:
        if found and rank == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((rank, 1))
    return found


def parse(data: bytes) -> list[Beat]:
    """Beats of a file or map; slots that nobody has written are left out."""
    found = []
    for at in range(0, len(data) - _SLOT.size + 1, _SIZE):
        rank, pid, step, when, phase = _SLOT.unpack_from(data, at)
        if pid:
            found.append(
                Beat(rank, pid, step, when, phase.rstrip(b"\0").decode("ascii", "replace"))
            )
    return found


def read_heartbeats(run: RunDir) -> list[Beat]:
    """Where the ranks of a run stood last, by rank; empty where nothing was written."""
    try:
        return parse(heartbeat_file(run).read_bytes())
    except OSError:
        return []
