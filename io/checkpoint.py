"""A directory of committed checkpoints: save, find the newest good one, verify, read any box.

::

    checkpoints/
      step00000100/            a checkpoint: whole, or not there
        manifest.json          what it holds, where, and every checksum
        manifest.json.xxh3     checksum of the manifest
        tensors.h5             plain HDF5 of global logical tensors
      latest                   name of the newest one, for people and other programs
      step00000200.tmp-…       being written, or left behind by a writer that died

Saving writes aside, fsyncs, renames (that is the commit), and then moves the pointer. The
methods marked collective are called by every rank of the communicator; where one rank fails
in one, every rank gets the same CheckpointError and none is left waiting.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import CheckpointError
from hpctrain.io import directory
from hpctrain.io.buffers import SaveOptions
from hpctrain.io.comm import Communicator, on_root
from hpctrain.io.directory import step_name
from hpctrain.io.flush import WriteOptions
from hpctrain.io.manifest import Manifest, file_problem, read_manifest
from hpctrain.io.plan import FileKind
from hpctrain.io.restore import CheckpointReader, extent_problems, read_scalars
from hpctrain.io.saver import Saver
from hpctrain.io.shards import TensorShard
from hpctrain.io.sources import HostSources
from hpctrain.io.together import TogetherReader

__all__ = ["CheckpointReader", "CheckpointStore", "SaveReport"]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A committed checkpoint: its directory, bytes on disk, seconds it took.

    ``warnings`` says, on rank 0, which older checkpoints could not be removed and why, and what
    was removed of writers elsewhere that died.
    """

    path: Path
    bytes: int
    seconds: float
    warnings: tuple[str, ...] = ()


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: directory of the checkpoints; made by the first save.
        comm: communicator of all ranks that train, for example mpi4py's.
        keep: newest checkpoints kept by :meth:`save`, at least 1.
        files: how many files a save writes: one, one a node, or one a rank.
        node: number of this rank's node, for one file a node and for reading together.
        write: how files are written.
    """

    def __init__(
        self,
        root: Path,
        comm: Communicator,
        keep: int = 2,
        *,
        files: FileKind = "one",
        node: int = 0,
        write: WriteOptions | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint has to be kept")
        self.root = Path(root)
        self.comm = comm
        self.keep = keep
        self.files: FileKind = files
        self.node = node
        self.write = write or WriteOptions()
        self._mates: Communicator | None = None

    def save(
        self,
        step: int,
        shards: Sequence[TensorShard],
        *,
        scalars: Mapping[str, Any],
        per_rank: Mapping[str, np.ndarray],
    ) -> SaveReport:
        """Write and commit a checkpoint; collective. On return it is durable.

        A checkpoint of the same step is replaced, and older ones beyond ``keep`` are removed,
        after the new one is committed.

        Args:
            step: optimizer steps done.
            shards: what this rank writes. Over all ranks each tensor is given exactly once:
                of replicas, one rank hands one in.
            scalars: JSON values, the same on every rank (rank 0's are stored): step, tokens,
                schedule, data cursor, layout, job.
            per_rank: arrays that differ between ranks, such as states of random number
                generators; the same names, dtypes and shapes on every rank.

        Raises:
            CheckpointError: on every rank, naming path and cause (no space, quota, I/O error,
                read-only, gaps or overlaps between shards). What was written is removed and
                the checkpoints before it are kept.
            ValueError: scalars are not JSON, or per_rank differs in its form between ranks.
        """
        begin = time.perf_counter()
        arrays = {name: np.asarray(array) for name, array in per_rank.items()}
        options = SaveOptions(self.files, buffers=1, write=self.write)
        saver = Saver(self.root, self.comm, keep=self.keep, options=options, node=self.node)
        try:
            saver.save(step, HostSources(shards), scalars=scalars, per_rank=lambda: arrays)
            (outcome,) = saver.drain()
        finally:
            saver.close()
        if outcome.error is not None:
            raise outcome.error
        assert outcome.path is not None
        seconds = time.perf_counter() - begin
        return SaveReport(outcome.path, outcome.bytes, seconds, outcome.warnings)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint directory, ascending; not collective."""
        return sorted(directory.committed(self.root))

    def clean(self) -> list[str]:
        """Remove what dead writers left behind; collective. Returns a line about each.

        To be called before training starts. A writer that is alive keeps its directory: on
        this host that is a process that is there, on others one that has written something
        within ``directory.LEASE_SECONDS``.
        """
        return on_root(self.comm, lambda: directory.clean(self.root))

    def latest_good(self, verify: bool = True) -> tuple[int | None, list[tuple[int, str]]]:
        """The most recently committed checkpoint that is whole; collective, agreed by all.

        Args:
            verify: check every byte, shared among the ranks; otherwise the manifest, the
                sizes and the HDF5 structure.

        Returns:
            Its step (None where there is none), and those that were passed over: step and
            reason.
        """
        skipped: list[tuple[int, str]] = []
        for step in on_root(self.comm, lambda: directory.by_commit(self.root)):
            problems = self.verify(step, deep=verify)
            if not problems:
                return step, skipped
            more = f" (and {len(problems) - 1} more faults)" if len(problems) > 1 else ""
            skipped.append((step, problems[0] + more))
        return None, skipped

    def verify(self, step: int, deep: bool = True) -> list[str]:
        """Faults of a checkpoint, empty where it is whole; collective, the same on all ranks.

        Args:
            step: which.
            deep: read every extent, shared among the ranks; otherwise only the manifest,
                presence and size of the files, and the HDF5 structure.
        """
        folder = self.root / step_name(step)

        def structure() -> tuple[Manifest | None, list[str]]:
            try:
                manifest = read_manifest(folder)
            except CheckpointError as error:
                return None, [error.message]
            faults = (file_problem(folder, manifest, i) for i in range(len(manifest.files)))
            return manifest, [fault for fault in faults if fault is not None]

        manifest, problems = on_root(self.comm, structure)
        if manifest is None or problems or not deep:
            return problems
        rank, size = self.comm.rank, self.comm.size
        return [
            fault
            for faults in self.comm.allgather(extent_problems(folder, manifest, rank, size))
            for fault in faults
        ]

    def open(self, step: int, *, verify: bool = True, together: bool = False) -> CheckpointReader:
        """Open a checkpoint for reading; collective.

        Args:
            step: which.
            verify: check each extent when it is first read. False saves reading whole extents
                for a few rows, where :meth:`latest_good` or :meth:`verify` has just read all.
            together: all ranks are about to call ``read_all``, which is collective the first
                time: what several ranks of a node want is read once for all of them, and every
                extent is checked by some rank, which has to tell the others what it found.

        Raises:
            CheckpointError: there is none, or its manifest or HDF5 structure is damaged.
        """
        folder = self.root / step_name(step)

        def load() -> tuple[Manifest, dict[str, Any]]:
            if not folder.is_dir():
                steps = ", ".join(map(str, self.steps())) or "none"
                raise CheckpointError(f"{folder}: there is no checkpoint of step {step}",
                                      hint=f"steps that there are: {steps}")  # fmt: skip
            manifest = read_manifest(folder)
            for index in range(len(manifest.files)):
                fault = file_problem(folder, manifest, index)
                if fault is not None:
                    raise CheckpointError(fault)
            return manifest, read_scalars(folder, manifest)

        # HDF5 is opened by one rank, not by all.
        manifest, scalars = on_root(self.comm, load)
        if not together:
            return CheckpointReader(folder, manifest, verify=verify, scalars=scalars)
        if self._mates is None:
            self._mates = self.comm.Split(self.node, self.comm.rank)
        return TogetherReader(folder, manifest, self.comm, self._mates, scalars=scalars)
