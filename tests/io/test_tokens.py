"""Token files: what plain h5py sees, what a sample is, what is refused."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.errors import UsageError
from hpctrain.io.encoders import BpeEncoder, ByteEncoder, from_description, load_encoder, train_bpe
from hpctrain.io.image import Reserved, build_hdf5, write_image
from hpctrain.io.tokens import TokenFile, TokenWriter, describe


def write(path: Path, rows: list[list[int]], vocab_size: int = 256) -> Path:
    with TokenWriter(path, vocab_size) as writer:
        for row in rows:
            writer.write(row)
            writer.end_document()
        writer.finish({"kind": "byte"}, [{"name": "x"}])
    return path


def foreign(path: Path, tokens: Any, **options: Any) -> Path:
    """A token file as another program would write it."""
    with h5py.File(path, "w") as file:
        file.create_dataset("tokens", data=tokens, **options).attrs["vocab_size"] = 1000
    return path


def test_plain_h5py_reads_a_token_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.h5", [[1, 2, 3], [], [250]])
    with h5py.File(path) as file:
        assert file["tokens"][...].tolist() == [1, 2, 3, 250]
        assert file["tokens"].dtype == np.uint8
        assert file["tokens"].attrs["vocab_size"] == 256
        assert file["documents"][...].tolist() == [0, 3, 3, 4]
    assert describe(path)["documents"] == 3
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_smallest_dtype(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    path = write(tmp_path / "t.h5", [[0, vocab_size - 1, 5]], vocab_size)
    file = TokenFile(path, 2)
    assert file.dtype == dtype
    assert file.read([0]).tolist() == [[0, vocab_size - 1, 5]]


@pytest.mark.parametrize(
    "options", [{}, {"chunks": (7,)}, {"compression": "gzip", "chunks": (16,)}]
)
def test_samples_overlap_by_one(tmp_path: Path, options: dict[str, Any]) -> None:
    tokens = np.arange(100, dtype=np.int32)
    file = TokenFile(foreign(tmp_path / "t.h5", tokens, **options), 9)
    assert (len(file), file.vocab_size) == (11, 1000)  # (100 - 1) // 9
    assert file[10].tolist() == list(range(90, 100))
    wanted = [3, 0, 10, 1, 3, 7]
    assert file.read(wanted).tolist() == [list(range(9 * i, 9 * i + 10)) for i in wanted]
    assert file.read([]).shape == (0, 10)
    for outside in (-1, 11):
        with pytest.raises(IndexError, match="samples 0 to 10"):
            file.read([outside])


def test_threads_and_a_forked_process_share_one_file(tmp_path: Path) -> None:
    tokens = np.arange(10_000, dtype=np.uint16)
    for options in ({}, {"chunks": (64,)}):
        file = TokenFile(foreign(tmp_path / f"{len(options)}.h5", tokens, **options), 10)
        with ThreadPoolExecutor(4) as pool:
            rows = list(pool.map(file.__getitem__, range(900)))
        assert [row[0] for row in rows] == list(range(0, 9000, 10))
        child = os.fork()
        if child == 0:
            good = file.read([5, 800])[:, 0].tolist() == [50, 8000]
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert file.read([1])[0, 0] == 10
        file.close()


def test_reading_takes_little_memory(tmp_path: Path) -> None:
    """A sparse file of 64 GiB of tokens: no machine here could hold them."""
    path = tmp_path / "t.h5"
    count = 1 << 34
    tokens = Reserved((count,), h5py.h5t.py_create(np.dtype("<u4")), {"vocab_size": 1 << 20})
    write_image(path, build_hdf5(lambda file: None, {"tokens": tokens})[1])
    file = TokenFile(path, 1024)
    assert len(file) == (1 << 24) - 1
    assert not file.read([0, (1 << 24) - 2]).any()


def test_checksum_of_the_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "t.h5", [[7, 8, 9, 10]])
    assert TokenFile(path, 1).verify()
    data = path.read_bytes()
    assert data.count(bytes([7, 8, 9, 10])) == 1
    path.write_bytes(data.replace(bytes([7, 8, 9, 10]), bytes([7, 8, 8, 10])))
    assert not TokenFile(path, 1).verify()


def test_faulty_files_are_named(tmp_path: Path) -> None:
    def refused(path: Path, message: str, length: int = 1) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            TokenFile(path, length)
        assert caught.value.message.startswith(str(path))

    refused(tmp_path / "none.h5", "No such file")
    (tmp_path / "text.h5").write_text("hello")
    refused(tmp_path / "text.h5", "not a readable HDF5 file")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["weights"] = [1]
    refused(tmp_path / "other.h5", "no data set 'tokens'; found weights")
    refused(foreign(tmp_path / "real.h5", np.zeros(3)), "one row of integers")
    refused(foreign(tmp_path / "two.h5", np.zeros((3, 3), int)), "one row of integers")
    short = write(tmp_path / "short.h5", [[1, 2, 3]])
    refused(short, "3 tokens are less than one sample of 3", 3)
    with short.open("r+b") as stream:
        stream.truncate(short.stat().st_size - 2)
    refused(short, "truncated|missing")


def test_nothing_is_left_where_writing_stops(tmp_path: Path) -> None:
    def stop() -> None:
        with TokenWriter(tmp_path / "t.h5", 256) as writer:
            writer.write([1, 2])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert list(tmp_path.iterdir()) == []


def test_bytes_round_trip() -> None:
    encoder = ByteEncoder()
    text = "Grüße, 世界 🌍\n"
    assert encoder.encode(text).tolist() == list(text.encode("utf-8"))
    assert encoder.decode(encoder.encode(text)) == text
    with pytest.raises(UsageError, match="NUL"):
        encoder.encode("a\0b")
    with pytest.raises(UsageError, match="surrogate"):
        encoder.encode("\ud800")


def test_bpe_round_trips_and_keeps_special_tokens_out_of_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = "the cat sat on the mat and the cat saw the rat\n" * 20 + "Grüße 🌍 <|endoftext|>"
    encoder = train_bpe([text], 300)
    assert encoder.vocab_size <= 300
    tokens = encoder.encode(text)
    assert encoder.decode(tokens) == text
    assert encoder.end not in tokens.tolist()
    assert len(tokens) < len(text.encode()) / 2
    again = from_description(encoder.describe())
    assert again.encode(text).tolist() == tokens.tolist()
    assert isinstance(again, BpeEncoder) and again.end == encoder.end


def test_truncation_in_a_tokenizer_file_does_not_cut_the_corpus(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    text = "the cat sat on the mat\n" * 50
    trained = train_bpe([text], 260)
    raw = tokenizers.Tokenizer.from_str(__import__("json").dumps(trained.describe()["tokenizer"]))
    raw.enable_truncation(8)
    raw.enable_padding(length=4096)
    raw.save(str(tmp_path / "tokenizer.json"))
    loaded = load_encoder(tmp_path / "tokenizer.json")
    assert loaded.encode(text).tolist() == trained.encode(text).tolist()
    with pytest.raises(UsageError, match="no token <stop>"):
        load_encoder(tmp_path / "tokenizer.json", "<stop>")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match=r"bad\.json: not a tokenizer\.json"):
        load_encoder(tmp_path / "bad.json")
