"""``hpctrain submit``: from a job file to a started run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hpctrain.cli.options import job_argument, runs_option, set_option


@click.command(short_help="Start a run from a job file, here or on Slurm.")
@job_argument()
@set_option
@click.option(
    "--launcher",
    type=click.Choice(["auto", "local", "slurm"]),
    default="auto",
    show_default=True,
    help="Where to run; auto is Slurm where sbatch answers, else this machine.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the batch script that Slurm would get; touch nothing. With --launcher slurm "
    "the limits of that Slurm are checked too.",
)
@click.option(
    "--wait/--no-wait",
    default=None,
    help="Stay with the run and show its progress, or leave it to itself. "
    "[default: --wait on this machine, --no-wait on Slurm]",
)
@click.option(
    "--yes", is_flag=True, help="Submit although it may take more than slurm.max_node_hours."
)
@runs_option
def command(
    job: str,
    overrides: tuple[str, ...],
    launcher: str,
    dry_run: bool,
    wait: bool | None,
    yes: bool,
    runs: Path,
) -> int:
    """Check a job file, make a run directory and start the run.

    The run's id and Slurm's job number are printed first. On this machine the first Ctrl-C
    asks all ranks to checkpoint and stop, the second one ends them at once; on Slurm Ctrl-C
    only ends the waiting. With --wait the exit code is that of the run.
    """
    from hpctrain.cli import launch, output
    from hpctrain.cli.prepare import load
    from hpctrain.errors import ImpossibleError

    prepared = load(job, overrides)
    if dry_run:
        try:
            launch.check_budget(prepared, yes)
        except ImpossibleError as error:
            output.warn(f"Slurm would not get it without --yes: {error.message}")
        launch.print_script(prepared, runs, ask_slurm=launcher == "slurm")
        return 0
    chosen = launch.choose(launcher, prepared)
    launch.check_start(prepared, chosen)
    if chosen == "slurm":
        launch.check_budget(prepared, yes)
    run = launch.create(prepared, runs, sys.argv)
    stay = chosen == "local" if wait is None else wait
    return launch.start(run, prepared, launch.Plan(chosen, stay))
