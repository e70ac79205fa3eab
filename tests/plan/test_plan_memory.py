"""Memory: Korthikanti's activation counts, ZeRO's states, placements, and published failures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.layout import ParallelLayout
from hpctrain.plan.inputs import Placement, StatePlacement, Strategy, Workload
from hpctrain.plan.memory import activations, counts, state_bytes
from hpctrain.plan.platform import CATALOGUE
from hpctrain.plan.shapes import ModelShape
from hpctrain.plan.software import STACKS, calibration
from hpctrain.plan.steptime import StepModel
from hpctrain.plan.volume import volumes

S, H, HEADS, L = 2048, 6144, 64, 48


def workload(stack="megatron-2021", dtype="fp16", platform="A100-80G", **more):
    model = ModelShape(
        layers=L,
        hidden=H,
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=H // HEADS,
        ffn_hidden=4 * H,
        vocab=51200,
        dropout=True,
        positions=S,
    )
    plan = {
        "model": model,
        "sequence": S,
        "global_batch": 64,
        "dtype": dtype,
        "platform": CATALOGUE[platform],
        "stack": replace(STACKS[stack], norm_kept=0.0),
        "values": calibration(CATALOGUE[platform].family, stack).values,
    }
    return Workload(**{**plan, **more})


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("t", [1, 8])
def test_activations_of_a_layer(b, t):
    """Korthikanti et al. 2022, equations 1, 2, 4 and table 2: bytes of one layer.

    no parallelism sbh(34 + 5as/h); tensor sbh(10 + 24/t + 5as/(ht)); with sequence parallelism
    sbh/t·(34 + 5as/h); selective recomputation 34·sbh/t; full 2·sbh.
    """
    work, scores = workload(), 5 * HEADS * S / H
    sbh = S * b * H

    def kept(**how):
        layout = ParallelLayout(tp=t)
        return activations(work, Strategy(layout=layout, micro_batch=b, **how))

    assert kept().kept == pytest.approx(sbh * (10 + 24 / t + scores / t))
    assert kept(sequence_parallel=True).kept == pytest.approx(sbh / t * (34 + scores))
    selective = kept(sequence_parallel=True, recompute="selective")
    assert selective.kept == pytest.approx(34 * sbh / t)
    full = kept(recompute="full")
    assert full.kept == pytest.approx(2 * sbh)
    assert full.live == pytest.approx(kept().kept), "one layer at a time is whole again"


def test_recomputing_whole_stages_keeps_one_input_a_chunk():
    work = workload()
    layout = ParallelLayout(pp=4)
    plan = Strategy(layout=layout, micro_batch=1, recompute="stage")
    kept = activations(work, plan)
    assert kept.chunk == 2 * S * H
    held, layers = 4.0, 12
    again = layers * activations(work, replace(plan, recompute="none")).kept
    assert kept.stage(layers, held, 1) == pytest.approx(held * 2 * S * H + again)


def test_bytes_a_parameter():
    """18 with fp32 main gradients, 16 with half-precision ones; ZeRO-1 leaves 6 + 12/dp."""
    plan = Strategy(layout=ParallelLayout(dp_replicate=8))
    assert sum(state_bytes(workload(dtype="bf16"), plan).common) == 18
    assert sum(state_bytes(workload(), plan).common) == 16
    zero1 = Strategy(layout=ParallelLayout(dp_shard=8), states=StatePlacement.zero(1))
    assert sum(state_bytes(workload(dtype="bf16"), zero1).common) == 6 + 12 / 8


def test_zero3_against_data_parallelism():
    """Rajbhandari et al. 2020, sections 5 and 7: over 8 ranks ZeRO-3 needs an 8th of the memory
    of the states, and moves 1.5 times the bytes."""
    work = workload(reduce_bytes=2, global_batch=8)
    plain = Strategy(layout=ParallelLayout(dp_replicate=8))
    sharded = Strategy(layout=ParallelLayout(dp_shard=8), states=StatePlacement.zero(3))
    everything = sum(state_bytes(work, plain).common)
    assert everything == 16
    assert everything / sum(state_bytes(work, sharded).common) == pytest.approx(8.0)

    def moved(plan):
        """Bytes out of a rank over 7/8: 2 a buffer of an all-reduce, 1 of the others."""
        passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
        return sum(passes[v.pattern] * v.bytes for v in volumes(work, plan))

    # embedding and output layer are one unit that is gathered once; the blocks are gathered twice
    size = counts(work, sharded)
    blocks, ends = L * size.dense, size.first + size.last
    assert moved(plain) == pytest.approx(2 * 2 * (blocks + ends))
    assert moved(sharded) == pytest.approx(3 * 2 * blocks + 2 * 2 * ends)
    assert 3 * 2 * blocks / (2 * 2 * blocks) == 1.5


def test_every_placement_is_priced():
    work = workload(dtype="bf16")
    layout = ParallelLayout(dp_shard=4)
    both = Placement.SHARDED
    sizes = {
        placement: sum(
            state_bytes(
                work,
                Strategy(
                    layout=layout,
                    states=StatePlacement(parameters=placement, gradients=both, optimizer=both),
                ),
            ).common
        )
        for placement in Placement
    }
    assert sizes[Placement.REPLICATED] == 2 + 16 / 4
    assert sizes[Placement.OFFLOADED] == 16 / 4
    assert sizes[Placement.GATHERED] == sizes[Placement.MATERIALISED] == 18 / 4
    # FSDP's sharded parameters are the fp32 master copy themselves
    fsdp = replace(work, stack=STACKS["pytorch-2024"])
    states = StatePlacement(Placement.GATHERED, both, both)
    assert sum(state_bytes(fsdp, Strategy(layout=layout, states=states)).common) == 16 / 4
    kept = state_bytes(
        work, Strategy(layout=layout, states=StatePlacement(parameters=Placement.MATERIALISED))
    )
    assert kept.block == 2.0, "what is materialised stands in half precision"


def test_1f1b_holds_as_many_micro_batches_as_stages_behind_it():
    work = workload()
    plan = Strategy(
        layout=ParallelLayout(tp=8, pp=8), micro_batch=1, recompute="full", sequence_parallel=False
    )
    stages = StepModel(work).memory(plan)
    one = 2 * S * H * (L // 8)  # inputs of six blocks of one micro-batch
    for stage in range(1, 8):
        fewer = stages[stage - 1].activations - stages[stage].activations
        assert fewer == pytest.approx(one)
    assert stages[-1].logits > 0 and not any(s.logits for s in stages[:-1])
    assert stages[0].parameters > stages[1].parameters, "the first stage holds the embedding"


def test_streamed_output_layer_keeps_the_logits_of_a_piece():
    work = workload()
    whole = Strategy(layout=ParallelLayout(tp=2), micro_batch=1, sequence_parallel=True)
    pieces = replace(whole, stream=S // 16)
    share = activations(work, pieces).logits / activations(work, whole).logits
    assert share == pytest.approx(2 / 16), "a piece of each of two slices"
    assert activations(work, pieces).kept < activations(work, whole).kept
