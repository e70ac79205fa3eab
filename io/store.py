"""The level that everything is for: committed checkpoints on the parallel file system."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hpctrain.errors import CheckpointError
from hpctrain.io import directory
from hpctrain.io.directory import fsync_path, step_name, write_durably
from hpctrain.io.flush import WriteOptions, allocated_bytes, write_pieces
from hpctrain.io.manifest import CHECKSUM, MANIFEST, seal
from hpctrain.io.parts import Part, merge, part_name, read_part
from hpctrain.io.plan import RankPlan
from hpctrain.io.quota import quota_left
from hpctrain.io.snapshot import Snapshot
from hpctrain.units import format_bytes

STORE = "store"


class StoreTier:
    """Writes aside; rank 0 commits when every rank has written.

    Args:
        root: directory of the checkpoints.
        rank: of this process.
        writer: name of rank 0's process, see ``directory.writer``.
        keep: newest checkpoints kept.
        options: how to write.
    """

    name = STORE

    def __init__(
        self, root: Path, rank: int, writer: str, keep: int, options: WriteOptions
    ) -> None:
        self.root = root
        self.keep = keep
        self._rank = rank
        self._writer = writer
        self._options = options

    def newest_sequence(self) -> int:
        return directory.last_sequence(self.root)

    def write(self, snapshot: Snapshot, hurry: Callable[[], bool]) -> None:
        """Write this rank's pieces and its part; in the writer thread.

        Raises:
            OSError, CheckpointError, Abandoned: see there.
        """
        plan = snapshot.staging.plan
        self.root.mkdir(parents=True, exist_ok=True)
        folder = self._aside(snapshot)
        if self._rank == 0 and self._options.check_space:
            self._check_space(plan, folder)
        write_pieces(
            folder,
            plan,
            snapshot.staging,
            self._options,
            ready=snapshot.wait_ready,
            wanted=snapshot.wanted,
            hurry=hurry,
        )
        part = snapshot.wait_sealed()
        if plan.world_size > 1:
            write_durably(folder / part_name(part.rank), part.to_bytes())

    def commit(self, snapshot: Snapshot) -> None:
        """Make it a checkpoint; on rank 0, after all ranks have written.

        Raises:
            OSError, CheckpointError: see there.
        """
        folder = self._aside(snapshot)
        manifest = merge(self._parts(snapshot, folder))
        data = manifest.to_json().encode()
        write_durably(folder / MANIFEST, data)
        write_durably(folder / CHECKSUM, seal(data).encode())
        if manifest.world_size > 1:
            for rank in range(manifest.world_size):
                (folder / part_name(rank)).unlink()
        fsync_path(folder)
        directory.commit(self.root, folder, snapshot.step)

    @staticmethod
    def _parts(snapshot: Snapshot, folder: Path) -> list[Part]:
        size = snapshot.staging.plan.world_size
        if size == 1:
            return [snapshot.wait_sealed()]
        return [read_part(folder / part_name(rank)) for rank in range(size)]

    def discard(self, snapshot: Snapshot) -> None:
        """Remove what was written of one that failed; on rank 0, after all ranks gave up."""
        shutil.rmtree(self._aside(snapshot), ignore_errors=True)

    def retain(self, snapshot: Snapshot) -> list[str]:
        """Remove all but the newest, on rank 0; a line about each that could not be. What a
        writer elsewhere left goes too, once it is sure that it is dead."""
        if self._rank != 0:
            return []
        warnings = directory.clean(self.root, elsewhere_only=True)
        for step in directory.by_commit(self.root)[self.keep :]:
            try:
                directory.remove(self.root, step)
            except OSError as error:
                warnings.append(f"step {step} could not be removed: {error}")
        return warnings

    def close(self, *, forget: bool) -> None:
        return

    def _aside(self, snapshot: Snapshot) -> Path:
        name = f"{step_name(snapshot.step)}.tmp-{self._writer}.{snapshot.sequence}"
        return self.root / name

    def _check_space(self, plan: RankPlan, folder: Path) -> None:
        found = os.statvfs(self.root)
        free = found.f_bavail * found.f_frsize
        # Other ranks may have begun: what they wrote is no longer free and not wanted again.
        wanted = plan.total_bytes - allocated_bytes(folder)
        left = quota_left(self.root)
        if left is not None and wanted > left.bytes:
            self._refuse(wanted, f"{format_bytes(left.bytes)} left of the {left.whose}'s quota")
        if wanted > free:
            self._refuse(wanted, f"{format_bytes(free)} free")

    def _refuse(self, wanted: int, there: str) -> NoReturn:
        raise CheckpointError(
            f"{self.root}: {format_bytes(wanted)} wanted, {there}",
            hint="free some space, lower checkpoint.keep, or set checkpoint.path",
        )
