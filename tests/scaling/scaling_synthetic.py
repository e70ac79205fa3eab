"""Run directories with known answers: written as ranks write them, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.records import LaunchRecord, StateRecord, StepRecord, append_line, write_json
from hpctrain.rundir import RunDir
from hpctrain.scaling.points import Point
from hpctrain.scaling.sweepdir import SweepDir, SweepIndex
from hpctrain.scaling.sweepfile import parse_sweep
from hpctrain.spec import dump_job, parse_job, resolve

JOB = """
name: synthetic
machine: local
nodes: 1
ranks_per_node: 1
model: {layers: 2, hidden: 64, heads: 4, vocab_size: 256}
data: {path: /data/t.h5, sequence_length: 128}
train: {steps: 20, global_batch: 32}
"""
SEQUENCE, BATCH = 128, 32


class Site:
    devices_per_node = 1


def write_run(
    parent: Path,
    overrides: Sequence[str],
    seconds: Sequence[float],
    *,
    status: str = "finished",
    reason: str = "",
    hardware: dict | None = None,
    name: str = "run",
    **step_fields,
) -> RunDir:
    """A run whose steps took ``seconds`` each."""
    spec = resolve(parse_job(JOB, overrides=overrides), Site(), parent).spec
    run = RunDir.create(name, parent)
    run.job.write_text(dump_job(spec))
    facts = {"machine": "local", "device": "CPU", "cpu": "one kind"}
    write_json(run.provenance, {"hardware": hardware or facts})
    ranks = spec.nodes * spec.ranks_per_node
    run.add_launch(LaunchRecord(0, "local", 1000.0, ranks))
    clock, tokens = 1000.0, spec.train.global_batch * spec.data.sequence_length
    for number, taken in enumerate(seconds, start=1):
        clock += taken
        append_line(
            run.metrics,
            StepRecord(
                number, clock, 1.0, 1e-3, 1.0, number * tokens, taken, tokens / taken,
                memory_bytes=10**9, **step_fields,
            ),
        )  # fmt: skip
    total = spec.train.steps
    run.write_state(StateRecord(status, len(seconds), total, clock, ranks, reason=reason))
    return run


def write_sweep(
    parent: Path,
    text: str,
    seconds: dict[int, Sequence[Sequence[float]] | str],
    *,
    fixed: Sequence[str] = (),
    **fields,
) -> Path:
    """A sweep over ranks_per_node; each number of ranks has the steps of its runs, or why it
    cannot run."""
    sweep_file = parent / "sweep.yaml"
    (parent / "job.yaml").write_text(JOB)
    sweep = parse_sweep(text, sweep_file)
    points = []
    for (setting,) in sweep.axes[0].rows:
        ranks = int(setting.text)
        given = seconds[ranks]
        grown = ()
        if sweep.kind == "weak":
            from hpctrain.scaling.sweepfile import Setting

            grown = (Setting("train.global_batch", str(BATCH * ranks)),)
        overrides = (*fixed, setting.override, *(one.override for one in grown))
        points.append(
            Point(
                f"p{len(points):03d}", (setting,), grown, overrides, 1, ranks,
                reason=given if isinstance(given, str) else "",
            )
        )  # fmt: skip
    index = SweepIndex.of(sweep, points, parent, "local")
    made = SweepDir.create(sweep, index, parent / "runs")
    for point in points:
        for repeat, steps in enumerate(() if point.reason else seconds[point.ranks]):
            bad = not steps
            run = write_run(
                made.root, point.overrides, steps, name=f"{point.id}-{repeat + 1}",
                status="failed" if bad else "finished", reason="node lost" if bad else "", **fields,
            )  # fmt: skip
            index = made.add_run(index, point.id, repeat, run)
    return made.root
