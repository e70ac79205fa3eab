"""Speed-up, efficiency, FLOP/s: what a report says of each point, and from which formula.

With W the work of a step, T its time and n the devices, against a baseline b::

    strong   speed-up S = T_b / T_n, efficiency E = S · n_b / n   (W is the same)
    weak     E = (W_n / (n·T_n)) / (W_b / (n_b·T_b))   scaled speed-up S = E · n / n_b
    grid     as weak, without an ideal line

W is tokens, or model FLOPs where a weak sweep grows the model. For a batch that grows with the
devices E is T_b / T_n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hpctrain.errors import UsageError
from hpctrain.scaling.collect import Collection, Measured, PointRuns
from hpctrain.scaling.stats import Estimate
from hpctrain.scaling.sweepfile import shown

if TYPE_CHECKING:
    from hpctrain.plan.plan import Plan
    from hpctrain.spec import JobSpec

CONVENTION = (
    "Model FLOPs: 6 a token and weight of every matrix product (the output layer is one, the "
    "embedding look-up none) and 12·layers·hidden·sequence a token for attention, counted in full; "
    "recomputation is not counted (Narayanan et al. 2021; Chowdhery et al. 2022). Hardware FLOPs "
    "count what is computed again. MFU: model FLOP/s of a device over its dense peak for the job's "
    "precision."
)
_OVER = 1.0 + 1e-9


class Planner(Protocol):
    """What a report asks of the planner; None where it cannot say."""

    def plan(self, spec: JobSpec) -> Plan | None: ...


@dataclass
class Row:
    """A point as the report shows it.

    Attributes:
        point: its runs.
        step: seconds of a step; None where nothing was measured.
        tokens: tokens a second, all ranks.
        speedup, efficiency: against the baseline of its series.
        model_flops, hardware_flops: FLOP/s of a device.
        mfu: share of the peak; peak: FLOP/s of a device; peak_assumed: nobody stated it.
        split: seconds a step by kind.
        memory_bytes: peak of rank 0.
        joules_per_token: where nodes offer it.
        predicted_step, predicted_efficiency: by the planner.
        flags: what a reader has to know of the point.
    """

    point: PointRuns
    step: Estimate | None = None
    tokens: Estimate | None = None
    speedup: Estimate | None = None
    efficiency: Estimate | None = None
    model_flops: float | None = None
    hardware_flops: float | None = None
    mfu: float | None = None
    peak: float | None = None
    peak_assumed: bool = False
    split: dict[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    joules_per_token: float | None = None
    predicted_step: float | None = None
    predicted_efficiency: float | None = None
    is_baseline: bool = False
    flags: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.point.ranks


@dataclass
class Series:
    """Points that differ in size only.

    Attributes:
        title: settings that they share; empty where there is one series.
        rows: by number of devices.
        baseline: the row that the others are compared with; None where nothing was measured.
        note: what is special about it.
    """

    title: str
    rows: list[Row]
    baseline: Row | None = None
    note: str = ""


@dataclass
class Report:
    """A scaling report.

    Attributes:
        collection: what it is made of.
        series: in the order of the sweep.
        hardware: what the runs ran on, one line each.
        emulated: name of the machine that was emulated; empty for real ones.
        ways: how: ``emulated``, by real ranks that slept, ``simulated``, without ranks, or both.
        warm_up: steps after each start that were left out.
    """

    collection: Collection
    series: list[Series]
    hardware: list[str]
    emulated: str
    ways: str
    warm_up: int

    @property
    def rows(self) -> list[Row]:
        return [row for series in self.series for row in series.rows]

    @property
    def title(self) -> str:
        kind = {"strong": "Strong scaling", "weak": "Weak scaling"}.get(
            self.collection.kind, "Comparison"
        )
        return f"{kind}: {self.collection.name}{self.mark}"

    @property
    def mark(self) -> str:
        """`` (emulated …)`` after every title of an emulated report."""
        if not self.emulated:
            return ""
        return f" ({self.ways}: {self.emulated})"


def analyse(
    collection: Collection,
    planner: Planner | None = None,
    *,
    warm_up: int,
    mixed: bool = False,
    baseline: Mapping[str, str] | None = None,
) -> Report:
    """The report of a collection.

    Args:
        collection: from hpctrain.scaling.collect.
        planner: for peaks and predictions; None leaves both out.
        warm_up: that the collection was made with.
        mixed: take runs on different hardware together.
        baseline: settings of the point to compare with; None takes the sweep's, else the point
            with the fewest devices.

    Raises:
        UsageError: different hardware, or a baseline that is not there or was not measured.
    """
    runs = [run for point in collection.points for run in point.runs]
    kinds = _hardware(runs)
    if len(kinds) > 1 and not mixed:
        listed = "; ".join(f"{name}: {ids[0]}" + (f" and {len(ids) - 1} more" if ids[1:] else "")
                           for name, ids in kinds.items())  # fmt: skip
        raise UsageError(
            f"runs on different hardware make no scaling: {listed}",
            hint="report them apart, compare them with --compare, or say --mixed",
        )
    emulated = {str(run.hardware.get("emulated")) for run in runs if run.hardware.get("emulated")}
    ways = {
        "simulated" if run.hardware.get("simulated") else "emulated"
        for run in runs
        if run.hardware.get("emulated")
    }
    groups: dict[str, list[Row]] = {}
    for point in collection.points:
        groups.setdefault(_series_of(collection, point), []).append(_row(point, planner))
    series = [
        Series(title, sorted(rows, key=lambda row: row.ranks)) for title, rows in groups.items()
    ]
    for one in series:
        _choose(one, baseline)
        _relate(one, collection)
    if baseline is not None and not any(_matches(row, baseline) for s in series for row in s.rows):
        raise UsageError(f"--baseline: no point has {_words(baseline)}")
    return Report(
        collection,
        series,
        list(kinds),
        ", ".join(sorted(emulated)),
        " and ".join(sorted(ways)),
        warm_up,
    )


def _words(settings: Mapping[str, str]) -> str:
    return " ".join(f"{key}={shown(text)}" for key, text in settings.items())


def _hardware(runs: Sequence[Measured]) -> dict[str, list[str]]:
    """Description of hardware -> runs on it."""
    found: dict[str, list[str]] = {}
    for run in runs:
        facts = run.hardware
        parts = [str(facts[key]) for key in ("device", "machine") if facts.get(key)]
        if facts.get("emulated"):
            parts.append("as modelled")
        if facts.get("cpu") and facts.get("machine") == "local" and not facts.get("emulated"):
            parts.append(str(facts["cpu"]))
        found.setdefault(", ".join(parts) or "unknown", []).append(run.run.id)
    return found


def _series_of(collection: Collection, point: PointRuns) -> str:
    grown = {"train.global_batch", "model.layers", "model.hidden"}
    hidden = collection.size_keys | (grown if collection.kind == "weak" else set())
    told = {key: text for key, text in point.settings.items() if key not in hidden}
    return _words(told) if collection.kind != "grid" else ""


def _row(point: PointRuns, planner: Planner | None) -> Row:
    row = Row(point)
    spec = point.spec
    if planner is not None and spec is not None:
        plan = planner.plan(spec)
        if plan is not None:
            row.predicted_step = plan.step.seconds
            row.peak = plan.work.platform.peak_flops(plan.work.dtype)
            row.peak_assumed = not plan.work.platform.known
    if point.reason:
        row.flags.append(f"cannot run: {point.reason}")
    if point.missing:
        row.flags.append(f"{point.missing} run{'s are' if point.missing > 1 else ' is'} missing")
    for run in point.runs:
        if not run.usable:
            why = f": {run.reason}" if run.reason else ""
            state = "has no steps" if run.status == "finished" else f"is {run.status}"
            row.flags.append(f"{run.run.id} {state}{why}")
    usable = point.usable
    if not usable:
        return row
    row.step = Estimate.of([run.step_seconds for run in usable])
    tokens = usable[0].tokens_per_step
    row.tokens = row.step.inverse(tokens)
    splits = [run.split for run in usable]
    kinds = dict.fromkeys(kind for split in splits for kind in split)
    row.split = {k: sum(split.get(k, 0.0) for split in splits) / len(splits) for k in kinds}
    row.memory_bytes = max(run.memory_bytes for run in usable)
    energy = [run.joules_per_token for run in usable if run.joules_per_token is not None]
    row.joules_per_token = sum(energy) / len(energy) if energy else None
    _flops(row, usable[0].spec)
    return row


def _flops(row: Row, spec: JobSpec) -> None:
    length = spec.data.sequence_length
    if spec.model.module is not None or length is None or row.tokens is None:
        return
    from hpctrain.plan.shapes import ModelShape

    dims = spec.model.transformer()
    each = row.tokens.value / row.ranks
    row.model_flops = each * dims.model_flops_per_token(length)
    row.hardware_flops = row.model_flops
    if spec.parallel.recompute != "none":
        row.hardware_flops = each * ModelShape.of(dims).hardware_flops_per_token(length)
    if row.peak:
        row.mfu = row.model_flops / row.peak


# ---- against the baseline ------------------------------------------------------------------


def _matches(row: Row, settings: Mapping[str, str]) -> bool:
    return settings.items() <= row.point.settings.items() or (
        list(settings) == ["ranks"] and settings["ranks"] == str(row.ranks)
    )


def _choose(series: Series, wanted: Mapping[str, str] | None) -> None:
    """The baseline of a series, and what has to be said of it."""
    measured = [row for row in series.rows if row.step is not None]
    if wanted is not None:
        named = [row for row in series.rows if _matches(row, wanted)]
        if named and named[0].step is None:
            raise UsageError(
                f"--baseline: {named[0].point.title} was not measured: "
                f"{'; '.join(named[0].flags) or 'no run is finished'}"
            )
    else:
        named = [row for row in series.rows if row.point.baseline]
    meant = named[0] if named else series.rows[0]
    if meant.step is not None:
        series.baseline = meant
    elif measured:
        series.baseline = measured[0]
        series.note = (
            f"The baseline {meant.point.title} ({meant.ranks} devices) is missing: numbers are "
            f"relative to {measured[0].point.title} ({measured[0].ranks} devices), whose own "
            "efficiency is 100 % by definition."
        )
    if series.baseline is not None:
        series.baseline.is_baseline = True


def _work(row: Row, collection: Collection) -> float:
    """Work of a step."""
    spec = row.point.spec
    assert spec is not None
    tokens = float(spec.train.global_batch * (spec.data.sequence_length or 1))
    if collection.kind == "weak" and collection.grow != "batch" and spec.data.sequence_length:
        return tokens * spec.model.transformer().model_flops_per_token(spec.data.sequence_length)
    return tokens


def _relate(series: Series, collection: Collection) -> None:
    base = series.baseline
    if base is None or base.step is None:
        return
    base_work = _work(base, collection)
    for row in series.rows:
        if row.step is None:
            continue
        devices = row.ranks / base.ranks
        share = _work(row, collection) / base_work
        if row is base:
            row.speedup = Estimate(1.0, None, None, row.step.count, None)
            row.efficiency = Estimate(1.0, None, None, row.step.count, None)
        else:
            row.efficiency = base.step.per(row.step, share / devices)
            row.speedup = row.efficiency.times(devices)
        if row.predicted_step and base.predicted_step:
            row.predicted_efficiency = base.predicted_step / row.predicted_step * share / devices
        if row is not base and row.efficiency.value > _OVER:
            row.flags.append(_explain_over(row, base))
        if collection.kind == "strong" and abs(share - 1.0) > 1e-9:
            row.flags.append(
                f"not the same work: {share:g} times the baseline's, so that this is no strong "
                "scaling"
            )


def _explain_over(row: Row, base: Row) -> str:
    """Why a point may be more than 100 % efficient."""
    assert row.efficiency is not None
    percent = f"{100 * row.efficiency.value:.1f} %"
    if row.efficiency.low is not None and row.efficiency.low <= 1.0:
        return f"{percent} is more than 100 %, but within the error of the measurement"
    mine, theirs = row.point.spec, base.point.spec
    assert mine is not None and theirs is not None
    differs = []
    for key, a, b in (
        ("train.micro_batch", mine.train.micro_batch, theirs.train.micro_batch),
        ("parallel.recompute", mine.parallel.recompute, theirs.parallel.recompute),
        ("parallel.tensor", mine.parallel.tensor, theirs.parallel.tensor),
        ("parallel.pipeline", mine.parallel.pipeline, theirs.parallel.pipeline),
        ("parallel.sharding", mine.parallel.sharding, theirs.parallel.sharding),
    ):
        if a != b:
            differs.append(f"{key} is {a}, the baseline's {b}")
    if row.memory_bytes and base.memory_bytes > 1.2 * row.memory_bytes:
        differs.append("a rank holds less, so that more of it fits into caches")
    why = "; ".join(differs) or (
        "no key that is known to cause it differs: caches, clock rates, or a disturbed baseline; "
        "repeat the baseline before this is published"
    )
    return f"{percent} is more than 100 %: {why}"
