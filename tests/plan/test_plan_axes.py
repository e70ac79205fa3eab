"""Context and expert parallelism: memory and bytes by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.layout import ParallelLayout
from hpctrain.plan.inputs import StatePlacement, Strategy, Workload
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
