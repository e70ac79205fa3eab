"""HDF5 files whose tensors are allocated but not written, so that ranks can write them by offset.

The file is created with contiguous datasets, allocated early and never filled, then closed.
After that each dataset is a known range of bytes and HDF5 is out of the way: many ranks and
threads may ``pwrite`` into one file with no HDF5 lock. An unwritten range reads as zeros with
no error, which is why the manifest, and not the file, says what is complete.
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
from hpctrain.io.shards import RESERVED, Shape

ALIGNMENT = 4096
SCALARS = f"{RESERVED}/scalars"
RANK_STATE = f"{RESERVED}/rank_state"

_HEADER_BYTES = 640
"""Object header, link and attribute of one dataset, generously; about 560 were measured."""


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
    small = sum(array.nbytes + ALIGNMENT for array in rank_state.values())
    return data + small + _metadata_bytes(tensors, scalars, rank_state)


def _metadata_bytes(
    tensors: Mapping[str, TensorMeta], scalars: str, rank_state: Mapping[str, np.ndarray]
) -> int:
    names = sum(2 * len(name.encode()) for name in tensors)
    wanted = _HEADER_BYTES * (len(tensors) + len(rank_state) + 16) + names + len(scalars.encode())
    return -(-wanted // (64 << 10)) * (64 << 10)


def create_skeleton(
    path: Path,
    tensors: Mapping[str, TensorMeta],
    *,
    attributes: Mapping[str, Any],
    scalars: str,
    rank_state: Mapping[str, np.ndarray],
) -> dict[str, int]:
    """Create the file and close it; the byte offset of each tensor that has elements.

    Args:
        path: file to create; it must not exist.
        tensors: by name, in the order in which they shall lie.
        attributes: of the root group.
        scalars: JSON text, stored as the string dataset ``hpctrain/scalars``.
        rank_state: arrays of shape [world size, …], stored below ``hpctrain/rank_state``.

    Raises:
        OSError: the file cannot be created or written.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_LATEST)
    access.set_alignment(ALIGNMENT, ALIGNMENT)
    access.set_meta_block_size(_metadata_bytes(tensors, scalars, rank_state))
    # The directory is this writer's alone; some parallel file systems have no flock.
    access.set_file_locking(False, True)
    handle = h5py.h5f.create(str(path).encode(), h5py.h5f.ACC_EXCL, fapl=access)
    offsets = {}
    with h5py.File(handle) as file:
        for key, value in attributes.items():
            file.attrs[key] = value
        for name, meta in tensors.items():
            offset = _create_dataset(file, name, meta)
            if meta.bytes:
                offsets[name] = offset
        file.create_dataset(SCALARS, data=np.bytes_(scalars.encode()), track_times=False)
        for name, array in rank_state.items():
            file.create_dataset(f"{RANK_STATE}/{name}", data=array, track_times=False)
        file.flush()
    # On a full disk closing succeeds and the file reopens with fewer datasets.
    with open_hdf5(path) as file:
        for name, offset in offsets.items():
            if name not in file or file[name].id.get_offset() != offset:
                raise OSError(f"{path}: HDF5 lost the dataset {name}; is the disk full?")
    return offsets


def _create_dataset(file: h5py.File, name: str, meta: TensorMeta) -> int:
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_layout(h5py.h5d.CONTIGUOUS)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    create.set_obj_track_times(False)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple(meta.shape) if meta.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    kind = hdf5_type(meta.torch_dtype)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, space, create, links)
    h5py.Dataset(dataset).attrs["torch_dtype"] = meta.torch_dtype
    return dataset.get_offset() if meta.bytes else -1


def open_hdf5(path: Path) -> h5py.File:
    """Open a committed file for reading; nobody changes it any more, so no lock is needed.

    The default comes first all the same: within a process HDF5 refuses to open a file twice
    with different locking, and a user may have it open.
    """
    try:
        return h5py.File(path, "r")
    except OSError:
        return h5py.File(path, "r", locking=False)
