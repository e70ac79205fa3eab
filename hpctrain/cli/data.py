"""``hpctrain data``: token files from text, and what is in them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from hpctrain.cli import output
from hpctrain.cli.options import json_option

if TYPE_CHECKING:
    from hpctrain.io.corpus import Source
    from hpctrain.io.encoders import Encoder


@click.group(short_help="Make token files and look into them.")
def command() -> None:
    """Make token files and look into them."""


@command.command()
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True, type=click.Path())
@click.option(
    "-o",
    "--output",
    "target",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path),
    help="HDF5 token file to write.",
)
@click.option(
    "--tokenizer",
    metavar="byte|FILE",
    default="byte",
    show_default=True,
    help="byte (a token is a byte of UTF-8), a tokenizer.json, or a token file whose tokenizer "
    "is used again.",
)
@click.option(
    "--train-bpe",
    metavar="VOCAB",
    type=int,
    help="Train a byte-level BPE tokenizer of VOCAB tokens on the inputs, and use it.",
)
@click.option(
    "--save-tokenizer",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write the BPE tokenizer as a tokenizer.json.",
)
@click.option(
    "--end-of-text",
    metavar="TOKEN",
    help="BPE token that ends a document. [<|endoftext|>, </s> and the like, where there is one]",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["auto", "text", "jsonl"]),
    default="auto",
    show_default=True,
    help="auto goes by the suffix: .jsonl and .ndjson are JSON lines, all else is text.",
)
@click.option(
    "--field",
    metavar="KEY",
    default="text",
    show_default=True,
    help="Key of the text in a JSON line.",
)
@click.option("--force", is_flag=True, help="Replace FILE where it exists.")
@json_option
def tokenize(
    inputs: tuple[str, ...],
    target: Path,
    tokenizer: str,
    train_bpe: int | None,
    save_tokenizer: Path | None,
    end_of_text: str | None,
    kind: Literal["auto", "text", "jsonl"],
    field: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write the tokens of text files or JSON lines to an HDF5 token file.

    A text file is one document, a JSON line is one; - reads standard input. FILE appears when
    it is whole, and not before.

    \b
      hpctrain data tokenize book.txt -o book.h5
      hpctrain data tokenize *.jsonl -o corpus.h5 --train-bpe 32000
      zcat web.jsonl.gz | hpctrain data tokenize - --format jsonl -o web.h5
    """
    from hpctrain.errors import UsageError
    from hpctrain.io import corpus
    from hpctrain.units import format_bytes, format_count

    if target.exists() and not force:
        raise UsageError(f"{target} exists", hint="replace it with --force, or name another")
    if not target.parent.is_dir():
        raise UsageError(f"{target}: there is no directory {target.parent}")
    sources = corpus.open_sources([Path(name) for name in inputs], kind, field)
    encoder = _encoder(sources, tokenizer, train_bpe, end_of_text)
    if save_tokenizer is not None:
        _save(encoder, save_tokenizer)
    with _progress("tokenizing", sources) as advance:
        report = corpus.tokenize(sources, target, encoder, advance)
    if as_json:
        output.emit_json(
            {
                "path": str(report.path),
                "tokens": report.tokens,
                "documents": report.documents,
                "vocab_size": report.vocab_size,
                "text_bytes": report.text_bytes,
            }
        )
        return
    output.line(
        f"wrote {report.path}: {format_count(report.tokens)} tokens of {report.documents} "
        f"document{'s' if report.documents > 1 else ''}, vocabulary {report.vocab_size}, "
        f"from {format_bytes(report.text_bytes)} of input"
    )
    output.line("in the job file:")
    output.line(f"  data: {{path: {report.path}, sequence_length: 256}}")
    output.line(f"  model.vocab_size: {report.vocab_size} or more")


def _encoder(
    sources: Sequence[Source], tokenizer: str, train_bpe: int | None, end: str | None
) -> Encoder:
    from hpctrain.errors import UsageError
    from hpctrain.io import corpus, encoders

    if train_bpe is not None:
        if tokenizer != "byte":
            raise UsageError("--train-bpe makes a tokenizer and --tokenizer names one: give one")
        if any(source.path == corpus.STDIN for source in sources):
            raise UsageError("--train-bpe reads the inputs twice, which standard input cannot be")

        def texts(advance: Callable[[int], None]) -> Iterator[str]:
            done = 0
            for source in sources:
                for piece in source.pieces():
                    yield piece.text
                    advance(done + source.bytes)
                done += source.bytes

        with _progress("training BPE", sources) as advance:
            return encoders.train_bpe(texts(advance), train_bpe, end)
    if tokenizer == "byte":
        if end is not None:
            raise UsageError("--end-of-text names a BPE token; bytes end a document with 0")
        return encoders.ByteEncoder()
    return encoders.load_encoder(Path(tokenizer), end)


def _save(encoder: Encoder, path: Path) -> None:
    import json

    from hpctrain.errors import UsageError

    found = encoder.describe().get("tokenizer")
    if found is None:
        raise UsageError("--save-tokenizer: bytes need no tokenizer.json")
    path.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    output.note(f"wrote {path}")


@contextmanager
def _progress(what: str, sources: Sequence[Source]) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal; bytes of text done."""
    from hpctrain.io.corpus import STDIN

    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    sizes = [source.path.stat().st_size for source in sources if source.path != STDIN]
    total = sum(sizes) if len(sizes) == len(sources) else None
    columns: tuple[Any, ...] = (
        "{task.description}", BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@command.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read all tokens and compare their checksum.")
@click.option("--sample", metavar="N", type=int, help="Also show the first N tokens as text.")
@json_option
def inspect(path: Path, verify: bool, sample: int | None, as_json: bool) -> None:
    """Show what a token file holds and how it was made."""
    from hpctrain.errors import UsageError
    from hpctrain.io.encoders import from_description
    from hpctrain.io.tokens import TokenFile, describe
    from hpctrain.units import format_count

    found = describe(path)
    if verify and not TokenFile(path, 1).verify():
        raise UsageError(f"{path}: the tokens do not match the file's checksum; make it anew")
    made = found["tokenizer"] or {}
    if sample is not None:
        if not made:
            raise UsageError(f"{path}: the file does not say how its tokens are decoded")
        count = min(sample, found["tokens"])
        found["sample"] = from_description(made).decode(TokenFile(path, 1).slice(0, count))
    if as_json:
        output.emit_json(found | {"verified": verify})
        return
    sources = found["sources"] or []
    output.pairs(
        [
            ("file", str(path)),
            ("tokens", f"{found['tokens']} ({format_count(found['tokens'])})"),
            ("stored as", found["dtype"]),
            ("vocabulary", str(found["vocab_size"])),
            ("documents", str(found["documents"] if found["documents"] is not None else "unknown")),
            ("tokenizer", made.get("kind", "unknown")),
            ("checksum", (found["xxh3"] or "none") + (", matches" if verify else "")),
            ("sources", "\n".join(f"{s['name']} ({s['bytes']} bytes)" for s in sources)),
        ]
    )
    if sample is not None:
        output.line()
        output.line(found["sample"])
