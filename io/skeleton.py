"""HDF5 files whose tensors are allocated but not written, so that ranks can write them by offset.

The datasets are contiguous, allocated but never filled. Each is a known range of bytes,
and HDF5 is out of the way: many ranks and threads may ``pwrite`` into one file with no HDF5
lock. An unwritten range reads as zeros with no error, which is why the manifest, and not the
file, says what is complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.io.dtypes import hdf5_type, raw_dtype
from hpctrain.io.image import ALIGNMENT, Reserved, build_hdf5, write_image
from hpctrain.io.shards import RESERVED, Shape

SCALARS = f"{RESERVED}/scalars"
RANK_STATE = f"{RESERVED}/rank_state"

_HEADER_BYTES = 1024
"""Headers of one dataset (about 370 were measured) and its line of the manifest, generously."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Global shape and torch dtype of a tensor."""

    shape: Shape
    torch_dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * raw_dtype(self.torch_dtype).itemsize


def planned_bytes(
    tensors: Mapping[str, TensorMeta], scalars: str, rank_state: Mapping[str, np.ndarray]
) -> int:
    """Upper bound of the file's size, to be held against the free space."""
    data = sum(-(-meta.bytes // ALIGNMENT) * ALIGNMENT for meta in tensors.values())
    small = len(scalars.encode()) + sum(a.nbytes + ALIGNMENT for a in rank_state.values())
    headers = _HEADER_BYTES * (len(tensors) + len(rank_state) + 64)
    return data + small + headers + sum(2 * len(name.encode()) for name in tensors)


def create_skeleton(
    path: Path,
    tensors: Mapping[str, TensorMeta],
    *,
    attributes: Mapping[str, Any],
    scalars: str,
    rank_state: Mapping[str, np.ndarray],
) -> dict[str, int]:
    """Create the file; the byte offset of each tensor that has elements.

    Args:
        path: file to create; it must not exist.
        tensors: by name, in the order in which they shall lie.
        attributes: of the root group.
        scalars: JSON text, stored as the string dataset ``hpctrain/scalars``.
        rank_state: arrays of shape [world size, …], stored below ``hpctrain/rank_state``.

    Raises:
        OSError: the file cannot be created or written.
    """

    def small(file: h5py.File) -> None:
        for key, value in attributes.items():
            file.attrs[key] = value
        file.create_dataset(SCALARS, data=np.bytes_(scalars.encode()), track_times=False)
        for name, array in rank_state.items():
            file.create_dataset(f"{RANK_STATE}/{name}", data=array, track_times=False)

    reserved = {
        name: Reserved(meta.shape, hdf5_type(meta.torch_dtype), {"torch_dtype": meta.torch_dtype})
        for name, meta in tensors.items()
    }
    offsets, image = build_hdf5(small, reserved)
    write_image(path, image)
    return offsets


def open_hdf5(path: Path) -> h5py.File:
    """Open a committed file for reading; nobody changes it any more, so no lock is needed.

    The default comes first all the same: within a process HDF5 refuses to open a file twice
    with different locking, and a user may have it open.
    """
    try:
        return h5py.File(path, "r")
    except OSError:
        return h5py.File(path, "r", locking=False)
