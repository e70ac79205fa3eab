"""From run directories to measurements: one object a run, one a point of a sweep."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.records import StepRecord, read_json
from hpctrain.rundir import RunDir
from hpctrain.scaling.points import SIZE_KEYS
from hpctrain.scaling.steps import WARM_UP, effective, steady
from hpctrain.scaling.sweepdir import SweepDir, SweepIndex
from hpctrain.scaling.sweepfile import shown
from hpctrain.spec import read_job

if TYPE_CHECKING:
    from hpctrain.spec import JobSpec

_AXES = {
    "tp": "tensor",
    "cp": "context",
    "ep": "experts",
    "etp": "experts",
    "pp": "pipeline",
    "dp": "data-parallel",
    "dp_replicate": "data-parallel",
    "dp_shard": "data-parallel",
    "edp": "data-parallel",
}
PARTS = (
    "compute", "tensor", "context", "experts", "pipeline", "data-parallel", "other ranks",
    "data loading", "checkpoint", "idle",
)  # fmt: skip
"""Kinds of time, in the order in which they are shown."""
_UNTOLD = ("name", "train.seed", "train.steps", "checkpoint", "slurm", "env", "data.path")
"""Keys that make no other point of a run."""


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        run: its directory.
        spec: its job.
        status: as its state says; ``missing`` for a run that is not there.
        reason: why it failed.
        world_size: ranks.
        steps: that count, in order.
        steady: that speed is taken from.
        provenance: what it was made from, without variables.
        hardware: what it ran on, as far as its files say.
        joules: of all nodes; None where no node offers it.
    """

    run: RunDir
    spec: JobSpec
    status: str
    reason: str
    world_size: int
    steps: Sequence[StepRecord]
    steady: Sequence[StepRecord]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    joules: float | None = None

    @property
    def usable(self) -> bool:
        """Whether it is finished and has steps to measure."""
        return self.status == "finished" and bool(self.steady)

    @property
    def step_seconds(self) -> float:
        """Median of the steady steps."""
        return statistics.median(record.step_seconds for record in self.steady)

    @property
    def tokens_per_step(self) -> int:
        """Tokens, or samples of a model without sequences."""
        return self.spec.train.global_batch * (self.spec.data.sequence_length or 1)

    @property
    def memory_bytes(self) -> int:
        """Peak of rank 0."""
        return max((record.memory_bytes for record in self.steps), default=0)

    @property
    def joules_per_token(self) -> float | None:
        tokens = self.tokens_per_step * len(self.steps)
        return self.joules / tokens if self.joules and tokens else None

    @property
    def split(self) -> dict[str, float]:
        """Seconds a step by kind, mean of the steady steps, on rank 0; see PARTS.

        Communication counts in full, and compute is what is left of the step. Where the time of
        computing was noted (``compute_seconds``), data-parallel communication counts only as far
        as nothing hid it.
        """
        count = len(self.steady)
        if not count:
            return {}
        found = dict.fromkeys(PARTS, 0.0)
        for record in self.steady:
            for axis, amounts in record.comm.items():
                if not axis.startswith("mpi:"):
                    kind = _kind(axis)
                    found[kind] += amounts.get("seconds", 0.0) / count
            found["data loading"] += record.data_seconds / count
            found["checkpoint"] += record.checkpoint_seconds / count
        step = statistics.fmean(record.step_seconds for record in self.steady)
        computed = statistics.fmean(record.compute_seconds for record in self.steady)
        inside = sum(found.values()) - found["checkpoint"]
        if computed:
            seen = step - computed - (inside - found["data-parallel"])
            found["data-parallel"] = min(found["data-parallel"], max(0.0, seen))
            inside = sum(found.values()) - found["checkpoint"]
            found["compute"] = computed
            found["other ranks"] += max(0.0, step - inside - computed)
        else:
            found["compute"] = max(0.0, step - inside)
        if not self.hardware.get("emulated"):  # whose clock is not this machine's
            found["idle"] = max(0.0, _clock(self.steady) - step - found["checkpoint"])
        return {kind: seconds for kind, seconds in found.items() if seconds > 0}


def _kind(axis: str) -> str:
    if axis in _AXES:
        return _AXES[axis]
    kinds = {_AXES.get(part) for part in axis.split("_")}
    return "data-parallel" if "data-parallel" in kinds else "other ranks"


def _clock(records: Sequence[StepRecord]) -> float:
    """Mean seconds from the end of a step to the end of the next, for steps that follow."""
    gaps = [
        after.time - before.time
        for before, after in itertools.pairwise(records)
        if after.step == before.step + 1
    ]
    return statistics.fmean(gaps) if gaps else 0.0


@dataclass(frozen=True)
class PointRuns:
    """A point and its runs.

    Attributes:
        settings: varied keys and values, as text.
        nodes, ranks: that it runs on.
        runs: of all repeats, the newest of each.
        missing: repeats without a run.
        reason: why it cannot run.
        baseline: named as the one that others are compared with.
        spec: its job; None where no run of it is there.
    """

    settings: dict[str, str]
    nodes: int
    ranks: int
    runs: tuple[Measured, ...]
    missing: int = 0
    reason: str = ""
    baseline: bool = False

    @property
    def spec(self) -> JobSpec | None:
        return self.runs[0].spec if self.runs else None

    @property
    def usable(self) -> list[Measured]:
        return [run for run in self.runs if run.usable]

    @property
    def title(self) -> str:
        return " ".join(f"{key}={shown(text)}" for key, text in self.settings.items())


@dataclass(frozen=True)
class Collection:
    """All that a report is made of.

    Attributes:
        name: of the sweep, or of the directories.
        kind: strong, weak or grid.
        grow: what a weak sweep grew.
        size_keys: keys that are no part of a series' name.
        points: measured, failed and impossible ones.
        sources: directories that were read.
    """

    name: str
    kind: str
    grow: str
    size_keys: frozenset[str]
    points: tuple[PointRuns, ...]
    sources: tuple[Path, ...]


def collect(
    paths: Sequence[Path], *, kind: str | None = None, warm_up: int = WARM_UP
) -> Collection:
    """Read sweeps and run directories.

    Args:
        paths: sweep directories, run directories, or directories of runs.
        kind: strong, weak or grid; None takes the sweep's, or what the jobs look like.
        warm_up: steps after each start that are left out.

    Raises:
        UsageError: nothing to read in one of them, or a damaged run.
    """
    runs: list[Measured] = []
    sweeps: list[tuple[SweepDir, SweepIndex]] = []
    for path in paths:
        if SweepDir.holds(path):
            sweeps.append((SweepDir(path.absolute()), SweepDir(path.absolute()).read()))
            continue
        if (path / "job.yaml").is_file():
            found = [RunDir(path.absolute())]
        else:
            found = RunDir.all(path)
        if not found:
            raise UsageError(f"{path}: neither a run, nor a sweep, nor a directory of runs")
        runs += [measure(run, warm_up) for run in found]
    if len(sweeps) == 1 and not runs:
        sweep, index = sweeps[0]
        points = tuple(_sweep_points(sweep, index, warm_up))
        chosen = kind or index.kind
        size_keys = frozenset(index.size_keys)
        return Collection(index.name, chosen, index.grow, size_keys, points, tuple(paths))
    for sweep, index in sweeps:
        for point in index.points:
            for ids in point.runs:
                runs += [measure(sweep.run(run_id), warm_up) for run_id in ids[-1:]]
    points = tuple(_points_of(runs))
    name = ", ".join(path.name for path in paths)
    guessed = kind or _guess([point for point in points if point.spec is not None])
    return Collection(name, guessed, "batch", frozenset(SIZE_KEYS), points, tuple(paths))


def measure(run: RunDir, warm_up: int = WARM_UP) -> Measured:
    """Read one run.

    Raises:
        UsageError, SpecError: its job.yaml is missing or damaged.
    """
    spec = read_job(run.job).spec
    state = run.read_state()
    launches = run.read_launches()
    steps = effective(run.read_steps())
    origin = read_json(run.provenance) or {}
    failures = run.read_failures(len(launches) - 1) if launches else []
    status = "created" if state is None else str(state.status)
    reason = "" if state is None else state.reason
    if failures and status not in ("finished", "stopped"):
        status = "failed"
        reason = f"rank {failures[0].rank}: {failures[0].error}: {failures[0].message}"
    per_node = spec.ranks_per_node
    ranks = spec.nodes * per_node if isinstance(per_node, int) else 1
    joules = [e.data.get("joules") for e in run.read_events() if e.kind == "energy"]
    known = [float(value) for value in joules if isinstance(value, int | float)]
    return Measured(
        run=run,
        spec=spec,
        status=status,
        reason=reason.split("\n")[0],
        world_size=launches[-1].world_size if launches else ranks,
        steps=steps,
        steady=steady(steps, launches, warm_up),
        provenance=origin,
        hardware=origin.get("hardware") or {"machine": spec.machine},
        joules=sum(known) if known else None,
    )


def _sweep_points(sweep: SweepDir, index: SweepIndex, warm_up: int) -> Iterator[PointRuns]:
    for point in index.points:
        runs = []
        for ids in point.runs:
            for run_id in ids[-1:]:
                try:
                    runs.append(measure(sweep.run(run_id), warm_up))
                except HpctrainError:
                    continue  # its directory is gone or damaged: shown as missing
        yield PointRuns(
            settings={**point.settings, **point.grown},
            nodes=point.nodes,
            ranks=point.ranks,
            runs=tuple(runs),
            missing=0 if point.reason else index.repeats - len(runs),
            reason=point.reason,
            baseline=point.baseline,
        )


def _points_of(runs: Sequence[Measured]) -> Iterator[PointRuns]:
    """Runs with equal jobs as one point; settings are the keys in which the jobs differ."""
    flats = [_flat(run.spec) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for flat in flats for key in flat)
        if len({flat.get(key) for flat in flats}) > 1
    ]
    groups: dict[tuple[str | None, ...], list[Measured]] = {}
    for run, flat in zip(runs, flats, strict=True):
        groups.setdefault(tuple(flat.get(key) for key in keys), []).append(run)
    ordered = sorted(groups.items(), key=lambda item: (item[1][0].world_size, str(item[0])))
    for values, members in ordered:
        first = members[0]
        settings = {k: v for k, v in zip(keys, values, strict=True) if v is not None}
        yield PointRuns(
            settings=settings or {"nodes": str(first.spec.nodes)},
            nodes=first.spec.nodes,
            ranks=first.world_size,
            runs=tuple(members),
        )


def _flat(spec: JobSpec) -> dict[str, str]:
    """Keys of a job that make a point, and their values as text."""
    found: dict[str, str] = {}

    def walk(value: Any, key: str) -> None:
        if key in _UNTOLD or (key == "parallel.data"):
            return  # the data-parallel degree is what is left of the ranks
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else name)
        else:
            found[key] = str(value)

    walk(spec.model_dump(mode="json"), "")
    return found


def _guess(points: Sequence[PointRuns]) -> str:
    batches = {(p.spec.train.global_batch, p.ranks) for p in points if p.spec is not None}
    if len({batch for batch, _ in batches}) == 1:
        return "strong"
    if len({batch / ranks for batch, ranks in batches}) == 1:
        return "weak"
    return "grid"
