"""Data-parallel traffic of a simulated step, event by event beside the passes that hide it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.plan.collectives import Group
from hpctrain.plan.experts import experts_apart
from hpctrain.plan.inputs import Placement, Strategy
from hpctrain.plan.seconds import LayerTime
from hpctrain.plan.steptime import StepModel
from hpctrain.schedule import ActionKind, Schedule, Timeline
from hpctrain.shard_streams import ShardStreams

BUCKETS = 8
"""That the gradients of replicas are summed in on an emulated machine."""


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds of one block and micro-batch: passes, and what its ranks say to each other.

    Attributes:
        forward, inputs, weights: computing.
        ahead, back: axis (tp, cp, ep) -> communication in the forward and the backward pass.
    """

    forward: float
    inputs: float
    weights: float
    ahead: dict[str, float]
    back: dict[str, float]

    @classmethod
    def of(cls, time: LayerTime, tensor: float, strategy: Strategy) -> Block:
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

    @property
    def onward(self) -> float:
        """Seconds of the forward pass."""
        return self.forward + sum(self.ahead.values())

    @property
    def backward(self) -> float:
        """Seconds of both gradients."""
        return self.inputs + self.weights + sum(self.back.values())

    def talk(self, axis: str) -> float:
        """Seconds of communication on an axis, both passes."""
        return self.ahead[axis] + self.back[axis]


def sharded(
    model: StepModel,
    strategy: Strategy,
    blocks: Sequence[Block],
    ends: tuple[float, float],
) -> float:
    """Seconds of the passes of a step without a pipeline whose parameters are gathered a block at
    a time, until the last gradients are scattered."""
    usual, streams = model.shards(strategy), ShardStreams(1.0 - model.work.values.fsdp_overlap)
    early = model.work.model.dense_layers if model.work.model.experts else 0
    of_dense = model.shards(strategy, dense=True) if early else usual
    times = [of_dense if number < early else usual for number in range(len(blocks))]
    again = strategy.states.parameters is not Placement.MATERIALISED
    embedding, head = (seconds / 3.0 for seconds in ends)
    micro, now = model.work.micro_batches(strategy), 0.0
    last = len(blocks) - 1

    def asked(seconds: float) -> float:
        return streams.gather(streams.asked(now), seconds)

    for number in range(micro):
        now = streams.use(now, asked(usual.ends_gather), usual.ends_gather)
        for index, block in enumerate(blocks):
            now = streams.use(now, asked(times[index].gather), times[index].gather)
            now += block.onward + (index == 0) * embedding + (index == last) * head
        due = deque([asked(times[last].gather)] if again else [])
        for index, block in reversed(list(enumerate(blocks))):
            if again:
                if index:  # the block before it is gathered while this one is computed
                    due.append(asked(times[index - 1].gather))
                now = streams.use(now, due.popleft(), times[index].gather)
            now += block.backward + 2.0 * ((index == 0) * embedding + (index == last) * head)
            if number == micro - 1:
                now = streams.scatter(now, now, times[index].scatter)
    now = streams.scatter(now, now, usual.ends_scatter)
    return streams.drain(now)


def gathered_once(model: StepModel, strategy: Strategy, block: Block) -> tuple[float, float]:
    """Seconds by which gathering the first stage's parameters holds up its first micro-batch, and
    in which the gradients of all its micro-batches are scattered."""
    times, streams = model.shards(strategy), ShardStreams(1.0 - model.work.values.fsdp_overlap)
    layers = max(model.layers_of(strategy))
    units = [times.ends_gather] + [times.gather] * layers
    overs = [streams.gather(0.0, seconds) for seconds in units]
    now = streams.use(0.0, overs[0], units[0])
    for over, seconds in zip(overs[1:], units[1:], strict=True):
        now = streams.use(now, over, seconds) + block.onward
    return now - layers * block.onward, layers * times.scatter + times.ends_scatter


def summed(
    model: StepModel,
    strategy: Strategy,
    blocks: Sequence[Block],
    ends: tuple[float, float],
) -> float:
    """Seconds of the passes of a step without a pipeline whose gradients are summed in buckets
    while the last backward runs, until the last bucket is there and what follows from it."""
    held = ReplicatedParameters.of(model, strategy)
    sizes = [held.block(number) for number in range(len(blocks))]
    table = held.table * (1 if model.work.model.tied else 2)
    whole = sum(sizes) + table
    bucket = _summing(model, strategy, whole) / BUCKETS
    micro = model.work.micro_batches(strategy)
    embedding, head = (seconds / 3.0 for seconds in ends)
    now = micro * (sum(b.onward for b in blocks) + embedding + head)
    now += (micro - 1) * (sum(b.backward for b in blocks) + 2.0 * (embedding + head)) + 2.0 * head
    there = over = 0.0
    sent = 0
    for block, size in zip(reversed(blocks), reversed(sizes), strict=True):
        now, there = now + block.backward, there + size
        while (sent + 1) * whole / BUCKETS <= there:
            over, sent = max(over, now) + bucket, sent + 1
    now += 2.0 * embedding
    over = max(over, now) + (BUCKETS - sent) * bucket
    return over + _afterwards(model, strategy, whole, range(len(blocks)))


def summed_after(
    model: StepModel,
    strategy: Strategy,
    schedule: Schedule,
    timeline: Timeline,
    stages: Sequence[Sequence[int]],
    scattered: float | None = None,
) -> float:
    """Seconds between a pipeline's last pass and the moment when all its gradients are summed and
    what follows from it is there: each chunk's from its last gradient on, one after another.

    Args:
        model, strategy: of the job.
        schedule, timeline: of its pipeline.
        stages: numbers of their blocks.
        scattered: seconds in which the gradients of a rank's stages are scattered; without, they
            are summed.
    """
    held = ReplicatedParameters.of(model, strategy)
    sizes = [
        sum(map(held.block, blocks)) + held.table * (number in (0, len(stages) - 1))
        for number, blocks in enumerate(stages)
    ]
    most = max(model.layers_of(strategy)) * held.block(len(stages)) + held.table
    latest, after = timeline.makespan, 0.0
    for rank, row in enumerate(schedule.actions):
        complete: dict[int, float] = {}
        for at, index in enumerate(timeline.indices[rank]):
            if row[index].kind in (ActionKind.B, ActionKind.W):
                stage = row[index].stage
                assert stage is not None
                complete[stage] = timeline.ends[rank][at]
        over = 0.0
        for stage, moment in sorted(complete.items(), key=lambda one: one[1]):
            seconds = _summing(model, strategy, sizes[stage])
            if scattered is not None:
                seconds = scattered * sizes[stage] / most
            over = max(over, moment) + seconds
        latest = max(latest, over)
        if scattered is None:
            blocks = [block for stage in complete for block in stages[stage]]
            mine = sum(sizes[stage] for stage in complete)
            after = max(after, _afterwards(model, strategy, mine, blocks))
    return latest - timeline.makespan + after


@dataclass(frozen=True, slots=True)
class ReplicatedParameters:
    """Parameters of a rank whose gradients all its replicas sum: of a block with experts where
    there are some, of one without, of embedding and output layer."""

    usual: float
    dense: float
    table: float
    dense_layers: int

    @classmethod
    def of(cls, model: StepModel, strategy: Strategy) -> ReplicatedParameters:
        shape, layout = model.work.model, strategy.layout
        usual = shape.local_layer_parameters(layout.tp)
        if not experts_apart(layout):
            usual += shape.expert_parameters
        dense = shape.local_dense_parameters(layout.tp)
        table = shape.vocab * shape.hidden / layout.tp
        return cls(usual, dense, table, shape.dense_layers if shape.experts else 0)

    def block(self, number: int) -> float:
        return self.dense if number < self.dense_layers else self.usual


def _replicas(model: StepModel, strategy: Strategy) -> Group:
    strides = strategy.strides()
    axes = ("cp", "dp_shard", "dp_replicate")
    return model.wires.group(*((getattr(strategy.layout, a), strides[a]) for a in axes))


def _summing(model: StepModel, strategy: Strategy, count: float) -> float:
    """Seconds of summing so many gradients over all replicas."""
    moved, group = model.work.gradient_bytes * count, _replicas(model, strategy)
    if strategy.states.optimizer is Placement.REPLICATED:
        return model.wires.all_reduce(moved, group)
    one = model.wires.gather(moved, group)
    return one if model.work.stack.scattered_gradients else 2.0 * one


def _afterwards(model: StepModel, strategy: Strategy, count: float, blocks: Iterable[int]) -> float:
    """Seconds of what follows the sums of ``count`` gradients and of the ``blocks`` of a rank:
    sums of routed experts over the ranks with copies, and handing out."""
    work, layout = model.work, strategy.layout
    sparse = sum(number >= work.model.dense_layers for number in blocks)
    seconds = sum(handing_out(model, strategy, count, sparse))
    if work.model.experts and experts_apart(layout):
        routed = sparse * work.model.expert_parameters / (layout.ep * layout.etp)
        group = model.wires.group((layout.edp, layout.ep * layout.etp))
        seconds += model.wires.all_reduce(work.gradient_bytes * routed, group)
    return seconds


def handing_out(
    model: StepModel, strategy: Strategy, count: float, sparse: int
) -> tuple[float, float]:
    """Seconds in which ranks that updated some rows each give ``count`` parameters to all
    replicas, and those of routed experts of ``sparse`` blocks to the ranks with copies."""
    work, layout, wires = model.work, strategy.layout, model.wires
    if strategy.states.optimizer is Placement.REPLICATED:
        return 0.0, 0.0
    first = wires.gather(work.weight_bytes * count, _replicas(model, strategy))
    if not (work.model.experts and experts_apart(layout)):
        return first, 0.0
    routed = sparse * work.model.expert_parameters / (layout.ep * layout.etp)
    group = wires.group((layout.edp, layout.ep * layout.etp))
    return first, wires.gather(work.weight_bytes * routed, group)
