"""From a sweep file to its points: every combination, what it asks for, and why it cannot run.

Nothing is started here. A point is checked as a job is before it is launched: the job file's own
rules, divisibility, the schedule, the planner's memory and the site's limits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.errors import HpctrainError, Problem, SpecError, UsageError
from hpctrain.scaling.sweepfile import Grow, Setting, SweepFile, shown
from hpctrain.units import format_bytes

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.spec import Job, JobSpec

SIZE_KEYS = ("nodes", "ranks_per_node")
"""Keys that say on how much of a machine a point runs."""


class Prepared(Protocol):
    """A resolved job and its machine."""

    @property
    def job(self) -> Job: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def ranks(self) -> int: ...


class Workshop(Protocol):
    """What expanding asks of its caller, which knows directories and machines."""

    def parse(self, overrides: list[str]) -> Job:
        """The base job with keys replaced."""
        ...

    def prepare(self, job: Job) -> Prepared:
        """The job resolved for its machine."""
        ...

    def ranks_per_node(self, spec: JobSpec) -> int:
        """Ranks a node of a job that is not resolved yet."""
        ...

    def check_limits(self, prepared: Prepared) -> None:
        """Raises ImpossibleError where the machine or its scheduler would refuse the job."""
        ...


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of settings.

    Attributes:
        id: ``p000`` and so on, in the order of the file.
        settings: varied keys and their values.
        grown: keys that weak scaling worked out.
        overrides: all of ``--set`` that the point adds to the base job.
        nodes, ranks: that it runs on.
        prepared: the resolved job; None where it cannot be resolved.
        reason: why it cannot run; empty where it can.
        step_seconds: of a step, by the planner; None where it cannot say.
        walltime: seconds that are asked for; None where the job names none.
        steps: of the job.
    """

    id: str
    settings: tuple[Setting, ...]
    grown: tuple[Setting, ...]
    overrides: tuple[str, ...]
    nodes: int
    ranks: int
    prepared: Prepared | None = None
    reason: str = ""
    step_seconds: float | None = None
    walltime: int | None = None
    steps: int = 0

    @property
    def title(self) -> str:
        """``nodes=2 parallel.tensor=4``."""
        return " ".join(f"{s.key}={shown(s.text)}" for s in (*self.settings, *self.grown))

    @property
    def node_hours(self) -> float | None:
        """That one run may take at most, by its walltime; else what the planner expects."""
        seconds = self.walltime
        if seconds is None and self.step_seconds is not None:
            return self.nodes * self.step_seconds * self.steps / 3600
        return None if seconds is None else self.nodes * seconds / 3600


def expand(sweep: SweepFile, shop: Workshop) -> list[Point]:
    """All points of a sweep that its conditions let through, each checked.

    Raises:
        SpecError: a value of the sweep file is no value of its key, the base job has faults, or
            a condition cannot be judged.
        UsageError: a baseline that is no point.
    """
    fixed = [setting.override for setting in sweep.fixed]
    _check_single_values(sweep, shop, fixed)
    base = shop.parse(fixed).spec
    base_ranks = base.nodes * shop.ranks_per_node(base)
    found: list[Point] = []
    for rows in itertools.product(*(axis.rows for axis in sweep.axes)):
        settings = tuple(itertools.chain.from_iterable(rows))
        point = _point(sweep, shop, settings, fixed, base_ranks, f"p{len(found):03d}")
        if point is not None:
            found.append(point)
    if not found:
        raise UsageError(f"{sweep.file}: when: no combination meets the conditions")
    baseline_of(sweep, found)
    return found


def baseline_of(sweep: SweepFile, points: list[Point]) -> list[Point]:
    """Points that ``baseline:`` means; empty where the sweep names none.

    Raises:
        UsageError: no point has these settings.
    """
    wanted = {setting.key: setting.text for setting in sweep.baseline}
    if not wanted:
        return []
    found = [
        point
        for point in points
        if wanted.items() <= {s.key: s.text for s in (*point.settings, *point.grown)}.items()
    ]
    if not found:
        named = " ".join(f"{key}={shown(text)}" for key, text in wanted.items())
        raise UsageError(f"{sweep.file}: baseline: no point has {named}")
    return found


def _check_single_values(sweep: SweepFile, shop: Workshop, fixed: list[str]) -> None:
    """Faults of single values, at their place in the sweep file.

    What is wrong with a combination is a reason of that point and found later.
    """
    problems: list[Problem] = []
    for setting in sweep.fixed:
        problems += _faults(sweep, shop, [], setting)
    if not problems:
        shop.parse(fixed)  # faults of the base job are its own
    for axis in sweep.axes:
        for row in axis.rows:
            for setting in row:
                problems += _faults(sweep, shop, fixed, setting)
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))


def _faults(
    sweep: SweepFile, shop: Workshop, others: list[str], setting: Setting
) -> Iterator[Problem]:
    try:
        shop.parse([*others, setting.override])
    except SpecError as error:
        for problem in error.problems:
            if problem.file.startswith("--set") and problem.key == setting.key:
                yield replace(problem, file=sweep.file, line=setting.line, column=setting.column)


def _point(
    sweep: SweepFile,
    shop: Workshop,
    settings: tuple[Setting, ...],
    fixed: list[str],
    base_ranks: int,
    name: str,
) -> Point | None:
    overrides = [*fixed, *(setting.override for setting in settings)]
    try:
        job = shop.parse(overrides)
    except SpecError as error:
        reason = "; ".join(_where_not(problem) for problem in error.problems)
        return Point(name, settings, (), tuple(overrides), 0, 0, reason=reason)
    per_node = shop.ranks_per_node(job.spec)
    ranks = job.spec.nodes * per_node
    if not _wanted(sweep, job.spec, per_node):
        return None
    point = Point(
        name, settings, (), tuple(overrides), job.spec.nodes, ranks,
        walltime=job.spec.slurm.time, steps=job.spec.train.steps,
    )  # fmt: skip
    try:
        if sweep.kind == "weak":
            grown = grow(job.spec, sweep.grow, ranks, base_ranks)
            point = replace(
                point, grown=grown, overrides=(*overrides, *(one.override for one in grown))
            )
            job = shop.parse(list(point.overrides))
        prepared = shop.prepare(job)
        point = replace(point, prepared=prepared, ranks=prepared.ranks)
        shop.check_limits(prepared)
        return replace(point, step_seconds=_planned(prepared))
    except SpecError as error:
        return replace(point, reason="; ".join(_where_not(p) for p in error.problems))
    except HpctrainError as error:
        return replace(point, reason=error.message)


def grow(spec: JobSpec, what: Grow, ranks: int, base_ranks: int) -> tuple[Setting, ...]:
    """What weak scaling makes of a job on ``ranks`` ranks that was stated for ``base_ranks``.

    batch: train.global_batch times ranks / base ranks. layers: model.layers times the same, so
    that parameters and work grow about in proportion. hidden: model.hidden times its square
    root (parameters of a block are 12·hidden²), to the nearest width that the heads divide.

    Raises:
        UsageError: the result is not whole, or the model is the user's own.
    """
    if what == "batch":
        product = spec.train.global_batch * ranks
        if product % base_ranks:
            raise UsageError(
                f"train.global_batch: {spec.train.global_batch} samples on {base_ranks} ranks are "
                f"no whole number on {ranks}"
            )
        return (Setting("train.global_batch", str(product // base_ranks)),)
    if spec.model.module is not None:
        raise UsageError(f"grow: {what} needs a transformer; model.module is your own")
    if what == "layers":
        assert spec.model.layers is not None
        product = spec.model.layers * ranks
        if product % base_ranks:
            raise UsageError(
                f"model.layers: {spec.model.layers} layers on {base_ranks} ranks are no whole "
                f"number on {ranks}"
            )
        return (Setting("model.layers", str(product // base_ranks)),)
    assert spec.model.hidden and spec.model.heads
    unit = spec.model.heads * (2 if spec.model.position == "rotary" else 1)
    width = spec.model.hidden * math.sqrt(ranks / base_ranks)
    return (Setting("model.hidden", str(max(1, round(width / unit)) * unit)),)


def _wanted(sweep: SweepFile, spec: JobSpec, per_node: int) -> bool:
    def look(key: str) -> Any:
        if key == "ranks":
            return spec.nodes * per_node
        if key == "ranks_per_node":
            return per_node
        here: Any = spec
        for part in key.split("."):
            if isinstance(here, Mapping):
                if part not in here:
                    raise KeyError(key)
                here = here[part]
            elif part in getattr(type(here), "model_fields", {}):
                here = getattr(here, part)
            else:
                raise KeyError(key)
        return here

    for condition in sweep.when:
        try:
            if not condition.holds(look):
                return False
        except ValueError as error:
            raise SpecError([Problem("when", str(error), sweep.file)]) from None
    return True


def _planned(prepared: Prepared) -> float | None:
    """Seconds of a step; None for a model of the user's own.

    Raises:
        ImpossibleError: the job does not fit the machine's memory.
    """
    from hpctrain.errors import ImpossibleError
    from hpctrain.plan.plan import make_plan

    spec, machine = prepared.job.spec, prepared.machine
    if spec.model.module is not None:
        return None
    plan = make_plan(spec, machine, alternatives=0)
    if not plan.fits:
        raise ImpossibleError(
            f"memory: stage {plan.fullest} needs {format_bytes(plan.used)} of "
            f"{format_bytes(plan.limit)} on a device, by the planner"
        )
    return plan.step.seconds


def _where_not(problem: Problem) -> str:
    return f"{problem.key}: {problem.message}" if problem.key else problem.message
