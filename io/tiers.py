"""Levels that are nearer than the parallel file system: memory and a node's own storage.

At each of them a rank's share lies on its own, as images of its pieces under the checkpoint's
file names and a part that vouches for them. There is nothing to commit: a share is there when
its part is, and whether the shares of all ranks are there is found out when they are needed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from hpctrain.errors import CheckpointError
from hpctrain.io.directory import replace_durably, step_name
from hpctrain.io.flush import WriteOptions, write_pieces
from hpctrain.io.parts import Part, is_part, part_name, read_part
from hpctrain.io.snapshot import Snapshot
from hpctrain.io.staging import Staging

MEMORY = "memory"
NODE = "node"
PARTNER = "partner"
PARITY = "parity"


class Tier(Protocol):
    """A level of storage, as the saver sees it."""

    @property
    def name(self) -> str: ...

    def newest_sequence(self) -> int:
        """Highest number of a save that it holds, 0 for none."""

    def write(self, snapshot: Snapshot, hurry: Callable[[], bool]) -> None:
        """Store this rank's share; in the writer thread.

        Raises:
            OSError, CheckpointError, Abandoned: it could not be stored.
        """

    def retain(self, snapshot: Snapshot) -> list[str]:
        """Remove older ones, now that every rank holds ``snapshot``; a line about each that
        could not be."""

    def close(self, *, forget: bool) -> None:
        """The saver ends.

        Args:
            forget: what it holds is not needed any more.
        """


def private_folder(path: Path) -> Path:
    """Make a directory that only this user can reach, and the one it is in; both may lie in a
    place that is shared, such as ``/dev/shm``.

    Raises:
        CheckpointError: one is there and somebody else's, or a link.
    """
    for folder in (path.parent, path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise CheckpointError(f"{folder}: is not a directory of this user")
    return path


def remove_folder(path: Path) -> None:
    """Undo :func:`private_folder`; the one above goes when it is empty."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def held_parts(folder: Path) -> Iterator[tuple[Path, Part]]:
    """Every part below a level's directory, with the directory that it lies in; damaged ones
    are left out."""
    if not folder.is_dir():
        return
    for inner in sorted(folder.iterdir()):
        if not inner.is_dir() or inner.is_symlink():
            continue
        for path in sorted(inner.iterdir()):
            if is_part(path.name):
                with contextlib.suppress(CheckpointError):
                    yield inner, read_part(path)


class MemoryTier:
    """The staging buffers themselves, as files in memory that outlive the process.

    Args:
        root: the run's directory in ``/dev/shm``.
        rank: of this process.
        leads: this rank cleans up for its node.
    """

    name = MEMORY

    def __init__(self, root: Path, rank: int, *, leads: bool) -> None:
        self.root = root
        self._rank = rank
        self._leads = leads

    def newest_sequence(self) -> int:
        return max((part.sequence for _, part in held_parts(self.root)), default=0)

    def folder(self, number: int) -> Path:
        """Directory of a buffer.

        Raises:
            CheckpointError, OSError: it cannot be made.
        """
        private_folder(self.root)
        return private_folder(self.root / f"slot{number}")

    def held(self, number: int, plan: str) -> int:
        """Number of the save that a buffer's files hold, if they are of the layout ``plan``; 0
        otherwise."""
        path = self.root / f"slot{number}" / part_name(self._rank)
        try:
            part = read_part(path)
        except CheckpointError:
            return 0
        return part.sequence if part.plan == plan else 0

    def clear(self) -> None:
        """Remove what other layouts left."""
        if self._leads:
            for slot in self.root.glob("slot*"):
                shutil.rmtree(slot, ignore_errors=True)

    def forget(self, staging: Staging) -> None:
        """The buffer is about to be overwritten."""
        assert staging.folder is not None
        (staging.folder / part_name(self._rank)).unlink(missing_ok=True)

    def write(self, snapshot: Snapshot, hurry: Callable[[], bool]) -> None:
        folder = snapshot.staging.folder
        assert folder is not None
        part = snapshot.wait_sealed()
        aside = folder / f".{part_name(self._rank)}"
        aside.write_bytes(part.to_bytes())
        aside.rename(folder / part_name(self._rank))

    def retain(self, snapshot: Snapshot) -> list[str]:
        return []

    def close(self, *, forget: bool) -> None:
        if forget:
            remove_folder(self.root)


class NodeTier:
    """A node's own storage (NVMe, a local scratch directory).

    Args:
        root: the run's directory there.
        rank: of this process.
        leads: this rank removes old ones for its node.
        keep: newest ones kept.
        options: how to write.
        name: of the level.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        *,
        leads: bool,
        keep: int,
        options: WriteOptions,
        name: str = NODE,
    ) -> None:
        self.root = root
        self.name = name
        self.keep = keep
        self._rank = rank
        self._leads = leads
        self._options = options

    def newest_sequence(self) -> int:
        return max((part.sequence for _, part in held_parts(self.root)), default=0)

    def write(self, snapshot: Snapshot, hurry: Callable[[], bool]) -> None:
        private_folder(self.root)
        folder = self.root / folder_name(snapshot.step, snapshot.sequence)
        try:
            write_pieces(
                folder,
                snapshot.staging.plan,
                snapshot.staging,
                self._options,
                ready=snapshot.wait_ready,
                wanted=snapshot.wanted,
                hurry=hurry,
            )
            part = snapshot.wait_sealed()
            replace_durably(folder / part_name(self._rank), part.to_bytes())
        except BaseException:
            # The room is needed for the next one; other ranks' shares in it are no use alone.
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def retain(self, snapshot: Snapshot) -> list[str]:
        return remove_old(self.root, self.keep) if self._leads else []

    def close(self, *, forget: bool) -> None:
        if forget and self._leads:
            remove_folder(self.root)


def folder_name(step: int, sequence: int) -> str:
    return f"{step_name(step)}.{sequence}"


def remove_old(root: Path, keep: int) -> list[str]:
    """Remove all but the ``keep`` newest of a level; a line about each that could not be."""
    pattern = re.compile(r"step\d{8,}\.(\d+)")
    found = [
        (int(match[1]), path)
        for path in root.iterdir()
        if (match := pattern.fullmatch(path.name)) is not None
    ]
    warnings = []
    for _, path in sorted(found, reverse=True)[keep:]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            warnings.append(f"{path} could not be removed: {error}")
    return warnings
