"""All that commands print: text and tables on stdout, messages on stderr, JSON on request.

Rich is imported where a terminal is written to or a table drawn, and nowhere else. Colour
follows the terminal and NO_COLOR; what is not a terminal gets plain lines.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from hpctrain.records import SCHEMA_VERSION, finite

_STYLES = {
    "finished": "green",
    "running": "green",
    "ok": "green",
    "failed": "red",
    "missing": "red",
    "cancelled": "yellow",
    "stopped": "yellow",
    "warning": "yellow",
}


def line(text: str = "") -> None:
    """One line of data on stdout."""
    click.echo(text)


def note(text: str) -> None:
    """A message for the person, on stderr."""
    click.echo(f"hpctrain: {text}", err=True)


def warn(text: str) -> None:
    """A warning, on stderr."""
    click.echo(f"hpctrain: warning: {text}", err=True)


def emit_json(data: Mapping[str, Any], *, lines: bool = False) -> None:
    """A command's ``--json`` answer: one object, its schema version first.

    Args:
        data: the rest of the object.
        lines: on one line, for commands that answer more than once.
    """
    document = {"schema_version": SCHEMA_VERSION, **finite(dict(data))}
    indent = None if lines else 2
    click.echo(json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=False))


def styled(word: str, width: int = 0) -> str:
    """A status word, padded to ``width``, in its colour where colours are shown."""
    style = _STYLES.get(word)
    padded = f"{word:<{width}}"
    return padded if style is None or not colours() else click.style(padded, fg=style)


def is_terminal() -> bool:
    """Whether stdout is a person's terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def colours() -> bool:
    """Whether stdout shows colours."""
    return is_terminal() and not os.environ.get("NO_COLOR")


def pairs(rows: Iterable[tuple[str, str]], indent: str = "") -> None:
    """``key  value`` lines with the values in one column; further lines of a value below it."""
    listed = list(rows)
    width = max((len(key) for key, _ in listed), default=0)
    for key, value in listed:
        first, *rest = value.splitlines() or [""]
        line(f"{indent}{key:<{width}}  {first}".rstrip())
        for further in rest:
            line(f"{indent}{'':<{width}}  {further}".rstrip())


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
    """A table on stdout; cut to the terminal's width only where there is a terminal.

    Args:
        headers: one a column.
        rows: cells, as text.
        right: numbers of the columns that are aligned right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="bold")
    for number, header in enumerate(headers):
        drawn.add_column(header, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    with console.capture() as captured:
        console.print(drawn)
    for text in captured.get().splitlines():
        line(text.rstrip())
