"""Token files: one long row of tokens in plain HDF5, read a sample at a time.

::

    tokens             1-D, uint8, uint16 or uint32; all documents, one after the other
      @vocab_size      tokens are 0 … vocab_size - 1
      @xxh3            XXH3-64 of the tokens' bytes, hexadecimal
    documents          uint64, [documents + 1]: where each begins, and where the last one ends
    tokenizer          JSON text: how the tokens were made, all that is needed to decode them
    sources            JSON text: name, bytes, XXH3-64 and documents of each input
    / @format, @format_version

Only ``tokens`` and its ``vocab_size`` are needed for training, so that other programs can
write such files with a few lines. Sample ``i`` of length L is ``tokens[i·L : i·L + L + 1]``:
L inputs, and the same shifted by one as targets.
"""

from __future__ import annotations

import json
import os
import secrets
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from hpctrain.errors import UsageError
from hpctrain.io.extents import read_bytes
from hpctrain.io.image import Reserved, build_hdf5, open_hdf5, write_image

FORMAT = "hpctrain-tokens"
FORMAT_VERSION = 1
_COPY_BYTES = 16 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integer that holds every token."""
    return np.dtype("<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


class TokenFile:
    """A token file as samples of ``sequence_length`` tokens and one more.

    Reads only what is asked for. Where the tokens lie in one piece (as ``TokenWriter`` writes
    them) they are read with ``pread``, without HDF5's lock: threads and forked processes may
    share one TokenFile.

    Args:
        path: HDF5 file.
        sequence_length: L, in tokens, at least 1.

    Attributes:
        vocab_size: tokens are 0 … vocab_size - 1.
        n_tokens: length of the whole row.
        n_samples: whole samples in it, ``(n_tokens - 1) // L``.
        dtype: of the tokens.
        fingerprint: XXH3-64 of the tokens, as the file says; empty where it does not.

    Raises:
        UsageError: not a token file, damaged, or shorter than one sample.
    """

    def __init__(self, path: str | Path, sequence_length: int) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length is {sequence_length}; at least 1 token")
        self.path = Path(path)
        self.sequence_length = sequence_length
        self._pid = os.getpid()
        self._file: h5py.File | None = _open(self.path)
        tokens = _tokens(self._file, self.path)
        self.vocab_size = int(tokens.attrs["vocab_size"])
        self.fingerprint = str(tokens.attrs.get("xxh3", ""))
        self.n_tokens: int = tokens.shape[0]
        self.dtype: np.dtype = tokens.dtype
        self.n_samples: int = max(0, self.n_tokens - 1) // sequence_length
        if self.n_samples < 1:
            self._file.close()
            raise UsageError(
                f"{self.path}: {self.n_tokens} tokens are less than one sample of "
                f"{sequence_length} and one more"
            )
        self._start: int | None = tokens.id.get_offset()
        self._descriptor = -1
        if self._start is not None:
            self._file.close()
            self._file = None
            self._descriptor = os.open(self.path, os.O_RDONLY)
            missing = self._start + self.nbytes - os.fstat(self._descriptor).st_size
            if missing > 0:
                raise UsageError(f"{self.path}: the last {missing} bytes of the tokens are missing")

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens."""
        return self.n_tokens * int(self.dtype.itemsize)

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Sample ``index``: [L + 1] tokens."""
        found: NDArray[Any] = self.read([index])[0]
        return found

    def read(self, indices: ArrayLike) -> NDArray[Any]:
        """Samples by index: [samples, L + 1] tokens of ``dtype``.

        Neighbours are read in one piece, whatever order they are asked for in.

        Raises:
            IndexError: a sample that is not there.
            OSError: the file cannot be read.
        """
        wanted = np.asarray(indices, np.int64).reshape(-1)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.n_samples):
            raise IndexError(f"{self.path}: samples 0 to {self.n_samples - 1}, wanted {wanted}")
        length = self.sequence_length
        out = np.empty((wanted.size, length + 1), self.dtype)
        order = np.argsort(wanted, kind="stable")
        gaps = np.flatnonzero(np.diff(wanted[order]) > 1) + 1
        for run in np.split(order, gaps):
            if run.size:
                first, last = int(wanted[run[0]]), int(wanted[run[-1]])
                row = self.slice(first * length, (last + 1) * length + 1)
                starts = (wanted[run] - first) * length
                out[run] = row[starts[:, None] + np.arange(length + 1)]
        return out

    def document_starts(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Where the document of each input token begins: [samples, L] places in its sample.

        0 where it began before the sample did.

        Raises:
            UsageError: the file does not say where documents begin.
        """
        wanted = np.asarray(indices, np.int64).reshape(-1, 1)
        length = self.sequence_length
        places = wanted * length + np.arange(length)
        begins = self.document_bounds[:-1]
        begins = begins[np.searchsorted(begins, places, side="right") - 1]
        found: NDArray[np.int64] = np.maximum(begins - wanted * length, 0)
        return found

    @cached_property
    def document_bounds(self) -> NDArray[np.int64]:
        """Where each document begins, and where the last one ends; [documents + 1] tokens.

        Raises:
            UsageError: the file does not say.
        """
        with _open(self.path) as file:
            if "documents" not in file:
                raise UsageError(
                    f"{self.path}: does not say where documents begin (no data set 'documents')",
                    hint="hpctrain data tokenize writes it; or set data.documents: joined",
                )
            return np.asarray(file["documents"][:], np.int64)

    def slice(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens ``start`` to ``stop`` of the whole row."""
        if self._start is None:
            found: NDArray[Any] = _tokens(self._hdf5(), self.path)[start:stop]
            return found
        size = self.dtype.itemsize
        try:
            data = read_bytes(self._descriptor, self._start + start * size, (stop - start) * size)
        except EOFError:
            raise OSError(f"{self.path}: became shorter while it was in use") from None
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        return np.frombuffer(data, self.dtype)

    def _hdf5(self) -> h5py.File:
        # An HDF5 handle must not be used on both sides of a fork.
        if self._file is None or self._pid != os.getpid():
            self._file = _open(self.path)
            self._pid = os.getpid()
        return self._file

    def verify(self) -> bool:
        """Read all and compare with the file's own checksum; True where it has none."""
        state = xxhash.xxh3_64()
        count = _COPY_BYTES // self.dtype.itemsize
        for start in range(0, self.n_tokens, count):
            state.update(self.slice(start, min(start + count, self.n_tokens)).tobytes())
        return self.fingerprint in ("", state.hexdigest())

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._file is not None and self._pid == os.getpid():
            self._file.close()
        self._file = None

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()


def describe(path: Path) -> dict[str, Any]:
    """What a token file says about itself, JSON-able.

    Raises:
        UsageError: not a token file.
    """
    with _open(path) as file:
        tokens = _tokens(file, path)
        return {
            "path": str(path),
            "tokens": int(tokens.shape[0]),
            "dtype": str(tokens.dtype),
            "vocab_size": int(tokens.attrs["vocab_size"]),
            "xxh3": str(tokens.attrs.get("xxh3", "")),
            "documents": max(0, file["documents"].shape[0] - 1) if "documents" in file else None,
            "tokenizer": _json(file, "tokenizer"),
            "sources": _json(file, "sources"),
        }


def _json(file: h5py.File, name: str) -> Any:
    return json.loads(file[name][()]) if name in file else None


def _open(path: Path) -> h5py.File:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        make = "make one: hpctrain data tokenize TEXT... -o tokens.h5"
        hint = make if isinstance(error, FileNotFoundError) else None
        raise UsageError(f"{path}: {error.strerror}", hint=hint) from error
    try:
        return open_hdf5(path)
    except OSError as error:
        raise UsageError(
            f"{path}: not a readable HDF5 file: {error}",
            hint="token files are made by: hpctrain data tokenize TEXT... -o tokens.h5",
        ) from error


def _tokens(file: h5py.File, path: Path) -> h5py.Dataset:
    tokens = file.get("tokens")
    fault = None
    if not isinstance(tokens, h5py.Dataset):
        fault = f"no data set 'tokens'; found {', '.join(file) or 'nothing'}"
    elif tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        fault = f"'tokens' is {tokens.dtype} {tokens.shape}; one row of integers belongs here"
    elif "vocab_size" not in tokens.attrs:
        fault = "'tokens' has no attribute vocab_size"
    if fault is not None:
        file.close()
        raise UsageError(f"{path}: {fault}")
    return tokens


class TokenWriter:
    """Writes a token file of a length that is not known before.

    The tokens are spooled beside the output and copied into it by :meth:`finish`, which
    renames it into place; without that nothing is left. Takes twice the tokens' bytes on disk
    while it works.

    Args:
        path: file to write; replaced by ``finish``.
        vocab_size: tokens are 0 … vocab_size - 1.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.n_tokens = 0
        self._documents = array("Q", [0])
        self._state = xxhash.xxh3_64()
        tail = f"{os.getpid()}.{secrets.token_hex(3)}"
        self._spool = path.with_name(f".{path.name}.spool-{tail}")
        self._aside = path.with_name(f".{path.name}.tmp-{tail}")
        self._stream = self._spool.open("w+b", buffering=1 << 20)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._stream.close()
        except OSError:  # the buffer of a full disk; the error was raised before
            pass
        finally:
            self._spool.unlink(missing_ok=True)
            self._aside.unlink(missing_ok=True)

    @property
    def n_documents(self) -> int:
        return len(self._documents) - 1

    def write(self, tokens: ArrayLike) -> None:
        """Append tokens of the present document.

        Raises:
            OSError: no space, quota, I/O error; names the file.
        """
        row = np.ascontiguousarray(tokens, self.dtype)
        try:
            self._stream.write(row.data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._spool)) from error
        self._state.update(row.data)
        self.n_tokens += row.size

    def end_document(self) -> None:
        self._documents.append(self.n_tokens)

    def finish(self, tokenizer: Mapping[str, Any], sources: Sequence[Mapping[str, Any]]) -> None:
        """Make the HDF5 file, durable and in place.

        Raises:
            OSError: it cannot be written; names the file.
        """
        try:
            self._stream.flush()
            start = self._create(tokenizer, sources)
            self._copy(start)
            self._aside.replace(self.path)
        except OSError as error:
            text = error.strerror or str(error)
            raise OSError(error.errno or 0, text, str(self.path)) from error

    def _create(self, tokenizer: Mapping[str, Any], sources: Sequence[Mapping[str, Any]]) -> int:
        documents = np.frombuffer(self._documents, np.uint64)
        texts = {
            "tokenizer": json.dumps(tokenizer).encode(),
            "sources": json.dumps(list(sources)).encode(),
        }

        def small(file: h5py.File) -> None:
            file.attrs["format"] = FORMAT
            file.attrs["format_version"] = FORMAT_VERSION
            file.create_dataset("documents", data=documents, track_times=False)
            for name, text in texts.items():
                file.create_dataset(name, data=np.bytes_(text), track_times=False)

        kind = h5py.h5t.py_create(self.dtype)
        tokens = Reserved(
            (self.n_tokens,),
            kind,
            {"vocab_size": self.vocab_size, "xxh3": self._state.hexdigest()},
        )
        offsets, image = build_hdf5(small, {"tokens": tokens})
        write_image(self._aside, image)
        return offsets["tokens"]

    def _copy(self, start: int) -> None:
        with self._aside.open("r+b") as target:
            target.seek(start)
            self._stream.seek(0)
            while block := self._stream.read(_COPY_BYTES):
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
