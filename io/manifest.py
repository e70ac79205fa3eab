"""The manifest: which files, which tensors, where each extent lies, and every checksum.

``manifest.json`` makes a directory of HDF5 files a checkpoint; ``manifest.json.xxh3`` holds
its own checksum in the form that ``xxhsum --check`` reads. Every byte of every file is under
exactly one checksum: an extent's, or that of its file's structure (everything outside of the
tensors: HDF5 headers, scalars, rank states, padding).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from hpctrain.errors import CheckpointError
from hpctrain.io.dtypes import raw_dtype
from hpctrain.io.extents import Extent, dense_strides, read_bytes
from hpctrain.io.shards import Box, Shape

FORMAT = "hpctrain-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
CHECKSUM = "manifest.json.xxh3"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the checkpoint: its name, size in bytes and the XXH3-64 of its structure."""

    name: str
    bytes: int
    structure_xxh3: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A range of bytes that holds nothing but one tensor's elements."""

    file: int
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: global shape, torch dtype, the bytes it fills, its extents."""

    shape: Shape
    torch_dtype: str
    storage: tuple[Storage, ...]
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint but its numbers.

    Attributes:
        step: optimizer steps done.
        tokens: tokens seen, None where the scalars do not say.
        sequence: grows with every save of the run, see Saver; the newest commit has the
            highest, also after training went back to an older step.
        world_size: ranks that wrote it.
        created: seconds since the epoch.
        writer: names and versions of the code that wrote it.
        files, tensors: see there; tensors by name.
    """

    step: int
    tokens: int | None
    sequence: int
    world_size: int
    created: float
    writer: Mapping[str, str]
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry] = field(repr=False)

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def to_json(self) -> str:
        tensors = {name: tensor_to_dict(entry) for name, entry in self.tensors.items()}
        head = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "tokens": self.tokens,
            "sequence": self.sequence,
            "world_size": self.world_size,
            "created": self.created,
            "writer": dict(self.writer),
            "files": [
                {"name": f.name, "bytes": f.bytes, "structure_xxh3": f.structure_xxh3}
                for f in self.files
            ],
        }
        # A line a tensor: a person can read it, and grep finds one.
        lines = [f"{json.dumps(n)}: {json.dumps(t)}" for n, t in tensors.items()]
        opening = json.dumps(head, indent=1)[: -len("\n}")]
        return opening + ',\n "tensors": {\n  ' + ",\n  ".join(lines) + "\n }\n}\n"

    @classmethod
    def from_json(cls, text: bytes | str) -> Manifest:
        """Raises ValueError where the text is not a manifest this version can read."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"this is not a manifest of the format {FORMAT}")
        version = data.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version!r}; this hpctrain reads {FORMAT_VERSION}")
        try:
            return cls(
                step=data["step"],
                tokens=data["tokens"],
                sequence=data["sequence"],
                world_size=data["world_size"],
                created=data["created"],
                writer=data["writer"],
                files=tuple(
                    FileEntry(f["name"], f["bytes"], f["structure_xxh3"]) for f in data["files"]
                ),
                tensors={name: tensor_from_dict(t) for name, t in data["tensors"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a field is missing or of the wrong kind: {error!r}") from None


def tensor_to_dict(entry: TensorEntry) -> dict[str, Any]:
    itemsize = raw_dtype(entry.torch_dtype).itemsize
    extents = []
    for extent in entry.extents:
        item: dict[str, Any] = {
            "offsets": extent.box.offsets,
            "shape": extent.box.shape,
            "file": extent.file,
            "start": extent.start,
            "xxh3": extent.xxh3,
        }
        if extent.strides != dense_strides(extent.box.shape, itemsize):
            item["strides"] = extent.strides
        extents.append(item)
    return {
        "shape": entry.shape,
        "torch_dtype": entry.torch_dtype,
        "storage": [{"file": s.file, "start": s.start, "bytes": s.bytes} for s in entry.storage],
        "extents": extents,
    }


def tensor_from_dict(data: Mapping[str, Any]) -> TensorEntry:
    itemsize = raw_dtype(data["torch_dtype"]).itemsize
    extents = []
    for item in data["extents"]:
        box = Box(tuple(item["offsets"]), tuple(item["shape"]))
        strides = tuple(item.get("strides") or dense_strides(box.shape, itemsize))
        extents.append(Extent(box, item["file"], item["start"], strides, item["xxh3"]))
    storage = tuple(Storage(s["file"], s["start"], s["bytes"]) for s in data["storage"])
    return TensorEntry(tuple(data["shape"]), data["torch_dtype"], storage, tuple(extents))


def seal(data: bytes) -> str:
    """Text of ``manifest.json.xxh3`` for a manifest of these bytes."""
    return f"XXH3 ({MANIFEST}) = {xxhash.xxh3_64_hexdigest(data)}\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint directory, its checksum verified.

    Raises:
        CheckpointError: missing, damaged, or of a version that is not known here.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
        found = (folder / CHECKSUM).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    if found != seal(data):
        raise CheckpointError(f"{path}: does not match its checksum in {CHECKSUM}")
    try:
        return Manifest.from_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def structure_digest(descriptor: int, size: int, storage: Iterable[Storage]) -> str:
    """XXH3-64 of the bytes of a file that lie in no tensor's storage, in the file's order.

    Raises:
        OSError, EOFError: the file cannot be read, or is shorter than ``size``.
    """
    gaps, position = [], 0
    for item in sorted(storage, key=lambda item: item.start):
        gaps.append((position, item.start))
        position = item.start + item.bytes
    gaps.append((position, size))
    # Small and far apart: asked for all at once they come in the time of a few, and read-ahead
    # would bring a hundred times as much.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    for start, end in gaps:
        if end > start:
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_WILLNEED)
    state = xxhash.xxh3_64()
    for start, end in gaps:
        _update(state, descriptor, start, end)
    return state.hexdigest()


def _update(state: xxhash.xxh3_64, descriptor: int, start: int, end: int) -> None:
    while start < end:
        count = min(end - start, 1 << 20)
        state.update(read_bytes(descriptor, start, count))
        start += count


def file_problem(folder: Path, manifest: Manifest, index: int) -> str | None:
    """What is wrong with a file's presence, size or structure; None where all is well."""
    entry = manifest.files[index]
    path = folder / entry.name
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            if size != entry.bytes:
                return f"{path}: {size} bytes, the manifest says {entry.bytes}"
            storage = (s for t in manifest.tensors.values() for s in t.storage if s.file == index)
            found = structure_digest(descriptor, size, storage)
        finally:
            os.close(descriptor)
    except (OSError, EOFError) as error:
        return f"{path}: {getattr(error, 'strerror', None) or error}"
    if found != entry.structure_xxh3:
        return f"{path}: HDF5 structure (headers, scalars, rank states) does not match its checksum"
    return None
