"""Run a whole job on this machine from a test: real run directory, real ranks, real files.

::

    def test_my_model_learns(tmp_path):
        run = run_job(JOB, tmp_path, "train.steps=50")
        losses = [step.loss for step in run.read_steps()]
        assert losses[-1] < losses[0]
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import Exit
from hpctrain.records import LaunchRecord, write_json
from hpctrain.rundir import RunDir
from hpctrain.spec import dump_job, parse_job, resolve
from hpctrain.spec.resolve import check
from hpctrain.testing.ranks import RanksFailed, environment, mpiexec


@dataclasses.dataclass(frozen=True)
class _OneRank:
    devices_per_node: int | None = 1


def make_run(text: str, directory: Path, *overrides: str) -> RunDir:
    """A run directory below ``directory`` for the job ``text``; nothing is started."""
    job = resolve(parse_job(text, overrides=overrides), _OneRank(), directory)
    check(job)
    run = RunDir.create(job.spec.name, directory / "runs")
    run.job.write_text(dump_job(job.spec))
    write_json(run.provenance, {"import_paths": [str(directory)]})
    return run


def start_run(
    run: RunDir, ranks: int, *, restore: int = -1, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start an incarnation of the run on ``ranks`` MPI ranks of this machine."""
    attempt = len(run.read_launches())
    run.add_launch(LaunchRecord(attempt, "local", time.time(), world_size=ranks, restore=restore))
    command = [mpiexec() or "mpiexec", "-n", str(ranks), sys.executable, "-m", "hpctrain"]
    with run.job_log.open("ab") as log:
        return subprocess.Popen(
            [*command, "run", str(run.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment(), **(env or {})},
            start_new_session=True,
        )


def run_job(
    text: str,
    directory: Path,
    *overrides: str,
    ranks: int = 1,
    run: RunDir | None = None,
    expect: int = Exit.OK,
    timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
) -> RunDir:
    """Run a job to its end and return its run directory.

    Args:
        text: the job file; ``ranks_per_node`` is set to ``ranks``.
        directory: what relative paths start from; runs go to ``runs/`` in it.
        overrides: ``a.b=c`` each.
        ranks: MPI ranks on this machine.
        run: an existing run directory to go on with, in place of a new one; its job is
            replaced by ``text`` and the overrides.
        expect: the exit code that is right.
        timeout: seconds until the ranks are killed.
        env: further environment variables.

    Raises:
        RanksFailed: another exit code, with the ends of the logs.
    """
    overrides = (*overrides, f"ranks_per_node={ranks}")
    fresh = make_run(text, directory, *overrides)
    if run is None:
        run = fresh
    else:
        fresh.job.replace(run.job)
    process = start_run(run, ranks, env=env)
    try:
        code: int | None = process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        code = None
    if code != expect:
        raise RanksFailed(f"exit {code}, expected {expect}\n{_logs(run)}")
    return run


def _logs(run: RunDir, lines: int = 30) -> str:
    parts = []
    for path in sorted(run.logs.iterdir()):
        tail = path.read_text(errors="replace").splitlines()[-lines:]
        parts.append("\n".join([f"--- {path.name}", *tail]))
    return "\n".join(parts)
