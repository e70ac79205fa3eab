"""What the search tries: degrees that divide, schedules, placements of the states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpctrain.layout import DEFAULT_ORDER, ParallelLayout, divisors
from hpctrain.plan.inputs import Placement, StatePlacement, Workload
from hpctrain.plan.pipeline import FORMS

MATERIALISED = replace(StatePlacement.zero(3), parameters=Placement.MATERIALISED)
STATES: tuple[tuple[str, StatePlacement], ...] = (
    ("none", StatePlacement.zero(0)),
    ("zero1", StatePlacement.zero(1)),
    ("zero2", MATERIALISED),
    ("zero3", StatePlacement.zero(3)),
)
"""Placements that are searched, by the name that a job file gives them where it has one."""

ORDERS = (DEFAULT_ORDER, ("pp", "dp_replicate", "dp_shard", "cp", "tp"))


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched; None means every value that divides.

    Attributes:
        tensor, context, pipeline, expert, expert_tensor, micro_batch: degrees that are tried.
        schedules: names of closed forms in hpctrain.plan.pipeline.
        virtual: most chunks a rank.
        recompute: policies.
        states: names in STATES.
        sequence_parallel: values tried wherever there is tensor parallelism.
        orders: axis orders.
        zero1_shards: optimizer states are also shared within a part of the data-parallel ranks.
        indivisible: layers that do not divide over the stages are dealt unevenly.
    """

    tensor: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    expert_tensor: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zb-h1")
    virtual: int = 16
    recompute: tuple[str, ...] = ("none", "selective", "full")
    states: tuple[str, ...] = ("none", "zero1", "zero2", "zero3")
    sequence_parallel: tuple[bool, ...] = (True, False)
    orders: tuple[tuple[str, ...], ...] = ORDERS
    zero1_shards: bool = True
    indivisible: bool = False


def degrees(work: Workload, devices: int, space: Space) -> Iterator[ParallelLayout]:
    """Every (tp, cp, pp, ep, etp) that divides devices, model and batch; all data parallelism in
    ``dp_replicate``."""
    model = work.model
    for tp in space.tensor or divisors(devices):
        if devices % tp or model.heads % tp or model.ffn_hidden % tp:
            continue
        if model.kv_heads % tp and tp % model.kv_heads:
            continue
        for cp in space.context or divisors(devices // tp):
            # two pieces a rank, so that causal work is even
            if devices % (tp * cp) or (cp > 1 and work.sequence % (2 * cp)):
                continue
            for pp in space.pipeline or divisors(devices // (tp * cp)):
                if devices % (tp * cp * pp) or pp > model.layers:
                    continue
                dp = devices // (tp * cp * pp)
                if work.global_batch % dp:
                    continue
                yield from _with_experts(work, tp, cp, pp, dp, space)


def _with_experts(
    work: Workload, tp: int, cp: int, pp: int, dp: int, space: Space
) -> Iterator[ParallelLayout]:
    model = work.model
    if not model.experts:
        yield ParallelLayout(tp=tp, cp=cp, pp=pp, dp_replicate=dp)
        return
    stage = tp * cp * dp
    for etp in space.expert_tensor or divisors(stage):
        if stage % etp or model.ffn_hidden % etp:
            continue
        for ep in space.expert or divisors(stage // etp):
            if model.experts % ep or stage % (ep * etp):
                continue
            yield ParallelLayout(tp=tp, cp=cp, pp=pp, dp_replicate=dp, ep=ep, etp=etp)


def chunkings(work: Workload, pp: int, m: int, space: Space) -> list[tuple[str, int]]:
    """Schedules and chunks a rank that the number of stages, layers and micro-batches allow."""
    if pp == 1:
        return [("1f1b", 1)]
    layers = work.model.layers
    found = []
    for name in space.schedules:
        form = FORMS[name]
        if form.rounds and m % pp:
            continue
        if not form.chunked:
            found.append((name, 1))
            continue
        found += [
            (name, v)
            for v in range(2, min(space.virtual, layers // pp) + 1)
            if space.indivisible or layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0
        ]
    return found
