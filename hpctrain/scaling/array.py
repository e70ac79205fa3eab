"""Job arrays: runs whose batch scripts ask Slurm for the same become the tasks of one array.

Each run keeps its own batch script. A task of the array is that script, executed in the place of
the array's own, so that signals, requeueing and logs are those of a single job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hpctrain.slurm.quoting import bash_quote, log_pattern, sbatch_quote

LARGEST = 1000
"""Tasks of an array; Slurm's default MaxArraySize is 1001."""
_OWN = re.compile(r"#SBATCH --(job-name|output|comment)=")


def shape_of(script: str) -> tuple[str, ...]:
    """What a batch script asks Slurm for, without what names the run."""
    return tuple(
        line for line in script.splitlines() if line.startswith("#SBATCH ") and not _OWN.match(line)
    )


def array_script(
    name: str, shape: Sequence[str], runs: Sequence[Path], log: Path, at_once: int | None
) -> str:
    """The batch script of an array.

    Args:
        name: job name.
        shape: of the scripts of all runs; see shape_of.
        runs: run directories that hold a ``job.sbatch`` each, in the order of the tasks.
        log: what a task prints before its own log is opened.
        at_once: tasks that run at a time; None for all.
    """
    assert 0 < len(runs) <= LARGEST
    throttle = "" if at_once is None else f"%{at_once}"
    lines = [
        "#!/bin/bash",
        f"#SBATCH {sbatch_quote(f'--job-name={name}', 'name')}",
        f"#SBATCH {sbatch_quote(f'--output={log_pattern(str(log))}-%a.log', 'sweep')}",
        *shape,
        f"#SBATCH --array=0-{len(runs) - 1}{throttle}",
        "",
        "# The run of each task, in order.",
        "runs=(",
        *(f"  {bash_quote(str(run))}" for run in runs),
        ")",
        "run=${runs[$SLURM_ARRAY_TASK_ID]}",
        'exec bash "$run/job.sbatch" >>"$run/logs/job.log" 2>&1',
        "",
    ]
    return "\n".join(lines)
