"""``hpctrain run``: what a launcher starts once a rank."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click

from hpctrain.errors import UsageError
from hpctrain.rundir import RunDir


@click.command(short_help="Run one rank (every rank executes this).")
@click.argument("rundir", metavar="RUNDIR", type=click.Path(path_type=Path))
def command(rundir: Path) -> NoReturn:
    """Train the job of a run directory on this rank.

    Started by mpiexec or srun on every rank; `hpctrain submit` and `hpctrain resume` do that.
    """
    run = RunDir(rundir.absolute())
    if not (run.job.is_file() and run.provenance.is_file()):
        raise UsageError(
            f"{rundir}: not a run directory (job.yaml and {run.provenance.name} belong there)",
            hint="ranks are started by hpctrain submit JOB or hpctrain resume RUN",
        )
    from hpctrain.runtime.process import leave
    from hpctrain.train.main import run_rank

    leave(run_rank(run))
