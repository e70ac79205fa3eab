"""Seconds of a step: blocks on stages, the pipeline, data-parallel traffic, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpctrain.plan.collectives import Wires
from hpctrain.plan.inputs import Placement, Strategy, Workload
from hpctrain.plan.kernels import Device
from hpctrain.plan.layer import LayerTime, Seconds, embedding_time, head_time, layer_time

_OPTIMIZER_BYTES = 30.0
"""Adam in mixed precision, bytes a parameter: reads master, two moments and gradient (16), writes
master and moments (12) and the half-precision copy (2)."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time and what it is made of.

    Attributes:
        seconds: the step.
        micro_batches: forward passes of a pipeline in a step.
        split: seconds by kind, on the stage that sets the pace; sums to ``seconds``.
        stages: seconds a micro-batch of each stage, forward and backward.
        bubble: idle seconds of the pipeline.
    """

    seconds: float
    micro_batches: int
    split: dict[str, float]
    stages: tuple[float, ...]
    bubble: float
    layer: LayerTime = field(repr=False)


def stage_layers(layers: int, pp: int, virtual: int, balanced: bool, ends: float) -> list[int]:
    """Layers of each pipeline stage.

    Evenly where they divide (over virtual chunks too); else with the embedding and the output
    layer each taking a layer's place, where that divides; else, or where ``balanced``, dealt so
    that the slowest stage is as fast as can be when the output layer weighs ``ends`` layers.
    """
    chunks = pp * virtual
    if not balanced and layers % chunks == 0:
        return [layers // pp] * pp
    if not balanced and (layers + 2) % chunks == 0 and pp > 1:
        places = [(layers + 2) // pp] * pp
        places[0] -= 1
        places[-1] -= 1
        return places
    if not balanced and layers % pp == 0:
        return [layers // pp] * pp
    load = [0] * pp
    for _ in range(layers):
        weights = [load[i] + (ends if i == pp - 1 else 0.0) for i in range(pp)]
        load[weights.index(min(weights))] += 1
    return load


class StepModel:
    """Step times of one workload under many strategies; blocks are computed once a shape."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.device = Device.of(work.platform, work.values, work.dtype, work.kernel)
        self.wires = Wires.of(work.platform, work.values)
        self._layers: dict[tuple[object, ...], tuple[LayerTime, LayerTime | None, float, float]] = {}

    def layer(self, plan: Strategy) -> tuple[LayerTime, LayerTime | None, float, float]:
        """Times of a block, of a dense block among experts, of the head and of the embedding."""
        layout = plan.layout
        key = (
            layout.tp,
            layout.cp,
            layout.ep,
            layout.etp,
            plan.micro_batch,
            plan.recompute,
            plan.sequence_parallel,
        )
        found = self._layers.get(key)
        if found is None:
            work = self.work
            block = layer_time(work, self.device, self.wires, plan)
            dense = None
            if work.model.experts and work.model.dense_layers:
                dense = layer_time(work, self.device, self.wires, plan, dense=True)
            head = head_time(work, self.device, self.wires, plan)
            found = (block, dense, head, embedding_time(work, self.device, plan))
            self._layers[key] = found
        return found

    def step(self, plan: Strategy) -> StepTime:
        """The time of a step under a strategy."""
        work, values, layout = self.work, self.work.values, plan.layout
        model = work.model
        block, dense, head, embedding = self.layer(plan)
        pp = layout.pp
        micro_batches = max(1, work.global_batch // (layout.dp * plan.micro_batch))
        one = block.total
        layers = work.stages or tuple(
            stage_layers(
                model.layers, pp, plan.virtual, work.stack.balanced_stages, head / max(one, 1e-30)
            )
        )
        send = self._send(plan)
        stages = [count * one for count in layers]
        if dense is not None:
            stages[0] += min(layers[0], model.dense_layers) * (dense.total - one)
        stages[0] += embedding
        stages[-1] += head
        if pp > 1:
            for i in range(pp):
                ends = (i == 0) + (i == pp - 1)
                stages[i] += send * (1.0 if ends == 0 or plan.virtual > 1 else 0.5)
        gathered = self._sharded(plan, block)
        if gathered:
            stages = [s + gathered * n for s, n in zip(stages, layers, strict=True)]
            gather_ends = self._sharded_ends(plan)
            stages[0] += gather_ends
        slowest = max(stages)
        bubble = (sum(stages) - slowest) / plan.virtual if pp > 1 else 0.0
        running = micro_batches * slowest
        reduction = self._reduction(plan, max(layers), running + bubble, micro_batches)
        optimizer = self._optimizer(plan, max(layers))
        tied = self._tied(plan)
        seconds = running + bubble + reduction + optimizer + tied + values.step_seconds
        pace = stages.index(slowest)
        split = self._split(block, micro_batches * layers[pace])
        split["output layer"] = micro_batches * (head if pace == pp - 1 else 0.0)
        split["sharded state"] = micro_batches * gathered * layers[pace]
        split["pipeline sends"] = micro_batches * send if pp > 1 else 0.0
        split["pipeline bubble"] = bubble
        split["gradient reduction"] = reduction + tied
        split["optimizer"] = optimizer
        split["other"] = seconds - sum(split.values())
        return StepTime(seconds, micro_batches, split, tuple(stages), bubble, block)

    # ---- parts -----------------------------------------------------------------------------

    @staticmethod
    def _split(block: LayerTime, times: float) -> dict[str, float]:
        whole = Seconds().plus(block.forward).plus(block.backward)
        again = block.recompute
        return {
            "matrix products": times * whole.products,
            "attention": times * whole.attention,
            "element-wise": times * whole.elementwise,
            "launches": times * (whole.launch + again.launch),
            "recompute": times * (again.products + again.attention + again.elementwise),
            "tensor parallel": times * (whole.tp + again.tp),
            "context parallel": times * (whole.cp + again.cp),
            "expert parallel": times * (whole.ep + again.ep),
        }

    def _stride(self, plan: Strategy) -> int:
        """Ranks between neighbours of a pipeline (tensor, context, data inside; pipeline outside)."""
        return plan.layout.stage_size

    def _send(self, plan: Strategy) -> float:
        """Seconds a micro-batch and middle stage sends and waits, both directions, all chunks."""
        work, layout = self.work, plan.layout
        if layout.pp == 1:
            return 0.0
        whole = 2.0 * plan.micro_batch * work.sequence / layout.cp * work.model.hidden
        split = layout.tp > 1 and (plan.sequence_parallel or work.stack.split_sends)
        one = self.wires.send(whole / (layout.tp if split else 1), self._stride(plan))
        if split and not plan.sequence_parallel:
            one += self.wires.gather(whole, self.wires.group(layout.tp))
        return 2.0 * one * (1.0 - work.values.pp_overlap) * plan.virtual

    def _layer_bytes(self, plan: Strategy) -> tuple[float, float]:
        """Parameters of a block on a rank before data-parallel sharding: dense and expert part."""
        model, layout = self.work.model, plan.layout
        dense = (model.layer_parameters - model.expert_parameters) / layout.tp
        experts = model.expert_parameters / (layout.ep * layout.etp)
        return dense, experts

    def _sharded(self, plan: Strategy, block: LayerTime) -> float:
        """Exposed seconds a block and micro-batch of gathering and scattering sharded state."""
        if not plan.states.fully_sharded:
            return 0.0
        work, layout, wires = self.work, plan.layout, self.wires
        dense, experts = self._layer_bytes(plan)
        moved = 0.0
        gathers = 1.0 if plan.states.parameters is Placement.MATERIALISED else 2.0
        size = layout.dp_shard * layout.cp
        for count, group in (
            (dense, wires.group(size, layout.tp)),
            (experts, wires.group(layout.edp, layout.ep * layout.etp)),
        ):
            if count:
                moved += gathers * wires.gather(2.0 * count, group)
                moved += wires.gather(work.gradient_bytes * count, group)
        if layout.dp_replicate > 1:
            replicas = wires.group(layout.dp_replicate, layout.tp * size)
            moved += wires.all_reduce(work.gradient_bytes * (dense + experts) / size, replicas)
        hidden = work.values.fsdp_overlap * moved
        return max(0.0, hidden - block.total) + moved - hidden

    def _sharded_ends(self, plan: Strategy) -> float:
        """Seconds a micro-batch of gathering and scattering embedding and output weights."""
        model, layout, wires = self.work.model, plan.layout, self.wires
        group = wires.group(layout.dp_shard * layout.cp, layout.tp)
        copies = 1 if model.tied else 2
        count = copies * model.vocab * model.hidden / layout.tp
        return wires.gather(2.0 * count, group) + wires.gather(
            self.work.gradient_bytes * count, group
        )

    def _stage_parameters(self, plan: Strategy, layers: int) -> tuple[float, float]:
        """Parameters a rank of the fullest stage trains: dense and expert part."""
        model, layout = self.work.model, plan.layout
        dense, experts = self._layer_bytes(plan)
        copies = 1 if model.tied or layout.pp > 1 else 2
        ends = copies * model.vocab * model.hidden / layout.tp
        return layers * dense + ends, layers * experts

    def _reduction(self, plan: Strategy, layers: int, busy: float, micro_batches: int) -> float:
        """Exposed seconds a step of summing gradients and handing out new parameters."""
        work, layout, wires = self.work, plan.layout, self.wires
        size = layout.dp * layout.cp
        if size == 1 or plan.states.fully_sharded:
            return 0.0
        dense, experts = self._stage_parameters(plan, layers)
        seconds = 0.0
        for count, group in (
            (dense, wires.group(size, layout.tp)),
            (experts, wires.group(layout.edp, layout.ep * layout.etp)),
        ):
            if not count:
                continue
            one = wires.gather(work.gradient_bytes * count, group)
            if plan.states.optimizer is Placement.REPLICATED:
                seconds += 2.0 * one
            else:
                sharded = plan.states.gradients is not Placement.REPLICATED
                scattered = sharded or work.stack.scattered_gradients
                seconds += one if scattered else 2.0 * one
                seconds += wires.gather(2.0 * count, group)
        hidden = work.values.dp_overlap * busy / micro_batches
        return max(0.05 * seconds, seconds - hidden) if hidden else seconds

    def _optimizer(self, plan: Strategy, layers: int) -> float:
        dense, experts = self._stage_parameters(plan, layers)
        layout = plan.layout
        if plan.states.optimizer is not Placement.REPLICATED:
            dense /= layout.dp_shard * layout.cp
            experts /= layout.edp
        return self.device.stream(_OPTIMIZER_BYTES * (dense + experts))

    def _tied(self, plan: Strategy) -> float:
        """Seconds of summing the shared embedding's gradient over first and last stage."""
        model, layout = self.work.model, plan.layout
        if layout.pp == 1 or not model.tied:
            return 0.0
        group = self.wires.group(2, self._stride(plan) * (layout.pp - 1))
        return self.wires.all_reduce(
            self.work.gradient_bytes * model.vocab * model.hidden / layout.tp, group
        )
