"""Seconds, bytes and messages of routed experts: who sends what where, and what they compute.

Routing is taken to be balanced. Three ways to dispatch, as in docs/parallelism/experts.md: flat
(to the rank of each expert), hierarchical (once to each node that has an expert of a token, from
there inside it: DeepSeek-V3 2024, section 3.2.2), and by index inside a tensor group (slice:
Chen et al. 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.layout import ParallelLayout
from hpctrain.plan.collectives import Group, Wires
from hpctrain.plan.inputs import Strategy, Workload
from hpctrain.plan.kernels import Device
from hpctrain.plan.seconds import Seconds

_PERMUTE = 12.0
"""Bytes a routed token and unit of width: gather, scatter and weighting, forward; as much back."""


def experts_apart(layout: ParallelLayout) -> bool:
    """Whether routed experts lie on a mesh of their own, so that their gradients are summed over
    the ranks with copies when all others are."""
    return max(layout.tp, layout.cp, layout.ep, layout.etp) > 1


@dataclass(frozen=True, slots=True)
class Routed:
    """What one micro-batch sends to the experts of a block, on a rank.

    Attributes:
        tokens: that the rank brings.
        rows: of them that leave it for experts, one for each of a token's choices.
        copied: experts of others of which it takes copies instead.
    """

    tokens: float
    rows: float
    copied: int


def routed(work: Workload, plan: Strategy) -> Routed:
    """Rows and copies under balanced routing; a copy is taken where an expert has more rows of this
    rank than it weighs (matrices * width / 2, as the runtime decides)."""
    model, layout = work.model, plan.layout
    tokens = plan.micro_batch * work.sequence / layout.cp / layout.tp
    rows = tokens * model.topk
    copied = 0
    if work.dispatch.copies and rows / model.experts > model.ffn_matrices * model.ffn_hidden / 2:
        copied = min(work.dispatch.copies, model.experts - model.experts // layout.ep)
    return Routed(tokens, rows * (1.0 - copied / model.experts), copied)


def nodes_visited(experts: int, nodes: float, choices: int) -> float:
    """Nodes that hold a token's choices, on average: N * (1 - C(E - E/N, k) / C(E, k)) of N nodes
    with E experts between them."""
    elsewhere = round(experts - experts / nodes)
    return nodes * (1.0 - math.comb(elsewhere, choices) / math.comb(experts, choices))


def by_index(work: Workload, plan: Strategy) -> bool:
    """Whether experts are found by index in a tensor group, without messages of their own."""
    return work.dispatch.kind == "slice" and plan.layout.ep == plan.layout.tp


def add_experts(
    work: Workload,
    device: Device,
    wires: Wires,
    plan: Strategy,
    forward: Seconds,
    backward: Seconds,
) -> float:
    """Adds routed experts: dispatch, grouped products and combine; returns weight-gradient time."""
    model, layout = work.model, plan.layout
    ep, etp = layout.ep, layout.etp
    sent = routed(work, plan)
    # rows of one local expert: those of all ranks that bring tokens to it
    rows = sent.tokens * model.topk * etp * (ep / model.experts)
    local = model.experts / ep
    parts = work.dispatch.parts
    gate = 2 if model.gated else 1
    weights = ahead = 0.0
    for inputs, outputs in (
        (model.hidden, gate * model.ffn_hidden / etp),
        (model.ffn_hidden / etp, model.hidden),
    ):
        f, i, w = device.linear(max(rows / parts, 1.0), inputs, outputs)
        forward.products += f * local * parts
        backward.products += (i + w) * local * parts
        weights += w * local * parts
        ahead += f * local * parts
    launches = work.stack.expert_launches * local * parts * work.values.layer_seconds
    forward.launch += launches / 3.0
    backward.launch += launches * 2.0 / 3.0
    moved = sent.tokens * model.topk * model.hidden * _PERMUTE
    forward.elementwise += device.stream(moved)
    backward.elementwise += device.stream(moved)
    if ep > 1 and not by_index(work, plan):
        one = 2.0 * (1.0 - work.values.expert_overlap) * _exchange(work, wires, plan, sent)
        # what is under way while another part is computed
        hidden = min(ahead, one) * (parts - 1) / parts
        forward.ep += one - hidden
        backward.ep += one - hidden
    if etp > 1:
        # sharers of experts get all rows of each other, and give back their parts of each
        wide = 2.0 * wires.all_to_all(2.0 * model.hidden * sent.rows * etp, wires.group((etp, 1)))
        forward.ep += wide * (1.0 - work.values.expert_overlap)
        backward.ep += wide * (1.0 - work.values.expert_overlap)
    if sent.copied:
        group = wires.group((ep, etp))
        size = 2.0 * sent.copied * model.ffn_matrices * model.hidden * model.ffn_hidden / etp
        forward.ep += wires.all_to_all(size, group)
        backward.ep += wires.all_to_all(2.0 * size, group)  # gradients in fp32
    return weights


def _exchange(work: Workload, wires: Wires, plan: Strategy, sent: Routed) -> float:
    """Seconds in which rows get to their experts; as long back."""
    model, layout = work.model, plan.layout
    group = wires.group((layout.ep, layout.etp))
    width = 2.0 * model.hidden
    if work.dispatch.kind != "hierarchical" or group.local in (1, group.size):
        return wires.all_to_all(width * sent.rows, group)
    nodes = group.domains
    once = width * sent.tokens * nodes_visited(model.experts, nodes, model.topk)
    across = wires.all_to_all(once, Group(round(nodes), 1))
    return across + wires.all_to_all(width * sent.rows, Group(group.local, group.local))
