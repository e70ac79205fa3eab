"""``hpctrain cancel``: stop a run, with a last checkpoint or at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli import output
from hpctrain.cli.options import find_run, run_argument
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.cli.view import RunView


@click.command(short_help="Stop a run.")
@run_argument(required=True)
@click.option("--now", is_flag=True, help="End it at once, without a last checkpoint.")
def command(name: str, runs: Path, now: bool) -> int:
    """Ask all ranks to checkpoint and stop after their present step.

    The run is then `stopped` and can be resumed. A job that still waits in Slurm's queue is
    removed from it. With --now a run ends at once and what it did since its last checkpoint
    is lost.
    """
    from hpctrain.cli.view import look

    run = find_run(name, runs)
    view = look(run)
    if view.is_final:
        why = f" ({view.reason})" if view.reason else ""
        output.note(f"run {run.id} is over already: {view.status}{why}")
        return 0
    if view.launch is None:
        raise UsageError(f"run {run.id} was never started", hint="its directory can be removed")
    if view.launch.launcher == "slurm":
        return _slurm(view, now)
    return _local(view, now)


def _local(view: RunView, now: bool) -> int:
    from hpctrain.cli import process

    run, launch = view.run, view.launch
    assert launch is not None
    if not now:
        _ask(view)
        return 0
    if process.alive(launch) is None:
        raise UsageError(
            f"run {run.id} is on {launch.host}, its processes cannot be ended from here",
            hint=f"run the same command on {launch.host}, or leave out --now",
        )
    if not process.end(launch):
        raise UsageError(
            f"run {run.id}: process {launch.pid} does not end",
            hint="it may be waiting for a file system; try again",
        )
    _cancelled(view, "hpctrain cancel --now")
    output.line(f"run {run.id} is cancelled; last checkpoint: {_durable(view)}")
    return 0


def _ask(view: RunView) -> None:
    view.run.stop_file.touch()
    output.line(f"asked run {view.run.id} to checkpoint and stop after its present step")
    output.line(f"  hpctrain status {view.run.id} --watch")
    output.line(f"  hpctrain cancel {view.run.id} --now    # does not wait for a checkpoint")


def _slurm(view: RunView, now: bool) -> int:
    raise NotImplementedError


def _cancelled(view: RunView, reason: str) -> None:
    """Write the end that the ranks could not write themselves."""
    from hpctrain.records import StateRecord

    state = view.state
    view.run.write_state(
        StateRecord(
            status="cancelled",
            step=view.step,
            total_steps=view.total_steps,
            time=time.time(),
            world_size=0 if state is None else state.world_size,
            reason=reason,
            durable_step=view.durable_step,
            resumed_from=-1 if state is None else state.resumed_from,
        )
    )


def _durable(view: RunView) -> str:
    return f"step {view.durable_step}" if view.durable_step >= 0 else "none"
