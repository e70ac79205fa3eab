"""Seconds a step that training state costs: its sums, gatherings and update."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.collectives import Wires
from hpctrain.plan.experts import experts_apart
from hpctrain.plan.inputs import Placement, Strategy, Workload
from hpctrain.plan.kernels import Device
from hpctrain.plan.pipeline import ends_apart

_OPTIMIZER_BYTES = 30.0
"""Adam in mixed precision, bytes a parameter: reads master, two moments and gradient (16), writes
master and moments (12) and the half-precision copy (2)."""


@dataclass(frozen=True, slots=True)
class StateCost:
    """Cost of the placement of training state.

    Attributes:
        reduction: seconds a step of summing gradients and handing out parameters, hidden or not.
        optimizer: seconds a step of the update.
        tied: seconds a step of summing a shared embedding's gradient over the pipeline's ends.
        after: seconds a step of what follows when all replicas' gradients are summed, hidden by
            nothing.
        gathering: seconds a block and micro-batch of gathering and scattering sharded state.
        ends: the same for embedding and output layer, a micro-batch of the first stage.
    """

    reduction: float
    optimizer: float
    tied: float
    after: float = 0.0
    gathering: float = 0.0
    ends: float = 0.0

    @property
    def serial(self) -> float:
        """Seconds a step of all that nothing can hide."""
        return self.optimizer + self.tied + self.after


@dataclass(frozen=True, slots=True)
class ShardTimes:
    """Seconds of one gathering and scattering: of a block, and of embedding and output layer."""

    gather: float
    scatter: float
    ends_gather: float
    ends_scatter: float


class StateModel:
    """What training state costs under many strategies."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.device = Device.of(work.platform, work.values, work.dtype, work.kernel)
        self.wires = Wires.of(work.platform, work.values)

    def shards(self, plan: Strategy, *, dense: bool = False) -> ShardTimes:
        """Seconds of gathering and scattering one block and the ends, where states are sharded; of
        a ``dense`` block among ones with experts, if it has to be."""
        work, layout, wires, model = self.work, plan.layout, self.wires, self.work.model
        strides = plan.strides()
        inner = wires.group((layout.cp, strides["cp"]), (layout.dp_shard, strides["dp_shard"]))
        edp = wires.group((layout.edp, layout.ep * layout.etp))
        kept, gradient = 4.0 if work.dtype == "fp32" else 2.0, work.gradient_bytes
        block = model.local_layer_parameters(layout.tp)
        experts = model.expert_parameters / (layout.ep * layout.etp)
        if dense:
            block, experts = model.local_dense_parameters(layout.tp), 0.0
        ends = (1 if model.tied else 2) * model.vocab * model.hidden / layout.tp
        gather, scatter = wires.gather(kept * block, inner), wires.gather(gradient * block, inner)
        if experts:
            gather += wires.gather(kept * experts, edp)
            scatter += wires.gather(gradient * experts, edp)
        if layout.dp_replicate > 1:
            across = wires.group((layout.dp_replicate, strides["dp_replicate"]))
            shard = layout.dp_shard * layout.cp
            scatter += wires.all_reduce(gradient * (block + experts) / shard, across)
        return ShardTimes(
            gather, scatter, wires.gather(kept * ends, inner), wires.gather(gradient * ends, inner)
        )

    def state(self, plan: Strategy, layers: int) -> StateCost:
        """What the placement of parameters, gradients and optimizer states costs.

        Args:
            plan: the cut.
            layers: blocks of the fullest stage.
        """
        work, layout, wires, states = self.work, plan.layout, self.wires, plan.states
        model = work.model
        strides = plan.strides()
        block = model.local_layer_parameters(layout.tp)
        experts = model.expert_parameters / (layout.ep * layout.etp)
        table = model.vocab * model.hidden / layout.tp
        copies = 1 if model.tied or layout.pp > 1 else 2
        # Without a pipeline the stage has the dense blocks that come before those with experts.
        early = model.dense_layers if model.experts and layout.pp == 1 else 0
        dense, routed = (layers - early) * block + copies * table, (layers - early) * experts
        dense += early * model.local_dense_parameters(layout.tp)
        size = layout.dp * layout.cp
        gradient = work.gradient_bytes

        moved = dense + routed
        if states.optimizer is not Placement.REPLICATED:
            wide = plan.optimizer_ranks
            moved = dense / wide + routed / min(layout.edp, wide)
        optimizer = self.device.stream(_OPTIMIZER_BYTES * moved)
        tied, pp, micro_batches = 0.0, layout.pp, work.micro_batches(plan)
        if pp > 1 and model.tied and ends_apart(plan.schedule, pp, plan.virtual, micro_batches):
            ends = wires.group((2, strides["pp"] * (layout.pp - 1)))
            tied = wires.all_reduce(gradient * table, ends)
        if size == 1:
            return StateCost(0.0, optimizer, tied)

        near = ((layout.cp, strides["cp"]), (layout.dp_shard, strides["dp_shard"]))
        far = (layout.dp_replicate, strides["dp_replicate"])
        inner = wires.group(*near)
        across = wires.group(far) if layout.dp_replicate > 1 else None
        edp = wires.group((layout.edp, layout.ep * layout.etp))
        if states.fully_sharded:
            times = self.shards(plan)
            if work.stack.sums_after_pipeline and layout.pp > 1:
                once = (
                    layers * (times.gather + times.scatter) + times.ends_gather + times.ends_scatter
                )
                return StateCost(once, optimizer, tied)
            gather = (1.0 if states.parameters is Placement.MATERIALISED else 2.0) * times.gather
            if work.stack.accumulates_whole and micro_batches > 1:
                once = layers * times.scatter + times.ends_scatter
                return StateCost(once, optimizer, tied, gathering=gather, ends=times.ends_gather)
            outside = times.ends_gather + times.ends_scatter
            gather += times.scatter
            return StateCost(0.0, optimizer, tied, gathering=gather, ends=outside)

        seconds = after = 0.0
        whole = wires.group(*near, far)
        serial = work.stack.serial_ends
        for count, group, apart in ((dense, whole, False), (routed, edp, experts_apart(layout))):
            if not count:
                continue
            last = serial and apart
            one, given = wires.gather(gradient * count, group), 0.0
            if states.optimizer is Placement.REPLICATED or last:
                summed = wires.all_reduce(gradient * count, group)
            elif states.gradients is not Placement.REPLICATED or work.stack.scattered_gradients:
                summed = one
            else:
                summed = 2.0 * one
            if states.optimizer is not Placement.REPLICATED:
                given = wires.gather(work.weight_bytes * count, group)
                if across is not None and layout.dp_shard > 1 and group is whole:
                    # sharded within a part of the data-parallel ranks, copies across them
                    shard = layout.dp_shard * layout.cp
                    summed = wires.gather(gradient * count, inner)
                    summed += wires.all_reduce(gradient * count / shard, across)
                    given = wires.gather(work.weight_bytes * count, inner)
            seconds += (0.0 if last else summed) + (0.0 if serial else given)
            after += (summed if last else 0.0) + (given if serial else 0.0)
        return StateCost(seconds, optimizer, tied, after)
