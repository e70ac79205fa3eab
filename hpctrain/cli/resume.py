"""``hpctrain resume``: a new incarnation of a run, from one of its checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli import output
from hpctrain.cli.options import find_run, run_argument, set_option
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.records import read_json, write_json
from hpctrain.rundir import RunDir

if TYPE_CHECKING:
    from hpctrain.cli.prepare import Prepared
    from hpctrain.spec import JobSpec

_BREAKS = (
    "model.module", "model.layers", "model.hidden", "model.heads", "model.kv_heads",
    "model.ffn_hidden", "model.vocab_size", "model.max_positions", "model.position",
    "model.norm", "model.activation", "model.tied_embeddings", "model.bias",
    "data.sequence_length",
)  # fmt: skip
"""Keys that a checkpoint is bound to: other tensors, or other samples under the same numbers."""


def _from(ctx: click.Context, param: click.Parameter, value: str) -> int:
    if value == "auto":
        return -1
    if not value.isdecimal():
        raise click.BadParameter(f"found {value!r}; auto or a step belongs here")
    return int(value)


@click.command(short_help="Go on with a run from its last checkpoint.")
@run_argument(required=True)
@click.option(
    "--from",
    "step",
    metavar="auto|STEP",
    default="auto",
    show_default=True,
    callback=_from,
    help="Checkpoint to start from; auto is the newest good one.",
)
@set_option
@click.option(
    "--launcher",
    type=click.Choice(["auto", "local", "slurm"]),
    default="auto",
    help="Where to run.  [default: where it ran before]",
)
@click.option(
    "--wait/--no-wait",
    default=None,
    help="As in submit.  [default: --wait on this machine, --no-wait on Slurm]",
)
def command(
    name: str,
    runs: Path,
    step: int,
    overrides: tuple[str, ...],
    launcher: str,
    wait: bool | None,
) -> int:
    """Start a run again in its own directory, from its newest good checkpoint.

    Says which checkpoint it takes and why not a newer one. --set changes keys of the job, for
    example train.steps or nodes; keys that a checkpoint is bound to, such as the dimensions
    of the model, are refused.
    """
    from hpctrain.cli import launch
    from hpctrain.cli.view import look

    run = find_run(name, runs)
    view = look(run)
    if not view.is_final and view.launch is not None:
        raise UsageError(
            f"run {run.id} is not over: it is {view.status}",
            hint=f"stop it first: hpctrain cancel {run.id}",
        )
    prepared, changed = _job(run, overrides)
    chosen = step if step >= 0 else _newest(run, prepared.job.spec)
    if step >= 0:
        _check_step(prepared.job.spec, run, step)
    steps = prepared.job.spec.train.steps
    if chosen >= steps:
        raise UsageError(
            f"nothing is left to do: the checkpoint is of step {chosen}, train.steps is {steps}",
            hint=f"go on for longer: --set train.steps={2 * steps}, or start earlier: --from STEP",
        )
    before = None if view.launch is None else view.launch.launcher
    where = launch.choose(before if launcher == "auto" and before else launcher, prepared)
    launch.check_start(prepared, where)
    for key, (old, new) in changed.items():
        output.note(f"changed: {key} was {old}, is {new}")
    if overrides or changed:
        launch.write_job(run, prepared)
    _remember(run, overrides, chosen)
    run.stop_file.unlink(missing_ok=True)
    stay = where == "local" if wait is None else wait
    return launch.start(run, prepared, launch.Plan(where, stay, step))


def _job(run: RunDir, overrides: tuple[str, ...]) -> tuple[Prepared, dict[str, tuple[str, str]]]:
    """The job made again from what it was given as, and what is not as it was before.

    From the text first given, so that ``auto`` follows a changed number of nodes.
    """
    from hpctrain.cli.elastic import Given
    from hpctrain.cli.reference import show
    from hpctrain.spec import read_job

    prepared = Given.of(run).prepare(*overrides)
    old, new = _flat(read_job(run.job).spec), _flat(prepared.job.spec)
    changed = {key: (show(old.get(key)), show(new[key])) for key in new if new[key] != old.get(key)}
    broken = [f"{key} was {changed[key][0]}, is {changed[key][1]}"
              for key in _BREAKS if key in changed]  # fmt: skip
    if broken:
        raise UsageError(
            "a checkpoint cannot be taken into another model: " + "; ".join(broken),
            hint="start a new run with hpctrain submit",
        )
    return prepared, changed


def _flat(spec: JobSpec) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else name)
        else:
            found[key] = value

    walk(spec.model_dump(mode="json"), "")
    return found


def _checkpoints(run: RunDir, spec: JobSpec) -> Path:
    return Path(spec.checkpoint.path) if spec.checkpoint.path else run.checkpoints


def _newest(run: RunDir, spec: JobSpec) -> int:
    """Step of the newest good checkpoint, said aloud with what was passed over; 0 for none.

    Looks at manifests, sizes and HDF5 structure; the ranks verify every byte when they start.
    """
    from hpctrain.io.checkpoint import CheckpointStore
    from hpctrain.io.comm import SoloCommunicator

    root = _checkpoints(run, spec)
    found, skipped = CheckpointStore(root, SoloCommunicator()).latest_good(verify=False)
    for step, reason in skipped:
        output.warn(f"the checkpoint of step {step} is passed over: {reason}")
    if found is None and skipped:
        raise CheckpointError(
            f"none of {len(skipped)} checkpoints in {root} is good",
            hint="start anew with hpctrain submit",
        )
    if found is None:
        output.note(f"no checkpoint in {root}: starting from step 0")
        return 0
    output.note(f"from the checkpoint of step {found}, the newest in {root}")
    return found


def _check_step(spec: JobSpec, run: RunDir, step: int) -> None:
    from hpctrain.io.checkpoint import CheckpointStore
    from hpctrain.io.comm import SoloCommunicator

    root = _checkpoints(run, spec)
    store = CheckpointStore(root, SoloCommunicator())
    if step not in store.steps():
        there = ", ".join(str(one) for one in store.steps()) or "none"
        raise CheckpointError(
            f"no checkpoint of step {step} in {root}", hint=f"steps that there are: {there}"
        )
    problems = store.verify(step, deep=False)
    if problems:
        raise CheckpointError(f"the checkpoint of step {step} is damaged: {problems[0]}")
    newer = [one for one in store.steps() if one > step]
    output.note(
        f"from the checkpoint of step {step}, as asked"
        + (f"; newer: {', '.join(str(one) for one in newer)}" if newer else "")
    )


def _remember(run: RunDir, overrides: tuple[str, ...], step: int) -> None:
    """Add this resume to the provenance."""
    from hpctrain.cli.provenance import caller

    origin = read_json(run.provenance) or {}
    entry = {
        "time": time.time(),
        "from_step": step,
        "overrides": list(overrides),
        "caller": caller(sys.argv),
    }
    write_json(run.provenance, origin | {"resumes": [*origin.get("resumes", []), entry]})
