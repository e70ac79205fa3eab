"""Reading a checkpoint: any box of any tensor, from the manifest and ``pread`` alone."""

from __future__ import annotations

import difflib
import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import CheckpointError
from hpctrain.io.dtypes import raw_dtype
from hpctrain.io.extents import Extent, distance
from hpctrain.io.image import open_hdf5
from hpctrain.io.inputs import InputFile
from hpctrain.io.manifest import Manifest, TensorEntry
from hpctrain.io.plan import RANK_STATE, SCALARS
from hpctrain.io.shards import RESERVED, Box, Shape

_RUN_BYTES = 128 << 20
_GAP = 8192
_THREADS = 3
"""Readers of one rank with cores of its own: enough to read, check and copy at the same time."""


class DamagedError(CheckpointError):
    """Bytes of a checkpoint do not match their checksum, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a range of one of the checkpoint's files lies.

    Attributes:
        file: index into the manifest's files.
        start, end: the range.
        folder: directory of the file.
    """

    file: int
    start: int
    end: int
    folder: Path


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A box to read: of which tensor, from where on, into what (any strides)."""

    name: str
    offsets: Shape
    out: np.ndarray

    @property
    def leaf(self) -> str:
        """Name of a rank state without its group."""
        return self.name.removeprefix(f"{RANK_STATE}/")


class CheckpointReader:
    """An open checkpoint; made by ``CheckpointStore.open``. Reading is not collective.

    Args:
        path: its directory, for messages.
        manifest: what it holds.
        verify: check each extent when it is first read.
        places: where its files lie, in ranges; all in ``path`` where nothing is said.
        scalars: the JSON values saved with it; read from the file where they are not given.

    Attributes:
        scalars: see there.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        *,
        verify: bool = True,
        places: Sequence[Place] | None = None,
        scalars: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._verify = verify
        self._threads = _THREADS
        self._good: set[tuple[str, int]] = set()
        self._places = places
        self._inputs: dict[Path, InputFile] = {}
        self._lock = threading.Lock()
        self.scalars: dict[str, Any] = dict(
            read_scalars(path, manifest) if scalars is None else scalars
        )

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; reading opens them again."""
        while self._inputs:
            self._inputs.popitem()[1].close()

    def __del__(self) -> None:
        if hasattr(self, "_inputs"):
            self.close()

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return self.manifest.world_size

    def tensors(self) -> dict[str, tuple[Shape, str]]:
        """Global shape and torch dtype of every tensor."""
        return {
            name: (t.shape, t.torch_dtype)
            for name, t in self.manifest.tensors.items()
            if not name.startswith(f"{RESERVED}/")
        }

    def rank_state(self, rank: int) -> dict[str, np.ndarray] | None:
        """The arrays that ``rank`` saved for itself; None where there was no such rank.

        Raises:
            CheckpointError: they cannot be read.
        """
        if not 0 <= rank < self.world_size:
            return None
        requests = self.rank_requests(rank)
        self.read_all(requests)
        return {request.leaf: request.out[0] for request in requests}

    def rank_requests(self, rank: int) -> list[Request]:
        """What :meth:`rank_state` reads."""
        requests = []
        for name, entry in self.manifest.tensors.items():
            if name.startswith(f"{RANK_STATE}/"):
                inner = entry.shape[1:]
                out = np.empty((1, *inner), raw_dtype(entry.torch_dtype))
                requests.append(Request(name, (rank, *(0 for _ in inner)), out))
        return requests

    def check(self, wanted: Mapping[str, tuple[Sequence[int], str]]) -> None:
        """Compare with what a model wants: name -> global shape and torch dtype.

        Raises:
            CheckpointError: tensors are missing or of another shape or dtype; names all.
        """
        found = self.tensors()
        faults = []
        for name, (shape, torch_dtype) in wanted.items():
            if name not in found:
                faults.append(self._missing(name))
            elif found[name] != (tuple(shape), torch_dtype):
                has_shape, has_dtype = found[name]
                faults.append(
                    f"{name}: the checkpoint has {has_dtype} {list(has_shape)}, "
                    f"the model wants {torch_dtype} {list(shape)}"
                )
        if faults:
            more = f"\n  … and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise CheckpointError(
                f"{self.path} does not fit the model:\n  " + "\n  ".join(faults[:10]) + more
            )

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """A box of a global tensor, read from wherever its parts lie.

        Args:
            name: of the tensor.
            offsets: index of the first element, one a dimension.
            shape: extent of the box; an axis may be empty.

        Returns:
            A new array of ``raw_dtype(torch_dtype)``: uint16 for bfloat16, uint8 for 8-bit
            floats.

        Raises:
            CheckpointError: no such tensor, a box outside of it, an extent whose checksum does
                not match, or a file that cannot be read.
        """
        entry = self.manifest.tensors.get(name)
        dtype = raw_dtype(entry.torch_dtype) if entry is not None else np.dtype("u1")
        if min(shape, default=0) < 0:
            raise CheckpointError(f"{self.path}: {name}: {list(shape)} is no shape")
        out = np.empty(tuple(shape), dtype)
        self.read_all([Request(name, tuple(offsets), out)])
        return out

    def require(self, requests: Sequence[Request]) -> None:
        """Bring what is about to be read within reach; collective. Committed checkpoints are
        in reach of every rank.

        Raises:
            CheckpointError: on every rank, where it cannot be done.
        """

    def read_all(self, requests: Iterable[Request]) -> None:
        """Fill many arrays, several extents at a time and in the order of the files.

        Raises:
            CheckpointError: see :meth:`read`.
        """
        self._read([job for request in requests for job in self._jobs(request)])

    def _read(self, jobs: list[Job]) -> None:
        jobs.sort(key=lambda job: (job.extent.file, job.extent.start, job.out is not None))
        runs = list(self._runs(jobs))
        if min(len(jobs), self._threads) < 2:
            for run in runs:
                self._run(run)
            return
        with ThreadPoolExecutor(self._threads) as pool:
            for _ in pool.map(self._run, runs):
                pass

    def _runs(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Jobs, together where they read whole neighbours in a file."""
        run: list[Job] = []
        end = size = 0
        for job in jobs:
            extent = job.extent
            count = 0 if job.out is None else job.out.nbytes
            near = bool(run) and extent.file == run[0].extent.file
            near = near and 0 <= extent.start - end < _GAP and size + count <= _RUN_BYTES
            if run and not (near and self._reads_whole(job) and self._reads_whole(run[0])):
                yield run
                run, size = [], 0
            run.append(job)
            size += count
            end = extent.start + count
        if run:
            yield run

    def _reads_whole(self, job: Job) -> bool:
        """Whether all of an extent goes straight to where it is wanted, to be checked there."""
        return (
            self._verify
            and job.out is not None
            and job.common == job.extent.box
            and job.out.flags.c_contiguous
            and (job.name, job.index) not in self._good
        )

    def _jobs(self, request: Request) -> list[Job]:
        entry = self.manifest.tensors.get(request.name)
        if entry is None:
            raise CheckpointError(f"{self.path}: {self._missing(request.name)}")
        wanted = Box(request.offsets, request.out.shape)
        fits = len(wanted.offsets) == len(wanted.shape) == len(entry.shape) and all(
            0 <= low <= high <= whole
            for low, high, whole in zip(wanted.offsets, wanted.end, entry.shape, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"{self.path}: {request.name} has shape {entry.shape}, wanted {wanted}"
            )
        jobs = []
        filled = 0
        for index, extent in enumerate(entry.extents):
            common = extent.box.overlap(wanted)
            if common is not None:
                window: tuple[Any, ...] = (..., *common.within(wanted))
                out = request.out[window]
                jobs.append(Job(request.name, entry, index, extent, common, out))
                filled += common.elements
        if filled != wanted.elements:
            raise CheckpointError(
                f"{self.path}: {request.name} {wanted}: only {filled} of {wanted.elements} "
                "elements are in the checkpoint"
            )
        return jobs

    def _run(self, run: Sequence[Job]) -> None:
        job = run[0]
        extent, out, common = job.extent, job.out, job.common
        file, folder = self._open(extent)
        fault: str | None = None
        try:
            if out is None or common is None:  # to be checked alone
                fault = differs(extent, file.digest(extent, raw_dtype(job.entry.torch_dtype)))
            elif self._verify and (job.name, job.index) not in self._good:
                if not self._reads_whole(job):
                    block = file.scratch(extent, out.dtype)
                    fault = differs(extent, *file.read_run([(extent, block)]))
                    if fault is None:
                        out[...] = block[common.within(extent.box)]
                else:
                    parts = [(one.extent, one.out) for one in run if one.out is not None]
                    for one, found in zip(run, file.read_run(parts), strict=True):
                        fault = differs(one.extent, found)
                        if fault is not None:
                            job = one
                            break
                self._good.update((one.name, one.index) for one in run)
            else:
                pairs = zip(common.offsets, extent.box.offsets, strict=True)
                inside = tuple(a - b for a, b in pairs)
                start = extent.start + distance(inside, extent.strides)
                file.read(start, extent.strides, out)
        except (OSError, EOFError) as error:
            fault = str(error)
        if fault is not None:
            raise DamagedError(show_fault(folder, self.manifest, job.name, job.extent, fault))

    def _folder_of(self, extent: Extent) -> Path | None:
        """Where an extent lies, None where it is out of reach."""
        if self._places is None:
            return self.path
        for place in self._places:
            if place.file == extent.file and place.start <= extent.start < place.end:
                return place.folder
        return None

    def _open(self, extent: Extent) -> tuple[InputFile, Path]:
        name = self.manifest.files[extent.file].name
        folder = self._folder_of(extent)
        if folder is None:
            raise CheckpointError(f"{name} at byte {extent.start}: is not on this node")
        path = folder / name
        with self._lock:
            if path not in self._inputs:
                try:
                    self._inputs[path] = InputFile(path, direct=self._verify)
                except OSError as error:
                    raise DamagedError(f"{path}: {error.strerror}") from error
            return self._inputs[path], folder

    def _missing(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.manifest.tensors, 1)
        return f"there is no tensor {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def read_scalars(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The JSON values saved with a checkpoint.

    Raises:
        CheckpointError: they cannot be read.
    """
    path = folder / manifest.files[0].name
    try:
        with open_hdf5(path) as file:
            found: dict[str, Any] = json.loads(file[SCALARS][()])
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: scalars cannot be read: {error}") from error
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One extent of one request: the common box, and where it goes; None to check it alone."""

    name: str
    entry: TensorEntry
    index: int
    extent: Extent
    common: Box | None
    out: np.ndarray | None


def differs(extent: Extent, found: str) -> str | None:
    """What is wrong where an extent's bytes have this checksum."""
    if found == extent.xxh3:
        return None
    return f"checksum {found}, the manifest says {extent.xxh3}"


def show_fault(path: Path, manifest: Manifest, name: str, extent: Extent, fault: str) -> str:
    """A fault with its place: file, tensor, box and byte."""
    file = path / manifest.files[extent.file].name
    return f"{file}: extent {name}{extent.box} at byte {extent.start}: {fault}"


def tensor_problems(
    folder: Path, names: Sequence[str], tensors: Mapping[str, TensorEntry]
) -> list[str]:
    """Faults of the extents of some tensors, whose files lie in one folder.

    Args:
        folder: see above.
        names: of the files, by number.
        tensors: by name; they need not be whole.
    """
    extents = [(name, t, extent) for name, t in tensors.items() for extent in t.extents]
    return _problems(folder, names, extents)


def extent_problems(path: Path, manifest: Manifest, part: int, parts: int) -> list[str]:
    """Faults of every ``parts``-th extent, by bytes read and checksum; empty where all is well."""
    problems = []
    for name, entry in manifest.tensors.items():
        if sum(extent.box.elements for extent in entry.extents) != math.prod(entry.shape):
            problems.append(f"{path}: {name}: the extents do not fill {list(entry.shape)}")
    mine = share_of_extents(manifest, part, parts)
    names = [file.name for file in manifest.files]
    return problems + _problems(path, names, [(n, t, t.extents[i]) for n, t, i in mine])


def share_of_extents(
    manifest: Manifest, part: int, parts: int
) -> list[tuple[str, TensorEntry, int]]:
    """Every ``parts``-th extent in the order of the files: tensor, its entry, extent's number."""
    extents = [
        (name, entry, index)
        for name, entry in manifest.tensors.items()
        for index in range(len(entry.extents))
    ]
    extents.sort(key=lambda item: (item[1].extents[item[2]].file, item[1].extents[item[2]].start))
    return extents[part::parts]


def _problems(
    folder: Path, names: Sequence[str], extents: Sequence[tuple[str, TensorEntry, Extent]]
) -> list[str]:
    """Read extents, several at a time, and hold them against their checksums."""
    files: dict[int, InputFile] = {}
    try:
        for number in {extent.file for _, _, extent in extents}:
            try:
                # Through the page cache: what another layout reads of it next is then there.
                files[number] = InputFile(folder / names[number], direct=False)
            except OSError as error:
                return [f"{folder / names[number]}: {error.strerror}"]

        def look(item: tuple[str, TensorEntry, Extent]) -> str | None:
            name, entry, extent = item
            try:
                found = files[extent.file].digest(extent, raw_dtype(entry.torch_dtype))
            except (OSError, EOFError) as error:
                fault = str(error)
            else:
                different = differs(extent, found)
                if different is None:
                    return None
                fault = different
            file = folder / names[extent.file]
            return f"{file}: extent {name}{extent.box} at byte {extent.start}: {fault}"

        if len(extents) < _THREADS:
            return [fault for fault in map(look, extents) if fault is not None]
        with ThreadPoolExecutor(_THREADS) as pool:
            return [fault for fault in pool.map(look, extents) if fault is not None]
    finally:
        for file in files.values():
            file.close()
