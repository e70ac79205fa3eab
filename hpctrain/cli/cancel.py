"""``hpctrain cancel``: stop a run, with a last checkpoint or at once."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli import output
from hpctrain.cli.options import find_run, run_argument
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.cli.view import RunView

_KILL_SECONDS = 60.0


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
    from hpctrain.cli.launch import conclude
    from hpctrain.launchers.local_run import LocalProcess, local_alive

    run, launch = view.run, view.launch
    assert launch is not None
    if not now:
        _ask(view)
        return 0
    if local_alive(launch) is None:
        raise UsageError(
            f"run {run.id} is on {launch.host}, its processes cannot be ended from here",
            hint=f"run the same command on {launch.host}, or leave out --now",
        )
    LocalProcess.attach(run, launch).kill()
    view = conclude(view, "cancelled", "hpctrain cancel --now")
    output.line(f"run {run.id} is {view.status}; last checkpoint: {_durable(view)}")
    return 0


def _ask(view: RunView) -> None:
    from hpctrain.cli.text import run_word

    view.run.stop_file.touch()
    output.line(f"asked run {view.run.id} to checkpoint and stop after its present step")
    run = run_word(view.run)
    output.line(f"  hpctrain status {run} --watch")
    output.line(f"  hpctrain cancel {run} --now    # does not wait for a checkpoint")


def _slurm(view: RunView, now: bool) -> int:
    from hpctrain.cli.launch import conclude
    from hpctrain.cli.view import look
    from hpctrain.slurm.client import SlurmClient

    run, launch = view.run, view.launch
    assert launch is not None
    waiting = view.slurm is not None and view.slurm.waiting
    if not now and not waiting:
        _ask(view)
        return 0
    client = SlurmClient(os.environ)
    client.cancel(launch.job_id)
    # Slurm ends the ranks with SIGTERM first: they may checkpoint and stop by themselves.
    deadline = time.monotonic() + _KILL_SECONDS
    while not (view := look(run)).is_final and time.monotonic() < deadline:
        time.sleep(0.5)
    if not view.is_final:
        output.note(f"job {launch.job_id} is cancelled; Slurm has not ended it yet")
        return 0
    if view.state is None or view.state.status != view.status:
        view = conclude(view, "cancelled", "hpctrain cancel" + (" --now" if now else ""))
    output.line(f"run {run.id} is {view.status}; last checkpoint: {_durable(view)}")
    return 0


def _durable(view: RunView) -> str:
    return f"step {view.durable_step}" if view.durable_step >= 0 else "none"
