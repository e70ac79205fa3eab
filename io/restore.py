"""Reading a checkpoint: any box of any tensor, from the manifest and ``pread`` alone."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import CheckpointError
from hpctrain.io.dtypes import raw_dtype
from hpctrain.io.extents import Extent, digest, place, read_block
from hpctrain.io.manifest import Manifest
from hpctrain.io.shards import Box, Shape
from hpctrain.io.skeleton import RANK_STATE, SCALARS, open_hdf5


class CheckpointReader:
    """An open checkpoint; made by ``CheckpointStore.open``. Reading is not collective.

    Attributes:
        path: its directory.
        manifest: what it holds.
        scalars: the JSON values that were saved with it.
    """

    def __init__(self, path: Path, manifest: Manifest, *, verify: bool = True) -> None:
        self.path = path
        self.manifest = manifest
        self._verify = verify
        self._good: set[tuple[str, int]] = set()
        self._descriptors: dict[int, int] = {}
        self._state_file = path / manifest.files[0].name
        try:
            with open_hdf5(self._state_file) as file:
                self.scalars: dict[str, Any] = json.loads(file[SCALARS][()])
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{self._state_file}: scalars cannot be read: {error}") from error

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; reading opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_descriptors"):
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
        return {name: (t.shape, t.torch_dtype) for name, t in self.manifest.tensors.items()}

    def rank_state(self, rank: int) -> dict[str, np.ndarray] | None:
        """The arrays that ``rank`` saved for itself; None where there was no such rank.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if not 0 <= rank < self.world_size:
            return None
        try:
            with open_hdf5(self._state_file) as file:
                if RANK_STATE not in file:
                    return {}
                return {name: np.asarray(d[rank]) for name, d in file[RANK_STATE].items()}
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{self._state_file}: rank states: {error}") from error

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
        if entry is None:
            raise CheckpointError(f"{self.path}: {self._missing(name)}")
        wanted = Box(tuple(offsets), tuple(shape))
        if len(wanted.offsets) != len(entry.shape) or len(wanted.shape) != len(entry.shape):
            raise CheckpointError(f"{self.path}: {name} has shape {entry.shape}, wanted {wanted}")
        axes = zip(wanted.offsets, wanted.end, entry.shape, strict=True)
        if any(not 0 <= low <= high <= whole for low, high, whole in axes):
            raise CheckpointError(f"{self.path}: {name} has shape {entry.shape}, wanted {wanted}")
        out = np.empty(wanted.shape, raw_dtype(entry.torch_dtype))
        filled = 0
        for index, extent in enumerate(entry.extents):
            common = extent.box.overlap(wanted)
            if common is not None:
                out[common.within(wanted)] = self._part(name, index, extent, common, out.dtype)
                filled += common.elements
        if filled != wanted.elements:
            raise CheckpointError(
                f"{self.path}: {name} {wanted}: only {filled} of {wanted.elements} elements are "
                "in the checkpoint"
            )
        return out

    def _part(
        self, name: str, index: int, extent: Extent, common: Box, dtype: np.dtype
    ) -> np.ndarray:
        if self._verify and (name, index) not in self._good:
            block, fault = _read_verified(self._descriptor(extent.file), extent, dtype)
            if fault is not None:
                raise CheckpointError(_show_fault(self.path, self.manifest, name, extent, fault))
            self._good.add((name, index))
            return block[common.within(extent.box)]
        inside = tuple(a - b for a, b in zip(common.offsets, extent.box.offsets, strict=True))
        start = extent.start + place(inside, extent.strides)
        try:
            descriptor = self._descriptor(extent.file)
            return read_block(descriptor, start, extent.strides, common.shape, dtype)
        except (OSError, EOFError) as error:
            fault = _show_fault(self.path, self.manifest, name, extent, str(error))
            raise CheckpointError(fault) from error

    def _descriptor(self, file: int) -> int:
        if file not in self._descriptors:
            path = self.path / self.manifest.files[file].name
            try:
                self._descriptors[file] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}") from error
        return self._descriptors[file]

    def _missing(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.manifest.tensors, 1)
        return f"there is no tensor {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _read_verified(
    descriptor: int, extent: Extent, dtype: np.dtype
) -> tuple[np.ndarray, str | None]:
    """The whole extent, and what is wrong with it."""
    try:
        block = read_block(descriptor, extent.start, extent.strides, extent.box.shape, dtype)
    except (OSError, EOFError) as error:
        return np.empty(0, dtype), str(error)
    found = digest(block)
    if found != extent.xxh3:
        return block, f"checksum {found}, the manifest says {extent.xxh3}"
    return block, None


def _show_fault(path: Path, manifest: Manifest, name: str, extent: Extent, fault: str) -> str:
    file = path / manifest.files[extent.file].name
    return f"{file}: extent {name}{extent.box} at byte {extent.start}: {fault}"


def extent_problems(path: Path, manifest: Manifest, part: int, parts: int) -> list[str]:
    """Faults of every ``parts``-th extent, by bytes read and checksum; empty where all is well."""
    problems = []
    descriptors: dict[int, int] = {}
    try:
        number = 0
        for name, entry in manifest.tensors.items():
            if sum(e.box.elements for e in entry.extents) != math.prod(entry.shape):
                problems.append(f"{path}: {name}: the extents do not fill {list(entry.shape)}")
            for extent in entry.extents:
                number += 1
                if number % parts != part:
                    continue
                if extent.file not in descriptors:
                    file = path / manifest.files[extent.file].name
                    try:
                        descriptors[extent.file] = os.open(file, os.O_RDONLY)
                    except OSError as error:
                        return [*problems, f"{file}: {error.strerror}"]
                dtype = raw_dtype(entry.torch_dtype)
                _, fault = _read_verified(descriptors[extent.file], extent, dtype)
                if fault is not None:
                    problems.append(_show_fault(path, manifest, name, extent, fault))
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return problems
