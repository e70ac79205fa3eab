"""What 2BP, vocabulary passes, offload and sharding change, against their papers and by count."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ImpossibleError
from hpctrain.schedule import (
    ActionKind,
    Costs,
    make,
    names,
    simulate,
    two_stage,
    with_offload,
    with_sharding,
    with_vocabulary,
)

K = ActionKind


def kinds(schedule, rank: int) -> Counter:
    return Counter(action.kind for action in schedule.actions[rank])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "bfs", "hanayo", "bitpipe"])
def test_2bp_is_never_slower_and_splits_everything(name):
    fused = make(name, ranks=4, micro_batches=8)
    split = make(f"{name}+2bp", ranks=4, micro_batches=8)
    assert simulate(split).makespan <= simulate(fused).makespan
    for rank in range(4):
        before, after = kinds(fused, rank), kinds(split, rank)
        assert after[K.B] == 0
        assert after[K.I] == after[K.W] == before[K.B]


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "zeropp"])
def test_2bp_refuses_what_is_split_already(name):
    with pytest.raises(ImpossibleError, match="two stages already"):
        two_stage(make(name, ranks=4, micro_batches=8, transfers=False))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(1, 24))
def test_vocabulary_passes_cost_one_micro_batch_a_barrier(p, extra):
    # Yeung et al. 2024, figure 10: 1F1B then holds p + 1 (one barrier) or p + 2 (two)
    m = p + extra
    for barriers in (1, 2):
        schedule = make("1f1b+vocab", ranks=p, micro_batches=m, barriers=barriers)
        peak = max(simulate(schedule).peak_activations)
        assert peak <= min(p + barriers, m)
        if extra >= 2:
            assert peak == p + barriers


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "zb-v"])
def test_a_large_output_layer_no_longer_slows_the_last_stage(name):
    # an output layer of two stages' work: on the last stage it sets the pace, over all ranks not
    p, m, head = 4, 16, 2.0
    plain = make(name, ranks=p, micro_batches=m, transfers=False)
    count = plain.stages.stages
    share = p / count
    forward = (share,) * (count - 1) + (share + head,)
    backward = (share,) * (count - 1) + (share + 2 * head,)
    on_the_last = Costs(forward=forward, input_grad=backward, weight_grad=(share,) * count)
    over_all = Costs(vocabulary_forward=head / p * 2, vocabulary_weight_grad=head / p)
    spread = make(f"{name}+vocab", ranks=p, micro_batches=m, transfers=False)
    before, after = simulate(plain, on_the_last), simulate(spread, over_all)
    assert sum(before.busy) == pytest.approx(sum(after.busy))
    assert before.makespan >= m * (3 + 3 * head)
    assert after.makespan < 0.75 * before.makespan
    assert max(after.busy) == pytest.approx(min(after.busy))


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("name", sorted({*names()} - {"bitpipe"}))
def test_all_ranks_make_vocabulary_passes_in_one_order(name, barriers):
    """The executor sums what a pass made as soon as it is there: in that order, on every rank."""
    for p, m in ((2, 4), (3, 6), (4, 8)):
        schedule = make(f"{name}+vocab", ranks=p, micro_batches=m, barriers=barriers)
        for kind in (K.E, K.S, K.T, K.D):
            orders = {
                tuple(a.micro_batch for a in row if a.kind is kind) for row in schedule.actions
            }
            assert len(orders) == 1, (kind, orders)
            assert sorted(*orders) == list(range(m))


def test_vocabulary_passes_need_one_last_stage_and_several_ranks():
    with pytest.raises(ImpossibleError, match="two last stages"):
        make("bitpipe+vocab", ranks=4, micro_batches=4)
    with pytest.raises(ImpossibleError, match="one rank"):
        make("1f1b+vocab", ranks=1, micro_batches=4)
    with pytest.raises(ValueError, match="barriers: 1 or 2"):
        with_vocabulary(make("1f1b", ranks=2, micro_batches=2, transfers=False), barriers=3)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-v", "interleaved", "bfs"])
def test_offload_lowers_the_peak_and_takes_no_time_while_copies_are_fast(name):
    kept = make(name, ranks=4, micro_batches=16, transfers=False)
    parked = with_offload(kept, fraction=0.5)
    before, after = simulate(kept), simulate(parked)
    assert max(after.peak_activations) < max(before.peak_activations)
    assert after.makespan == before.makespan
    none = with_offload(kept, fraction=0.0)
    assert simulate(none).peak_activations == before.peak_activations
    for rank in range(4):
        counts = kinds(parked, rank)
        assert counts[K.OFFLOAD] == counts[K.RELOAD] <= 16 * kept.chunks // 2 + 1


def test_offload_takes_the_longest_lives_first():
    parked = with_offload(make("zb-v", ranks=4, micro_batches=16, transfers=False), fraction=0.5)
    # rank 0 holds the first stage, whose activations live longest, and the last one
    stages = {a.stage for a in parked.actions[0] if a.kind is K.OFFLOAD}
    assert stages == {0}


def test_offload_of_everything_leaves_few_activations():
    parked = make("gpipe+offload", ranks=4, micro_batches=32, fraction=1.0)
    assert max(simulate(parked).peak_activations) <= 4


def test_slow_copies_do_cost_time():
    parked = make("gpipe+offload", ranks=2, micro_batches=8, fraction=1.0)
    assert simulate(parked, Costs(offload=4.0, reload=4.0)).makespan > simulate(parked).makespan


@pytest.mark.parametrize(("fraction", "lead"), [(1.5, 1), (-0.1, 1), (0.5, 0)])
def test_offload_options_out_of_range(fraction, lead):
    schedule = make("1f1b", ranks=2, micro_batches=2, transfers=False)
    with pytest.raises(ValueError, match=r"(fraction|lead): "):
        with_offload(schedule, fraction=fraction, lead=lead)


def gathers(name: str, **options) -> list[int]:
    schedule = make(f"{name}+fsdp", ranks=4, micro_batches=8, **options)
    return [kinds(schedule, rank)[K.GATHER] for rank in range(4)]


def test_how_often_parameters_are_gathered():
    # breadth-first: each of v chunks once forward and once backward; the last chunk's two runs
    # are one (Lamy-Poirier 2022, section 4.2)
    assert gathers("bfs", chunks=4) == [7] * 4
    # one chunk that is always in use: once
    assert gathers("1f1b") == gathers("gpipe") == [1] * 4
    # all chunks kept: once each
    assert gathers("interleaved", chunks=4, resident=4) == [4] * 4
    # depth-first with one chunk kept: again and again
    assert min(gathers("interleaved", chunks=4)) > 2 * 7
    # ZeroPP: once a chunk and direction in every unit (here two), less the turns
    assert gathers("zeropp", chunks=4, unit=4) == [2 * 8 - 3] * 4


def test_sharding_reduces_each_chunk_once():
    for name in ("bfs", "zb-v", "zeropp", "bitpipe", "interleaved"):
        schedule = make(f"{name}+fsdp", ranks=4, micro_batches=8)
        for rank, row in enumerate(schedule.actions):
            scattered = [a.chunk for a in row if a.kind is K.SCATTER]
            assert sorted(scattered) == list(range(len(schedule.stages.held[rank])))


def test_a_gather_hides_behind_the_chunk_before():
    schedule = make("bfs+fsdp", ranks=4, micro_batches=8, transfers=False)
    free = simulate(schedule).makespan
    # a chunk works for 8 * 0.5: the first gather shows, the others do not
    assert simulate(schedule, Costs(gather=2.0)).makespan == pytest.approx(free + 1.0)
    assert simulate(schedule, Costs(gather=40.0)).makespan > free + 20


def test_resident_chunks_out_of_range():
    with pytest.raises(ValueError, match="resident"):
        with_sharding(make("bfs", ranks=2, micro_batches=2, transfers=False), resident=0)
