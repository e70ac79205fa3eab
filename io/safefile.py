"""safetensors files, streamed: a length, a JSON header, and the tensors' bytes.

The library of that name wants all tensors in memory, and its numpy side knows no bfloat16; a
checkpoint is written tensor by tensor and read through a mapping. The format is that of
github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import CheckpointError
from hpctrain.io.directory import fsync_path
from hpctrain.io.dtypes import raw_dtype
from hpctrain.io.shards import Shape

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in _CODES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write: name, shape, torch dtype, and what gives its elements."""

    name: str
    shape: Shape
    torch_dtype: str
    load: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * raw_dtype(self.torch_dtype).itemsize


def write_safetensors(
    folder: Path, entries: Iterable[Entry], metadata: Mapping[str, str], largest: int
) -> list[Path]:
    """Write tensors as one file, or as several with an index, the way Hugging Face does.

    Args:
        folder: made where it is missing.
        entries: in the order in which they shall lie.
        metadata: texts for the header.
        largest: bytes a file at most, but for a single larger tensor.

    Raises:
        CheckpointError: a dtype that the format has not.
        OSError: it cannot be written.
    """
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if entry.torch_dtype not in _CODES:
            raise CheckpointError(f"{entry.name}: safetensors has no {entry.torch_dtype}")
        if shards[-1] and filled + entry.bytes > largest:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.bytes
    folder.mkdir(parents=True, exist_ok=True)
    if len(shards) == 1:
        paths = [folder / SINGLE]
    else:
        count = len(shards)
        paths = [folder / f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for path, shard in zip(paths, shards, strict=True):
        _write_file(path, shard, metadata)
    if len(shards) > 1:
        where = {e.name: p.name for p, shard in zip(paths, shards, strict=True) for e in shard}
        total = sum(entry.bytes for shard in shards for entry in shard)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    fsync_path(folder)
    return paths


def _write_file(path: Path, entries: list[Entry], metadata: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _CODES[entry.torch_dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.bytes],
        }
        offset += entry.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    aside = path.with_name(f".{path.name}")
    with aside.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)))
        stream.write(text)
        for entry in entries:
            array = np.ascontiguousarray(entry.load())
            stream.write(array.reshape(-1).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())
    aside.rename(path)


class SafeReader:
    """Tensors of a safetensors file, or of a directory of them.

    Raises:
        CheckpointError: there is none, or it is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self._where: dict[str, tuple[memoryview, int, int, Shape, str]] = {}
        for file in _files(path):
            self._add(file)

    def _add(self, path: Path) -> None:
        try:
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                (length,) = struct.unpack("<Q", stream.read(8))
                if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                header = json.loads(stream.read(length))
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            data = memoryview(mapped)[8 + length :]
            self.metadata.update(header.pop("__metadata__", {}))
            for name, item in header.items():
                first, last = item["data_offsets"]
                dtype, shape = _NAMES[item["dtype"]], tuple(item["shape"])
                wanted = int(np.prod(shape, dtype=np.int64)) * raw_dtype(dtype).itemsize
                if not 0 <= first <= last <= len(data) or last - first != wanted:
                    raise ValueError(f"{name}: bytes {first} to {last} for {wanted}")
                self._where[name] = (data, first, last, shape, dtype)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise CheckpointError(f"{path}: is no safetensors file: {error}") from error

    def names(self) -> Iterator[str]:
        yield from self._where

    def form(self, name: str) -> tuple[Shape, str]:
        """Shape and torch dtype."""
        _, _, _, shape, dtype = self._where[name]
        return shape, dtype

    def read(self, name: str) -> np.ndarray:
        """The elements, raw bits where numpy has no such type; read-only.

        Raises:
            CheckpointError: no such tensor.
        """
        if name not in self._where:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        data, first, last, shape, dtype = self._where[name]
        return np.frombuffer(data[first:last], raw_dtype(dtype)).reshape(shape)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / INDEX
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"].values()
            return sorted({path / Path(name).name for name in names})
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index}: {error!r}") from error
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"{path}: there is no safetensors file")
    return found
