"""Several runs as one job array: one entry in the queue, a task a run.

Each task executes the run's own script, so that a task lives as a job does: it is requeued, or
followed by a successor, alone.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.launchers.shape import world_size
from hpctrain.records import LaunchRecord
from hpctrain.slurm.quoting import bash_quote, log_pattern, sbatch_quote
from hpctrain.slurm.submit import Submission, write_script

if TYPE_CHECKING:
    from hpctrain.rundir import RunDir
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.spec import JobSpec

_OWN = re.compile(r"#SBATCH --(job-name|output)=")


def array_script(runs: Sequence[RunDir], scripts: Sequence[str], *, at_once: int = 0) -> str:
    """The batch script of an array whose task N executes the script of run N.

    Args:
        runs: their directories.
        scripts: from hpctrain.slurm.script.render, one a run.
        at_once: tasks that may run at the same time; 0 for all.

    Raises:
        UsageError: the runs do not ask Slurm for the same.
    """
    wanted = [_options(script) for script in scripts]
    for run, lines in zip(runs, wanted, strict=True):
        if lines != wanted[0]:
            other = next(iter(set(lines) ^ set(wanted[0])))
            raise UsageError(
                f"{run.id}: asks Slurm for something else than {runs[0].id} ({other}); runs of an "
                "array ask for the same"
            )
    limit = f"%{at_once}" if at_once else ""
    name = next(line for line in scripts[0].splitlines() if line.startswith("#SBATCH --job-name="))
    log = sbatch_quote(f"--output={log_pattern(str(runs[0].logs / 'array.log'))}", "output")
    return "\n".join(
        [
            "#!/bin/bash",
            name,
            f"#SBATCH --array=0-{len(runs) - 1}{limit}",
            f"#SBATCH {log}",
            *wanted[0],
            "",
            "scripts=(",
            *(f"  {bash_quote(str(run.script))}" for run in runs),
            ")",
            "logs=(",
            *(f"  {bash_quote(str(run.job_log))}" for run in runs),
            ")",
            "task=$SLURM_ARRAY_TASK_ID",
            'exec /bin/bash "${scripts[$task]}" >>"${logs[$task]}" 2>&1',
            "",
        ]
    )


def _options(script: str) -> list[str]:
    """The ``#SBATCH`` lines that runs of an array have to share."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [line for line in lines if not _OWN.match(line)]


def submit_array(
    specs: Sequence[JobSpec],
    runs: Sequence[RunDir],
    scripts: Sequence[str],
    client: SlurmClient,
    *,
    at_once: int = 0,
) -> list[Submission]:
    """Write the scripts, submit the array, add each run's LaunchRecord.

    Args:
        specs, runs, scripts: of each run, in the order of the tasks.
        client: talks to Slurm.
        at_once: see array_script.

    Raises:
        UsageError: see array_script.
        SchedulerError: Slurm refused it.
    """
    text = array_script(runs, scripts, at_once=at_once)
    for run, script in zip(runs, scripts, strict=True):
        run.logs.mkdir(parents=True, exist_ok=True)
        run.stop_file.unlink(missing_ok=True)
        write_script(run.script, script)
    path = runs[0].root / "array.sbatch"
    write_script(path, text)
    submitted = client.submit(path)
    cluster = submitted.cluster or client.cluster()
    found = []
    for task, (spec, run) in enumerate(zip(specs, runs, strict=True)):
        launch = LaunchRecord(
            attempt=len(run.read_launches()),
            launcher="slurm",
            submitted=time.time(),
            world_size=world_size(spec),
            job_id=f"{submitted.job_id}_{task}",
            host=socket.gethostname(),
            cluster=cluster,
        )
        run.add_launch(launch)
        found.append(Submission(launch, submitted.warnings))
    return found
