"""Bytes of a device, by part, on every pipeline stage.

Activation counts follow Korthikanti et al. 2022 (equations 1 to 4), generalised to gated networks
and grouped key/value heads: what a fused implementation keeps for its backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from hpctrain.plan.inputs import Placement, Strategy, Workload
from hpctrain.plan.shapes import ModelShape
from hpctrain.plan.steptime import stage_layers

GIB = 2**30

_NORM_KEPT = 1.0
"""Bytes a token and unit of width that a layer keeps beside norm inputs and outputs."""
_NORM_UNFUSED_KEPT = 16.0
_GATHERED_LOGIT = 12.0
"""Further bytes a logit where they are gathered over the tensor-parallel group for the loss:
the gathered value, its transposed copy, and the gradients of both and of the parts."""
_SCORES = 5.0
"""Bytes a score of an unfused attention core: softmax, its dropout and the mask."""
USABLE = 0.95
"""Share of a device's memory that can be filled before fragments of the allocator get in the way."""


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
        return sum(getattr(self, f.name) for f in fields(self))

    def parts(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def layer_activations(work: Workload, plan: Strategy) -> tuple[float, float]:
    """Bytes that one block keeps for one micro-batch: as planned, and all of it once (live).

    The second is what a recomputed block holds while it runs backward.
    """
    model, layout = work.model, plan.layout
    tp = layout.tp
    tokens = plan.micro_batch * work.sequence / layout.cp
    each = 4.0 if work.dtype == "fp32" else 2.0
    split = tp if plan.sequence_parallel else 1

    # Residual stream: inputs and outputs of two norms, masks of two dropouts.
    half = 1.0 if work.dtype == "fp8" else each
    outputs = 2.0 * half
    stream = 2.0 * each + (2.0 if model.dropout else 0.0)
    stream += _NORM_KEPT if work.norms_fused else _NORM_UNFUSED_KEPT
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
    inner += ffn * (each * (tensors - 1) + (0.0 if again else half))
    whole = tokens * (model.hidden * (stream / split + outputs / gathered) + inner / tp)
    scores = 0.0
    if work.kernel in ("torch", "fused"):
        scores = (
            _SCORES
            * plan.micro_batch
            * model.heads
            / tp
            * (work.sequence / layout.cp)
            * work.sequence
        )
    if plan.recompute == "full":
        kept = each * tokens * model.hidden / split
    elif plan.recompute == "selective":
        kept = whole
    else:
        kept = whole + scores
    return kept, whole + scores


def stage_memory(
    work: Workload, plan: Strategy, layers: Sequence[int], in_flight: Sequence[float]
) -> tuple[StageMemory, ...]:
    """Memory of each pipeline stage.

    Args:
        work: what is planned.
        plan: the cut.
        layers: blocks of each stage.
        in_flight: micro-batches whose activations a stage holds at its fullest moment, in units
            of all its blocks.
    """
    model, layout = work.model, plan.layout
    tp, pp = layout.tp, layout.pp
    each = 4.0 if work.dtype == "fp32" else 2.0
    kept, live = layer_activations(work, plan)
    tokens = plan.micro_batch * work.sequence / layout.cp
    dense = (model.layer_parameters - model.expert_parameters) / tp
    experts = model.expert_parameters / (layout.ep * layout.etp)
    states = plan.states
    shard = layout.dp_shard * layout.cp
    weight_bytes, optimizer_bytes = work.weight_bytes, work.optimizer_bytes
    if states.fully_sharded and weight_bytes == 2.0:
        # the sharded parameters are the master copy; half-precision ones exist while gathered
        weight_bytes, optimizer_bytes = 4.0, optimizer_bytes - 4.0
    found = []
    for stage in range(pp):
        first, last = stage == 0, stage == pp - 1
        copies = 1 if model.tied and pp == 1 else int(first) + int(last)
        ends = copies * model.vocab * model.hidden / tp
        ends += (model.positions * model.hidden if first else 0) + last * model.norm_parameters
        common = layers[stage] * dense + ends
        routed = layers[stage] * experts

        def held(placement: Placement, bytes_each: float, common: float, routed: float) -> float:
            if placement is Placement.REPLICATED:
                return bytes_each * (common + routed)
            if placement is Placement.OFFLOADED:
                return 0.0
            return bytes_each * (common / shard + routed / min(shard, layout.edp))

        gathered = 0.0
        unit = dense + experts
        if states.parameters is Placement.GATHERED:
            # the running block and the one fetched ahead, and gradients of one before they scatter
            gathered = 2 * each * unit + work.state_gradient_bytes * unit
            gathered += each * ends
        elif states.parameters is Placement.MATERIALISED:
            gathered = each * (common + routed) + work.state_gradient_bytes * unit
        activations = in_flight[stage] * layers[stage] * kept
        if plan.recompute == "full":
            activations += live
        logits = 0.0
        if last:
            logits = tokens * model.vocab * work.kept_logit_bytes
            if work.loss_is_parallel:
                logits /= tp
            elif tp > 1:
                logits += tokens * model.vocab * _GATHERED_LOGIT
        found.append(
            StageMemory(
                parameters=held(states.parameters, weight_bytes, common, routed),
                gradients=held(states.gradients, work.state_gradient_bytes, common, routed),
                optimizer=held(
                    states.optimizer, optimizer_bytes, common, routed
                ),
                activations=activations,
                logits=logits,
                gathered=gathered,
                context=work.stack.context_bytes,
                buffers=2 * each * tokens * model.hidden / (tp if plan.sequence_parallel else 1)
                if pp > 1
                else 0.0,
            )
        )
    return tuple(found)


def in_flight(schedule: str, stage: int, pp: int, virtual: int, micro_batches: int) -> float:
    """Micro-batches, in units of a stage's blocks, whose activations are held at the peak.

    1F1B: min(p - i, m). Interleaved: the first stage holds p·(1 + (p-1)/(p·v)) of them
    (Korthikanti et al. 2022, section 4.2.3), later ones one chunk less each. GPipe: all.
    """
    if pp == 1:
        return 1.0
    if schedule == "gpipe":
        return float(micro_batches)
    if virtual > 1:
        warm = (virtual - 1) * pp + 2 * (pp - stage - 1) + 1
        return min(warm, virtual * micro_batches) / virtual
    return float(min(pp - stage, micro_batches))


def memory(work: Workload, plan: Strategy, layers: Sequence[int] | None = None) -> tuple[StageMemory, ...]:
    """Memory of each stage of a strategy, with the stack's own deal of layers."""
    layout = plan.layout
    micro_batches = max(1, work.global_batch // (layout.dp * plan.micro_batch))
    if layers is None:
        layers = work.stages or stage_layers(
            work.model.layers,
            layout.pp,
            plan.virtual,
            work.stack.balanced_stages,
            head_weight(work.model),
        )
    held = [
        in_flight(plan.schedule, i, layout.pp, plan.virtual, micro_batches)
        for i in range(layout.pp)
    ]
    return stage_memory(work, plan, layers, held)


def head_weight(model: ModelShape) -> float:
    """Weights of the output layer in units of those of a block."""
    return model.vocab * model.hidden / max(1, model.matmul_weights - model.vocab * model.hidden) * (
        model.layers
    )


def limit(work: Workload) -> float:
    """Bytes of a device that a plan may fill."""
    return work.platform.memory_bytes * USABLE
