"""What every rank of a job executes: from a run directory to an exit code."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import Exit, HpctrainError, ImpossibleError
from hpctrain.layout import RankGrid
from hpctrain.records import LaunchRecord, read_json
from hpctrain.rundir import RunDir
from hpctrain.runtime.bootstrap import bootstrap, shut_down, start_mpi
from hpctrain.runtime.environment import RankEnvironment
from hpctrain.runtime.process import abort, record_failure, redirect_output
from hpctrain.runtime.stopping import StopWatch
from hpctrain.spec import read_job
from hpctrain.spec.resolve import layout_of

if TYPE_CHECKING:
    from hpctrain.runtime.context import RankContext
    from hpctrain.runtime.energy import EnergyMeter
    from hpctrain.train.metrics import Recorder


def run_rank(run: RunDir) -> int:
    """Train the job of a run directory on this rank; started on all ranks by a launcher.

    Returns:
        Exit.OK, or Exit.STOPPED when all ranks agreed to stop early. Every failure is
        recorded in the run directory and ends all ranks with its exit code.
    """
    stopwatch = StopWatch()
    stopwatch.install()
    comm: Any = None
    attempt, step, rank, host = 0, -1, 0, ""
    progress: dict[str, int] = {}
    try:
        comm = start_mpi()
        rank = comm.rank
        environment = RankEnvironment.read()
        host = environment.node_name or _hostname()
        redirect_output(run.rank_log(rank))
        launch = _launch(comm, run)
        attempt = launch.attempt
        return _train(run, comm, environment, launch, stopwatch, progress)
    except BaseException as error:
        # First the record, then the end: no collective from here on.
        step = progress.get("step", -1)
        record_failure(
            run.failure(attempt, rank), error, rank=rank, host=host, attempt=attempt, step=step
        )
        code = error.exit_code if isinstance(error, HpctrainError) else Exit.RANK_FAILED
        abort(comm, code)


def _train(
    run: RunDir,
    comm: Any,
    environment: RankEnvironment,
    launch: LaunchRecord,
    stopwatch: StopWatch,
    progress: dict[str, int],
) -> int:
    began = time.perf_counter()
    spec = read_job(run.job).spec
    _extend_import_path(run)
    stopwatch.deadline = environment.deadline
    stopwatch.stop_file = run.stop_file if comm.rank == 0 else None
    context = bootstrap(comm, RankGrid(layout_of(spec)), environment)
    emulation = None
    if spec.emulated:
        from hpctrain.train.emulation import Emulation

        emulation = Emulation.read(run, spec, context)
        spec = emulation.spec

    # Heavy imports come after MPI and after the size check, so that a misconfigured launch
    # ends in seconds.
    from hpctrain.health.monitor import Monitor
    from hpctrain.health.profile import differences
    from hpctrain.parallel.optimizer import make_optimizer
    from hpctrain.parallel.parallelize import parallelize
    from hpctrain.runtime.energy import EnergyMeter
    from hpctrain.train.checkpointing import Checkpointer
    from hpctrain.train.data import open_batches, open_source
    from hpctrain.train.loop import Trainer
    from hpctrain.train.metrics import Recorder
    from hpctrain.train.rng import seed_everything
    from hpctrain.train.state import TrainState
    from hpctrain.train.step import Stepper

    recorder = Recorder(
        run,
        writes=context.is_first,
        attempt=launch.attempt,
        total_steps=spec.train.steps,
        world_size=context.world_size,
        tensorboard=spec.train.tensorboard,
    )
    recorder.state("starting", 0)
    monitor = Monitor(run, spec, context, launch.attempt, recorder.event)
    for difference in differences(spec, context):
        recorder.event("warning", difference)
    source = open_source(spec) if emulation is None else emulation.source()
    seed_everything(spec.train.seed, 0)  # a user's model starts alike on every rank
    model = parallelize(spec, context, None if emulation is None else emulation.passes)
    optimizer = make_optimizer(model, spec)
    seed_everything(spec.train.seed, context.coordinate("dp"))
    state = TrainState(model, optimizer)
    root = Path(spec.checkpoint.path) if spec.checkpoint.path else run.checkpoints
    checkpointer = Checkpointer(root, spec, context)
    found = monitor.preflight(*_planned(root, spec, state, context))
    if found is not None and (reason := _grounds(found, spec)):
        recorder.state("stopped", max(0, recorder.durable_step), reason)
        recorder.event("stopped", reason)
        monitor.close()
        recorder.close()
        shut_down(context)
        return Exit.STOPPED
    checkpointer.restore(state, launch.restore, recorder)
    checkpointer.guard(state)
    progress["step"] = state.step
    batches = open_batches(source, spec, context, start=state.samples)
    recorder.event(
        "started",
        f"{context.world_size} ranks on {context.nodes} node{'s' * (context.nodes > 1)}, "
        f"{context.device.type}, {context.grid.layout.describe()}, step {state.step} of "
        f"{spec.train.steps}; ready after {time.perf_counter() - began:.1f} s",
        nodes=context.nodes,
    )
    trainer = Trainer(
        spec=spec,
        context=context,
        state=state,
        stepper=Stepper(model, optimizer, spec, emulation=emulation),
        batches=batches,
        checkpointer=checkpointer,
        recorder=recorder,
        stopwatch=stopwatch,
        monitor=monitor,
        emulation=emulation,
    )
    # An emulated machine's energy is not this one's.
    meter = EnergyMeter() if context.local_rank == 0 and emulation is None else None
    try:
        reason = trainer.run()
    finally:
        progress["step"] = state.step
    monitor.mark("checkpoint")
    _record_energy(context, meter, recorder)
    checkpointer.close(state.step, recorder.durable_step)
    batches.close()
    if reason:
        recorder.state("stopped", state.step, reason)
        recorder.event("stopped", f"at step {state.step}: {reason}", step=state.step)
    else:
        recorder.state("finished", state.step)
        recorder.event("finished", f"all {state.step} steps", step=state.step)
    recorder.close()
    monitor.close()
    shut_down(context)
    return Exit.STOPPED if reason else Exit.OK


def _planned(root: Path, spec: Any, state: Any, context: Any) -> tuple[list[Path], int]:
    """Directories that checkpoints go to, and the bytes that the job keeps in the first one."""
    paths = [root]
    paths += [Path(one.path) for one in (spec.checkpoint.node, spec.checkpoint.partner)
              if one.every is not None and one.path is not None]  # fmt: skip
    own = sum(p.numel() for p in state.model.parameters())
    # Weights and two moments in fp32; each data-parallel rank holds a whole one or its part.
    whole = context.comm.allreduce(own) / (1 if spec.parallel.fsdp else context.size("dp"))
    return paths, int(12 * whole) * (spec.checkpoint.keep + 1)


def _grounds(found: Any, spec: Any) -> str:
    """Why the job must not start on these nodes; empty where it may.

    Raises:
        ImpossibleError: what no other nodes would mend, or the job does not want others.
    """
    problems = [f"{node.name}: {one}" for node in found.nodes for one in node.problems]
    if found.bad_nodes and spec.health.exclude_bad_nodes:
        return f"preflight: bad nodes {', '.join(found.bad_nodes)}: {'; '.join(found.findings)}"
    if problems:
        raise ImpossibleError(
            "preflight: " + "; ".join(problems),
            hint="health.exclude_bad_nodes: true goes on without such nodes where others are well; "
            "health.preflight: false starts all the same",
        )
    return ""


def _record_energy(context: RankContext, meter: EnergyMeter | None, recorder: Recorder) -> None:
    """Write the joules of all nodes since training began, where every node counts them."""
    used = None if meter is None else meter.joules()
    all_used = context.comm.gather((meter is not None, used, "" if meter is None else meter.source))
    if all_used is None:
        return
    counted = [(joules, source) for counts, joules, source in all_used if counts]
    if counted and all(joules is not None for joules, _ in counted):
        total = sum(joules for joules, _ in counted)
        sources = ", ".join(sorted({source for _, source in counted}))
        nodes = len(counted)
        recorder.event(
            "energy",
            f"{total:.0f} J on {nodes} node{'s' * (nodes > 1)} ({sources})",
            joules=total,
            source=sources,
        )


def _launch(comm: Any, run: RunDir) -> LaunchRecord:
    """The newest LaunchRecord, read by rank 0 for all."""
    launches = run.read_launches() if comm.rank == 0 else []
    newest = launches[-1] if launches else LaunchRecord(0, "local", time.time(), comm.size)
    found: LaunchRecord = comm.bcast(newest)
    return found


def _extend_import_path(run: RunDir) -> None:
    """Let the job's own modules be found from the directories it was submitted from."""
    provenance = read_json(run.provenance) or {}
    for folder in provenance.get("import_paths", []):
        if folder not in sys.path:
            sys.path.append(folder)


def _hostname() -> str:
    import socket

    return socket.gethostname()
