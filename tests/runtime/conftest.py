"""Ranks are started once for many tests: starting them is most of the time."""

from __future__ import annotations

import pytest
from runtime_rank_programs import count_operations, on_eight_ranks, on_four_ranks, on_six_ranks

SIX = {
    "three nodes of two": [0, 0, 1, 1, 2, 2],
    "two nodes of three": [0, 0, 0, 1, 1, 1],
    "dealt out in turn": [0, 1, 0, 1, 0, 1],
    "in no order": [1, 0, 0, 1, 1, 0],
    "uneven": [0, 1, 1, 2, 2, 2],
    "one alone": [0, 0, 0, 0, 0, 1],
}
"""Node of each rank."""

EIGHT = {
    # dp of 4 beside tp of 2: two groups of four over two nodes.
    "part": {"nodes": [0, 0, 0, 0, 1, 1, 1, 1], "dp_shard": 4, "tp": 2},
    "moved": {"nodes": [0, 0, 0, 0, 1, 1, 1, 1], "permutation": [7, 6, 5, 4, 3, 2, 1, 0]},
    # One of the two groups spans nodes in two levels, the other has one node to itself.
    "one of two": {"nodes": [0, 0, 1, 1, 2, 2, 2, 2], "dp_replicate": 2, "dp_shard": 4,
                   "axis": "dp_shard"},
    "replicate and shard": {"nodes": [0, 0, 0, 0, 1, 1, 1, 1], "dp_replicate": 2, "dp_shard": 4},
    "one node": {"nodes": [0] * 8},
    "one a node": {"nodes": list(range(8))},
    "alone": {"nodes": [0] * 8, "axis": "cp"},
}  # fmt: skip


def _ranks(count, program, *arguments):
    from hpctrain.testing import ranks

    if (reason := ranks.unavailable()) is not None:
        pytest.skip(f"no MPI here: {reason}")
    return ranks.run_ranks(count, program, *arguments)


@pytest.fixture(scope="session")
def six():
    found = _ranks(6, on_six_ranks, [{"nodes": nodes} for nodes in SIX.values()])
    return {name: [rank[i] for rank in found] for i, name in enumerate(SIX)}


@pytest.fixture(scope="session")
def on_eight():
    return _ranks(8, on_eight_ranks, list(EIGHT.values()))


@pytest.fixture(scope="session")
def eight(on_eight):
    return {name: [rank["shapes"][i] for rank in on_eight] for i, name in enumerate(EIGHT)}


@pytest.fixture(scope="session")
def groups(on_eight):
    return [rank["groups"] for rank in on_eight]


@pytest.fixture(scope="session")
def four():
    return _ranks(4, on_four_ranks)


@pytest.fixture(scope="session")
def counted():
    return _ranks(2, count_operations)
