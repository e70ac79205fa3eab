"""Bytes of a device, by part, on every pipeline stage.

Activation counts follow Korthikanti et al. 2022 (equations 1 to 4), generalised to gated networks
and grouped key/value heads: what a fused implementation keeps for its backward pass. Bytes of
training state follow from the placement of each state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from hpctrain.plan.inputs import Placement, Strategy, Workload
from hpctrain.plan.pipeline import form_of, has_form, simulated

GIB = 2**30

_NORM_UNFUSED_KEPT = 16.0
"""As Stack.norm_kept, where a norm is several kernels in fp32."""
_GATHERED_LOGIT = 12.0
"""Further bytes a logit where they are gathered over the tensor-parallel group for the loss:
the gathered value, its transposed copy, and the gradients of both and of the parts."""
_SCORES = 5.0
"""Bytes a score of an unfused attention core: softmax, its dropout and the mask."""
USABLE = 0.95
"""Share of a device's memory that can be filled; the allocator's fragments take the rest."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of the fullest rank of a stage, by part."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0
    buffers: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self)))

    def parts(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one micro-batch on a rank.

    Attributes:
        kept: of one block until its backward pass.
        live: of one block that runs backward after it was recomputed; 0 without recompute.
        logits: on the last stage.
        buffers: sends and receives between stages.
        chunk: of the input of a model chunk, where whole chunks are recomputed.
        live_block: of each block of a chunk that runs backward after it was recomputed.
    """

    kept: float
    live: float
    logits: float
    buffers: float
    chunk: float = 0.0
    live_block: float = 0.0

    def stage(self, layers: int, held: float, virtual: int) -> float:
        """Bytes of a stage of ``layers`` blocks that holds ``held`` micro-batches of all of them,
        logits and buffers left out."""
        blocks = held * layers * self.kept + layers * self.live_block / virtual
        return blocks + held * virtual * self.chunk + self.live


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes a parameter on a rank, from the placement of the states.

    Attributes:
        common: of parameters, gradients and optimizer states of what all data-parallel ranks
            share.
        routed: the same of experts, which their own ranks share.
        unit: bytes a parameter of the block that runs (gathered copies and their gradients).
        block: bytes a parameter of every block of a stage that stays gathered.
        ends: bytes a gathered parameter of embedding and output layer.
        matrices: bytes a block of optimizer states beyond AdamW's.
    """

    common: tuple[float, float, float]
    routed: tuple[float, float, float]
    unit: float = 0.0
    block: float = 0.0
    ends: float = 0.0
    matrices: float = 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters of a rank before data-parallel sharding.

    Attributes:
        dense, experts: of one block.
        first, last: of what only the first and the last stage hold.
    """

    dense: float
    experts: float
    first: float
    last: float


def activations(work: Workload, plan: Strategy) -> Activations:
    """What one micro-batch leaves on a rank."""
    model, layout = work.model, plan.layout
    tp = layout.tp
    tokens = plan.micro_batch * work.sequence / layout.cp
    each = 4.0 if work.dtype == "fp32" else 2.0
    split = tp if plan.sequence_parallel else 1
    # Residual stream: inputs and outputs of two norms, masks of two dropouts.
    half = 1.0 if work.dtype == "fp8" else each
    outputs = 2.0 * half
    wide = work.stack.fp32_stream and not plan.states.fully_sharded
    stream = 2.0 * (4.0 if wide else each) + (2.0 if model.dropout else 0.0)
    stream += work.stack.norm_kept if work.norms_fused else _NORM_UNFUSED_KEPT
    again = plan.recompute == "selective" and work.kernel in ("flash1", "flash2", "cudnn")
    if again:
        outputs = 0.0  # norms and activation functions run again instead
    gathered = 1 if work.stack.keeps_gathered else split
    # Inside: queries, keys, values, the core's output, and the network's inner tensors.
    heads = model.heads * model.head_dim
    inner = each * (heads + 2 * model.kv_heads * model.head_dim) + half * heads
    ffn = model.ffn_hidden
    if model.experts:
        ffn = model.ffn_hidden * model.topk + model.shared_ffn
        inner += (half + each) * model.hidden * model.topk  # routed copies, in and out
    tensors = work.stack.gated_tensors if model.gated else 2
    if plan.stream is None:  # else backward computes the network again, a piece at a time
        inner += ffn * (each * (tensors - 1) + (0.0 if again else half))
    if again:
        inner *= 1.0 - work.stack.selective_share  # products that run again leave no output
    if work.on_host:
        # processors' kernels: RMSNorm keeps the normalised input, attention expands key-value
        # heads and its output is copied
        stream += 0.0 if model.layernorm else 2 * 4.0
        inner += each * (2 * (model.heads - model.kv_heads) * model.head_dim + heads)
    whole = tokens * (model.hidden * (stream / split + outputs / gathered) + inner / tp)
    if work.dispatch.copies:  # as many as are ever taken, in the parameters' own type
        copied = work.dispatch.copies * model.ffn_matrices * model.hidden * model.ffn_hidden
        whole += work.weight_bytes * copied / layout.etp
    scores = 0.0
    if work.kernel in ("torch", "fused"):
        rows = plan.micro_batch * model.heads / tp * (work.sequence / layout.cp)
        scores = _SCORES * rows * work.sequence
    live = chunk = live_block = 0.0
    if plan.recompute == "stage":
        kept, chunk, live_block = 0.0, each * tokens * model.hidden / split, whole + scores
    elif plan.recompute == "full":
        kept, live = each * tokens * model.hidden / split, whole + scores
    elif plan.recompute == "selective":
        kept = whole
    else:
        kept = whole + scores
    at_once = tokens
    if plan.stream is not None:
        at_once = min(tokens, float(plan.micro_batch * plan.stream * split))
    logits = at_once * model.vocab * work.kept_logit_bytes
    if work.loss_is_parallel:
        logits /= tp
    elif tp > 1:
        logits += at_once * model.vocab * _GATHERED_LOGIT
    buffers = 2 * each * tokens * model.hidden / split if layout.pp > 1 else 0.0
    return Activations(kept, live, logits, buffers, chunk, live_block)


def counts(work: Workload, plan: Strategy) -> Counts:
    """Parameters that a rank holds a copy or a shard of."""
    model, layout = work.model, plan.layout
    table = model.vocab * model.hidden / layout.tp
    alone = layout.pp == 1
    return Counts(
        dense=model.local_layer_parameters(layout.tp),
        experts=model.expert_parameters / (layout.ep * layout.etp),
        first=table + model.positions * model.hidden,
        last=(0.0 if model.tied and alone else table) + model.norm_parameters,
    )


def state_bytes(work: Workload, plan: Strategy) -> StateBytes:
    """Bytes a parameter that the placement of the states leaves on a rank."""
    found = _adamw_bytes(work, plan)
    if work.matrix_optimizer.kind == "adamw":
        return found
    beyond = work.matrix_optimizer.beyond_adamw(work.model) / plan.layout.tp
    if plan.states.optimizer is not Placement.REPLICATED:
        beyond /= plan.optimizer_ranks
    return replace(found, matrices=beyond)


def _adamw_bytes(work: Workload, plan: Strategy) -> StateBytes:
    layout, states = plan.layout, plan.states
    shard = layout.dp_shard * layout.cp
    shards = (float(shard), float(min(shard, layout.edp)))
    wide = plan.optimizer_ranks
    each = 4.0 if work.dtype == "fp32" else 2.0
    weights, optimizer = work.weight_bytes, work.optimizer_bytes
    gradients = work.state_gradient_bytes
    if states.fully_sharded and weights == 2.0 and work.stack.sharded_master:
        # the sharded parameters are the master copy; half-precision ones exist while gathered
        weights, optimizer = 4.0, optimizer - 4.0

    accumulated = work.stack.accumulates_whole and work.micro_batches(plan) > 1
    buckets = 1.0
    if accumulated and states.gradients is Placement.SHARDED:
        states = replace(states, gradients=Placement.REPLICATED)
    elif accumulated and not states.fully_sharded and layout.dp * layout.cp > 1 and layout.pp == 1:
        buckets = 2.0  # DDP's buckets stand beside what earlier micro-batches accumulated

    def held(near: float, widest: float) -> tuple[float, float, float]:
        found = []
        for placement, size, share in (
            (states.parameters, weights, near),
            (states.gradients, gradients * buckets, near),
            (states.optimizer, optimizer, widest),
        ):
            if placement is Placement.REPLICATED:
                found.append(size)
            elif placement is Placement.OFFLOADED:
                found.append(0.0)
            else:
                found.append(size / share)
        return found[0], found[1], found[2]

    common = held(shards[0], wide)
    routed = held(shards[1], min(wide, layout.edp))
    if states.parameters is Placement.GATHERED:
        # the running block and the one fetched ahead, and gradients of one before they scatter
        unit = 2 * each + (0.0 if accumulated else gradients)
        return StateBytes(common, routed, unit=unit, ends=each)
    if states.parameters is Placement.MATERIALISED:
        unit = 0.0 if accumulated else gradients
        return StateBytes(common, routed, unit=unit, block=each, ends=each)
    if work.stack.casts and work.dtype != "fp32":
        return StateBytes(common, routed, block=2.0, ends=2.0)
    return StateBytes(common, routed)


def stage_memory(
    work: Workload, plan: Strategy, layers: Sequence[int], held: Sequence[float]
) -> tuple[StageMemory, ...]:
    """Memory of each pipeline stage.

    Args:
        work: what is planned.
        plan: the cut.
        layers: blocks of each stage.
        held: micro-batches whose activations a stage holds at its fullest moment, in units of
            all its blocks.
    """
    kept = activations(work, plan)
    size, state = counts(work, plan), state_bytes(work, plan)
    pp = plan.layout.pp
    found = []
    for stage in range(pp):
        ends = (size.first if stage == 0 else 0.0) + (size.last if stage == pp - 1 else 0.0)
        common = layers[stage] * size.dense + ends
        routed = layers[stage] * size.experts
        block = size.dense + size.experts
        parts = [c * common + r * routed for c, r in zip(state.common, state.routed, strict=True)]
        gathered = state.unit * block + state.block * layers[stage] * block + state.ends * ends
        found.append(
            StageMemory(
                parameters=parts[0],
                gradients=parts[1],
                optimizer=parts[2] + layers[stage] * state.matrices,
                activations=kept.stage(layers[stage], held[stage], plan.virtual),
                logits=kept.logits if stage == pp - 1 else 0.0,
                gathered=gathered,
                buffers=kept.buffers,
                context=work.context_bytes,
            )
        )
    return tuple(found)


def micro_batches_held(
    plan: Strategy, micro_batches: int, ratios: tuple[float, float] = (1.0, 1.0)
) -> tuple[float, ...]:
    """Micro-batches, in units of a stage's blocks, that each rank holds at its fullest moment.

    Closed forms of 1F1B and its kin (Korthikanti et al. 2022, section 4.2.3); other schedules by
    simulating their table.

    Args:
        plan: the cut.
        micro_batches: of a step.
        ratios: seconds of the two backward parts over the forward pass, for simulated schedules.
    """
    pp = plan.layout.pp
    if pp == 1:
        return (1.0,)
    if has_form(plan.schedule):
        form = form_of(plan.schedule, plan.virtual)
        return tuple(form.held(i, pp, plan.virtual, micro_batches) for i in range(pp))
    _, held = simulated(plan.schedule, pp, plan.virtual, micro_batches, ratios)
    return held


def limit(work: Workload) -> float:
    """Bytes of a device that a plan may fill."""
    return work.platform.memory_bytes * USABLE
