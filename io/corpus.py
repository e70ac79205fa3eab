"""Text files and JSON lines to a token file, streaming.

A text file is one document; a line of a JSON-lines file is one. Each document is followed by
the encoder's end token.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import xxhash

from hpctrain.errors import UsageError
from hpctrain.io.encoders import Encoder
from hpctrain.io.tokens import TokenWriter

Format = Literal["auto", "text", "jsonl"]
STDIN = Path("-")
_BLOCK_BYTES = 1 << 20
_JSON_SUFFIXES = {".jsonl", ".ndjson"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a document.

    Attributes:
        text: at most about 1 MiB of a text file, cut at the end of a line; a whole document
            of a JSON-lines file.
        where: file, with the line of a JSON-lines file, for messages.
        last: whether the document ends here.
    """

    text: str
    where: str
    last: bool


@dataclass(frozen=True, slots=True)
class TokenizeReport:
    """What was made: file, tokens, documents, vocabulary, bytes of text read."""

    path: Path
    tokens: int
    documents: int
    vocab_size: int
    text_bytes: int


class Source:
    """One input; ``bytes``, ``xxh3`` and ``documents`` are known once it was read.

    Args:
        path: a file, or ``-`` for standard input.
        kind: text or JSON lines; auto goes by the suffix (.jsonl, .ndjson).
        field: key of the text in a JSON line.
    """

    def __init__(self, path: Path, kind: Format, field: str) -> None:
        self.path = path
        self.jsonl = kind == "jsonl" or (kind == "auto" and path.suffix in _JSON_SUFFIXES)
        self.field = field
        self.name = "<stdin>" if path == STDIN else str(path)
        self.bytes = 0
        self.documents = 0
        self._state = xxhash.xxh3_64()

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.bytes,
            "xxh3": self._state.hexdigest(),
            "documents": self.documents,
        }

    def pieces(self) -> Iterator[Piece]:
        """The text, a piece at a time.

        Raises:
            UsageError: missing, unreadable, not UTF-8, not JSON lines with the field; names
                file and line.
        """
        self.bytes = self.documents = 0
        self._state = xxhash.xxh3_64()
        try:
            if self.path == STDIN:
                yield from self._read(sys.stdin.buffer)
            else:
                with self.path.open("rb") as stream:
                    yield from self._read(stream)
        except OSError as error:
            if error.filename not in (None, str(self.path)):
                raise  # of the output
            raise UsageError(f"{self.name}: {error.strerror}") from error

    def _read(self, stream: IO[bytes]) -> Iterator[Piece]:
        for piece in self._json_lines(stream) if self.jsonl else self._text(stream):
            if piece.last:
                self.documents += 1
            yield piece

    def _count(self, data: bytes) -> None:
        self.bytes += len(data)
        self._state.update(data)

    def _text(self, stream: IO[bytes]) -> Iterator[Piece]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        held = ""
        while True:
            block = stream.read(_BLOCK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                held += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = self.bytes - pending + error.start
                raise UsageError(
                    f"{self.name}: not UTF-8: {error.reason} at byte {at}",
                    hint="convert it, for example: iconv -f latin1 -t utf-8; decompress a "
                    "compressed file into standard input: zcat FILE.gz | hpctrain data tokenize -",
                ) from None
            self._count(block)
            if not block:
                break
            # Cut after a line, so that a BPE tokenizer sees whole words.
            cut = held.rfind("\n") + 1
            if cut:
                yield Piece(held[:cut], self.name, last=False)
                held = held[cut:]
        if self.bytes:
            yield Piece(held, self.name, last=True)

    def _json_lines(self, stream: IO[bytes]) -> Iterator[Piece]:
        for number, line in enumerate(stream, 1):
            self._count(line)
            if line.strip():
                where = f"{self.name}:{number}"
                text = self._field_of(line, where)
                if text:
                    yield Piece(text, where, last=True)

    def _field_of(self, line: bytes, where: str) -> str:
        try:
            data = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise UsageError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON: {error}") from None
        if not isinstance(data, dict):
            raise UsageError(f"{where}: found a {type(data).__name__}; a JSON object a line")
        if self.field not in data:
            keys = ", ".join(map(repr, list(data)[:8])) or "none"
            raise UsageError(
                f"{where}: no key {self.field!r}; found {keys}",
                hint="name the key that holds the text: --field KEY",
            )
        text = data[self.field]
        if not isinstance(text, str):
            raise UsageError(
                f"{where}: {self.field!r} is {json.dumps(text)[:40]}; text belongs here"
            )
        return text


def open_sources(inputs: Sequence[Path], kind: Format, field: str) -> list[Source]:
    """Raises UsageError where an input is missing or is a directory."""
    sources = [Source(path, kind, field) for path in inputs]
    for source in sources:
        if source.path != STDIN and not source.path.exists():
            raise UsageError(f"{source.name}: no such file")
        if source.path.is_dir():
            raise UsageError(f"{source.name}: is a directory; give the files in it")
    return sources


def tokenize(
    sources: Sequence[Source],
    output: Path,
    encoder: Encoder,
    progress: Callable[[int], None] | None = None,
) -> TokenizeReport:
    """Write the tokens of all sources to ``output``, which appears only when it is whole.

    Args:
        sources: in the order in which their documents shall lie.
        output: HDF5 file; replaced where it exists.
        encoder: text to tokens.
        progress: called now and then with the bytes of text read so far.

    Raises:
        UsageError: an input cannot be used, there is no text in any, or the output cannot be
            written (no space, quota, permission).
    """
    try:
        return _tokenize(sources, output, encoder, progress or (lambda done: None))
    except OSError as error:
        raise UsageError(f"{output}: {error.strerror or error}; nothing was written") from error


def _tokenize(
    sources: Sequence[Source], output: Path, encoder: Encoder, progress: Callable[[int], None]
) -> TokenizeReport:
    end = np.array([encoder.end])
    done = 0
    with TokenWriter(output, encoder.vocab_size) as writer:
        for source in sources:
            for piece in source.pieces():
                try:
                    writer.write(encoder.encode(piece.text))
                except UsageError as error:
                    raise UsageError(f"{piece.where}: {error.message}", hint=error.hint) from None
                if piece.last:
                    writer.write(end)
                    writer.end_document()
                progress(done + source.bytes)
            done += source.bytes
        if not writer.n_documents:
            raise UsageError(f"no text in {', '.join(source.name for source in sources)}")
        writer.finish(encoder.describe(), [source.describe() for source in sources])
        return TokenizeReport(output, writer.n_tokens, writer.n_documents, encoder.vocab_size, done)
