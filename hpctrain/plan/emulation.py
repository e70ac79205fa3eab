"""What an emulated machine needs to know: seconds of passes, seconds of links, in one table.

The numbers are the planner's own, so that an emulated step can be held against its prediction.
The table is plain JSON; it lies in the run directory, where the ranks read it.
"""

from __future__ import annotations

from typing import Any

from hpctrain.errors import UsageError
from hpctrain.machine import Machine
from hpctrain.plan.emulation_links import Scales, axes_name, links_of
from hpctrain.plan.job import strategy_of, workload_of
from hpctrain.plan.seconds import LayerTime
from hpctrain.plan.simulated_data import BUCKETS
from hpctrain.plan.steptime import StepModel
from hpctrain.schedule import Schedule
from hpctrain.schedule.job import plan_pipeline
from hpctrain.spec.job import JobSpec


def emulation_table(spec: JobSpec, machine: Machine) -> dict[str, Any]:
    """The table of a resolved job.

    ``block``: seconds of a block's forward, input-gradient and weight-gradient pass, without
    communication; ``dense``: of one without experts, where others have some. ``head``,
    ``embedding``: of a micro-batch, all passes; ``vocabulary``: in their place, of each pass of
    Vocabulary Parallelism. ``optimizer``, ``step``: of a step.

    ``links``: axis -> operation -> [seconds, seconds a byte of the small model's messages];
    ``near`` and ``far``: the same for a message to the next stage, inside a node and between
    nodes, in bytes of the job's model, of which ``messages`` stand for one of the small one's:
    activations, gradients of a stage that two ranks hold; ``tied``: seconds of a message with the
    gradients of a tied embedding. ``gathered``, ``scattered``: axes, and operations on them, that
    hide behind computing but for the share ``unhidden``. ``buckets``: of gradients.

    Raises:
        UsageError: as check_emulated().
    """
    check_emulated(spec, ranks=True)
    work, _ = workload_of(spec, machine)
    strategy = strategy_of(spec)
    model = StepModel(work)
    layout, wires = strategy.layout, model.wires
    block, dense, head, embedding = model.layer(strategy)
    scales = Scales.of(spec, work, strategy.states.fully_sharded)
    state = model.state(strategy, model.pipe(strategy).layers)
    schedule = plan_pipeline(spec)
    spread = {}
    if schedule is not None and schedule.vocabulary:
        spread = vocabulary_passes(schedule, head, embedding)
    across = work.platform.network_bandwidth(strategy.strides()["pp"]) * wires.network
    gathered: list[str] = []
    scattered: list[list[str]] = []
    if strategy.states.fully_sharded:
        shards = axes_name(tuple(a for a in ("dp_shard", "cp") if getattr(layout, a) > 1))
        gathered = [shards, "edp"]
        scattered = [[axis, "reduce_scatter"] for axis in gathered]
        scattered.append(["dp_replicate", "all_reduce"])
    return {
        "machine": machine.name,
        "ranks_per_node": spec.ranks_per_node,
        "block": _passes(block),
        "dense": None if dense is None else _passes(dense),
        "head": 0.0 if spread else head,
        "embedding": 0.0 if spread else embedding,
        "vocabulary": spread,
        "optimizer": state.optimizer,
        "step": work.values.step_seconds,
        "links": links_of(spec, model, strategy, scales),
        "near": [wires.hop, 1.0 / (work.platform.peer_bandwidth * wires.link)],
        "far": [2.0 * wires.hop, 1.0 / across],
        "messages": [scales.activations, scales.gradients],
        "tied": state.tied,
        "gathered": gathered,
        "scattered": scattered,
        "unhidden": 1.0 - work.values.fsdp_overlap if gathered else 0.0,
        "buckets": BUCKETS,
    }


def vocabulary_passes(schedule: Schedule, head: float, embedding: float) -> dict[str, float]:
    """Seconds of the passes E, S, T and D of one rank's rows, for those of all rows.

    The input gradient of the output layer belongs to S with one barrier, to T with two (Yeung et
    al. 2024, sections 4.2 and 4.3).
    """
    third, rows = head / schedule.ranks / 3.0, embedding / schedule.ranks
    early = 2.0 if schedule.vocabulary == 1 else 1.0
    return {"E": rows / 2.0, "S": early * third, "T": (3.0 - early) * third, "D": rows / 2.0}


def _passes(block: LayerTime) -> list[float]:
    """Seconds of forward, input-gradient and weight-gradient pass without communication."""
    inputs = block.backward.total - block.backward.communication - block.weights
    return [block.forward.total - block.forward.communication, inputs, block.weights]


def check_emulated(spec: JobSpec, *, ranks: bool) -> None:
    """Refuse a job whose passes have no known times.

    Args:
        spec: resolved.
        ranks: whether there are real ranks, or the simulator alone.

    Raises:
        UsageError: a model of the user's own, or ranks with experts whose dispatch is unknown.
    """
    if spec.model.module is not None:
        raise UsageError(
            f"machine.emulate: the shape of model.module {spec.model.module} is not known",
            hint="give layers, hidden, heads and vocab_size of a transformer that is like it",
        )
    dispatch = spec.parallel.dispatch
    if ranks and spec.model.moe.experts and (dispatch.kind == "hierarchical" or dispatch.copies):
        found = "hierarchical" if dispatch.kind == "hierarchical" else f"copies: {dispatch.copies}"
        raise UsageError(
            f"parallel.dispatch: {found}: its messages have no emulated times",
            hint="emulate the flat dispatch, or simulate the job: "
            f"machine: {{simulate: {spec.machine_name}}}",
        )
