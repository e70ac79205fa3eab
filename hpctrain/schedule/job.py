"""The pipeline that a job asks for: its schedule, and the layers of each stage.

Used where a job is checked before it is launched and where its ranks build the model, so that
both say the same.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hpctrain.errors import HpctrainError, ImpossibleError, UsageError
from hpctrain.schedule.balance import share_layers
from hpctrain.schedule.registry import make, parse
from hpctrain.schedule.table import Schedule

if TYPE_CHECKING:
    from hpctrain.spec import Job
    from hpctrain.spec.job import JobSpec


def plan_pipeline(spec: JobSpec) -> Schedule | None:
    """The schedule, with transfers, of a resolved job; None without pipeline parallelism.

    Raises:
        UsageError: no such schedule or option, or keys that exclude each other.
        ImpossibleError: a number of ranks, chunks or micro-batches that the schedule does not
            allow, or too few layers. Messages start with the key.
    """
    parallel = spec.parallel
    if parallel.pipeline == 1:
        if parallel.offload:
            raise UsageError("parallel.offload: needs parallel.pipeline above 1")
        return None
    if spec.train.loss.module is not None:
        raise UsageError(
            "train.loss.module: a loss that calls the whole model cannot be cut into stages",
            hint="with parallel.pipeline the loss is cross entropy of the model's logits",
        )
    schedule = _schedule(spec)
    if spec.model.module is None:
        assert spec.model.layers is not None
        stage_layers(spec, spec.model.layers, schedule.stages.stages)
    return schedule


def check_pipeline(job: Job) -> None:
    """Refuse a resolved job whose pipeline is not possible; names file, line and key.

    Raises:
        UsageError, ImpossibleError: see :func:`plan_pipeline`.
    """
    try:
        plan_pipeline(job.spec)
    except (UsageError, ImpossibleError) as error:
        key, found, rest = error.message.partition(": ")
        if not found or not key.startswith(("parallel.", "train.")):
            raise
        raise type(error)(str(job.locate(key, rest)), hint=error.hint) from None


def stage_layers(spec: JobSpec, layers: int, stages: int) -> list[range]:
    """Layers of each stage, in the order of the model.

    Args:
        spec: resolved job.
        layers: of the whole model (children, of a sequential one).
        stages: of the schedule.

    Raises:
        UsageError, ImpossibleError: fewer layers than stages, or ``parallel.stage_layers`` are
            not that many.
    """
    parallel, counts = spec.parallel, spec.parallel.stage_layers
    if layers < stages:
        chunks = stages // parallel.pipeline
        product = f"{parallel.pipeline} ranks" + (f" × {chunks} chunks" if chunks > 1 else "")
        raise ImpossibleError(
            f"parallel.pipeline: {product} are {stages} stages, but the model has {layers} "
            f"layer{'s' * (layers != 1)}",
            hint="fewer ranks or chunks, or more layers",
        )
    if not counts:
        counts = share_layers(layers, [1.0] * stages)
    if len(counts) != stages or sum(counts) != layers:
        raise UsageError(
            f"parallel.stage_layers: {stages} stages share {layers} layers; found "
            f"{len(counts)} numbers with the sum {sum(counts)}",
            hint=f"for example {list(share_layers(layers, [1.0] * stages))}",
        )
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _schedule(spec: JobSpec) -> Schedule:
    parallel, train = spec.parallel, spec.train
    name, options = _name(spec)
    assert isinstance(parallel.data, int) and isinstance(train.micro_batch, int), "resolved"
    micro_batches = train.global_batch // parallel.data // train.micro_batch
    try:
        return make(
            name,
            ranks=parallel.pipeline,
            micro_batches=micro_batches,
            chunks=parallel.chunks,
            **options,
        )
    except HpctrainError as error:
        message = f"parallel.schedule: {error.message}"
        if isinstance(error, ImpossibleError) and "micro-batch" in message:
            message += (
                f" (train.global_batch {train.global_batch} / parallel.data {parallel.data} / "
                f"train.micro_batch {train.micro_batch})"
            )
        raise type(error)(message, hint=error.hint) from None


def _name(spec: JobSpec) -> tuple[str, dict[str, Any]]:
    """The schedule's name with the transforms that other keys stand for, and its options."""
    parallel = spec.parallel
    name, options = parallel.schedule.name, dict(parallel.schedule.options)
    try:
        base, suffixes = parse(name)
    except HpctrainError as error:
        raise type(error)(f"parallel.schedule: {error.message}", hint=error.hint) from None
    if "fsdp" in suffixes and not parallel.fsdp:
        raise UsageError(
            "parallel.schedule: +fsdp gathers sharded parameters; set parallel.sharding: zero3"
        )
    if "vocab" in suffixes and spec.model.module is not None:
        raise UsageError(
            "parallel.schedule: +vocab spreads the embedding and output layer of our transformer; "
            "your own model's are not known"
        )
    if parallel.offload:
        suffixes = [*{*suffixes, "offload"}]
        options["fraction"] = parallel.offload
    if parallel.sharding == "zero3":
        suffixes = [*{*suffixes, "fsdp"}]
    return "+".join((base, *suffixes)), options
