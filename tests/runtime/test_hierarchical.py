"""Collectives in two levels give what flat ones give, for every shape of group."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.mpi

COUNTS = {
    "three nodes of two": [2, 2, 2],
    "two nodes of three": [3, 3],
    "dealt out in turn": [3, 3],
    "in no order": [3, 3],
    "uneven": [1, 2, 3],
    "one alone": [5, 1],
}


@pytest.mark.parametrize("shape", COUNTS)
def test_all_collectives_of_six_ranks(six, shape):
    for rank in six[shape]:
        assert rank["wrong"] == []
        assert rank["counts"] == COUNTS[shape]
        assert rank["done"] > 270


@pytest.mark.parametrize("shape", ["uneven", "one alone"])
def test_uneven_nodes_refuse_what_needs_even_ones(six, shape):
    counts = ", ".join(map(str, COUNTS[shape]))
    for rank in six[shape]:
        assert f"needs as many members on every node, there are {counts}" in rank["refused"]


def test_a_group_beside_others(eight):
    assert [rank["ranks"] for rank in eight["part"][:2]] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    for rank in eight["part"]:
        assert rank["wrong"] == []
        assert rank["counts"] == [2, 2]


def test_members_stand_in_the_order_of_coordinates_where_a_placement_moved_them(eight):
    for rank in eight["moved"]:
        assert rank["wrong"] == []
        assert rank["ranks"] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_joint_axes(eight):
    for rank in eight["replicate and shard"]:
        assert rank["wrong"] == []
        assert rank["counts"] == [4, 4]


def test_groups_of_an_axis_may_differ(eight):
    first, second = eight["one of two"][0], eight["one of two"][4]
    assert first["counts"] == [2, 2]
    assert first["wrong"] == []
    assert second["levels"] is False


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("one node", "there are 8 members on 1 node"),
        ("one a node", "there are 8 members on 8 nodes"),
    ],
)
def test_groups_of_one_level_are_refused_by_name(eight, shape, words):
    for rank in eight[shape]:
        assert rank["levels"] is False
        assert words in rank["refused"]


def test_a_group_of_one_rank_does_nothing(eight):
    for rank in eight["alone"]:
        assert rank == {"levels": False, "refused": "", "wrong": [], "done": 0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_packing_restores_every_bit_and_shrinks_gradients(dtype):
    import torch

    from hpctrain.runtime.packing import pack, unpack

    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(3)
    gradients = (torch.randn(50_001, generator=generator) * 1e-3).to(kind)
    bits = {2: torch.int16, 4: torch.int32}[gradients.element_size()]
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, -1.0]).to(kind)
    noise = torch.randint(-(2**15), 2**15, (4000,), generator=generator).to(torch.int16).view(kind)
    for values in (gradients, odd, noise, gradients[:1], gradients[:0]):
        back = torch.empty_like(values)
        packed = pack(values)
        unpack(packed, back)
        assert torch.equal(back.view(bits), values.view(bits))
        assert packed.numel() <= values.numel() * values.element_size()
    # Sign and exponent of normal numbers: about 2.6 bits in float32 and bfloat16.
    wide = gradients.element_size()
    saved = wide - pack(gradients).numel() / gradients.numel()
    assert saved > (0.3 if dtype == "float16" else 0.6)
