"""From a rendered script to a job in the queue, written down in the run directory."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.launchers.shape import world_size
from hpctrain.records import LaunchRecord

if TYPE_CHECKING:
    from hpctrain.rundir import RunDir
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted run.

    Attributes:
        launch: as written to ``launch.jsonl``.
        warnings: for the user.
    """

    launch: LaunchRecord
    warnings: tuple[str, ...]


def submit(
    spec: JobSpec,
    run: RunDir,
    script: str,
    client: SlurmClient,
    *,
    restore: int = -1,
    directory: Path | None = None,
    options: Sequence[str] = (),
    automatic: bool = False,
) -> Submission:
    """Write the script, submit it, add the LaunchRecord.

    Args:
        spec: the resolved job.
        run: its run directory, which exists.
        script: from hpctrain.slurm.script.render.
        client: talks to Slurm.
        restore: checkpoint step to start from; -1 is the newest good one.
        directory: where the job starts; the present one where not given.
        options: of sbatch, above those of the script.
        automatic: it follows an earlier incarnation by itself.

    Raises:
        SchedulerError: Slurm refused the job; the run directory holds the script then.
    """
    # Slurm ends a job with 0:53 and no word where the directory of its log is missing.
    run.logs.mkdir(parents=True, exist_ok=True)
    run.stop_file.unlink(missing_ok=True)
    write_script(run.script, script)
    submitted = client.submit(run.script, directory=directory, options=options)
    cluster = submitted.cluster or client.cluster()
    launch = add_launch(run, spec, submitted.job_id, cluster, restore=restore, automatic=automatic)
    return Submission(launch, submitted.warnings)


def add_launch(
    run: RunDir,
    spec: JobSpec,
    job_id: str,
    cluster: str,
    *,
    restore: int = -1,
    automatic: bool = False,
) -> LaunchRecord:
    """Write down that Slurm has a run: ``12345``, or ``12345_7`` for a task of an array."""
    launch = LaunchRecord(
        attempt=len(run.read_launches()),
        launcher="slurm",
        submitted=time.time(),
        world_size=world_size(spec),
        job_id=job_id,
        host=socket.gethostname(),
        cluster=cluster,
        restore=restore,
        automatic=automatic,
    )
    run.add_launch(launch)
    return launch


def write_script(path: Path, script: str) -> None:
    """Readable by the user only: a job's variables may be secrets."""
    data = script.encode("utf-8", "surrogateescape")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
