"""A layer of experts on four ranks: every way to dispatch, routings of the worst kind, bytes.

Two ranks are taken for a node. All cases share one start of the ranks.
"""

from __future__ import annotations

import pytest
from expert_rank_programs import compare

from hpctrain.testing.ranks import run_ranks

pytestmark = pytest.mark.mpi

EP4, EP2, EP2_ETP2 = (
    "parallel.expert=4",
    "parallel.expert=2",
    "parallel.expert=2 parallel.expert_tensor=2",
)
FLAT, NODES = "parallel.dispatch=flat", "parallel.dispatch=hierarchical"
LAYOUTS = {
    "flat": f"{EP4} {FLAT}",
    "copies of an expert on several ranks": f"{EP2} {FLAT}",
    "channels shared": EP2_ETP2,
    "all channels shared": "parallel.expert_tensor=4",
    "two levels": f"{EP4} {NODES}",
    "flat in parts": f"{EP4} parallel.dispatch.chunks=3",
    "two levels in parts": f"{EP4} {NODES} parallel.dispatch.chunks=2",
    "hot experts copied": f"{EP4} parallel.dispatch.copies=2",
    "two levels, hot experts copied": f"{EP4} {NODES} parallel.dispatch.copies=2",
}
ROUTINGS = {
    "as drawn": {},
    "all to the first experts": {"router": "ties"},
    "all to the last experts": {"router": "last"},
    "ranks without tokens": {"sequences": [2, 0, 1, 0]},
    "no more sequences than one": {"sequences": [0, 0, 0, 1]},
    "capacity": {"set": "model.moe.capacity=0.6"},
    "one choice": {"set": "model.moe.top_k=1"},
}
LONG = {"sequences": [16] * 4}
TRAFFIC = {
    "flat": {"set": f"{EP4} model.moe.top_k=4", **LONG},
    "two levels": {"set": f"{EP4} {NODES} model.moe.top_k=4", **LONG},
    "skewed": {"set": EP4, "router": "ties", **LONG},
    "skewed, copied": {"set": f"{EP4} parallel.dispatch.copies=2", "router": "ties", **LONG},
}


def cases() -> dict[str, dict]:
    found = {}
    for layout, options in LAYOUTS.items():
        for routing, change in ROUTINGS.items():
            given = {**change, "set": f"{options} {change.get('set', '')}"}
            found[f"{layout}: {routing}"] = given
    return found | {f"traffic: {name}": case for name, case in TRAFFIC.items()}


@pytest.fixture(scope="module")
def ranks():
    """By case, what each rank found."""
    found = run_ranks(4, compare, list(cases().values()), 2, timeout=150)
    return {name: [rank[i] for rank in found] for i, name in enumerate(cases())}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_and_gradients_are_those_of_the_whole_layer(ranks, layout):
    wrong = [
        f"{name}, rank {rank}: {found['worst']:.2g} ({found['where']})"
        for name, each in ranks.items()
        if name.startswith(f"{layout}: ")
        for rank, found in enumerate(each)
        if not found["worst"] < 1e-12
    ]
    assert not wrong, "\n".join(wrong)


def test_traffic_cases_are_right_too(ranks):
    for name in TRAFFIC:
        assert all(found["worst"] < 1e-11 for found in ranks[f"traffic: {name}"])


def test_two_levels_send_a_token_to_a_node_once(ranks):
    """Of 80 tokens a rank most visit both nodes with 4 choices of 6: 80 rows a way at most,
    where straight ones send each choice of the other node, about 160."""
    flat = [found["sent"]["ep"] for found in ranks["traffic: flat"]]
    levels = [found["sent"] for found in ranks["traffic: two levels"]]
    row = 8 * 8  # bytes of a token
    for sent in levels:
        # There and back, forward and backward; beside each, its choices and weights.
        most = 80 * (4 * row + 4 * 4 + 2 * 4 * 8) + 1000
        assert 0 < sent["ep/across"] <= most
        assert sent["ep/inside"] > 0
        assert sent.get("ep", 0) == 0
    # Flat sends 4 · 80 choices less those of its own experts (1 or 2 of 6) four times.
    assert min(flat) > 4 * row * 80 * 4 * 0.6


def test_copies_of_hot_experts_save_what_they_claim(ranks):
    """All tokens want the two experts of rank 0: without copies they all go there; with them
    each rank works on its own tokens, and only the two experts travel."""
    skewed, copied = ranks["traffic: skewed"], ranks["traffic: skewed, copied"]
    assert [found["rows"] for found in skewed] == [4 * 160, 0, 0, 0]
    assert [found["rows"] for found in copied] == [160] * 4
    expert = 3 * 8 * 6 * 8  # bytes
    row = 8 * 8
    for rank, (before, after) in enumerate(zip(skewed, copied, strict=True)):
        counts = 3 * 6 * 8  # everyone tells everyone how many rows are for which expert
        # Rows go there and their outputs' gradients in backward; outputs and gradients return.
        rows = 2 * 160 * row * (3 if rank == 0 else 1)
        assert before["sent"]["ep"] == rows + counts
        # Rank 0 sends two experts to three ranks; these send two gradients back.
        assert after["sent"]["ep"] == 2 * expert * (3 if rank == 0 else 1) + counts
        assert after["sent"]["ep"] < before["sent"]["ep"] / 5
        # Memory: beside its own experts (2, 2, 1, 1) a rank holds 2 copies at most, of 6.
        assert after["parameters"] == before["parameters"] == (2 if rank < 2 else 1) * 3 * 8 * 6
