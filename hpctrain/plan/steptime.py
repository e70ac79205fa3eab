"""Seconds of a step: blocks on stages, the pipeline, data-parallel traffic, the optimizer.

A step is put together from two parts that do not know each other: ``Pipe`` (what a pipeline of
one data-parallel rank does with its micro-batches) and ``StateCost`` (what keeping parameters,
gradients and optimizer states where they are placed costs). The search multiplies the two.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from hpctrain.plan.inputs import Strategy, Workload
from hpctrain.plan.layer import embedding_time, head_time, layer_time
from hpctrain.plan.memory import StageMemory, micro_batches_held, stage_memory
from hpctrain.plan.pipeline import form_of, has_form, simulated, spreads_vocabulary
from hpctrain.plan.seconds import LayerTime, Seconds
from hpctrain.plan.statetime import StateCost, StateModel

_UNHIDDEN = 0.05
"""Part of a hidden gradient reduction that shows nevertheless: its first and last buckets."""


@dataclass(frozen=True, slots=True)
class StageKind:
    """A run of neighbouring stages that are alike.

    Attributes:
        seconds: a micro-batch, forward and backward.
        layers: blocks of each.
        count: stages of the run.
        start: number of the first one.
    """

    seconds: float
    layers: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class Pipe:
    """A pipeline's work before the cost of sharded state.

    Attributes:
        micro_batches: m.
        kinds: its stages in order; the first and the last stage are runs of their own.
        idle: idle share of a further stage's seconds (1 for 1F1B, less for other forms).
        simulated: idle seconds of a schedule without a closed form, in place of ``idle``.
        send: seconds a micro-batch of sends on a middle stage.
        head: seconds a micro-batch of the output layer on the last stage.
        layers: blocks of the fullest stage.
        block: one block's time.
    """

    micro_batches: int
    kinds: tuple[StageKind, ...]
    idle: float
    simulated: float | None
    send: float
    head: float
    layers: int
    block: LayerTime


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time and what it is made of.

    Attributes:
        seconds: the step.
        micro_batches: forward passes of a pipeline in a step.
        split: seconds by kind, on the stage that sets the pace; sums to ``seconds``.
        stages: seconds a micro-batch of each stage, forward and backward.
        layers: blocks of each stage.
        bubble: idle seconds of the pipeline.
    """

    seconds: float
    micro_batches: int
    split: dict[str, float]
    stages: tuple[float, ...]
    layers: tuple[int, ...]
    bubble: float
    layer: LayerTime = field(repr=False)


def deal(
    layers: int, pp: int, virtual: int, balanced: bool, ends: float, even_only: bool = False
) -> tuple[tuple[int, int], ...]:
    """Blocks of pipeline stages as runs of (blocks, stages); ends are runs of one stage.

    Evenly where they divide (over virtual chunks too); else with the embedding and the output
    layer each taking a block's place, where that divides; else, or where ``balanced``, dealt so
    that the slowest stage is as fast as can be when the output layer weighs ``ends`` blocks.
    With ``even_only`` always evenly, the first stages with one more.
    """
    if pp == 1:
        return ((layers, 1),)
    if even_only:
        rest, more = divmod(layers, pp)
        first = rest + (1 if more else 0)
        return _runs(rest, pp - 2, max(0, more - 1), first, rest)
    chunks = pp * virtual
    even, padded = layers % chunks == 0, (layers + 2) % chunks == 0
    if not balanced and (even or (layers % pp == 0 and not padded)):
        return _runs(layers // pp, pp - 2, 0, layers // pp, layers // pp)
    if not balanced and padded:
        inner = (layers + 2) // pp
        return _runs(inner, pp - 2, 0, inner - 1, inner - 1)
    # one block at a time to the stage with the least, the last stage starting with ``ends``: it
    # gets its next block once all others are above it
    last = 0
    while last < layers and (pp - 1) * (math.floor(ends + last) + 1) + last < layers:
        last += 1
    rest, more = divmod(layers - last, pp - 1)
    first = rest + (1 if more else 0)
    return _runs(rest, pp - 2, max(0, more - 1), first, last)


def _runs(
    inner: int, stages: int, fuller: int, first: int, last: int
) -> tuple[tuple[int, int], ...]:
    runs = ((first, 1), (inner + 1, fuller), (inner, stages - fuller), (last, 1))
    return tuple(run for run in runs if run[1] > 0)


def compose(
    pipe: Pipe, state: StateCost, fsdp_overlap: float, dp_overlap: float
) -> tuple[float, float, float, float]:
    """Seconds of everything but the fixed cost of a step: running, bubble, reduction, gathering.

    ``running`` is the slowest stage times the micro-batches and holds the gathering of its own
    blocks, which is returned a block and micro-batch as the last number.
    """
    gathering = 0.0
    if state.gathering:
        hidden = fsdp_overlap * state.gathering
        gathering = max(0.0, hidden - pipe.block.total) + state.gathering - hidden
    slowest = whole = 0.0
    for kind in pipe.kinds:
        seconds = kind.seconds
        if gathering:
            seconds += gathering * kind.layers + (state.ends if kind.start == 0 else 0.0)
        if seconds > slowest:
            slowest = seconds
        whole += seconds * kind.count
    bubble = (whole - slowest) * pipe.idle if pipe.simulated is None else pipe.simulated
    running = pipe.micro_batches * slowest
    reduction = state.reduction
    if reduction and dp_overlap:
        hidden = dp_overlap * (running + bubble) / pipe.micro_batches
        reduction = max(_UNHIDDEN * reduction, reduction - hidden)
    return running, bubble, reduction, gathering


class StepModel(StateModel):
    """Step times of one workload under many strategies; blocks are computed once a shape."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._layers: dict[
            tuple[object, ...], tuple[LayerTime, LayerTime | None, float, float]
        ] = {}
        self._sends: dict[tuple[object, ...], float] = {}

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
            plan.order,
            plan.stream,
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
        values = self.work.values
        pipe = self.pipe(plan)
        state = self.state(plan, pipe.layers)
        running, bubble, reduction, gathering = compose(
            pipe, state, values.fsdp_overlap, self.work.dp_overlap(plan.layout.pp)
        )
        m = pipe.micro_batches
        seconds = running + bubble + reduction + state.serial + values.step_seconds
        layers = [kind.layers for kind in pipe.kinds for _ in range(kind.count)]
        stages = [
            kind.seconds + gathering * kind.layers for kind in pipe.kinds for _ in range(kind.count)
        ]
        if gathering:
            stages[0] += state.ends
        pace, final = stages.index(max(stages)), len(stages) - 1
        split = _split(pipe.block, m * layers[pace])
        split["output layer"] = m * pipe.head if pace == final else 0.0
        split["sharded state"] = m * gathering * layers[pace]
        if gathering and pace == 0:
            split["sharded state"] += m * state.ends
        half = pace in (0, final) and plan.virtual == 1
        split["pipeline sends"] = m * pipe.send * (0.5 if half else 1.0)
        split["pipeline bubble"] = bubble
        split["gradient reduction"] = reduction + state.tied + state.after
        split["optimizer"] = state.optimizer
        split["other"] = seconds - sum(split.values())
        return StepTime(seconds, m, split, tuple(stages), tuple(layers), bubble, pipe.block)

    def memory(self, plan: Strategy) -> tuple[StageMemory, ...]:
        """Bytes of each pipeline stage under a strategy."""
        held = micro_batches_held(plan, self.work.micro_batches(plan), self.ratios(plan))
        return stage_memory(self.work, plan, self.layers_of(plan), held)

    def ratios(self, plan: Strategy) -> tuple[float, float]:
        """Seconds of input- and weight-gradient pass over those of the forward pass."""
        block = self.layer(plan)[0]
        forward = block.forward.total
        inputs = block.backward.total + block.recompute.total - block.weights
        return round(inputs / forward, 3), round(block.weights / forward, 3)

    # ---- the pipeline ----------------------------------------------------------------------

    def runs_of(self, plan: Strategy) -> tuple[tuple[int, int], ...]:
        """Blocks of the stages as runs of (blocks, stages); see ``deal``."""
        work = self.work
        if work.stages:
            if len(work.stages) == 1:
                return ((work.stages[0], 1),)
            first, *inner, last = work.stages
            middle = ((n, len(list(g))) for n, g in itertools.groupby(inner))
            return ((first, 1), *middle, (last, 1))
        block, _, head, _ = self.layer(plan)
        return deal(
            work.model.layers,
            plan.layout.pp,
            plan.virtual,
            work.stack.balanced_stages,
            head / block.total,
            work.stack.even_stages,
        )

    def layers_of(self, plan: Strategy) -> tuple[int, ...]:
        """Blocks of each stage."""
        return tuple(n for n, count in self.runs_of(plan) for _ in range(count))

    def pipe(self, plan: Strategy) -> Pipe:
        """What a pipeline does with its micro-batches."""
        block, dense, head, embedding = self.layer(plan)
        pp = plan.layout.pp
        send = self.send(plan)
        one = block.total
        ends = send * (1.0 if plan.virtual > 1 else 0.5) if pp > 1 else 0.0
        kinds, start, deepest = [], 0, 0
        rows = head / pp if spreads_vocabulary(plan.schedule) else 0.0
        for layers, count in self.runs_of(plan):
            seconds = layers * one + rows
            if start == 0:
                seconds += embedding + ends
                if dense is not None:
                    few = min(layers, self.work.model.dense_layers)
                    seconds += few * (dense.total - one)
            if start + count == pp:
                seconds += (0.0 if rows else head) + (ends if start else 0.0)
            elif start:
                seconds += send
            kinds.append(StageKind(seconds, layers, count, start))
            start += count
            deepest = max(deepest, layers)
        micro_batches = self.work.micro_batches(plan)
        idle, bubble = 0.0, None
        if pp > 1:
            forward = block.forward.total
            if has_form(plan.schedule):
                inputs = one - forward - block.weights
                form = form_of(plan.schedule, plan.virtual)
                idle = form.bubble(forward, inputs, block.weights, plan.virtual) / one
            else:
                ratios = self.ratios(plan)
                slowest = max(kind.seconds for kind in kinds)
                # The forward pass of a stage that is in step with the slowest one.
                unit = slowest * forward / (one + rows / deepest)
                share = round(rows / deepest / forward, 3)
                units, _ = simulated(plan.schedule, pp, plan.virtual, micro_batches, ratios, share)
                bubble = units * unit
        return Pipe(micro_batches, tuple(kinds), idle, bubble, send, head, deepest, block)

    def send(self, plan: Strategy) -> float:
        """Seconds a micro-batch and middle stage sends and waits, both directions, all chunks."""
        layout = plan.layout
        if layout.pp == 1:
            return 0.0
        key = (
            layout.tp,
            layout.cp,
            layout.pp,
            layout.dp_shard,
            plan.order,
            plan.micro_batch,
            plan.sequence_parallel,
        )
        found = self._sends.get(key)
        if found is None:
            found = self._sends[key] = self._send(plan)
        return found * plan.virtual

    def _send(self, plan: Strategy) -> float:
        work, layout = self.work, plan.layout
        whole = 2.0 * plan.micro_batch * work.sequence / layout.cp * work.model.hidden
        split = layout.tp > 1 and (plan.sequence_parallel or work.stack.split_sends)
        strides = plan.strides()
        moved = whole / (layout.tp if split else 1)
        both = self.wires.exchange(moved, layout.pp, strides["pp"])
        if split and not plan.sequence_parallel:
            both += 2.0 * self.wires.gather(whole, self.wires.group((layout.tp, strides["tp"])))
        return both * (1.0 - work.values.pp_overlap)


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
