"""``hpctrain history``: every run of a directory tree, what became of it and what it cost."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli import output
from hpctrain.cli.options import json_option
from hpctrain.rundir import DEFAULT_ROOT


@click.command(short_help="List all runs of a directory tree.")
@click.argument("tree", metavar="[DIR]", default=DEFAULT_ROOT, type=click.Path(path_type=Path))
@json_option
def command(tree: Path, as_json: bool) -> None:
    """A line a run in DIR and below it, oldest first: when, how long, steps, restarts, losses.

    `lost` is the time of work that had to be done again after restarts.
    """
    from hpctrain.cli.overview import HISTORY, HISTORY_RIGHT, Row, runs_below

    rows = [Row.of(run, tree) for run in runs_below(tree)]
    if as_json:
        output.emit_json({"runs": [row.to_dict() for row in rows]})
        return
    if not rows:
        output.note(f"no runs in {tree} and below")
        return
    output.table(HISTORY, [row.history() for row in rows], right=HISTORY_RIGHT)
