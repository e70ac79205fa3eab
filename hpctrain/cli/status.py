"""``hpctrain status``: where a run stands, from Slurm where it knows, else from its own files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli import output
from hpctrain.cli.options import find_run, json_option, run_argument

if TYPE_CHECKING:
    from hpctrain.cli.view import RunView

_WATCH_SECONDS = 2.0


@click.command(short_help="Show where a run stands, and why.")
@run_argument()
@click.option("--watch", is_flag=True, help="Show it anew until the run is over.")
@json_option
def command(name: str | None, runs: Path, watch: bool, as_json: bool) -> None:
    """Show state, step, loss, speed, last durable checkpoint, and why a run waits or failed.

    RUN is a path, an id or its unique start; without it the newest run. Works without
    accounting and after Slurm has forgotten the job. Exits 0 whatever the run's state is;
    --json has its exit_code.
    """
    from hpctrain.cli.view import look

    run = find_run(name, runs)
    view = look(run)
    if not watch:
        _show(view, as_json)
        return
    if output.is_terminal() and not as_json:
        _watch_terminal(view)
    else:
        _watch_plain(view, as_json)


def _show(view: RunView, as_json: bool) -> None:
    from hpctrain.cli import text

    if as_json:
        output.emit_json(view.to_dict())
        return
    output.pairs(text.rows(view))


def _watch_plain(view: RunView, as_json: bool) -> None:
    from hpctrain.cli import text
    from hpctrain.cli.view import look

    said = None
    while True:
        words = f"{view.status}  {text.progress(view)}"
        if words != said:
            if as_json:
                output.emit_json(view.to_dict(), lines=True)  # one object a change
            else:
                output.line(words)
            said = words
        if view.is_final:
            break
        time.sleep(_WATCH_SECONDS)
        view = look(view.run)
    if not as_json:
        _show(view, as_json)


def _watch_terminal(view: RunView) -> None:
    from rich.live import Live
    from rich.text import Text

    from hpctrain.cli import text
    from hpctrain.cli.view import look

    def drawn(view: RunView) -> Text:
        width = max(len(key) for key, _ in text.rows(view))
        lines = [f"{key:<{width}}  {value}" for key, value in text.rows(view)]
        return Text.from_ansi("\n".join(lines))

    with Live(drawn(view), refresh_per_second=4) as live:
        while not view.is_final:
            time.sleep(_WATCH_SECONDS)
            view = look(view.run)
            live.update(drawn(view))
