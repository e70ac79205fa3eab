"""A step of an emulated machine without its ranks: the schedule's table run event by event.

The same passes and links as hpctrain.plan.emulation gives the ranks, for jobs that are too large
to be given ranks. One pipeline stands for all: data-parallel replicas are alike, and what they
exchange is added as the planner sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.machine import Machine
from hpctrain.plan.emulation import check_emulated
from hpctrain.plan.inputs import Strategy, Workload
from hpctrain.plan.plan import Plan, make_plan
from hpctrain.plan.seconds import LayerTime
from hpctrain.plan.steptime import StepModel
from hpctrain.schedule import Costs, simulate
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


@dataclass(frozen=True, slots=True)
class _Block:
    """Seconds of one block and micro-batch: passes, and what its ranks say to each other."""

    forward: float
    inputs: float
    weights: float
    ahead: dict[str, float]
    back: dict[str, float]

    @classmethod
    def of(cls, time: LayerTime, tensor: float, strategy: Strategy) -> _Block:
        """Of the planner's block, whose tensor-parallel messages nothing hides: ``tensor``."""
        again = time.recompute
        inputs = time.backward.total - time.backward.communication - time.weights
        # Under sequence parallelism the weight gradients gather both regions' inputs once more.
        back = tensor * (1.5 if strategy.sequence_parallel else 1.0)
        if strategy.recompute in ("full", "stage"):
            back += tensor
        return cls(
            time.forward.total - time.forward.communication,
            inputs + again.total - again.communication,
            time.weights,
            {"tp": tensor, "cp": time.forward.cp, "ep": time.forward.ep},
            {
                "tp": back,
                "cp": time.backward.cp + again.cp,
                "ep": time.backward.ep + again.ep,
            },
        )

    def talk(self, axis: str) -> float:
        return self.ahead[axis] + self.back[axis]


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
    tensor = _tensor(model, work, strategy)
    block = _Block.of(usual, tensor, strategy)
    first = block if dense is None else _Block.of(dense, tensor, strategy)
    assert spec.model.layers is not None
    early = work.model.dense_layers if dense is not None else 0
    blocks = [first if number < early else block for number in range(spec.model.layers)]
    micro = plan.step.micro_batches
    split = plan.step.split
    # The two copies of a tied embedding are summed by messages between the pipeline's ends.
    tied = model.state(strategy, model.pipe(strategy).layers).tied
    data = split["gradient reduction"] - tied + split["sharded state"]
    update = split["optimizer"] + work.values.step_seconds
    schedule = plan_pipeline(spec)
    if schedule is None:
        passes = sum(b.forward + b.inputs + b.weights for b in blocks) + head + embedding
        compute = micro * passes
        talk = {axis: micro * sum(b.talk(axis) for b in blocks) for axis in block.ahead}
        seconds = compute + sum(talk.values()) + data + update
        return SimulatedStep(seconds, compute + update, talk, 0.0, data, update, 0.0, plan)
    stages = [
        [blocks[layer] for layer in layers]
        for layers in stage_layers(spec, spec.model.layers, schedule.stages.stages)
    ]
    ends = [0.0] * len(stages)
    ends[0] += embedding / 3.0
    ends[-1] += head / 3.0
    pairs = list(zip(stages, ends, strict=True))
    costs = Costs(
        forward=tuple(sum(b.forward + sum(b.ahead.values()) for b in s) + end for s, end in pairs),
        input_grad=tuple(sum(b.inputs + sum(b.back.values()) for b in s) + end for s, end in pairs),
        weight_grad=tuple(sum(b.weights for b in s) + end for s, end in pairs),
        transfer=_transfers(model, work, strategy, machine),
    )
    timeline = simulate(schedule, costs)
    mine = [b for _, stage in schedule.stages.held[0] for b in stages[stage]]
    talk = {axis: micro * sum(b.talk(axis) for b in mine) for axis in block.ahead}
    return SimulatedStep(
        seconds=timeline.makespan + tied + data + update,
        compute=timeline.busy[0] - sum(talk.values()) + update,
        talk=talk,
        pipeline=timeline.makespan - timeline.busy[0] + tied,
        data=data,
        update=update,
        bubble=timeline.bubble_fraction,
        plan=plan,
    )


def _tensor(model: StepModel, work: Workload, strategy: Strategy) -> float:
    """Seconds of tensor-parallel communication in a block's forward: the two regions are entered
    and left, by gathering and scattering (half an all-reduce each) or by an all-reduce."""
    layout = strategy.layout
    if layout.tp == 1:
        return 0.0
    element = 4.0 if work.dtype == "fp32" else 2.0
    whole = element * strategy.micro_batch * work.sequence / layout.cp * work.model.hidden
    group = model.wires.group((layout.tp, strategy.strides()["tp"]))
    return 4.0 * model.wires.gather(whole, group)


def _transfers(
    model: StepModel, work: Workload, strategy: Strategy, machine: Machine
) -> tuple[tuple[float, ...], ...]:
    """Seconds of a message between every two ranks of the first pipeline."""
    layout, wires, platform = strategy.layout, model.wires, work.platform
    element = 4.0 if work.dtype == "fp32" else 2.0
    moved = element * strategy.micro_batch * work.sequence / layout.cp * work.model.hidden
    if layout.tp > 1 and strategy.sequence_parallel:
        moved /= layout.tp
    stride, per_node = strategy.strides()["pp"], platform.node_devices
    near = wires.hop + moved / (platform.peer_bandwidth * wires.link)
    far = 2.0 * wires.hop + moved / (platform.network_bandwidth(stride) * wires.network)
    nodes = [rank * stride // per_node for rank in range(layout.pp)]
    return tuple(tuple(near if a == b else far for b in nodes) for a in nodes)
