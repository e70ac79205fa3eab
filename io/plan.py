"""Where every rank's bytes go: worked out once for a layout, then used by every save.

A rank's shards lie one after the other in one file, each in a data set of its own that starts
at a multiple of 4096. So each rank has one contiguous range of a file to write, whatever the
shards' shapes, and no two ranks ever share a block. What is sharded over ranks is put together
again by virtual data sets under the tensor's own name.

::

    files    tensors.h5                           others
    one      all data, and the virtual data sets  none
    node     virtual data sets only               node00000.h5 … the data of each node's ranks
    rank     virtual data sets only               rank00000.h5 … the data of each rank
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import h5py
import numpy as np
import xxhash

from hpctrain.errors import CheckpointError
from hpctrain.io.comm import Communicator, on_all, on_root
from hpctrain.io.dtypes import hdf5_type
from hpctrain.io.extents import Extent, dense_strides, distance, split
from hpctrain.io.image import ALIGNMENT, Reserved, Virtual, build_hdf5
from hpctrain.io.manifest import FORMAT, FORMAT_VERSION, Storage
from hpctrain.io.shards import RESERVED, Box, Shape, ShardSpec, coverage

TENSORS_FILE = "tensors.h5"
SCALARS = f"{RESERVED}/scalars"
RANK_STATE = f"{RESERVED}/rank_state"
SHARDS = f"{RESERVED}/shards"
FileKind = Literal["one", "node", "rank"]
Blocks = tuple[tuple[int, bytes], ...]
"""Offsets and the bytes there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's range of a file; start and bytes are multiples of 4096.

    Attributes:
        file: index of the file.
        name: of the file.
        start, bytes: the range.
        header: what it begins with, as (offset in the piece, bytes), where this rank makes the
            file's HDF5 headers.
    """

    file: int
    name: str
    start: int
    bytes: int
    header: Blocks = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Owned:
    """A file whose structure checksum this rank works out.

    Attributes:
        piece: index of this rank's piece, which begins the file.
        name, bytes: of the whole file.
        storage: (start, bytes) of everything in it that belongs to a tensor, ascending.
    """

    piece: int
    name: str
    bytes: int
    storage: tuple[tuple[int, int], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank needs to know to write its part.

    Attributes:
        digest: of the whole plan, the same on every rank.
        rank, world_size: whose plan.
        specs: this rank's shards; empty ones are never written.
        pieces: its ranges.
        places: (piece, offset in the piece) of each spec, None for an empty one.
        owned: files it heads.
        scalars: (piece, offset in the piece, bytes) of the JSON scalars; rank 0 alone.
        files: names of all files.
        total_bytes: of all files.
        largest_share: bytes of the rank that writes most.
    """

    digest: str
    rank: int
    world_size: int
    specs: tuple[ShardSpec, ...] = field(repr=False)
    pieces: tuple[Piece, ...]
    places: tuple[tuple[int, int] | None, ...] = field(repr=False)
    owned: tuple[Owned, ...]
    scalars: tuple[int, int, int] | None
    files: tuple[str, ...]
    total_bytes: int
    largest_share: int

    @property
    def bytes(self) -> int:
        """What this rank writes."""
        return sum(piece.bytes for piece in self.pieces)

    def extents(self, index: int) -> list[Extent]:
        """Extents of a spec, with no checksum yet."""
        where, spec = self.places[index], self.specs[index]
        if where is None:
            return []
        piece = self.pieces[where[0]]
        itemsize = spec.dtype.itemsize
        strides = dense_strides(spec.shape, itemsize)
        found = []
        for box in split(spec.box, itemsize):
            inside = tuple(a - b for a, b in zip(box.offsets, spec.offsets, strict=True))
            start = piece.start + where[1] + distance(inside, strides)
            # Cut along outer dimensions, each part is dense.
            found.append(Extent(box, piece.file, start, dense_strides(box.shape, itemsize), ""))
        return found

    def storage(self, index: int) -> Storage | None:
        """The bytes of a spec in its file."""
        where = self.places[index]
        if where is None:
            return None
        piece = self.pieces[where[0]]
        return Storage(piece.file, piece.start + where[1], self.specs[index].bytes)


def rank_state_spec(name: str, array: np.ndarray, rank: int, world_size: int) -> ShardSpec:
    """Row ``rank`` of the stacked states of all ranks."""
    shape = (world_size, *array.shape)
    offsets = (rank, *(0 for _ in array.shape))
    return ShardSpec(f"{RANK_STATE}/{name}", shape, offsets, (1, *array.shape), array.dtype.name)


def choose_files(kind: FileKind, nodes: Sequence[int]) -> list[str]:
    """Name of the file that each rank writes to.

    Args:
        kind: see the table above.
        nodes: number of each rank's node.
    """
    if kind == "one" or len(nodes) == 1:
        return [TENSORS_FILE] * len(nodes)
    if kind == "node":
        return [f"node{node:05d}.h5" for node in nodes]
    return [f"rank{rank:05d}.h5" for rank in range(len(nodes))]


@dataclass(frozen=True, slots=True)
class _FileJob:
    """A file for the first of its ranks to lay out."""

    name: str
    members: tuple[tuple[int, tuple[ShardSpec, ...]], ...]
    world_size: int
    scalars: int


@dataclass(frozen=True, slots=True)
class _FileLayout:
    """A file as laid out.

    Attributes:
        ranges: (start, end) of each rank's piece.
        offsets: byte offset of each rank's specs, None for empty ones.
        storage: (start, bytes) of what belongs to tensors, ascending.
        scalars: offset of the scalars, 0 where the file has none.
        header: what the file begins with; (offset, bytes).
    """

    name: str
    bytes: int
    ranges: dict[int, tuple[int, int]]
    offsets: dict[int, tuple[int | None, ...]]
    storage: tuple[tuple[int, int], ...]
    scalars: int
    header: Blocks


@dataclass(frozen=True, slots=True)
class _Share:
    """What rank 0 tells a rank: the plan's digest, all files, the rank's file and range."""

    digest: str
    files: tuple[str, ...]
    total_bytes: int
    largest: int
    file: str
    range: tuple[int, int]
    offsets: tuple[int | None, ...]


def make_plan(
    comm: Communicator,
    specs: tuple[ShardSpec, ...],
    *,
    files: FileKind,
    node: int,
    scalars_bytes: int,
) -> RankPlan:
    """Lay out a checkpoint; collective, and the only part of a save that moves descriptions.

    Args:
        comm: all ranks.
        specs: this rank's shards.
        files: how many files.
        node: number of this rank's node.
        scalars_bytes: room for the JSON scalars (rank 0's counts).

    Raises:
        CheckpointError: on every rank: gaps or overlaps between the ranks' shards, or shapes
            and dtypes that differ.
    """
    given = on_all(comm, lambda: (node, specs))
    jobs: list[_FileJob | None] = [None] * comm.size
    names: list[str] = []

    def assign() -> None:
        assert given is not None
        _merge([mine for _, mine in given])
        names.extend(choose_files(files, [number for number, _ in given]))
        for name in dict.fromkeys(names):
            members = tuple((r, given[r][1]) for r in range(comm.size) if names[r] == name)
            room = scalars_bytes if name == TENSORS_FILE else 0
            jobs[members[0][0]] = _FileJob(name, members, comm.size, room)

    on_root(comm, assign)
    job = comm.scatter(jobs)
    mine: dict[str, _FileLayout] = {}

    def lay_out() -> _FileLayout | None:
        if job is None:
            return None
        mine[job.name] = _data_file(job)
        return dataclasses.replace(mine[job.name], header=(), storage=())

    done = on_all(comm, lay_out)
    shares: list[_Share] = []

    def share_out() -> None:
        assert done is not None
        assert given is not None
        found = {file.name: file for file in done if file is not None}
        if TENSORS_FILE not in found:
            master = _master_file(names, [own for _, own in given], scalars_bytes)
            mine[TENSORS_FILE] = master
            found = {TENSORS_FILE: master, **found}
        order = tuple(found)
        total = sum(file.bytes for file in found.values())
        digest = _digest(names, scalars_bytes, [own for _, own in given])
        sizes = [end - start for start, end in (found[n].ranges[r] for r, n in enumerate(names))]
        if TENSORS_FILE not in names:
            sizes[0] += found[TENSORS_FILE].bytes
        for rank, name in enumerate(names):
            file = found[name]
            shares.append(
                _Share(
                    digest, order, total, max(sizes), name, file.ranges[rank], file.offsets[rank]
                )
            )

    on_root(comm, share_out)
    share: _Share = comm.scatter(shares)
    return _rank_plan(comm, specs, share, mine, scalars_bytes)


def _rank_plan(
    comm: Communicator,
    specs: tuple[ShardSpec, ...],
    share: _Share,
    mine: dict[str, _FileLayout],
    scalars_bytes: int,
) -> RankPlan:
    ranges = {share.file: share.range}
    if TENSORS_FILE in mine:
        ranges.setdefault(TENSORS_FILE, (0, mine[TENSORS_FILE].bytes))
    pieces = []
    for name, (start, end) in ranges.items():
        header = mine[name].header if name in mine else ()
        pieces.append(Piece(share.files.index(name), name, start, end - start, header))
    start = share.range[0]
    places = tuple(None if offset is None else (0, offset - start) for offset in share.offsets)
    number = {piece.name: index for index, piece in enumerate(pieces)}
    owned = tuple(
        Owned(number[name], name, file.bytes, file.storage) for name, file in mine.items()
    )
    scalars = None
    if TENSORS_FILE in mine:
        scalars = (number[TENSORS_FILE], mine[TENSORS_FILE].scalars, scalars_bytes)
    return RankPlan(
        digest=share.digest,
        rank=comm.rank,
        world_size=comm.size,
        specs=specs,
        pieces=tuple(pieces),
        places=places,
        owned=owned,
        scalars=scalars,
        files=share.files,
        total_bytes=share.total_bytes,
        largest_share=share.largest,
    )


def _merge(given: Sequence[tuple[ShardSpec, ...]]) -> None:
    """Raise with every fault in how the ranks' shards fit together."""
    known: dict[str, tuple[int, Shape, str]] = {}
    boxes: dict[str, list[Box]] = {}
    faults = []
    for rank, specs in enumerate(given):
        for spec in specs:
            shape, dtype = spec.global_shape, spec.torch_dtype
            first, has_shape, has_dtype = known.setdefault(spec.name, (rank, shape, dtype))
            if (shape, dtype) != (has_shape, has_dtype):
                faults.append(
                    f"{spec.name}: rank {rank} gives {dtype} {list(shape)}, "
                    f"rank {first} {has_dtype} {list(has_shape)}"
                )
            boxes.setdefault(spec.name, []).append(spec.box)
    for name, (_, shape, _) in known.items():
        fault = coverage(shape, boxes[name])
        if fault is not None:
            faults.append(f"{name} {list(shape)}: {fault}")
        above = name.rpartition("/")[0]
        while above:
            if above in known:
                faults.append(f"{name}: {above} is a tensor too, so it cannot hold another")
            above = above.rpartition("/")[0]
    if faults:
        more = f"\n  … and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise CheckpointError("the ranks' shards do not fit:\n  " + "\n  ".join(faults[:10]) + more)


def _digest(names: Sequence[str], scalars: int, given: Sequence[tuple[ShardSpec, ...]]) -> str:
    state = xxhash.xxh3_64()
    state.update(json.dumps([FORMAT_VERSION, list(names), scalars]).encode())
    for specs in given:
        for spec in specs:
            row = (spec.name, spec.global_shape, spec.offsets, spec.shape, spec.torch_dtype)
            state.update(json.dumps(row).encode())
        state.update(b"\n")
    return state.hexdigest()


def _source_names(rank: int, specs: Sequence[ShardSpec]) -> list[str]:
    """Name of each spec's own data set: the tensor's where it is whole."""
    seen: dict[str, int] = {}
    found = []
    for spec in specs:
        if spec.whole:
            found.append(spec.name)
            continue
        again = seen.get(spec.name, 0)
        seen[spec.name] = again + 1
        folder = f"{rank}.{again}" if again else str(rank)
        found.append(f"{SHARDS}/{folder}/{spec.name}")
    return found


def _data_file(job: _FileJob) -> _FileLayout:
    reserved: dict[str, Reserved] = {}
    if job.scalars:
        reserved[SCALARS] = _scalars(job.scalars)
    where: dict[int, list[str]] = {}
    for rank, specs in job.members:
        where[rank] = _source_names(rank, specs)
        for spec, name in zip(specs, where[rank], strict=True):
            if spec.bytes or spec.whole:
                attributes: dict[str, Any] = {"torch_dtype": spec.torch_dtype}
                if not spec.whole:
                    attributes |= {"global_shape": spec.global_shape, "offsets": spec.offsets}
                reserved[name] = Reserved(spec.shape, hdf5_type(spec.torch_dtype), attributes)
    virtual = {}
    if job.name == TENSORS_FILE:
        parts = [(".", rank, specs) for rank, specs in job.members]
        virtual = _virtual(parts, skip=reserved.keys())
    offsets, image = build_hdf5(_root(job.world_size), reserved, virtual)
    placed = {
        rank: tuple(
            offsets[name] if spec.bytes else None
            for spec, name in zip(specs, where[rank], strict=True)
        )
        for rank, specs in job.members
    }
    size = _aligned(image.size)
    storage = sorted(
        (offset, spec.bytes)
        for rank, specs in job.members
        for spec, offset in zip(specs, placed[rank], strict=True)
        if offset is not None
    )
    ranges = _ranges(placed, size)
    header = _clip(image.blocks(), ranges[job.members[0][0]][1])
    at = offsets.get(SCALARS, 0)
    return _FileLayout(job.name, size, ranges, placed, tuple(storage), at, header)


def _ranges(placed: Mapping[int, Sequence[int | None]], size: int) -> dict[int, tuple[int, int]]:
    """Each rank's piece: the first begins the file, each ends where the next one begins."""
    ranks = list(placed)
    firsts = [min((o for o in placed[rank] if o is not None), default=-1) for rank in ranks]
    starts = [0, *firsts[1:]]
    # A rank with nothing to write has an empty piece where the next one begins.
    for index in range(len(starts) - 1, -1, -1):
        if starts[index] < 0:
            starts[index] = starts[index + 1] if index + 1 < len(starts) else size
    ends = [*starts[1:], size]
    return {r: (a, b) for r, a, b in zip(ranks, starts, ends, strict=True)}


def _clip(blocks: Iterable[tuple[int, bytes]], end: int) -> Blocks:
    """What the image holds before ``end``; behind it there are only the zeros of allocation."""
    kept = []
    for start, data in blocks:
        if start < end:
            kept.append((start, data[: end - start]))
        assert start + len(data) <= end or not any(data[max(0, end - start) :])
    return tuple(kept)


def _master_file(
    names: Sequence[str], given: Sequence[tuple[ShardSpec, ...]], scalars: int
) -> _FileLayout:
    parts = [
        (file, rank, specs) for rank, (file, specs) in enumerate(zip(names, given, strict=True))
    ]
    reserved = {SCALARS: _scalars(scalars)}
    for specs in given:
        for spec in specs:
            if not math.prod(spec.global_shape):
                attributes = {"torch_dtype": spec.torch_dtype}
                kind = hdf5_type(spec.torch_dtype)
                reserved[spec.name] = Reserved(spec.global_shape, kind, attributes)
    virtual = _virtual(parts, skip=reserved.keys())
    offsets, image = build_hdf5(_root(len(given)), reserved, virtual)
    size = _aligned(image.size)
    header = _clip(image.blocks(), size)
    return _FileLayout(TENSORS_FILE, size, {}, {}, (), offsets[SCALARS], header)


def _virtual(
    parts: Iterable[tuple[str, int, Sequence[ShardSpec]]], skip: Container[str]
) -> dict[str, Virtual]:
    """Virtual data sets of all tensors but those in ``skip``."""
    found: dict[str, tuple[ShardSpec, list[Any]]] = {}
    for file, rank, specs in parts:
        for spec, source in zip(specs, _source_names(rank, specs), strict=True):
            if spec.bytes and spec.name not in skip:
                _, sources = found.setdefault(spec.name, (spec, []))
                sources.append((file, f"/{source}", spec.offsets, spec.shape))
    return {
        name: Virtual(
            spec.global_shape,
            hdf5_type(spec.torch_dtype),
            {"torch_dtype": spec.torch_dtype},
            tuple(sources),
            missing=math.nan if "float" in spec.torch_dtype and spec.dtype.itemsize > 1 else None,
        )
        for name, (spec, sources) in found.items()
    }


def _scalars(size: int) -> Reserved:
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(size)
    kind.set_strpad(h5py.h5t.STR_NULLTERM)
    kind.set_cset(h5py.h5t.CSET_UTF8)
    return Reserved((), kind, {})


def _root(world_size: int) -> Callable[[h5py.File], None]:
    def small(file: h5py.File) -> None:
        file.attrs["format"] = FORMAT
        file.attrs["format_version"] = FORMAT_VERSION
        file.attrs["world_size"] = world_size

    return small


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
