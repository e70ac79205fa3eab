"""Bytes that each axis of a layout moves in a step, as traffic of the groups that move them.

The counts are of hpctrain's own runtime: what its communicators are handed. Group sums of a few
numbers (loss, gradient norm) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.fabric import Traffic
from hpctrain.plan.inputs import Placement, Strategy, Workload
from hpctrain.plan.layer import exchanged_heads
from hpctrain.plan.memory import counts
from hpctrain.plan.steptime import StepModel


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes of one kind of operation of a rank in a step.

    Attributes:
        axes: axes of the groups.
        pattern: as in hpctrain.fabric.
        bytes: whole buffers, as Traffic counts them.
        messages: operations.
    """

    axes: tuple[str, ...]
    pattern: str
    bytes: float
    messages: int


def volumes(work: Workload, plan: Strategy) -> list[Volume]:
    """Every kind of traffic of a step of the stage with the most blocks; see ``Volume``."""
    return [
        *_tensor(work, plan),
        *_context(work, plan),
        *_experts(work, plan),
        *_data(work, plan),
        *_expert_data(work, plan),
        *_pipeline(work, plan),
    ]


def _tensor(work: Workload, plan: Strategy) -> list[Volume]:
    """Tensor parallelism: what enters and leaves the regions of each block, and of the ends."""
    layout, model = plan.layout, work.model
    if layout.tp == 1:
        return []
    m = work.micro_batches(plan)
    each = 4.0 if work.dtype == "fp32" else 2.0
    tokens = plan.micro_batch * work.sequence / layout.cp
    stream = each * tokens * model.hidden
    layers = max(StepModel(work).layers_of(plan))
    again = 1 if plan.recompute == "full" else 0
    # the loss: a maximum, and a sum beside the target's logit
    loss = [
        Volume(("tp",), "all_reduce", m * 4.0 * tokens, m),
        Volume(("tp",), "all_reduce", m * 8.0 * tokens, m),
    ]
    if not plan.sequence_parallel:
        # two all-reduces forward (leaving attention and network), two backward (entering them);
        # the embedding leaves once and the output layer enters once
        count = layers * (4 + 2 * again) + 2
        return [Volume(("tp",), "all_reduce", m * count * stream, m * count), *loss]
    # entering gathers, leaving scatters; backward each does the other's, and the inputs of
    # column-parallel layers are gathered again for their weights' gradients
    gathers = layers * (6 + 2 * again) + 3
    scatters = layers * (4 + 2 * again) + 2
    return [
        Volume(("tp",), "all_gather", m * gathers * stream, m * gathers),
        Volume(("tp",), "reduce_scatter", m * scatters * stream, m * scatters),
        *loss,
    ]


def _context(work: Workload, plan: Strategy) -> list[Volume]:
    """Context parallelism: keys and values round the ring in forward, and again in backward with
    the sums of their gradients in fp32 behind them (Liu et al. 2023); and heads exchanged for
    tokens before and after attention (Jacobs et al. 2023)."""
    layout, model = plan.layout, work.model
    inner = plan.exchange
    ring = layout.cp // inner
    if layout.cp == 1:
        return []
    each = 4.0 if work.dtype == "fp32" else 2.0
    m, layers = work.micro_batches(plan), max(StepModel(work).layers_of(plan))
    tokens = plan.micro_batch * work.sequence / layout.cp
    heads, kv = model.heads / layout.tp, max(1.0, model.kv_heads / layout.tp)
    rounds = 2 + (1 if plan.recompute in ("full", "stage") else 0)
    found = []
    if ring > 1:
        block = 2.0 * tokens * inner * max(1.0, kv / inner) * model.head_dim
        hops = m * layers * (ring - 1)
        size = hops * block * (rounds * each + 4.0)
        found.append(Volume(("cp",), "chain", size, hops * (rounds + 1)))
    if inner > 1:
        calls = 2 * m * layers * rounds
        handed = each * tokens * exchanged_heads(heads, kv, inner) * model.head_dim
        found.append(Volume(("cp",), "all_to_all", calls / 2 * handed, calls))
    return found


def _experts(work: Workload, plan: Strategy) -> list[Volume]:
    """Expert parallelism with balanced routing: tokens to their experts and back, forward and
    backward; where ranks share an expert's channels, they share its tokens as well."""
    layout, model = plan.layout, work.model
    if not model.experts:
        return []
    m = work.micro_batches(plan)
    layers = max(StepModel(work).layers_of(plan))
    each = 4.0 if work.dtype == "fp32" else 2.0
    rows = plan.micro_batch * work.sequence / layout.cp / layout.tp * model.topk
    sent = each * rows * model.hidden
    passes = m * layers * (2 + (1 if plan.recompute in ("full", "stage") else 0))
    found = []
    if layout.ep > 1:
        found.append(Volume(("ep",), "all_to_all", 2 * passes * sent, 2 * passes))
    if layout.etp > 1:
        wide = sent * layout.etp
        found.append(Volume(("etp",), "all_gather", passes * wide, passes))
        found.append(Volume(("etp",), "reduce_scatter", passes * wide, passes))
    return found


def _expert_data(work: Workload, plan: Strategy) -> list[Volume]:
    """Gradients of experts over the ranks with copies of them, and their parameters where those
    are sharded."""
    layout, states = plan.layout, plan.states
    if not work.model.experts or layout.edp == 1:
        return []
    m, layers = work.micro_batches(plan), max(StepModel(work).layers_of(plan))
    parameters = layers * counts(work, plan).experts
    gradient = float(work.gradient_bytes)
    kept = 4.0 if work.dtype == "fp32" else 2.0
    if states.parameters is Placement.REPLICATED and states.optimizer is Placement.REPLICATED:
        return [Volume(("edp",), "all_reduce", gradient * parameters, layers)]
    again = 2 if states.parameters is Placement.GATHERED else 1
    gathers = m * again if states.fully_sharded else 1
    scatters = 1 if work.stack.accumulates_whole or not states.fully_sharded else m
    return [
        Volume(("edp",), "all_gather", gathers * kept * parameters, gathers * layers),
        Volume(("edp",), "reduce_scatter", scatters * gradient * parameters, scatters * layers),
    ]


def _data(work: Workload, plan: Strategy) -> list[Volume]:
    """Data parallelism: gradients once a step, and parameters where they are sharded."""
    layout, states = plan.layout, plan.states
    if layout.dp * layout.cp == 1:
        return []
    size = counts(work, plan)
    layers = max(StepModel(work).layers_of(plan))
    ends = size.first + size.last if layout.pp == 1 else max(size.first, size.last)
    parameters = layers * size.dense + ends
    kept = 4.0 if work.dtype == "fp32" else 2.0
    gradient = float(work.gradient_bytes)
    near, far = ("dp_shard", "cp"), ("dp_replicate",)
    whole = ("dp_replicate", "dp_shard", "cp")
    shard = layout.dp_shard * layout.cp
    m = work.micro_batches(plan)
    if states.parameters is Placement.REPLICATED:
        if states.optimizer is Placement.REPLICATED:
            return [Volume(whole, "all_reduce", gradient * parameters, layers)]
        return [
            Volume(whole, "reduce_scatter", gradient * parameters, layers),
            Volume(whole, "all_gather", 2.0 * parameters, layers),
        ]
    blocks = layers * size.dense
    again = 2 if states.parameters is Placement.GATHERED else 1
    scatters = 1 if work.stack.accumulates_whole else m
    found = [
        Volume(near, "all_gather", m * kept * (again * blocks + ends), m * (again * layers + 1)),
        Volume(near, "reduce_scatter", scatters * gradient * parameters, scatters * (layers + 1)),
    ]
    if layout.dp_replicate > 1:
        found.append(
            Volume(far, "all_reduce", scatters * gradient * parameters / shard, layers + 1)
        )
    return found


def _pipeline(work: Workload, plan: Strategy) -> list[Volume]:
    """Pipeline: the residual stream from stage to stage, and as much back."""
    layout = plan.layout
    if layout.pp == 1:
        return []
    each = 4.0 if work.dtype == "fp32" else 2.0
    tokens = plan.micro_batch * work.sequence / layout.cp
    split = layout.tp if plan.sequence_parallel else 1
    m = work.micro_batches(plan) * plan.virtual
    return [Volume(("pp",), "chain", m * each * tokens * work.model.hidden / split, m)]


def traffic(work: Workload, plan: Strategy) -> list[Traffic]:
    """What a step moves, for the placement of ranks: volumes with the share that is exposed."""
    values = work.values
    exposed = {
        "tp": 1.0 - max(values.tp_overlap, values.tp_backward_overlap / 2),
        "pp": 1.0 - values.pp_overlap,
        "cp": 0.2,  # what attention does not hide
        "ep": 1.0 - values.expert_overlap,
        "etp": 1.0 - values.expert_overlap,
    }
    shared = 1.0 - (values.fsdp_overlap if plan.states.fully_sharded else values.dp_overlap)
    return [
        Traffic(v.axes, v.pattern, v.bytes, v.messages, exposed.get(v.axes[0], shared))  # type: ignore[arg-type]
        for v in volumes(work, plan)
        if v.bytes
    ]
