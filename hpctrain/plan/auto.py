"""``parallel: auto``: the layout of a job left to the search.

What a job gives beside ``auto`` stays as it is; the search fills in the rest. The choice becomes
part of the resolved job, so that ranks and later readers see an ordinary layout.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpctrain.errors import ImpossibleError, UsageError
from hpctrain.machine import Machine
from hpctrain.plan.job import RECOMPUTE, workload_of
from hpctrain.plan.memory import limit
from hpctrain.plan.pipeline import FORMS, form_of
from hpctrain.plan.plan import job_space, settings
from hpctrain.plan.search import search
from hpctrain.plan.software import DEFAULT_STACK
from hpctrain.plan.space import Space
from hpctrain.spec import Job, JobSpec, parse_job, resolve
from hpctrain.spec.load import Source
from hpctrain.spec.parallel import ParallelSpec
from hpctrain.spec.resolve import Site

ROOM = 0.95
"""Share of what can be filled that a choice fills at most, where there is one."""
_FIXED = ("tensor", "pipeline", "expert", "expert_tensor")
"""Degrees that a job may fix while the search chooses the rest."""
_BESIDE = frozenset(
    {
        *("layout", *_FIXED, "context", "sharding", "recompute", "sequence", "schedule"),
        *("overlap", "tensor_plan", "offload", "emulate", "prefetch", "dispatch"),
    }
)
"""Keys that a job may give beside ``auto``; others follow from what the search chooses."""


def chosen(job: Job, machine: Machine, site: Site, directory: Path) -> Job:
    """The job with its layout chosen; unchanged where it gives one itself.

    Args:
        job: as validated, not resolved.
        machine, site, directory: as ``resolve`` takes them.

    Raises:
        ImpossibleError: nothing divides, or nothing fits; names the nearest.
        UsageError: the model is the user's own, or a key is given that the search chooses.
    """
    parallel = job.spec.parallel
    if parallel.layout != "auto":
        return job
    for key in sorted(parallel.model_fields_set - _BESIDE):
        if getattr(parallel, key) != ParallelSpec.model_fields[key].get_default(
            call_default_factory=True
        ):
            problem = job.locate(f"parallel.{key}", "parallel.layout: auto works this out")
            raise UsageError(str(problem), hint=f"leave parallel.{key} out, or give the layout")
    found = auto_layout(_without_layout(job, site, directory), machine, space_of(job.spec))
    # through the same door as overrides of the command line, so that every check holds
    texts = [f"{key}={_text(value)}" for key, value in found.items()]
    again = parse_job(job.text, job.file, (*job.overrides, "parallel.layout=given", *texts))
    keys = [key for key in ("parallel.layout", *found) if job.source(key).kind == "default"]
    origin = Source("resolved", "the fastest layout that fits, by the planner")
    sources = {**job.sources, **dict.fromkeys(keys, origin), "parallel.layout": origin}
    return replace(job, spec=again.spec, sources=sources)


def auto_layout(
    spec: JobSpec, machine: Machine, space: Space | None = None, stack: str = DEFAULT_STACK
) -> dict[str, object]:
    """Keys of the job file of the fastest layout that fits, with room to spare where there is
    one.

    Raises:
        ImpossibleError: nothing fits, or nothing divides.
        UsageError: the model is the user's own.
    """
    work, _ = workload_of(spec, machine, stack)
    assert isinstance(spec.ranks_per_node, int), "resolve() leaves no auto"
    devices, space = spec.nodes * spec.ranks_per_node, space or job_space(spec)
    try:
        found = search(work, devices, space, keep=1, room=ROOM * limit(work))
    except ImpossibleError:
        try:
            found = search(work, devices, space, keep=1)
        except ImpossibleError as error:
            raise ImpossibleError(f"parallel: auto: {error.message}", hint=error.hint) from None
    return settings(found.best[0].strategy, work)


def space_of(spec: JobSpec) -> Space:
    """What may be chosen for a job, given the keys that it fixes."""
    parallel, given = spec.parallel, spec.parallel.model_fields_set
    fixed: dict[str, tuple[object, ...]] = {}
    for key in _FIXED:
        if key in given:
            fixed[key] = (getattr(parallel, key),)
    if "context" in given:
        fixed["context"] = (parallel.context.size,)
    if "sharding" in given:
        fixed["states"] = (parallel.sharding,)
    if "recompute" in given:
        fixed["recompute"] = (RECOMPUTE[parallel.recompute],)
    if "sequence" in given:
        fixed["sequence_parallel"] = (parallel.sequence,)
    if "schedule" in given:
        name = parallel.schedule.name
        if name not in FORMS:
            raise UsageError(
                f"parallel.schedule {name}: parallel.layout: auto cannot search with it",
                hint=f"one of {', '.join(FORMS)}, or give the layout",
            )
        fixed["schedules"] = (form_of(name, 1).name,)
    if isinstance(spec.train.micro_batch, int):
        fixed["micro_batch"] = (spec.train.micro_batch,)
    return replace(job_space(spec), **fixed)  # type: ignore[arg-type]


def _without_layout(job: Job, site: Site, directory: Path) -> JobSpec:
    """The job resolved as if all ranks were one tensor-parallel group, which divides every
    batch: model, ranks and paths are what the search needs of it."""
    per_node = job.spec.ranks_per_node
    ranks = site.devices_per_node or 1 if per_node == "auto" else per_node
    train = job.spec.train.model_copy(update={"micro_batch": "auto"})
    whole = ParallelSpec.model_validate({"tensor": job.spec.nodes * ranks})
    bare = job.spec.model_copy(update={"parallel": whole, "train": train})
    return resolve(replace(job, spec=bare), site, directory).spec


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
