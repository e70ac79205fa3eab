"""Bytes that each axis of a layout moves in a step, as traffic of the groups that move them.

The counts are of hpctrain's own runtime: what its communicators are handed. Group sums of a few
numbers (loss, gradient norm) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.fabric import Traffic
from hpctrain.plan.experts import by_index, nodes_visited, routed
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
    again = 1 if plan.recompute == "full" else 0
    sparse = _sparse(work, plan)
    layers = max(StepModel(work).layers_of(plan))
    # two regions of a block are shared, attention and network; of one with routed experts attention
    # and the experts that every token visits
    regions = 2 * layers - sparse + (sparse if model.shared_ffn else 0)
    # the loss: a maximum, and a sum beside the target's logit
    found = [
        Volume(("tp",), "all_reduce", m * 4.0 * tokens, m),
        Volume(("tp",), "all_reduce", m * 8.0 * tokens, m),
    ]
    if sparse:
        found += _beside_experts(work, plan, m * sparse, stream, again)
    if not plan.sequence_parallel:
        # an all-reduce forward (leaving a region) and one backward (entering it); the embedding
        # leaves once and the output layer enters once
        count = regions * (2 + again) + 2
        return [Volume(("tp",), "all_reduce", m * count * stream, m * count), *found]
    # entering gathers, leaving scatters; backward each does the other's, and the inputs of
    # column-parallel layers are gathered again for their weights' gradients
    gathers = regions * (3 + again) + 3
    scatters = regions * (2 + again) + 2
    return [
        Volume(("tp",), "all_gather", m * gathers * stream, m * gathers),
        Volume(("tp",), "reduce_scatter", m * scatters * stream, m * scatters),
        *found,
    ]


def _beside_experts(
    work: Workload, plan: Strategy, blocks: int, stream: float, again: int
) -> list[Volume]:
    """What a tensor group moves for routed experts: the load of each sequence; by index, the tokens
    with their choices and weights; else, where all members hold all tokens, each one's share of
    the outputs and of the gradients."""
    model, samples = work.model, plan.micro_batch
    tokens = samples * work.sequence / plan.layout.cp
    choices = tokens * model.topk
    once = blocks * (1 + again)
    found = []
    if plan.sequence_parallel:
        loads = 8.0 * samples * model.experts
        found.append(Volume(("tp",), "all_reduce", once * loads, once))
    if not by_index(work, plan):
        if not plan.sequence_parallel:
            found.append(Volume(("tp",), "all_gather", (once + blocks) * stream, once + blocks))
            found.append(Volume(("tp",), "all_gather", blocks * 4.0 * choices, blocks))
        return found
    if not plan.sequence_parallel:
        found.append(Volume(("tp",), "all_reduce", (once + blocks) * stream, once + blocks))
        found.append(Volume(("tp",), "all_reduce", blocks * 4.0 * choices, blocks))
        return found
    found.append(Volume(("tp",), "all_gather", (once + blocks) * stream, once + blocks))
    found.append(Volume(("tp",), "reduce_scatter", (once + blocks) * stream, once + blocks))
    found.append(Volume(("tp",), "all_gather", once * (4.0 + 8.0) * choices, 2 * once))
    found.append(Volume(("tp",), "reduce_scatter", blocks * 4.0 * choices, blocks))
    return found


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
    if not model.experts or by_index(work, plan):
        return []
    m = work.micro_batches(plan)
    layers = _sparse(work, plan)
    each = 4.0 if work.dtype == "fp32" else 2.0
    bring = routed(work, plan)
    width = each * model.hidden
    passes = m * layers * (2 + (1 if plan.recompute in ("full", "stage") else 0))
    found = []
    if layout.ep > 1:
        calls = 2 * passes * work.dispatch.parts
        nodes = plan.expert_nodes(work.platform.domain_devices)
        if work.dispatch.kind == "hierarchical" and nodes > 1:
            once = bring.tokens * nodes_visited(model.experts, nodes, model.topk)
            found.append(Volume(("ep",), "all_to_all", 2 * passes * width * once, calls))
        found.append(Volume(("ep",), "all_to_all", 2 * passes * width * bring.rows, calls))
    if bring.copied:
        size = bring.copied * model.ffn_matrices * model.hidden * model.ffn_hidden / layout.etp
        moved = passes * work.weight_bytes * size
        found.append(Volume(("ep",), "all_to_all", moved, passes))
    once = m * layers * work.dispatch.parts * (1 + (plan.recompute in ("full", "stage")))
    if layout.ep > 1 and work.dispatch.kind == "flat":
        # who sends how many rows to which expert
        found.append(Volume(("ep",), "all_gather", once * 8.0 * model.experts * layout.ep, once))
    if layout.etp > 1:
        # every sharer gets all rows, and gives back its part of each
        wide = width * bring.rows * layout.etp
        found.append(Volume(("etp",), "all_to_all", 2 * passes * wide, 2 * passes))
        counts_ = 8.0 * model.experts / layout.ep * layout.etp
        found.append(Volume(("etp",), "all_gather", once * counts_, once))
    return found


def _sparse(work: Workload, plan: Strategy) -> int:
    """Blocks with experts of the stage with the most blocks."""
    layers = max(StepModel(work).layers_of(plan))
    if not work.model.experts:
        return 0
    return layers - (work.model.dense_layers if plan.layout.pp == 1 else 0)


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
    late = work.dp_overlap(plan.layout.pp)
    shared = 1.0 - (values.fsdp_overlap if plan.states.fully_sharded else late)
    return [
        Traffic(v.axes, v.pattern, v.bytes, v.messages, exposed.get(v.axes[0], shared))  # type: ignore[arg-type]
        for v in volumes(work, plan)
        if v.bytes
    ]
