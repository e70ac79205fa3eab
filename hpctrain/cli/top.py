"""``hpctrain top``: all runs that are alive, on one screen."""

from __future__ import annotations

import time
from pathlib import Path

import click

from hpctrain.cli import output
from hpctrain.cli.options import json_option
from hpctrain.rundir import DEFAULT_ROOT

_SECONDS = 5.0


@click.command(short_help="Show all runs that are alive, and how they do.")
@click.argument("tree", metavar="[DIR]", default=DEFAULT_ROOT, type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Those that are over, too.")
@click.option("--once", is_flag=True, help="Show it once, also on a terminal.")
@json_option
def command(tree: Path, everything: bool, once: bool, as_json: bool) -> None:
    """A line a run in DIR and below it: status, step, loss, speed, time to go, restarts, why.

    On a terminal it is shown anew every few seconds until Ctrl-C.
    """
    from hpctrain.cli.overview import HEADERS, RIGHT, Row, runs_below

    while True:
        rows = [Row.of(run, tree) for run in runs_below(tree)]
        shown = [row for row in rows if everything or not row.view.is_final]
        if as_json:
            output.emit_json({"runs": [row.to_dict() for row in shown]})
            return
        live = output.is_terminal() and not once
        if live:
            click.clear()
        over = len(rows) - len(shown)
        output.line(
            f"{time.strftime('%H:%M:%S')}  {len(shown)} run{'s' * (len(shown) != 1)}"
            + (f", {over} over (--all shows them)" if over else "")
        )
        if shown:
            output.table(HEADERS, [row.cells() for row in shown], right=RIGHT)
        if not live:
            return
        time.sleep(_SECONDS)
