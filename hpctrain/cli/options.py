"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from hpctrain.rundir import DEFAULT_ROOT, RunDir

Command = Callable[..., Any]


def _complete_run(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    parent = Path(ctx.params.get("runs") or DEFAULT_ROOT)
    found = [run.id for run in reversed(RunDir.all(parent)) if run.id.startswith(incomplete)]
    return [CompletionItem(run_id) for run_id in found] or [CompletionItem(incomplete, type="dir")]


def runs_option(command: Command) -> Command:
    """``--runs DIR``: where run directories lie."""
    return click.option(
        "--runs",
        metavar="DIR",
        default=DEFAULT_ROOT,
        show_default=True,
        type=click.Path(path_type=Path),
        help="Directory of the run directories.",
    )(command)


def run_argument(required: bool = False) -> Callable[[Command], Command]:
    """``RUN``: a path, an id, the unique start of one; the newest where it may be left out."""

    def decorate(command: Command) -> Command:
        metavar = "RUN" if required else "[RUN]"
        argument = click.argument(
            "name", metavar=metavar, required=required, shell_complete=_complete_run
        )
        return runs_option(argument(command))

    return decorate


def json_option(command: Command) -> Command:
    """``--json``: one JSON object on stdout in place of text."""
    return click.option(
        "--json", "as_json", is_flag=True, help="One JSON object on stdout, for programs."
    )(command)


def job_argument(required: bool = True) -> Callable[[Command], Command]:
    """``JOB``: a job file; whether it exists is for the reader to say."""
    metavar = "JOB" if required else "[JOB]"
    return click.argument("job", metavar=metavar, required=required, type=click.Path())


def set_option(command: Command) -> Command:
    """``--set a.b=c``: replaces a key of the job file; may be repeated."""
    return click.option(
        "--set",
        "overrides",
        metavar="KEY=VALUE",
        multiple=True,
        help="Replace a key of the job file, for example --set train.lr=1e-3; may be repeated.",
    )(command)


def find_run(name: str | None, runs: Path) -> RunDir:
    """The run that the RUN argument means."""
    return RunDir.find(name, runs)
