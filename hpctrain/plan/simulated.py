"""A step of an emulated machine without its ranks: the schedule's table run event by event.

The same passes and links as hpctrain.plan.emulation gives the ranks, for jobs that are too large
to be given ranks. One pipeline stands for all: data-parallel replicas are alike, and what they
exchange runs beside its passes (hpctrain.plan.simulated_data).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.machine import Machine
from hpctrain.plan.collectives import Group
from hpctrain.plan.emulation import check_emulated, vocabulary_passes
from hpctrain.plan.inputs import Strategy
from hpctrain.plan.plan import Plan, make_plan
from hpctrain.plan.simulated_data import Block, gathered_once, sharded, summed, summed_after
from hpctrain.plan.steptime import StepModel
from hpctrain.schedule import ActionKind, Costs, Schedule, simulate
from hpctrain.schedule.job import plan_pipeline, stage_layers
from hpctrain.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step, on the first rank of the pipeline.

    Attributes:
        seconds: of all of it.
        compute: passes of the blocks.
        talk: axis (tp, cp, ep) -> communication inside the blocks.
        pipeline: waiting for other stages, messages included.
        data: summing gradients and gathering shards, as far as nothing hides it.
        update: the optimizer and what else is fixed.
        bubble: mean idle share of all stages.
        plan: of the same job.
    """

    seconds: float
    compute: float
    talk: dict[str, float]
    pipeline: float
    data: float
    update: float
    bubble: float
    plan: Plan


def simulate_step(spec: JobSpec, machine: Machine) -> SimulatedStep:
    """The step of a resolved job.

    Raises:
        UsageError: a model of the user's own.
        ImpossibleError: a schedule that the job does not allow.
    """
    check_emulated(spec, ranks=False)
    plan = make_plan(spec, machine, alternatives=0)
    work, strategy = plan.work, plan.strategy
    model = StepModel(work)
    usual, dense, head, embedding = model.layer(strategy)
    tensor = _tensor(model, strategy)
    block = Block.of(usual, tensor, strategy)
    first = block if dense is None else Block.of(dense, tensor, strategy)
    assert spec.model.layers is not None
    early = work.model.dense_layers if dense is not None else 0
    blocks = [first if number < early else block for number in range(spec.model.layers)]
    micro = plan.step.micro_batches
    split = plan.step.split
    # The two copies of a tied embedding are summed by messages between the pipeline's ends.
    tied = model.state(strategy, model.pipe(strategy).layers).tied
    data = split["gradient reduction"] - tied
    update = split["optimizer"] + work.values.step_seconds
    schedule = plan_pipeline(spec)
    if schedule is None:
        passes = sum(b.forward + b.inputs + b.weights for b in blocks) + head + embedding
        compute = micro * passes
        talk = {axis: micro * sum(b.talk(axis) for b in blocks) for axis in block.ahead}
        if strategy.states.fully_sharded:
            seconds = sharded(model, strategy, blocks, (embedding, head))
            data = seconds - compute - sum(talk.values())
        elif data:
            seconds = summed(model, strategy, blocks, (embedding, head))
            data = seconds - compute - sum(talk.values())
        seconds = compute + sum(talk.values()) + data + update
        return SimulatedStep(seconds, compute + update, talk, 0.0, data, update, 0.0, plan)
    numbers = stage_layers(spec, spec.model.layers, schedule.stages.stages)
    stages = [[blocks[layer] for layer in layers] for layers in numbers]
    costs = _costs(model, strategy, schedule, stages, (embedding, head))
    timeline = simulate(schedule, costs)
    passes = timeline.makespan
    if strategy.states.fully_sharded:
        gather, scattered = gathered_once(model, strategy, blocks[-1])
        if any(a.kind is ActionKind.GATHER for a in schedule.actions[0]):
            timeline = simulate(schedule, replace(costs, gather=gather, scatter=scattered))
            data = timeline.makespan - passes
        else:
            rest = summed_after(model, strategy, schedule, timeline, numbers, scattered)
            data = gather + rest
    elif data:
        data = summed_after(model, strategy, schedule, timeline, numbers)
    mine = [b for _, stage in schedule.stages.held[0] for b in stages[stage]]
    talk = {axis: micro * sum(b.talk(axis) for b in mine) for axis in block.ahead}
    return SimulatedStep(
        seconds=passes + tied + data + update,
        compute=timeline.busy[0] - sum(talk.values()) + update,
        talk=talk,
        pipeline=passes - timeline.busy[0] + tied,
        data=data,
        update=update,
        bubble=timeline.bubble_fraction,
        plan=plan,
    )


def _costs(
    model: StepModel,
    strategy: Strategy,
    schedule: Schedule,
    stages: Sequence[Sequence[Block]],
    outside: tuple[float, float],
) -> Costs:
    """Seconds of the passes and messages of a pipeline whose embedding and output layer take
    ``outside`` seconds a micro-batch."""
    embedding, head = outside
    ends = [0.0] * len(stages)
    if not schedule.vocabulary:
        ends[0] += embedding / 3.0
        ends[-1] += head / 3.0
    pairs = list(zip(stages, ends, strict=True))
    costs = Costs(
        forward=tuple(sum(b.onward for b in s) + end for s, end in pairs),
        input_grad=tuple(sum(b.backward - b.weights for b in s) + end for s, end in pairs),
        weight_grad=tuple(sum(b.weights for b in s) + end for s, end in pairs),
        transfer=_transfers(model, strategy),
    )
    if schedule.vocabulary:
        rows = vocabulary_passes(schedule, head, embedding)
        group = _group(model, strategy, "pp")
        costs = replace(
            costs,
            vocabulary_forward=rows["S"],
            vocabulary_weight_grad=rows["T"],
            embedding=rows["E"],
            embedding_grad=rows["D"],
            collective=model.wires.gather(_activation(model, strategy), group),
        )
    if len(schedule.stages.routes) > 1:
        costs = replace(costs, reduce=_copies(model, strategy))
    return costs


def _copies(model: StepModel, strategy: Strategy) -> float:
    """Seconds in which two ranks exchange the gradients of a stage that both hold."""
    shape, layout = model.work.model, strategy.layout
    count = max(model.layers_of(strategy)) * shape.local_layer_parameters(layout.tp)
    count += shape.vocab * shape.hidden / layout.tp
    moved = model.work.gradient_bytes * count
    return model.wires.exchange(moved, layout.pp, strategy.strides()["pp"]) / 2.0


def _tensor(model: StepModel, strategy: Strategy) -> float:
    """Seconds of tensor-parallel communication in a block's forward: the two regions are entered
    and left, by gathering and scattering (half an all-reduce each) or by an all-reduce."""
    layout = strategy.layout
    if layout.tp == 1:
        return 0.0
    whole = _activation(model, strategy)
    return 4.0 * model.wires.gather(whole, _group(model, strategy, "tp"))


def _activation(model: StepModel, strategy: Strategy) -> float:
    """Bytes of the residual stream of a micro-batch, whole over a tensor-parallel group."""
    work = model.work
    element = 4.0 if work.dtype == "fp32" else 2.0
    tokens = strategy.micro_batch * work.sequence / strategy.layout.cp
    return element * tokens * work.model.hidden


def _group(model: StepModel, strategy: Strategy, axis: str) -> Group:
    return model.wires.group((getattr(strategy.layout, axis), strategy.strides()[axis]))


def _transfers(model: StepModel, strategy: Strategy) -> tuple[tuple[float, ...], ...]:
    """Seconds of a message between every two ranks of the first pipeline."""
    layout, wires, platform = strategy.layout, model.wires, model.work.platform
    moved = _activation(model, strategy)
    if layout.tp > 1 and strategy.sequence_parallel:
        moved /= layout.tp
    stride, per_node = strategy.strides()["pp"], platform.node_devices
    near = wires.hop + moved / (platform.peer_bandwidth * wires.link)
    far = 2.0 * wires.hop + moved / (platform.network_bandwidth(stride) * wires.network)
    nodes = [rank * stride // per_node for rank in range(layout.pp)]
    return tuple(tuple(near if a == b else far for b in nodes) for a in nodes)
