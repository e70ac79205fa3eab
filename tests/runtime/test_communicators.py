"""Groups of every axis: whom they hold, in which order, and what they cost."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.mpi

# Numbered tp fastest, then pp, then replicate: rank = 4·replicate + 2·pp + tp.
PP = [[0, 2], [1, 3], [4, 6], [5, 7]]
REPLICATE = [[0, 4], [1, 5], [2, 6], [3, 7]]
TP = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(("axis", "rows"), [("pp", PP), ("dp_replicate", REPLICATE), ("tp", TP)])
def test_torch_mpi_and_mesh_agree_on_each_axis(groups, axis, rows):
    for rank in groups:
        row = next(row for row in rows if rank["rank"] in row)
        found = rank[axis]
        assert found["ranks"] == found["torch"] == found["mesh"] == found["mpi"] == row
        assert found["place"] == found["mpi_place"] == row.index(rank["rank"])


@pytest.mark.parametrize("axis", ["dp_shard", "cp"])
def test_an_axis_of_one_rank_has_no_group_of_its_own(groups, axis):
    for rank in groups:
        assert rank[axis]["ranks"] == rank[axis]["torch"] == [rank["rank"]]
        assert rank["made"] == ["alone", "pp", "dp_replicate", "tp"]


def test_joint_axes_nodes_rails_and_leaders(groups):
    assert groups[3]["dp_tp"] == {"name": "dp_replicate_tp", "ranks": [2, 3, 6, 7]}
    assert all(rank["dp is dp_replicate"] for rank in groups)
    assert groups[6]["node"] == [4, 5, 6, 7]
    assert groups[6]["rail"] == [2, 6]
    assert [rank["leaders"] for rank in groups] == [[0, 4], *[None] * 3, [0, 4], *[None] * 3]
    assert groups[5]["world"] == list(range(8))


def test_cost_of_making_groups_is_known(groups):
    for rank in groups:
        # alone and three axes, for torch and for MPI, then dp_tp, node and rail
        assert rank["cost"]["groups"] == rank["each"] == 11
        assert 0 < rank["cost"]["seconds"] < 60
        assert 0 <= rank["cost"]["rss_bytes"] < 2**28


def test_shards_of_moved_ranks_are_put_together_in_the_order_of_coordinates(four):
    """DeviceMesh's own groups stand in the order of ranks and give another tensor."""
    results = [rank["moved"] for rank in four]
    assert [rank["place"] for rank in results] == [1, 3, 2, 0]
    for rank in results:
        assert rank["ours"] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert rank["theirs"] == [1, 1, 3, 3, 2, 2, 0, 0]


def test_expert_axes_have_groups_of_their_own(four):
    results = [rank["experts"] for rank in four]
    assert [rank["ranks"] for rank in results] == [
        [[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]],
    ]  # fmt: skip
    for rank in results:
        assert rank["names"] == ["pp", "edp", "ep", "etp"]
        assert [rank["ep"], rank["edp"]] == rank["ranks"]
        assert rank["own"]


def test_a_grid_that_is_given_back_leaves_no_threads(four):
    for rank in four:
        assert len(set(rank["threads"])) == 1, rank["threads"]
