"""Text to token numbers: bytes, or a BPE tokenizer of the ``tokenizers`` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")


class Encoder(Protocol):
    """Turns text into tokens.

    Attributes:
        vocab_size: tokens are 0 … vocab_size - 1.
        end: token that ends every document.
    """

    vocab_size: int
    end: int

    def encode(self, text: str) -> NDArray[Any]: ...
    def decode(self, tokens: NDArray[Any]) -> str: ...
    def describe(self) -> dict[str, Any]:
        """JSON-able; what :func:`from_description` needs to make it again."""


class ByteEncoder:
    """A token is a byte of UTF-8; 0, which no text holds, ends a document."""

    vocab_size = 256
    end = 0

    def encode(self, text: str) -> NDArray[Any]:
        """Raises UsageError where the text holds NUL, or half of a surrogate pair."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(_surrogate(text, error)) from None
        if b"\0" in data:
            raise UsageError("found a NUL character, which stands for the end of a document")
        return np.frombuffer(data, np.uint8)

    def decode(self, tokens: NDArray[Any]) -> str:
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")

    def describe(self) -> dict[str, Any]:
        return {"kind": "byte", "vocab_size": self.vocab_size, "end": self.end}


def _surrogate(text: str, error: UnicodeEncodeError) -> str:
    return f"half of a surrogate pair, {text[error.start]!a}, is not text"


class BpeEncoder:
    """A tokenizer of the ``tokenizers`` library.

    Args:
        tokenizer: loaded or trained.
        end: its token that ends a document; the usual names are tried where it is None.

    Raises:
        UsageError: the tokenizer has no such token.
    """

    def __init__(self, tokenizer: Tokenizer, end: str | None = None) -> None:
        self._tokenizer = tokenizer
        # Files often carry the limits of the model they came with.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Text that spells a special token is text.
        tokenizer.encode_special_tokens = True
        # Numbers may have holes: the model's embedding goes up to the highest one.
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        candidates = _KNOWN_ENDS if end is None else (end,)
        known = {token: tokenizer.token_to_id(token) for token in candidates}
        found = [(token, number) for token, number in known.items() if number is not None]
        if not found:
            raise UsageError(
                f"the tokenizer has no token {' or '.join(candidates)} to end a document with",
                hint="name one of its tokens: --end-of-text TOKEN",
            )
        self.end_text, self.end = found[0]

    def encode(self, text: str) -> NDArray[Any]:
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False)
        except UnicodeEncodeError as error:
            raise UsageError(_surrogate(text, error)) from None
        return np.array(found.ids, np.uint32)

    def decode(self, tokens: NDArray[Any]) -> str:
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "tokenizers",
            "vocab_size": self.vocab_size,
            "end": self.end,
            "end_text": self.end_text,
            "tokenizer": json.loads(self._tokenizer.to_str()),
        }


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "BPE needs the tokenizers library, which is not installed",
            hint="pip install 'hpctrain[tokenizers]'",
        ) from None
    return tokenizers


def load_encoder(path: Path, end: str | None = None) -> Encoder:
    """The tokenizer of a ``tokenizer.json``, or the one that a token file was made with.

    Raises:
        UsageError: missing, neither, or the library is not installed.
    """
    from hpctrain.io.tokens import describe

    try:
        with path.open("rb") as stream:
            start = stream.read(8)
            is_hdf5 = start == b"\x89HDF\r\n\x1a\n"
            text = b"" if is_hdf5 else start + stream.read()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if is_hdf5:
        found = describe(path)["tokenizer"]
        if found is None:
            raise UsageError(f"{path}: the token file does not say how it was made")
        return from_description(found)
    library = _library()
    try:
        tokenizer = library.Tokenizer.from_str(text.decode())
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"{path}: not a tokenizer.json: {error}") from error
    return BpeEncoder(tokenizer, end)


def from_description(found: Mapping[str, Any]) -> Encoder:
    """The encoder whose ``describe()`` is given.

    Raises:
        UsageError: of a kind that is not known here, or the library is not installed.
    """
    if found.get("kind") == "byte":
        return ByteEncoder()
    if found.get("kind") == "tokenizers":
        tokenizer = _library().Tokenizer.from_str(json.dumps(found["tokenizer"]))
        return BpeEncoder(tokenizer, found["end_text"])
    raise UsageError(f"tokenizer of kind {found.get('kind')!r}; byte and tokenizers are known")


def train_bpe(texts: Iterable[str], vocab_size: int, end: str | None = None) -> BpeEncoder:
    """A byte-level BPE tokenizer (as GPT-2's) of ``vocab_size`` tokens, trained on the texts.

    Raises:
        UsageError: fewer than 257 tokens (256 bytes and the end), or no library.
    """
    if vocab_size < 257:
        raise UsageError(
            f"--train-bpe {vocab_size}: at least 257 tokens, the 256 bytes and the end of a text"
        )
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end or END_OF_TEXT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return BpeEncoder(tokenizer, end)
