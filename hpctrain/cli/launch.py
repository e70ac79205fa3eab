"""From a prepared job to a started run: shared by ``submit`` and ``resume``."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.cli import output, process, provenance, text
from hpctrain.cli.prepare import Prepared
from hpctrain.cli.view import RunView, look
from hpctrain.errors import Exit, ImpossibleError, UsageError
from hpctrain.records import LaunchRecord, StateRecord, write_json
from hpctrain.rundir import RunDir

Launcher = Literal["local", "slurm"]
INTERRUPTED = 130
_LOCAL_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """How an incarnation is to be started.

    Attributes:
        launcher: which.
        wait: stay with the run until it is over.
        restore: step of the checkpoint to start from; -1 is the newest good one, or none.
    """

    launcher: Launcher
    wait: bool
    restore: int = -1


def create(prepared: Prepared, runs: Path, argv: Sequence[str]) -> RunDir:
    """Make the run directory with the job as resolved and what it was made from."""
    job = prepared.job
    run = RunDir.create(job.spec.name, runs)
    write_job(run, prepared)
    write_json(run.provenance, provenance.describe(job, argv, Path.cwd()))
    return run


def write_job(run: RunDir, prepared: Prepared) -> None:
    """Replace ``job.yaml``: readers see the old or the new one, never half of one."""
    from hpctrain.spec import dump_job

    aside = run.job.with_name(f".{run.job.name}.{os.getpid()}")
    aside.write_text(dump_job(prepared.job.spec), encoding="utf-8")
    aside.replace(run.job)


def check_data(prepared: Prepared, launcher: Launcher) -> None:
    """The token file has to be there: for the local launcher an error, else a warning.

    Compute nodes may see file systems that a login node does not.
    """
    path = prepared.job.spec.data.path
    if path is None or Path(path).is_file():
        return
    problem = str(prepared.job.locate("data.path", f"no file {path}"))
    if launcher == "local":
        hint = f"make it: hpctrain data tokenize TEXT... -o {path}"
        raise UsageError(problem, hint=hint)
    output.warn(f"{problem} on this host")


def start(run: RunDir, prepared: Prepared, plan: Plan) -> int:
    """Start an incarnation, print its ids, stay with it where asked to; the exit code."""
    output.line(f"run {run.id}")
    if plan.launcher == "slurm":
        return _slurm(run, prepared, plan)
    return _local(run, prepared, plan)


def _submitted(run: RunDir, prepared: Prepared) -> None:
    """The state between the command and the first word of the ranks."""
    before = run.read_state()
    run.write_state(
        StateRecord(
            status="submitted",
            step=0 if before is None else before.step,
            total_steps=prepared.job.spec.train.steps,
            time=time.time(),
            world_size=prepared.ranks,
            durable_step=-1 if before is None else before.durable_step,
            resumed_from=-1 if before is None else before.resumed_from,
        )
    )


# ---- on this machine ----------------------------------------------------------------------


def _local(run: RunDir, prepared: Prepared, plan: Plan) -> int:
    tokens = _local_tokens(run, prepared)
    _submitted(run, prepared)
    attempt = len(run.read_launches())
    with process.held(tokens, log=run.job_log, env=_local_env(prepared), directory=Path.cwd()) as (
        child, release,
    ):  # fmt: skip
        launch = LaunchRecord(
            attempt=attempt,
            launcher="local",
            submitted=time.time(),
            world_size=prepared.ranks,
            pid=child.pid,
            pid_started=process.start_ticks(child.pid),
            host=socket.gethostname(),
            restore=plan.restore,
        )
        run.add_launch(launch)
        release()
    if not plan.wait:
        for command in text.next_commands(look(run)):
            output.line(f"  {command}")
        return Exit.OK
    from hpctrain.cli.attend import attend, summarise

    killed = False

    def interrupt(count: int) -> bool:
        nonlocal killed
        if count == 1:
            run.stop_file.touch()
            durable = look(run).durable_step
            last = f"the last checkpoint is step {durable}" if durable >= 0 else "nothing is saved"
            output.note(
                "asked all ranks to checkpoint and stop after this step; Ctrl-C again ends them "
                f"at once ({last})"
            )
        elif not killed:
            killed = True
            output.note("ending all ranks")
            process.end(launch)
        return True

    view = attend(
        run,
        over=lambda: child.poll() is not None,
        interrupt=interrupt,
        every=_LOCAL_LOOK_SECONDS,
    )
    view = _settle(view, child.returncode, killed)
    summarise(view)
    return INTERRUPTED if killed else int(view.exit_code or Exit.OK)


def _settle(view: RunView, code: int, killed: bool) -> RunView:
    """Write the end of a local run that its ranks had no time to write."""
    state = view.state
    if view.failures or (state is not None and state.status in ("finished", "stopped")):
        return view
    if killed:
        status, reason = "cancelled", "ended at once from the keyboard"
    else:
        how = f"signal {-code}" if code < 0 else f"code {code}"
        last = _last_line(view.run.job_log)
        status, reason = "failed", f"the launcher ended with {how}" + (f": {last}" if last else "")
    view.run.write_state(
        StateRecord(
            status=status,  # type: ignore[arg-type]
            step=view.step,
            total_steps=view.total_steps,
            time=time.time(),
            world_size=0 if state is None else state.world_size,
            reason=reason,
            durable_step=view.durable_step,
            resumed_from=-1 if state is None else state.resumed_from,
        )
    )
    return look(view.run)


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def program() -> str:
    """Absolute path of the installed ``hpctrain`` of this Python."""
    return str(Path(sys.executable).parent / "hpctrain")


def _local_tokens(run: RunDir, prepared: Prepared) -> list[str]:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    return [str(mpiexec), "-n", str(prepared.ranks), program(), "run", str(run.root)]


def _local_env(prepared: Prepared) -> dict[str, str]:
    cores = max(1, len(os.sched_getaffinity(0)) // prepared.ranks)
    return {**os.environ, "OMP_NUM_THREADS": str(cores), **prepared.job.spec.env}


# ---- on Slurm -----------------------------------------------------------------------------


def _slurm(run: RunDir, prepared: Prepared, plan: Plan) -> int:
    raise NotImplementedError


def choose(wanted: str, prepared: Prepared) -> Launcher:
    """The launcher for ``auto``: Slurm where sbatch answers, else local."""
    return "local"
