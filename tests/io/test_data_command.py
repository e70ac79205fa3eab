"""``hpctrain data``: as a person types it, in a process of its own where that matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

HPCTRAIN = Path(sys.executable).with_name("hpctrain")
ENGLISH = Path(__file__).parents[2] / "docs" / "examples" / "english_text.py"


def run(folder: Path, *arguments: str, text: bytes = b"") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(HPCTRAIN), "data", *arguments], cwd=folder, input=text, capture_output=True,
        check=False, timeout=60,
    )  # fmt: skip
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err, err
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def tokens(path: Path) -> bytes:
    with h5py.File(path) as file:
        return bytes(file["tokens"][...])


def test_text_and_json_lines_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Grüße\n")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "one"}\n\n{"text": ""}\n{"n": 1, "text": "tw\\u00f6"}\n'
    )
    done = run(tmp_path, "tokenize", "a.txt", "b.jsonl", "-o", "t.h5", "--json")
    assert done.returncode == 0
    assert tokens(tmp_path / "t.h5") == b"Gr\xc3\xbc\xc3\x9fe\n\0one\0tw\xc3\xb6\0"
    answer = json.loads(done.stdout)
    assert (answer["tokens"], answer["documents"], answer["vocab_size"]) == (18, 3, 256)
    with h5py.File(tmp_path / "t.h5") as file:
        assert file["documents"][...].tolist() == [0, 9, 13, 18]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.jsonl", "t.h5"]


def test_blocks_are_cut_without_loss(tmp_path: Path) -> None:
    """Longer than three blocks, with characters across their borders and one endless line."""
    text = ("Grüße 🌍 " * 9 + "\n") * 20_000 + "x" * 2_500_000
    (tmp_path / "a.txt").write_text(text)
    assert run(tmp_path, "tokenize", "a.txt", "-o", "t.h5").returncode == 0
    assert tokens(tmp_path / "t.h5") == text.encode() + b"\0"


def test_standard_input(tmp_path: Path) -> None:
    done = run(tmp_path, "tokenize", "-", "--format", "jsonl", "--field", "body", "-o", "t.h5",
               text=b'{"body": "hi"}\n')  # fmt: skip
    assert done.returncode == 0
    assert tokens(tmp_path / "t.h5") == b"hi\0"


def test_inspect_verifies_and_decodes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello there")
    run(tmp_path, "tokenize", "a.txt", "-o", "t.h5")
    answer = json.loads(
        run(tmp_path, "inspect", "t.h5", "--verify", "--sample", "5", "--json").stdout
    )
    assert answer["sample"] == "hello"
    assert answer["tokenizer"] == {"kind": "byte", "vocab_size": 256, "end": 0}
    assert answer["sources"][0]["name"] == "a.txt" and answer["sources"][0]["bytes"] == 11
    data = (tmp_path / "t.h5").read_bytes().replace(b"hello there", b"hello_there")
    (tmp_path / "t.h5").write_bytes(data)
    done = run(tmp_path, "inspect", "t.h5", "--verify")
    assert done.returncode == 2 and "do not match the file's checksum" in done.stderr


def test_bpe_trained_here_and_used_again(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    subprocess.run([sys.executable, str(ENGLISH), "english.txt"], cwd=tmp_path, check=True)
    done = run(tmp_path, "tokenize", "english.txt", "-o", "train.h5", "--train-bpe", "700",
               "--save-tokenizer", "tokenizer.json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    for number, tokenizer in enumerate(("train.h5", "tokenizer.json")):
        output = f"again{number}.h5"
        run(tmp_path, "tokenize", "english.txt", "-o", output, "--tokenizer", tokenizer)
        assert tokens(tmp_path / output) == tokens(tmp_path / "train.h5")
    answer = json.loads(run(tmp_path, "inspect", "train.h5", "--sample", "9" * 9, "--json").stdout)
    text = (tmp_path / "english.txt").read_text()
    assert answer["sample"] == text + "<|endoftext|>"
    assert answer["vocab_size"] == 700
    # Documented in docs/data.md: the vocabulary is worth about two and a half bytes a token.
    assert 2 < len(text.encode()) / answer["tokens"] < 4


def test_english_text_is_large_enough_for_the_quickstart(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ENGLISH), "e.txt"], cwd=tmp_path, check=True)
    text = (tmp_path / "e.txt").read_text()
    assert 400_000 < len(text) < 1_500_000
    assert 'The "with" statement' in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"txt": 1}\n', "a.jsonl:2: no key 'text'; found 'txt'"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1: 'text' is 5; text belongs here"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: found a list; a JSON object a line"),
        ("a.jsonl", b'{"text": "x"\n', "a.jsonl:1: not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl:1: not UTF-8: invalid start byte at byte 10"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1: half of a surrogate pair, '\\ud800'"),
        ("a.jsonl", b'{"text": "a\\u0000"}\n', "a.jsonl:1: found a NUL character"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: not JSON"),
        ("a.txt", b"abc\xff", "a.txt: not UTF-8: invalid start byte at byte 3"),
        ("a.txt", b"abc\xc3", "a.txt: not UTF-8: unexpected end of data at byte 3"),
        ("a.txt", b"x" * (1 << 20) + b"\xc3\n", "invalid continuation byte at byte 1048576"),
        ("a.txt", b"x" * ((1 << 20) - 1) + b"\xc3\n", "continuation byte at byte 1048575"),
        ("a.txt", b"", "no text in a.txt"),
        ("a.jsonl", b"\n\n", "no text in a.jsonl"),
    ],
)  # fmt: skip
def test_bad_inputs(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    done = run(tmp_path, "tokenize", name, "-o", "t.h5")
    assert done.returncode == 2
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.txt", "-o", "t.h5"), "none.txt: no such file"),
        ((".", "-o", "t.h5"), ".: is a directory"),
        (("a.txt", "-o", "a.txt"), "a.txt exists"),
        (("a.txt", "-o", "no/t.h5"), "there is no directory no"),
        (("a.txt", "-o", "t.h5", "--tokenizer", "none.json"), "none.json: No such file"),
        (("a.txt", "-o", "t.h5", "--end-of-text", "<e>"), "bytes end a document with 0"),
        (("a.txt", "-o", "t.h5", "--save-tokenizer", "x.json"), "bytes need no tokenizer.json"),
        (("a.txt", "-o", "t.h5", "--train-bpe", "100"), "at least 257 tokens"),
        (("a.txt", "-o", "t.h5", "--train-bpe", "300", "--tokenizer", "a.txt"), "give one"),
        (("-", "-o", "t.h5", "--train-bpe", "300"), "standard input cannot be"),
        ((), "Missing argument"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    done = run(tmp_path, "tokenize", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_without_the_tokenizers_library(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "tokenizers.py").write_text("raise ImportError('hidden by the test')")
    done = subprocess.run(
        [str(HPCTRAIN), "data", "tokenize", "a.txt", "-o", "t.h5", "--train-bpe", "300"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": "hidden"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip install 'hpctrain[tokenizers]'" in done.stderr


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk; it needs no root."""
    (tmp_path / "a.txt").write_text("words of text\n" * 200_000)
    limited = "import resource, signal, os, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); \
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", limited, str(HPCTRAIN), "data", "tokenize", "a.txt", "-o", "t.h5"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr == "hpctrain: error: t.h5: File too large; nothing was written\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
