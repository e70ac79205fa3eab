"""What one rank wrote of a checkpoint: extents with their checksums, and its files' structure.

A part says everything about a rank's share, so that the share is worth something by itself: in
memory, on a node's own disk or at a partner. On the parallel file system rank 0 puts the parts
of all ranks together into ``manifest.json``.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import xxhash

import hpctrain
from hpctrain.errors import CheckpointError
from hpctrain.io.extents import Extent
from hpctrain.io.manifest import (
    FORMAT,
    FORMAT_VERSION,
    FileEntry,
    Manifest,
    TensorEntry,
    tensor_from_dict,
    tensor_to_dict,
)
from hpctrain.io.plan import Owned, RankPlan
from hpctrain.io.staging import Staging

_PREFIX = "part-"


def part_name(rank: int) -> str:
    return f"{_PREFIX}{rank:05d}"


def is_part(name: str) -> bool:
    return name.startswith(_PREFIX)


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's share of one checkpoint.

    Attributes:
        step, tokens, sequence, world_size, created: see Manifest.
        rank: whose share.
        plan: digest of the layout; parts of one checkpoint have the same.
        pieces: (file, start, bytes) of the ranges that hold it.
        names: of all files of the checkpoint.
        files: those whose structure this part vouches for.
        tensors: this rank's extents; file numbers count in ``names``.
        scalars: the JSON values of rank 0; empty for others.
    """

    step: int
    tokens: int | None
    sequence: int
    world_size: int
    created: float
    rank: int
    plan: str
    pieces: tuple[tuple[str, int, int], ...]
    names: tuple[str, ...]
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    scalars: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def to_bytes(self) -> bytes:
        """JSON behind a line with the XXH3-64 of it."""
        data = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "tokens": self.tokens,
            "sequence": self.sequence,
            "world_size": self.world_size,
            "created": self.created,
            "rank": self.rank,
            "plan": self.plan,
            "pieces": self.pieces,
            "names": self.names,
            "files": [[f.name, f.bytes, f.structure_xxh3] for f in self.files],
            "scalars": dict(self.scalars),
            "tensors": {name: tensor_to_dict(entry) for name, entry in self.tensors.items()},
        }
        text = json.dumps(data).encode()
        return xxhash.xxh3_64_hexdigest(text).encode() + b"\n" + text

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """Raises ValueError where it is damaged or of another version."""
        seal, _, text = data.partition(b"\n")
        if seal != xxhash.xxh3_64_hexdigest(text).encode():
            raise ValueError("does not match its checksum")
        found: dict[str, Any] = json.loads(text)
        if found.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"format version {found.get('format_version')!r}")
        return cls(
            step=found["step"],
            tokens=found["tokens"],
            sequence=found["sequence"],
            world_size=found["world_size"],
            created=found["created"],
            rank=found["rank"],
            plan=found["plan"],
            pieces=tuple((name, start, size) for name, start, size in found["pieces"]),
            names=tuple(found["names"]),
            files=tuple(FileEntry(*file) for file in found["files"]),
            tensors={name: tensor_from_dict(entry) for name, entry in found["tensors"].items()},
            scalars=found["scalars"],
        )


def read_part(path: Path) -> Part:
    """Raises CheckpointError where it is missing or damaged."""
    try:
        return Part.from_bytes(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


class Sealer:
    """Makes the parts of one layout: the extents are worked out once, the checksums a save."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self._extents = [plan.extents(index) for index in range(len(plan.specs))]
        self._storage = [plan.storage(index) for index in range(len(plan.specs))]

    def seal(
        self, staging: Staging, *, step: int, sequence: int, scalars: Mapping[str, Any]
    ) -> Part:
        """The part of what lies in a buffer; reads all of it."""
        tokens = scalars.get("tokens")
        plan = self.plan
        tensors: dict[str, TensorEntry] = {}
        for index, spec in enumerate(plan.specs):
            extents = tuple(self._hash(staging, index))
            storage = self._storage[index]
            held = tensors.get(spec.name)
            if held is not None:
                extents = held.extents + extents
            stored = (held.storage if held else ()) + ((storage,) if storage else ())
            tensors[spec.name] = TensorEntry(spec.global_shape, spec.torch_dtype, stored, extents)
        return Part(
            step=step,
            tokens=tokens if isinstance(tokens, int) else None,
            sequence=sequence,
            world_size=plan.world_size,
            created=time.time(),
            rank=plan.rank,
            plan=plan.digest,
            pieces=tuple((piece.name, piece.start, piece.bytes) for piece in plan.pieces),
            names=plan.files,
            files=tuple(_file_entry(owned, staging) for owned in plan.owned),
            tensors=tensors,
            scalars=scalars if plan.rank == 0 else {},
        )

    def _hash(self, staging: Staging, index: int) -> Iterable[Extent]:
        where = self.plan.places[index]
        if where is None:
            return
        piece = self.plan.pieces[where[0]]
        image = staging.images[where[0]]
        itemsize = self.plan.specs[index].dtype.itemsize
        for extent in self._extents[index]:
            first = extent.start - piece.start
            data = image[first : first + extent.box.elements * itemsize]
            found = xxhash.xxh3_64_hexdigest(data.data)
            yield dataclasses.replace(extent, xxh3=found)


def _file_entry(owned: Owned, staging: Staging) -> FileEntry:
    """Structure checksum of a file whose other ranks' parts are elsewhere: between their
    tensors there are zeros."""
    state = xxhash.xxh3_64()
    image = staging.images[owned.piece]
    position = 0
    for start, count in (*owned.storage, (owned.bytes, 0)):
        inside = image[position:start]
        state.update(inside.data)
        state.update(bytes(start - position - len(inside)))
        position = start + count
    return FileEntry(owned.name, owned.bytes, state.hexdigest())


def merge(parts: Sequence[Part]) -> Manifest:
    """The manifest of a checkpoint of which all parts are there.

    Raises:
        ValueError: they are not the parts of one checkpoint.
    """
    first = parts[0]
    same = {(part.step, part.sequence, part.plan, part.world_size) for part in parts}
    if len(same) != 1 or [part.rank for part in parts] != list(range(first.world_size)):
        raise ValueError(f"parts of different checkpoints: {sorted(same)}")
    files = {entry.name: entry for part in parts for entry in part.files}
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            held = tensors.get(name)
            if held is not None:
                entry = dataclasses.replace(
                    held,
                    storage=held.storage + entry.storage,
                    extents=held.extents + entry.extents,
                )
            tensors[name] = entry
    return Manifest(
        step=first.step,
        tokens=first.tokens,
        sequence=first.sequence,
        world_size=first.world_size,
        created=first.created,
        writer={
            "hpctrain": hpctrain.__version__,
            "h5py": h5py.version.version,
            "hdf5": h5py.version.hdf5_version,
        },
        files=tuple(files[name] for name in first.names),
        tensors=tensors,
    )
