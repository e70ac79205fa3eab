"""How runs are put into words: one place, so that all commands say the same thing."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from hpctrain.cli.view import RunView, age
from hpctrain.records import StepRecord
from hpctrain.rundir import DEFAULT_ROOT, RunDir
from hpctrain.units import format_bytes, format_count, format_duration


def loss(value: float | None) -> str:
    """Nats a token, four digits."""
    return "not finite" if value is None else f"{value:.4f}"


def speed(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{format_count(tokens_per_second)} tokens/s"


def traffic(step: StepRecord) -> str:
    """What rank 0 handed to its communicators in a step: ``tp 24 calls, 1.2 MiB; …``."""
    by_size = sorted(step.comm.items(), key=lambda item: -float(item[1]["bytes"]))
    return "; ".join(
        f"{axis} {row['calls']:.0f} call{'s' if row['calls'] != 1 else ''}, "
        f"{format_bytes(row['bytes'])}"
        for axis, row in by_size
    )


def moment(when: float) -> str:
    """Local time of a record."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def progress(view: RunView) -> str:
    """``step 120/200  loss 2.7130  41.2K tokens/s  ETA 12 s`` on one line."""
    parts = [f"step {view.step}/{view.total_steps}"]
    if view.pace.last is not None:
        parts += [f"loss {loss(view.pace.last.loss)}", speed(view.pace.tokens_per_second)]
    if view.has_eta and view.pace.seconds_left is not None:
        parts.append(f"ETA {format_duration(view.pace.seconds_left)}")
    return "  ".join(parts)


def rows(view: RunView) -> list[tuple[str, str]]:
    """A run as ``status`` shows it."""
    from hpctrain.cli.output import styled

    found = [("run", view.run.id), ("status", styled(view.status))]
    if view.reason:
        found.append(("why", view.reason))
    share = f" ({100 * view.step / view.total_steps:.0f} %)" if view.total_steps else ""
    found.append(("step", f"{view.step} of {view.total_steps}{share}"))
    if view.pace.last is not None:
        found.append(("loss", loss(view.pace.last.loss)))
        found.append(("speed", speed(view.pace.tokens_per_second)))
        if view.pace.last.comm:
            found.append(("traffic", f"{traffic(view.pace.last)} in step {view.pace.last.step}"))
    if view.has_eta and view.pace.seconds_left is not None:
        found.append(("ETA", format_duration(view.pace.seconds_left)))
    durable = f"step {view.durable_step}" if view.durable_step >= 0 else "none yet"
    if view.would_lose is not None:
        durable += f"; a failure now would lose {format_duration(view.would_lose)} of work"
    found.append(("checkpoint", durable))
    if view.walltime_left is not None:
        found.append(("walltime", f"{format_duration(view.walltime_left)} left"))
    if view.restarted:
        last = next(one for one in reversed(view.restarts) if one.action != "stop")
        words = f"{view.restarted}; last: {last.reason} ({format_duration(age(last.time))} ago)"
        found.append(("restarts", words))
    if view.launch is not None:
        found.append(("launcher", _launcher(view)))
        found.append(("started", moment(view.launch.submitted)))
    if view.state is not None:
        silent = age(view.state.time)
        ago = f" ({format_duration(silent)} ago)" if silent > 60 and not view.is_final else ""
        found.append(("updated", moment(view.state.time) + ago))
    if len(view.failures) > 1:
        ranks = ", ".join(str(failure.rank) for failure in view.failures[1:9])
        more = ", ..." if len(view.failures) > 9 else ""
        found.append(("also failed", f"ranks {ranks}{more}"))
    found.append(("files", str(view.run.root)))
    return found


def _launcher(view: RunView) -> str:
    launch = view.launch
    assert launch is not None
    count = view.world_size or launch.world_size
    ranks = f"{count} rank{'s' if count > 1 else ''}"
    attempt = f", attempt {launch.attempt}" if launch.attempt else ""
    if launch.launcher == "slurm":
        state = f" {view.slurm.state}" if view.slurm is not None else ""
        nodes = f" on {view.slurm.nodes}" if view.slurm is not None and view.slurm.nodes else ""
        return f"Slurm job {launch.job_id}{state}{nodes}, {ranks}{attempt}"
    return f"local, {ranks} on {launch.host}{attempt}"


def run_word(run: RunDir) -> str:
    """What to type for a run from here: its id, or its path where it lies elsewhere."""
    here = run.root.parent == Path(DEFAULT_ROOT).absolute()
    return run.id if here else shlex.quote(str(run.root))


def next_commands(view: RunView) -> list[str]:
    """The three commands that make sense now."""
    run = run_word(view.run)
    match view.status:
        case "finished":
            return [
                f"hpctrain report {run}",
                f"hpctrain logs {run}",
                f"hpctrain resume {run} --set train.steps={2 * view.total_steps}",
            ]
        case "failed":
            rank = f" --rank {view.failures[0].rank}" if view.failures else ""
            return [
                f"hpctrain logs {run}{rank}",
                f"hpctrain status {run}",
                f"hpctrain resume {run}",
            ]
        case "stopped" | "cancelled":
            return [f"hpctrain resume {run}", f"hpctrain status {run}", f"hpctrain report {run}"]
    return [f"hpctrain status {run}", f"hpctrain logs {run} -f", f"hpctrain cancel {run}"]
