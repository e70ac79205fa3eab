"""Fill in what a job leaves to its machine, its directory and its other keys.

A resolved job has no ``auto`` left: every rank, the batch script and every later reader work
from the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hpctrain.errors import ImpossibleError
from hpctrain.layout import ParallelLayout, divisors
from hpctrain.spec.job import JobSpec
from hpctrain.spec.load import Job, Source
from hpctrain.spec.model import ModelSpec, default_ffn_hidden
from hpctrain.spec.sequence import SequenceSplit


class Site(Protocol):
    """What resolving asks of a machine."""

    @property
    def devices_per_node(self) -> int | None: ...


def resolve(job: Job, site: Site, directory: Path) -> Job:
    """The job with every default worked out.

    Args:
        job: as validated.
        site: the machine it names.
        directory: what relative paths start from.

    Raises:
        ImpossibleError: numbers that do not divide.
    """
    spec = job.spec
    if spec.parallel.layout == "auto":
        raise _impossible(job, "parallel.layout", "auto was not worked out: the planner does that")
    values: dict[str, Any] = {}
    ranks_per_node = spec.ranks_per_node
    if ranks_per_node == "auto":
        ranks_per_node = values["ranks_per_node"] = site.devices_per_node or 1
    world = spec.nodes * ranks_per_node
    try:
        layout = _layout(spec, world, ranks_per_node)
    except ImpossibleError as error:
        problem = job.locate("parallel", error.message.removeprefix("parallel: "))
        raise ImpossibleError(str(problem), hint=error.hint) from None
    data = values["parallel.data"] = layout.dp
    if spec.parallel.shard == "node":
        values["parallel.shard"] = layout.dp_shard
    values |= _context(job, ranks_per_node)
    values |= _batch(job, data)
    values |= _model(spec)
    if spec.checkpoint.every is None:
        values["checkpoint.every"] = max(1, spec.train.steps // 10)
    if spec.train.schedule.kind == "wsd" and spec.train.schedule.decay_steps is None:
        left = spec.train.steps - spec.train.schedule.warmup_steps
        values["train.schedule.decay_steps"] = max(1, min(spec.train.steps // 10, left))
    for key, path in (("data.path", spec.data.path), ("checkpoint.path", spec.checkpoint.path)):
        if path is not None and not Path(path).is_absolute():
            values[key] = str(directory.absolute() / path)
    name = spec.machine_name
    if "/" in name and not Path(name).is_absolute():
        absolute = str(directory.absolute() / name)
        values["machine"] = spec.machine.removesuffix(name) + absolute
    changed = JobSpec.model_validate(_merged(spec.model_dump(mode="json"), values))
    sources = dict(job.sources)
    for key in values:
        if key not in sources or key.endswith(("data", "micro_batch", "ranks_per_node")):
            sources[key] = Source("resolved", "worked out from the other keys")
    return dataclasses.replace(job, spec=changed, sources=sources)


def layout_of(spec: JobSpec) -> ParallelLayout:
    """The layout of a resolved job."""
    assert isinstance(spec.ranks_per_node, int)
    return _layout(spec, spec.nodes * spec.ranks_per_node, spec.ranks_per_node)


def _layout(spec: JobSpec, world: int, ranks_per_node: int) -> ParallelLayout:
    parallel = spec.parallel
    return ParallelLayout.resolve(
        world,
        tensor=parallel.tensor,
        context=parallel.context.size,
        pipeline=parallel.pipeline,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        data=parallel.data,
        shard=parallel.shard if parallel.fsdp else 1,
        ranks_per_node=ranks_per_node,
    )


def _context(job: Job, ranks_per_node: int) -> dict[str, Any]:
    """Ranks that exchange heads, of a two-level context group."""
    parallel, model = job.spec.parallel, job.spec.model
    size, inner = parallel.context.size, parallel.context.inner
    if parallel.context.method != "two-level":
        return {}
    if inner == "auto":
        room = max(1, ranks_per_node // parallel.tensor)
        if model.heads:
            room = min(room, _fewest_heads(model, parallel.tensor))
        inner = max(d for d in divisors(size) if d <= max(1, room))
    elif size % inner:
        message = f"{inner} ranks do not divide the {size} of parallel.context.size"
        raise _impossible(job, "parallel.context.inner", message)
    return {"parallel.context.inner": inner}


def _fewest_heads(model: ModelSpec, tensor: int) -> int:
    """Query heads of the tensor-parallel rank that has the fewest."""
    assert model.heads
    kv = model.kv_heads or model.heads
    return model.heads // tensor if kv < tensor else kv // tensor * (model.heads // kv)


def _batch(job: Job, data: int) -> dict[str, Any]:
    train = job.spec.train
    if train.global_batch % data:
        low = train.global_batch // data * data
        near = f"{low} or {low + data}" if low else str(data)
        raise _impossible(
            job,
            "train.global_batch",
            f"{train.global_batch} samples do not divide over {data} data-parallel ranks; "
            f"nearest: {near}",
        )
    share = train.global_batch // data
    if train.micro_batch == "auto":
        return {"train.micro_batch": _micro_batch(share, job.spec.parallel.pipeline)}
    if share % train.micro_batch:
        fits = [size for size in range(1, share + 1) if share % size == 0]
        raise _impossible(
            job,
            "train.micro_batch",
            f"a rank's share of {share} samples ({train.global_batch} / {data} ranks) does not "
            f"divide into micro-batches of {train.micro_batch}; these do: "
            + ", ".join(str(size) for size in fits[:12]),
        )
    return {}


def _micro_batch(share: int, pipeline: int) -> int:
    """All of a rank's share at once; in a pipeline 1/(4p) of it, so that a bubble of (p-1)/m is
    below a quarter, with a multiple of p micro-batches where there is one."""
    if pipeline == 1:
        return share
    sizes = [size for size in range(share, 0, -1) if share % size == 0]
    counts = {size: share // size for size in sizes}
    enough = [size for size in sizes if counts[size] >= 4 * pipeline]
    regular = [size for size in enough if counts[size] % pipeline == 0]
    return (regular or enough or [1])[0]


def _model(spec: JobSpec) -> dict[str, Any]:
    model = spec.model
    if model.module is not None:
        return {}
    assert model.hidden is not None
    values: dict[str, Any] = {}
    if model.kv_heads is None:
        values["model.kv_heads"] = model.heads
    if model.ffn_hidden is None:
        values["model.ffn_hidden"] = default_ffn_hidden(model.hidden, model.activation)
    if model.max_positions is None:
        values["model.max_positions"] = spec.data.sequence_length
    if model.moe.experts and model.moe.hidden is None:
        values["model.moe.hidden"] = values.get("model.ffn_hidden", model.ffn_hidden)
    return values


def check(job: Job) -> None:
    """What a resolved job must satisfy beyond single sections.

    Raises:
        ImpossibleError: the sequence is longer than the model's positions.
    """
    spec = job.spec
    length, longest = spec.data.sequence_length, spec.model.max_positions
    if spec.model.module is None and length and longest and length > longest:
        raise _impossible(
            job,
            "data.sequence_length",
            f"{length} tokens are more than model.max_positions {longest}",
        )
    tensor = spec.parallel.tensor
    if tensor > 1 and spec.model.module is None:
        _check_tensor(job, tensor)
    parallel = spec.parallel
    degrees = (tensor, parallel.pipeline, parallel.expert, parallel.context.size)
    parted = max(degrees) > 1 or parallel.fsdp
    if spec.health.dispersion and parted:
        message = (
            "gradients are compared where each data-parallel rank holds a whole one: without "
            "tensor, pipeline, context and expert parallelism, and parallel.sharding none or zero1"
        )
        raise _impossible(job, "health.dispersion", message)
    if spec.parallel.context.size > 1:
        _check_context(job)
    if spec.data.documents != "joined":
        _check_documents(job)
    _check_stream(job)
    _check_experts(job)
    kind = spec.train.optimizer.kind
    if kind != "adamw" and (tensor > 1 or spec.parallel.fsdp):
        key = "parallel.tensor" if tensor > 1 else "parallel.sharding"
        cut = f"{tensor} tensor-parallel ranks" if tensor > 1 else spec.parallel.sharding
        right = "1" if tensor > 1 else "zero1 or none"
        message = f"{kind} needs whole matrices, which {cut} would cut; set {key}: {right}"
        raise _impossible(job, key, message)


def _check_tensor(job: Job, tensor: int) -> None:
    spec = job.spec
    dims = spec.model.transformer()
    for key in ("heads", "ffn_hidden", "vocab_size"):
        total = getattr(dims, key)
        if total < tensor:
            message = f"{tensor} ranks cannot share model.{key} = {total}; at most {total} can"
            raise _impossible(job, "parallel.tensor", message)
    length, split = spec.data.sequence_length, spec.sequence_split()
    if not spec.parallel.sequence or not length:
        return
    if any(split.count(length, place) % tensor for place in range(split.size)):
        step = tensor * split.size
        ranks = f"{tensor} tensor-parallel ranks" + (
            f" × {split.size} context-parallel ones" if split.size > 1 else ""
        )
        raise _impossible(
            job,
            "parallel.sequence",
            f"data.sequence_length {length} does not divide over {ranks}; "
            f"set parallel.sequence: false, or a length of {length // step * step or step}",
        )


def _check_documents(job: Job) -> None:
    spec, documents = job.spec, job.spec.data.documents
    parallel = spec.parallel
    why = None
    if spec.model.module is not None:
        why = "it masks the attention of our transformer; a model of your own has its own"
    elif spec.model.attention == "linear":
        why = "the state of model.attention: linear goes on from document to document"
    elif documents == "each":
        refused = {
            "a model with experts": spec.model.moe.experts > 0,
            "model.dropout above 0": spec.model.dropout > 0,
            "parallel.pipeline above 1": parallel.pipeline > 1,
            "parallel.sharding zero2 or zero3": parallel.fsdp,
            "parallel.tensor with parallel.sequence": parallel.tensor > 1 and parallel.sequence,
            "another parallel.context.method than ring": parallel.context.method != "ring",
        }
        found = [what for what, given in refused.items() if given]
        if found:
            why = f"ranks have different numbers of micro-batches, which {found[0]} does not take"
    if why is not None:
        raise _impossible(job, "data.documents", f"{documents}: {why}; leave it joined")


def _check_stream(job: Job) -> None:
    parallel = job.spec.parallel
    if parallel.stream is None:
        return
    why = None
    if job.spec.model.module is not None:
        why = "the parts of a model of your own are not known"
    elif job.spec.train.loss.module is not None:
        why = "a loss of your own takes all logits"
    elif parallel.overlap:
        why = "parallel.overlap cuts a micro-batch in another way"
    elif "vocab" in parallel.schedule.name.split("+"):
        why = "+vocab has its own passes for the output layer"
    if why is not None:
        raise _impossible(job, "parallel.stream", f"{why}; leave it out")


def _check_context(job: Job) -> None:
    spec, split = job.spec, job.spec.sequence_split()
    length, key = spec.data.sequence_length, "parallel.context"
    if spec.model.module is not None:
        message = f"{split.size} ranks cannot share the sequences of a model of your own"
        raise _impossible(job, key, f"{message}, whose attention is not known; set it to 1")
    if length and not split.fits(length):
        most = max(n for n in range(1, min(split.size, length) + 1) if _fits(spec, n))
        message = f"{split.size} ranks cannot share data.sequence_length = {length}; {most} can"
        raise _impossible(job, key, message)
    context = spec.parallel.context
    if spec.model.attention == "linear" and (context.method != "ring" or context.both_ways):
        message = "model.attention: linear hands a state from rank to rank; set method: ring and"
        raise _impossible(job, key, f"{message} both_ways: false")
    heads = _fewest_heads(spec.model, spec.parallel.tensor)
    if split.inner > heads:
        of = f" / {spec.parallel.tensor} tensor-parallel ranks" if spec.parallel.tensor > 1 else ""
        raise _impossible(
            job,
            key,
            f"{split.inner} ranks exchange heads, but a rank has {heads} "
            f"(model.heads {spec.model.heads}{of}); set parallel.context.method: ring, or "
            "two-level with fewer parallel.context.inner",
        )
    if length and "vocab" in spec.parallel.schedule.name.split("+") and not split.even(length):
        message = f"+vocab wants data.sequence_length {length} to divide over {split.size} ranks"
        raise _impossible(job, key, message)


def _fits(spec: JobSpec, size: int) -> bool:
    assert spec.data.sequence_length
    return SequenceSplit(size).fits(spec.data.sequence_length)


def _check_experts(job: Job) -> None:
    parallel, moe = job.spec.parallel, job.spec.model.moe
    dispatch = parallel.dispatch
    ranks = {"expert": parallel.expert, "expert_tensor": parallel.expert_tensor}
    if not moe.experts:
        for key, value in (*ranks.items(), ("dispatch.chunks", dispatch.chunks)):
            if value > 1:
                message = f"found {value}, but the model has no experts (model.moe.experts)"
                raise _impossible(job, f"parallel.{key}", message)
        return
    shared = {"expert": moe.experts, "expert_tensor": moe.hidden or 0}
    for key, what in (("expert", "experts"), ("expert_tensor", "channels of an expert")):
        if ranks[key] > shared[key]:
            message = f"{ranks[key]} ranks cannot share {shared[key]} {what}"
            raise _impossible(job, f"parallel.{key}", message)
    if parallel.overlap and parallel.tensor > 1:
        message = "overlap takes blocks with dense feed-forward networks; set it to false"
        raise _impossible(job, "parallel.overlap", message)
    if dispatch.kind == "slice" and (parallel.expert != parallel.tensor or parallel.tensor == 1):
        raise _impossible(
            job,
            "parallel.dispatch.kind",
            f"slice needs as many expert as tensor ranks, above 1; found expert {parallel.expert}, "
            f"tensor {parallel.tensor}",
        )
    if dispatch.kind == "slice" and parallel.expert_tensor > 1:
        message = f"slice needs expert_tensor 1; found {parallel.expert_tensor}"
        raise _impossible(job, "parallel.dispatch.kind", message)
    if dispatch.kind == "slice" and dispatch.chunks > 1:
        message = f"slice sends nothing that {dispatch.chunks} parts could overlap; set it to 1"
        raise _impossible(job, "parallel.dispatch.chunks", message)
    if dispatch.copies and (
        parallel.expert == 1
        or parallel.expert_tensor > 1
        or dispatch.chunks > 1
        or dispatch.kind == "slice"
    ):
        raise _impossible(
            job,
            "parallel.dispatch.copies",
            "copies of experts need expert above 1, expert_tensor 1, and dispatch flat or "
            "hierarchical in one part",
        )


def _impossible(job: Job, key: str, message: str) -> ImpossibleError:
    return ImpossibleError(str(job.locate(key, message)))


def _merged(data: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        *parents, last = key.split(".")
        here = data
        for parent in parents:
            here = here[parent]
        here[last] = value
    return data
