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

import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import hpctrain
from hpctrain.errors import CheckpointError
from hpctrain.io import directory
from hpctrain.io.comm import Communicator, on_all, on_root
from hpctrain.io.directory import fsync_path, step_name
from hpctrain.io.dtypes import raw_dtype
from hpctrain.io.extents import Extent, dense_strides, digest, place, split, write_block
from hpctrain.io.manifest import (
    CHECKSUM,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    FileEntry,
    Manifest,
    Storage,
    TensorEntry,
    file_problem,
    read_manifest,
    seal,
    structure_digest,
)
from hpctrain.io.restore import CheckpointReader, extent_problems
from hpctrain.io.shards import Box, TensorShard, coverage
from hpctrain.io.skeleton import TensorMeta, create_skeleton, planned_bytes
from hpctrain.units import format_bytes

__all__ = ["CheckpointReader", "CheckpointStore", "SaveReport"]

TENSORS_FILE = "tensors.h5"


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A committed checkpoint: its directory, bytes on disk, seconds it took.

    ``warnings`` says, on rank 0, which older checkpoints could not be removed and why.
    """

    path: Path
    bytes: int
    seconds: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Contribution:
    """What one rank hands in, without the numbers."""

    boxes: tuple[tuple[str, TensorMeta, Box], ...]
    per_rank: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything goes, worked out by rank 0."""

    folder: Path
    offsets: Mapping[str, int]
    tensors: Mapping[str, TensorMeta] = field(repr=False)

    @property
    def file(self) -> Path:
        return self.folder / TENSORS_FILE


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: directory of the checkpoints; made by the first save.
        comm: communicator of all ranks that train, for example mpi4py's.
        keep: newest checkpoints kept by :meth:`save`, at least 1.
    """

    def __init__(self, root: Path, comm: Communicator, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint has to be kept")
        self.root = Path(root)
        self.comm = comm
        self.keep = keep

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
        shards = tuple(shards)
        plan: _Plan | None = None
        try:
            given = on_all(self.comm, lambda: _describe(shards, per_rank))
            plan = on_root(self.comm, lambda: self._begin(step, given, scalars))
            written = on_all(self.comm, lambda: _write_shards(plan, shards))
            size = on_root(self.comm, lambda: self._commit(step, plan, written, scalars))
        except BaseException as error:
            if self.comm.rank == 0 and plan is not None:
                shutil.rmtree(plan.folder, ignore_errors=True)
            if isinstance(error, CheckpointError):
                message = f"the checkpoint of step {step} was not written: {error.message}"
                hint = error.hint or "what was written of it is removed; the ones before are kept"
                raise CheckpointError(message, hint=hint) from error
            raise
        warnings = self._retain() if self.comm.rank == 0 else ()
        path = self.root / step_name(step)
        return SaveReport(path, size, time.perf_counter() - begin, warnings)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint directory, ascending; not collective."""
        return sorted(directory.committed(self.root))

    def clean(self) -> list[str]:
        """Remove what dead writers left behind; collective. Returns a line about each.

        To be called before training starts. A writer that is alive on this host keeps its
        directory; writers on other hosts are taken for dead, for a run has one incarnation.
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

    def open(self, step: int, *, verify: bool = True) -> CheckpointReader:
        """Open a checkpoint for reading; collective.

        Args:
            step: which.
            verify: check each extent when it is first read. False saves reading whole extents
                for a few rows, where :meth:`latest_good` or :meth:`verify` has just read all.

        Raises:
            CheckpointError: there is none, or its manifest or HDF5 structure is damaged.
        """
        folder = self.root / step_name(step)

        def load() -> Manifest:
            if not folder.is_dir():
                steps = ", ".join(map(str, self.steps())) or "none"
                raise CheckpointError(f"{folder}: there is no checkpoint of step {step}",
                                      hint=f"steps that there are: {steps}")  # fmt: skip
            manifest = read_manifest(folder)
            for index in range(len(manifest.files)):
                fault = file_problem(folder, manifest, index)
                if fault is not None:
                    raise CheckpointError(fault)
            return manifest

        return CheckpointReader(folder, on_root(self.comm, load), verify=verify)

    # Rank 0's part of a save.

    def _begin(
        self, step: int, given: Sequence[_Contribution] | None, scalars: Mapping[str, Any]
    ) -> _Plan:
        assert given is not None
        tensors = _merge(given)
        rank_state = _stack([contribution.per_rank for contribution in given])
        text = json.dumps(scalars, allow_nan=False)
        self.root.mkdir(parents=True, exist_ok=True)
        self._check_space(planned_bytes(tensors, text, rank_state))
        folder = directory.aside(self.root, step)
        folder.mkdir()
        try:
            attributes = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "step": step,
                "world_size": len(given),
            }
            offsets = create_skeleton(
                folder / TENSORS_FILE, tensors,
                attributes=attributes, scalars=text, rank_state=rank_state,
            )  # fmt: skip
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return _Plan(folder, offsets, tensors)

    def _check_space(self, wanted: int) -> None:
        found = os.statvfs(self.root)
        free = found.f_bavail * found.f_frsize
        if wanted > free:
            raise CheckpointError(
                f"{self.root}: {format_bytes(wanted)} wanted, {format_bytes(free)} free",
                hint="free some space, lower checkpoint.keep, or set checkpoint.path",
            )

    def _commit(
        self,
        step: int,
        plan: _Plan,
        written: Sequence[Mapping[str, list[Extent]]] | None,
        scalars: Mapping[str, Any],
    ) -> int:
        assert written is not None
        tensors = {}
        for name, meta in plan.tensors.items():
            extents = [extent for by_name in written for extent in by_name.get(name, ())]
            extents.sort(key=lambda extent: extent.start)
            storage = (Storage(0, plan.offsets[name], meta.bytes),) if meta.bytes else ()
            tensors[name] = TensorEntry(meta.shape, meta.torch_dtype, storage, tuple(extents))
        ranges = [item for entry in tensors.values() for item in entry.storage]
        descriptor = os.open(plan.file, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            structure = structure_digest(descriptor, size, ranges)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        tokens = scalars.get("tokens")
        manifest = Manifest(
            step=step,
            tokens=tokens if isinstance(tokens, int) else None,
            sequence=directory.last_sequence(self.root) + 1,
            world_size=self.comm.size,
            created=time.time(),
            writer={
                "hpctrain": hpctrain.__version__,
                "h5py": h5py.version.version,
                "hdf5": h5py.version.hdf5_version,
            },
            files=(FileEntry(TENSORS_FILE, size, structure),),
            tensors=tensors,
        )
        data = manifest.to_json().encode()
        directory.write_durably(plan.folder / MANIFEST, data)
        directory.write_durably(plan.folder / CHECKSUM, seal(data).encode())
        fsync_path(plan.folder)
        directory.commit(self.root, plan.folder, step)
        return size + len(data)

    def _retain(self) -> tuple[str, ...]:
        """Remove all but the newest; a failure is a warning, for nothing is lost by it."""
        warnings = []
        for step in directory.by_commit(self.root)[self.keep :]:
            try:
                directory.remove(self.root, step)
            except OSError as error:
                warnings.append(f"step {step} could not be removed: {error}")
        return tuple(warnings)


def _describe(shards: Sequence[TensorShard], per_rank: Mapping[str, np.ndarray]) -> _Contribution:
    boxes = tuple((s.name, TensorMeta(s.global_shape, s.torch_dtype), s.box) for s in shards)
    return _Contribution(boxes, {name: np.asarray(array) for name, array in per_rank.items()})


def _merge(given: Sequence[_Contribution]) -> dict[str, TensorMeta]:
    """All tensors, with every fault in how the ranks' shards fit together."""
    tensors: dict[str, TensorMeta] = {}
    boxes: dict[str, list[Box]] = {}
    faults = []
    for rank, contribution in enumerate(given):
        for name, meta, box in contribution.boxes:
            known = tensors.setdefault(name, meta)
            if meta != known:
                faults.append(f"{name}: rank {rank} gives {meta}, another rank {known}")
            boxes.setdefault(name, []).append(box)
    for name, meta in tensors.items():
        fault = coverage(meta.shape, boxes[name])
        if fault is not None:
            faults.append(f"{name} {list(meta.shape)}: {fault}")
    if faults:
        more = f"\n  … and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise CheckpointError("the ranks' shards do not fit:\n  " + "\n  ".join(faults[:10]) + more)
    return tensors


def _stack(per_rank: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    def forms(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[Any, ...]]:
        return {name: (array.dtype.str, array.shape) for name, array in arrays.items()}

    first = forms(per_rank[0])
    for rank, arrays in enumerate(per_rank):
        if forms(arrays) != first:
            raise ValueError(
                f"per_rank differs in form: rank 0 has {first}, rank {rank} {forms(arrays)}"
            )
    return {name: np.stack([arrays[name] for arrays in per_rank]) for name in per_rank[0]}


def _write_shards(plan: _Plan, shards: Sequence[TensorShard]) -> dict[str, list[Extent]]:
    """Write this rank's shards at their places and make them durable."""
    extents: dict[str, list[Extent]] = {}
    try:
        descriptor = os.open(plan.file, os.O_WRONLY)
        try:
            for shard in shards:
                found = extents.setdefault(shard.name, [])
                itemsize = raw_dtype(shard.torch_dtype).itemsize
                strides = dense_strides(shard.global_shape, itemsize)
                for box in split(shard.box, itemsize):
                    part = np.ascontiguousarray(shard.array[box.within(shard.box)])
                    start = plan.offsets[shard.name] + place(box.offsets, strides)
                    # Where an extent's rows follow each other without a gap it is dense.
                    dense = dense_strides(box.shape, itemsize)
                    tight = _same_layout(box.shape, strides, dense)
                    layout = dense if tight else strides
                    write_block(descriptor, start, layout, part.reshape(box.shape))
                    found.append(Extent(box, 0, start, layout, digest(part)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno or 0, error.strerror or str(error), str(plan.file)) from error
    return extents


def _same_layout(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides put the elements at the same places; axes of one do not matter."""
    return math.prod(shape) == 0 or all(
        count == 1 or a == b for count, a, b in zip(shape, one, other, strict=True)
    )
