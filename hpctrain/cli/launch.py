"""From a prepared job to a started run: shared by ``submit`` and ``resume``."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpctrain.cli import output, provenance, text
from hpctrain.cli.prepare import Prepared
from hpctrain.cli.view import FINAL, RunView, look, lost_words
from hpctrain.errors import Exit, HpctrainError, ImpossibleError, SchedulerError, UsageError
from hpctrain.records import RunStatus, StateRecord, write_json
from hpctrain.rundir import RunDir, safe_name
from hpctrain.units import format_bytes, format_walltime

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.slurm.script import Line
    from hpctrain.spec import JobSpec

Launcher = Literal["local", "slurm"]
INTERRUPTED = 130
_PRIVATE = 0o600
_LOCAL_LOOK_SECONDS = 0.5
_SLURM_LOOK_SECONDS = 2.0


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


def create(
    prepared: Prepared, runs: Path, argv: Sequence[str], *, name: str | None = None
) -> RunDir:
    """Make the run directory with the job as resolved and what it was made from.

    Args:
        prepared: the job.
        runs: where run directories lie.
        argv: command line.
        name: start of the directory's name; the job's own where None.
    """
    from hpctrain.spec import dump_job

    job = prepared.job
    text = dump_job(job.spec).encode()
    run = RunDir.create(name or job.spec.name, runs)
    _write_job(run, text, job.spec)
    described = provenance.describe(job, argv, Path.cwd())
    write_json(run.provenance, described | {"hardware": provenance.hardware(prepared)})
    _write_emulation(run, prepared)
    if job.spec.env:
        run.provenance.chmod(_PRIVATE)
    return run


def write_job(run: RunDir, prepared: Prepared) -> None:
    """Replace ``job.yaml``: readers see the old or the new one, never half of one."""
    from hpctrain.spec import dump_job

    _write_job(run, dump_job(prepared.job.spec).encode(), prepared.job.spec)
    _write_emulation(run, prepared)


def _write_emulation(run: RunDir, prepared: Prepared) -> None:
    """The times of an emulated machine, which depend on the job's model and layout."""
    if not prepared.job.spec.emulated:
        return
    from hpctrain.plan.emulation import emulation_table
    from hpctrain.scaling.simulated import is_simulated

    if is_simulated(prepared.job.spec):
        return
    write_json(run.emulation, emulation_table(prepared.job.spec, prepared.machine))


def _write_job(run: RunDir, text: bytes, spec: JobSpec) -> None:
    # Values of the job's variables may be secrets.
    mode = _PRIVATE if spec.env else 0o644
    aside = run.job.with_name(f".{run.job.name}.{os.getpid()}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as stream:
        stream.write(text)
    aside.replace(run.job)


def check_start(prepared: Prepared, launcher: Launcher) -> None:
    """What can be known before anything is made.

    Raises:
        UsageError: no token file (local launcher; compute nodes may see file systems that a
            login node does not, so for Slurm it is a warning), no mpiexec, a variable that
            cannot reach the ranks.
        ImpossibleError: a limit of the machine is broken.
    """
    from hpctrain.launchers import LocalLauncher, check_job_env, rank_program

    spec = prepared.job.spec
    if launcher == "slurm":
        check_limits(prepared, ask_slurm=True)
        _check_range(prepared)
    else:
        check_job_env(spec.env)
        _check_emulated(prepared)
        LocalLauncher.find(os.environ).command(spec, rank_program(RunDir(Path.cwd())))
    path = spec.data.path
    if path is None or Path(path).is_file() or spec.emulated:
        return
    problem = str(prepared.job.locate("data.path", f"no file {path}"))
    if launcher == "local":
        hint = f"make it: hpctrain data tokenize TEXT... -o {path}"
        raise UsageError(problem, hint=hint)
    output.warn(f"{problem} on this host")


def _check_range(prepared: Prepared) -> None:
    """Warn of node counts in the job's range that it cannot use."""
    from hpctrain.cli.elastic import Given, possible

    job, wanted = prepared.job, prepared.job.spec.slurm.nodes
    if wanted is None:
        return
    _, reasons = possible(Given(job.text, job.file, Path.cwd(), job.overrides), wanted.counts)
    if reasons:
        first = min(reasons)
        output.warn(
            f"slurm.nodes {wanted}: the job cannot use {' or '.join(map(str, sorted(reasons)))} "
            f"nodes and would leave some idle there (on {first}: {reasons[first]})"
        )


def check_budget(prepared: Prepared, yes: bool) -> None:
    """Refuse a job that may take more node-hours than it is given, unless told to.

    Raises:
        ImpossibleError: nodes times walltime is more, or there is no walltime to multiply.
    """
    spec = prepared.job.spec
    most = spec.slurm.max_node_hours
    if most is None or yes:
        return
    nodes = spec.nodes if spec.slurm.nodes is None else spec.slurm.nodes.most
    locate = prepared.job.locate
    if spec.slurm.time is None:
        message = f"{most:g} node-hours at most, and slurm.time does not say how long the job runs"
        raise ImpossibleError(str(locate("slurm.max_node_hours", message)), hint="or pass --yes")
    hours = nodes * spec.slurm.time / 3600
    if hours > most:
        message = (
            f"{nodes} node{'s' * (nodes > 1)} for {format_walltime(spec.slurm.time)} are "
            f"{hours:g} node-hours, {most:g} are allowed; each restart may take as many again"
        )
        hint = "submit all the same: --yes"
        raise ImpossibleError(str(locate("slurm.max_node_hours", message)), hint=hint)


_RANK_BYTES = 260 * 2**20
"""Memory that a rank of an emulated machine has for itself; libraries are shared."""


def _check_emulated(prepared: Prepared) -> None:
    """Refuse ranks of an emulated machine that this one has no memory for.

    Raises:
        ImpossibleError: too little memory, or more devices than the simulator takes.
    """
    from hpctrain.scaling.simulated import MOST_DEVICES, is_simulated

    spec, ranks = prepared.job.spec, prepared.ranks
    if not spec.emulated:
        return
    if ranks > MOST_DEVICES:
        raise ImpossibleError(
            f"machine.emulate: {ranks} devices; the simulator takes {MOST_DEVICES}"
        )
    if is_simulated(spec):
        return
    import psutil

    free = psutil.virtual_memory().available
    if ranks * _RANK_BYTES > free:
        raise ImpossibleError(
            f"machine.emulate: {ranks} ranks need about {format_bytes(ranks * _RANK_BYTES)}, "
            f"{format_bytes(free)} are free here",
            hint=f"fewer ranks, or none: machine: {{simulate: {spec.machine_name}}}",
        )


def start(run: RunDir, prepared: Prepared, plan: Plan) -> int:
    """Start an incarnation, print its ids, stay with it where asked to; the exit code."""
    if plan.launcher == "slurm":
        return _slurm(run, prepared, plan)
    return _local(run, prepared, plan)


def submitted(run: RunDir, prepared: Prepared) -> None:
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
    from hpctrain.launchers import rank_program
    from hpctrain.launchers.local_run import start as start_local

    output.line(f"run {run.id}")
    submitted(run, prepared)
    if (simulated := simulate(run, prepared)) is not None:
        from hpctrain.cli.attend import summarise as say

        say(simulated)
        return Exit.OK
    started = start_local(
        prepared.job.spec, run, rank_program(run), os.environ, restore=plan.restore
    )
    if not plan.wait:
        _say_next(run)
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
            started.kill()
        return True

    view = attend(
        run,
        over=lambda _: started.poll() is not None,
        interrupt=interrupt,
        every=_LOCAL_LOOK_SECONDS,
    )
    code = started.wait()
    view = settle(view, code, killed)
    summarise(view)
    if killed:
        return INTERRUPTED
    return int(code or 0) if view.exit_code is None else int(view.exit_code)


def simulate(run: RunDir, prepared: Prepared) -> RunView | None:
    """The end of a run that is simulated; None where it has ranks."""
    from hpctrain.scaling.simulated import is_simulated, write_simulated

    if not is_simulated(prepared.job.spec):
        return None
    write_simulated(run, prepared.job.spec, prepared.machine)
    return look(run, ask_slurm=False)


def settle(view: RunView, code: int | None, killed: bool) -> RunView:
    """Write the end of a local run that its ranks had no time to write."""
    if killed:
        return conclude(view, "cancelled", "ended at once from the keyboard")
    if view.failures or (view.state is not None and view.state.status in FINAL):
        return view
    return conclude(view, "failed", f"{lost_words(view.run)} (code {code})")


def conclude(view: RunView, status: RunStatus, reason: str) -> RunView:
    """Write a final state in the place of ranks that are gone, unless they wrote one."""
    state = view.run.read_state()
    if state is None or state.status not in FINAL:
        view.run.write_state(
            StateRecord(
                status=status,
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


# ---- on Slurm -----------------------------------------------------------------------------


def choose(wanted: str, prepared: Prepared) -> Launcher:
    """The launcher of a job: for ``auto`` Slurm where it answers, else local.

    Raises:
        SchedulerError: Slurm is asked for, or the machine is a site, and it does not answer.
    """
    return choose_for(wanted, prepared.machine, emulated=prepared.job.spec.emulated)


def choose_for(wanted: str, machine: Machine, *, emulated: bool) -> Launcher:
    """As :func:`choose`, for a machine.

    Raises:
        UsageError: Slurm is asked for to emulate one.
    """
    from hpctrain.slurm.client import SlurmClient

    if emulated:
        if wanted == "slurm":
            raise UsageError(
                "machine.emulate: an emulated machine is this one; Slurm has nothing to do with it",
                hint="leave --launcher slurm out",
            )
        return "local"

    if wanted == "local":
        return "local"
    why = SlurmClient(os.environ).why_unavailable()
    if why is None:
        return "slurm"
    if wanted == "slurm":
        raise SchedulerError(
            f"Slurm does not answer: {why}", hint="hpctrain doctor shows what is missing"
        )
    if machine.kind == "site":
        raise SchedulerError(
            f"machine {machine.name} runs jobs by Slurm, which does not answer: {why}",
            hint="submit from one of its login nodes, or run here all the same: --launcher local",
        )
    return "local"


def print_script(prepared: Prepared, runs: Path, *, ask_slurm: bool) -> None:
    """The batch script on stdout, for a run directory that is not made; ``--dry-run``.

    The same text for the same job, machine and directory, whether or not Slurm is here.

    Args:
        prepared: the job.
        runs: where run directories lie.
        ask_slurm: check the job against the limits of the Slurm that answers, too.
    """
    import click

    check_limits(prepared, ask_slurm=ask_slurm)
    run = RunDir(runs.absolute() / f"{safe_name(prepared.job.spec.name)}-dry-run")
    click.echo(script_of(run, prepared).encode("utf-8", "surrogateescape"), nl=False)


def script_of(run: RunDir, prepared: Prepared) -> str:
    from hpctrain.launchers import SrunLauncher, batch_hook, mpich_wheel, rank_program
    from hpctrain.slurm.script import render

    srun = SrunLauncher(prepared.machine, mpich_wheel=mpich_wheel(os.environ))
    return render(prepared.job.spec, run, rank_program(run), srun, batch_hook())


def script_lines_of(prepared: Prepared) -> list[Line]:
    """The lines of the batch script that the job and its machine bring, each with why."""
    from hpctrain.launchers import SrunLauncher, mpich_wheel, rank_program
    from hpctrain.slurm.script import script_lines

    run = RunDir(Path("runs").absolute() / f"{safe_name(prepared.job.spec.name)}-dry-run")
    srun = SrunLauncher(prepared.machine, mpich_wheel=mpich_wheel(os.environ))
    return script_lines(prepared.job.spec, run, rank_program(run), srun)


def check_limits(prepared: Prepared, *, ask_slurm: bool) -> None:
    """Limits of the machine's description and, where asked for, of Slurm itself.

    Raises:
        ImpossibleError: some are broken; those that are not certain are warnings.
        SchedulerError: Slurm is to be asked and does not answer.
    """
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.slurm.limits import check

    client = SlurmClient(os.environ) if ask_slurm else None
    job = prepared.job
    for warning in check(job.spec, prepared.machine, client, locate=job.locate):
        output.warn(warning)


def _slurm(run: RunDir, prepared: Prepared, plan: Plan) -> int:
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.slurm.submit import submit

    before, first = run.read_state(), not run.read_launches()
    output.line(f"run {run.id}")
    submitted(run, prepared)
    client = SlurmClient(os.environ)
    try:
        script = script_of(run, prepared)
        done = submit(prepared.job.spec, run, script, client, restore=plan.restore)
    except HpctrainError:
        # Nothing runs: leave the directory as it was, or none.
        if first:
            shutil.rmtree(run.root, ignore_errors=True)
        elif before is not None:
            run.write_state(before)
        raise
    output.line(f"job {done.launch.job_id}")
    for warning in done.warnings:
        output.warn(warning)
    if not plan.wait:
        _say_next(run)
        return Exit.OK
    return _attend_slurm(run)


def _attend_slurm(run: RunDir) -> int:
    from hpctrain.cli.attend import attend, summarise

    let_go = False

    def interrupt(count: int) -> bool:
        nonlocal let_go
        let_go = True
        return False

    view = attend(run, over=lambda view: view.is_final, interrupt=interrupt,
                  every=_SLURM_LOOK_SECONDS)  # fmt: skip
    if let_go:
        output.note(f"the job goes on without you: it is {view.status}")
        _say_next(run)
        return INTERRUPTED
    summarise(view)
    return int(view.exit_code or Exit.OK)


def _say_next(run: RunDir) -> None:
    for command in text.next_commands(look(run)):
        output.line(f"  {command}")
