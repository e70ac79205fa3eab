"""Context and expert parallelism: memory and bytes by hand."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import pytest

from hpctrain.layout import ParallelLayout
from hpctrain.plan.experts import nodes_visited, routed
from hpctrain.plan.inputs import Dispatch, StatePlacement, Strategy, Workload
from hpctrain.plan.layer import pieces
from hpctrain.plan.memory import activations, counts, stage_memory
from hpctrain.plan.platform import CATALOGUE
from hpctrain.plan.shapes import ModelShape
from hpctrain.plan.software import STACKS, calibration
from hpctrain.plan.steptime import StepModel
from hpctrain.plan.volume import volumes

S, H, HEADS, KV, L = 4096, 2048, 16, 4, 8
DENSE = ModelShape(
    layers=L, hidden=H, heads=HEADS, kv_heads=KV, head_dim=128, ffn_hidden=4096, vocab=32000,
    gated=True, tied=False, bias=False, layernorm=False,
)  # fmt: skip
SPARSE = replace(DENSE, experts=16, topk=2, ffn_hidden=1024)


def workload(model, stack="hpctrain", batch=16):
    return Workload(
        model=model,
        sequence=S,
        global_batch=batch,
        dtype="bf16",
        platform=CATALOGUE["H100"],
        stack=STACKS[stack],
        values=calibration("H100", stack).values,
    )


def by_axis(work, plan):
    return {(v.axes, v.pattern): v for v in volumes(work, plan)}


def test_context_ranks_share_activations_and_pass_keys_round():
    """Each of four ranks holds a quarter of the tokens, and sends three blocks of keys and values
    forward, three back, with three sums of their gradients in fp32."""
    work = workload(DENSE)
    alone = Strategy(layout=ParallelLayout(dp_replicate=2), micro_batch=2)
    four = Strategy(layout=ParallelLayout(cp=4, dp_replicate=2), micro_batch=2)
    assert activations(work, four).kept == pytest.approx(activations(work, alone).kept / 4)
    assert activations(work, four).logits == pytest.approx(activations(work, alone).logits / 4)
    ring = by_axis(work, four)[("cp",), "chain"]
    block = 2 * 2 * (S // 4) * KV * 128  # keys and values of two samples
    m = 16 // 2 // 2
    assert ring.bytes == m * L * 3 * (block * 2 + block * 2 + block * 4)
    assert ring.messages == m * L * 9
    again = by_axis(work, replace(four, recompute="full"))[("cp",), "chain"]
    assert again.bytes - ring.bytes == m * L * 3 * block * 2
    # gradients are summed over both
    assert (("dp_replicate", "dp_shard", "cp"), "all_reduce") in by_axis(work, four)


def test_a_jobs_context_ranks_are_planned():
    from pathlib import Path

    from hpctrain.machine import get_machine
    from hpctrain.plan.plan import make_plan
    from hpctrain.spec import parse_job, resolve

    text = """\
machine: dgx-h100
nodes: 2
model: llama-8b
data: {path: t.h5, sequence_length: 32768}
parallel: {context: 4, sharding: zero3}
train: {steps: 100, global_batch: 16, micro_batch: 1, precision: bf16}
"""
    machine = get_machine("dgx-h100")
    plan = make_plan(resolve(parse_job(text), machine, Path("/")).spec, machine, alternatives=0)
    assert (plan.strategy.layout.cp, plan.strategy.layout.dp_shard) == (4, 4)
    assert plan.exposed["cp"] == plan.step.split["context parallel"]
    alone = parse_job(text, overrides=("parallel.context=1",))
    other = make_plan(resolve(alone, machine, Path("/")).spec, machine, alternatives=0)
    assert plan.memory[0].activations == pytest.approx(other.memory[0].activations / 4)


def test_expert_ranks_share_experts_and_exchange_tokens():
    """Sixteen experts over four ranks, each cut in two: an eighth of them a rank, in two copies."""
    work = workload(SPARSE)
    layout = ParallelLayout(tp=2, dp_replicate=8, ep=4, etp=2)
    plan = Strategy(layout=layout, micro_batch=2, sequence_parallel=True)
    assert layout.edp == 2
    experts = 16 * 3 * H * 1024
    assert counts(work, plan).experts == experts / 8
    (stage,) = stage_memory(work, plan, (L,), (1.0,))
    whole = replace(plan, layout=replace(layout, ep=1, etp=2))
    (more,) = stage_memory(work, whole, (L,), (1.0,))
    # fp32 parameters and their share of what is gathered for products in half precision
    assert more.parameters - stage.parameters == pytest.approx(4 * L * experts * (1 / 2 - 1 / 8))
    moved = by_axis(work, plan)
    m, rows = 16 // 8 // 2, 2 * S / 2 * 2  # tokens of a tensor rank, twice
    there = moved[("ep",), "all_to_all"]
    assert there.bytes == m * L * 4 * rows * H * 2
    assert there.messages == m * L * 4
    wide = moved[("etp",), "all_to_all"]
    assert wide.bytes == m * L * 4 * rows * 2 * H * 2
    assert moved[("edp",), "all_reduce"].bytes == 4 * L * experts / 8
    sharded = replace(plan, layout=replace(layout, dp_replicate=1, dp_shard=8))
    sharded = by_axis(work, replace(sharded, states=StatePlacement.zero(3)))
    assert sharded[("edp",), "all_gather"].bytes == 2 * m * 2 * L * experts / 8


def test_more_ranks_that_share_a_sequence_or_experts_need_less_memory_and_say_what_it_costs():
    work = workload(SPARSE, "megatron-core-2024")
    model = StepModel(work)

    def plan(**degrees):
        rest = 16 // (degrees.get("tp", 1) * degrees.get("cp", 1))
        layout = ParallelLayout(dp_replicate=rest, **degrees)
        return Strategy(layout=layout, micro_batch=1)

    def used(one):
        return max(stage.total for stage in model.memory(one))

    assert used(plan(ep=4)) < used(plan(ep=2)) < used(plan())
    assert used(plan(cp=4)) < used(plan(cp=2)) < used(plan())
    assert model.step(plan(ep=4)).split["expert parallel"] > 0
    assert model.step(plan()).split["expert parallel"] == 0


def test_nodes_that_a_token_visits():
    """Every choice of k experts, counted: of the six pairs of four experts on two nodes, four
    lie on both and two on one."""
    assert nodes_visited(4, 2, 2) == pytest.approx((4 * 2 + 2 * 1) / 6)
    assert nodes_visited(16, 4, 1) == 1
    choices = list(itertools.combinations(range(12), 5))
    visited = statistics.fmean(len({expert // 3 for expert in one}) for one in choices)
    assert nodes_visited(12, 4, 5) == pytest.approx(visited)


def test_ways_to_dispatch():
    many = workload(replace(SPARSE, experts=64, topk=8), batch=32)
    plan = Strategy(layout=ParallelLayout(dp_replicate=32, ep=32), micro_batch=1)

    def exchanged(dispatch, strategy=plan):
        found = replace(many, dispatch=dispatch)
        return StepModel(found).step(strategy).split["expert parallel"]

    flat = exchanged(Dispatch())
    # 7.8 of 8 choices lie on other ranks, 6 of them on other nodes; but only 3.7 of 4 nodes are
    # visited, three quarters of which are others
    assert 0.4 * flat < exchanged(Dispatch("hierarchical")) < 0.8 * flat
    assert flat / 2 <= exchanged(Dispatch(parts=2)) < flat
    together = replace(plan, layout=ParallelLayout(tp=8, dp_replicate=4, ep=8))
    together = replace(together, sequence_parallel=True)
    assert exchanged(Dispatch(), together) > 0
    assert exchanged(Dispatch("slice"), together) == 0


def test_copies_of_experts():
    """2,048 rows of an expert weigh more than the 1,536 of its three matrices there and back."""
    few = replace(workload(SPARSE), dispatch=Dispatch(copies=2))
    plan = Strategy(layout=ParallelLayout(dp_replicate=4, ep=4), micro_batch=4)
    sent = routed(few, plan)
    assert (sent.tokens, sent.copied) == (4 * S, 2)
    assert sent.rows == 4 * S * 2 * (1 - 2 / 16)
    assert routed(few, replace(plan, micro_batch=1)).copied == 0, "512 rows are not worth it"
    more = activations(few, plan).kept - activations(workload(SPARSE), plan).kept
    assert more == 2 * 3 * H * 1024 * 4, "fp32 copies until backward"


def test_a_streamed_sequence_computes_the_network_again():
    work = workload(DENSE)
    model = StepModel(work)
    plan = Strategy(layout=ParallelLayout(dp_replicate=2), micro_batch=2)
    whole = replace(plan, stream=S)
    assert pieces(work, whole) == (1, 2 * S)
    assert pieces(work, replace(plan, stream=1000)) == (5, 2 * S / 5)
    again = model.layer(whole)[0].recompute.products
    up, down = (model.device.linear(2 * S, *sides)[0] for sides in ((H, 2 * 4096), (4096, H)))
    assert again == pytest.approx(up + down)
    steps = [model.step(replace(plan, stream=tokens)).seconds for tokens in (None, S, 256, 64)]
    assert steps == sorted(steps), "smaller pieces cost more"
    held = [activations(work, replace(plan, stream=tokens)).logits for tokens in (None, 1024, 256)]
    assert held[1] == held[0] / 4 and held[2] == held[0] / 16
