"""Products, attention and collectives: closed forms, and rates that others measured."""

from __future__ import annotations

import pytest

from hpctrain.errors import ImpossibleError
from hpctrain.plan.collectives import Wires
from hpctrain.plan.kernels import Device
from hpctrain.plan.platform import CATALOGUE, accelerator, find_accelerator
from hpctrain.plan.software import STACKS, Calibration, apply, calibration, restrict, stack


def device(name="A100-80G", kernel="flash2", dtype="bf16", **numbers):
    return Device.of(CATALOGUE[name], apply(Calibration(), numbers), dtype, kernel)


def test_a_product_is_its_flops_and_its_traffic():
    ideal = device(gemm=1.0, gemm_traffic=0.0, wave=0.0)
    assert ideal.product(4096, 8192, 2048) == pytest.approx(2 * 4096 * 8192 * 2048 / 312e12)
    full = device(gemm=1.0, gemm_traffic=1.0, wave=0.0)
    moved = 2 * (4096 * 8192 + 4096 * 2048 + 2048 * 8192) / 2.0e12
    extra = full.product(4096, 8192, 2048) - ideal.product(4096, 8192, 2048)
    assert extra == pytest.approx(moved)


def test_a_last_wave_of_tiles_is_lost():
    """217 tiles on 216 places take two waves: all but a tile of the second is lost."""
    whole = device(gemm=1.0, gemm_traffic=0.0, wave=1.0)
    per_tile = 2 * 128 * 128 * 1024 / 312e12
    assert whole.product(128 * 216, 128, 1024) == pytest.approx(216 * per_tile)
    assert whole.product(128 * 217, 128, 1024) == pytest.approx(432 * per_tile)


def test_flash_attention_does_the_lower_triangle_and_backward_2_5_times_as_much():
    """Dao 2023, section 4.1: 4·s²·d·heads, half of it for causal masks; backward 2.5 times."""
    ideal = device(flash2=1.0)
    forward, backward = ideal.attention_core("flash2", 2, 4096, 4096, 16, 128)
    assert forward == pytest.approx(4 * 2 * 4096**2 * 16 * 128 / 2 / 312e12)
    assert backward == pytest.approx(2.5 * forward)


def test_heads_that_are_no_multiple_of_8_are_slow_unfused():
    """BLOOM's search: 128 heads of 108 were half as fast as 96 of 144."""
    slow, _ = device().attention_core("fused", 2, 2048, 2048, 32, 108)
    fast, _ = device().attention_core("fused", 2, 2048, 2048, 24, 144)
    assert slow > 3 * fast


def test_large_products_reach_what_was_measured():
    """Published rates of large products: A100 about 271, H100 about 795, MI300X about 668."""
    for name, stack_name, measured in (
        ("A100-80G", "pytorch-2023", 271e12),
        ("H100", "megatron-core-2024", 795e12),
        ("MI300X", "megatron-core-2024", 668e12),
    ):
        platform = CATALOGUE[name]
        found = Device.of(platform, calibration(platform.family, stack_name).values, "bf16", "")
        n = 8192
        assert 2 * n**3 / found.product(n, n, n) == pytest.approx(measured, rel=0.15), name


def wires(name, **numbers):
    return Wires.of(CATALOGUE[name], apply(Calibration(), numbers))


def test_rings_move_the_least_bytes():
    """(n-1)/n of an all-gather's result, twice that for an all-reduce (Patarasuk, Yuan 2009)."""
    ring = wires("A100-80G", link=1.0, network=1.0, hop_seconds=0.0)
    inside = ring.group((8, 1))
    assert ring.gather(8e9, inside) == pytest.approx(7e9 / 300e9)
    assert ring.all_reduce(8e9, inside) == pytest.approx(14e9 / 300e9)
    between = ring.group((4, 8))
    assert (between.size, between.local) == (4, 1)
    assert ring.gather(8e9, between) == pytest.approx(6e9 / 25e9)
    # all eight ranks of a node share its eight cards
    wide = ring.group((16, 1))
    assert (wide.size, wide.local) == (16, 8)
    assert ring.gather(8e9, wide) == pytest.approx(7.5e9 / 200e9)


def test_nested_axes_join_to_one_group():
    ring = wires("A100-80G")
    joint = ring.group((2, 2), (4, 4))  # two ranks 2 apart, four of those pairs 4 apart
    assert (joint.size, joint.local) == (8, 4)


def test_who_sends_alone_has_the_cards_alone():
    """Four cards of 25 GB/s for eight devices: 12.5 GB/s each, 25 where only four send."""
    platform = CATALOGUE["A100-80G"].in_node(8, 100e9)
    assert [platform.network_bandwidth(n) for n in (16, 8, 4, 2)] == [12.5e9, 12.5e9, 25e9, 25e9]
    chain = Wires.of(platform, apply(Calibration(), {"link": 1, "network": 1, "hop_seconds": 0}))
    # stages of eight devices: both neighbours across the network
    assert chain.exchange(1e9, 4, 8) == pytest.approx(2 * 1e9 / 12.5e9)
    # of four: a node holds two, and the cards serve one of them at a time
    assert chain.exchange(1e9, 4, 4) == pytest.approx(1e9 / 25e9 + 1e9 / 300e9)
    assert chain.exchange(1e9, 4, 2) == pytest.approx(2 * 1e9 / 300e9)
    # a card for each device: nothing to share
    assert CATALOGUE["H100"].network_bandwidth(1) == 50e9


def test_mesh_links_need_all_peers():
    """MI300X: 64 GB/s a peer, 448 in all: bus bandwidth 48 with 2 devices, 313 with 8."""
    platform = CATALOGUE["MI300X"]
    assert platform.domain_bandwidth(2) == 64e9
    assert platform.domain_bandwidth(8) == 448e9
    assert pytest.approx(48 / 64, abs=0.06) == 313 / 448


def test_all_reduce_on_eight_a100_as_measured():
    """Bus bandwidth 235 GB/s for large messages, 164 at 32 MB; 93 us for 1 MB."""
    ring = Wires.of(CATALOGUE["A100-80G"], calibration("A100", "megatron-2021").values)
    group = ring.group((8, 1))
    for size, bus in ((4e9, 235e9), (32e6, 164e9)):
        assert 2 * 7 / 8 * size / ring.all_reduce(size, group) == pytest.approx(bus, rel=0.12)
    assert ring.all_reduce(1e6, group) == pytest.approx(93e-6, rel=0.15)


def test_names_of_accelerators():
    assert find_accelerator("A100-80G-SXM") == "A100-80G"
    assert find_accelerator("NVIDIA A100-SXM4-40GB") == "A100-40G"
    assert find_accelerator("H100-SXM") == "H100"
    assert find_accelerator("AMD Instinct MI250X, one GCD") == "MI250X"
    assert find_accelerator("V100-16G-SXM2") == "V100-16G"
    assert find_accelerator("abacus") is None
    with pytest.raises(ImpossibleError, match="abacus") as caught:
        accelerator("abacus")
    assert "MI300X" in str(caught.value)
    with pytest.raises(ImpossibleError, match="no software stack"):
        stack("fortran")


def test_a_stack_overlaps_only_what_it_can():
    values = apply(Calibration(), dict.fromkeys(("tp_overlap", "dp_overlap"), 0.9))
    assert restrict(values, STACKS["megatron-2020"]).dp_overlap == 0.0
    assert restrict(values, STACKS["megatron-core-2024"]).dp_overlap == 0.9


def test_unknown_pairs_take_the_nearest_and_say_so():
    known = calibration("A100", "pytorch-2023")
    assert known.source == "published" and known.rows > 50
    relative = calibration("A100", "pytorch-2024")
    assert relative.source == "assumed"
    assert relative.values.gemm == pytest.approx(known.values.gemm, abs=0.05)
    stranger = calibration("unknown", "pytorch-2024")
    assert stranger.values.spread > relative.values.spread
