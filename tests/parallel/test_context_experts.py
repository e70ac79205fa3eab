"""Experts under context parallelism, against one rank: routers see whole sequences."""

from __future__ import annotations

import pytest
from test_expert import CAPACITY, JOB, SIGMOID, SWIGLU, ZERO1, ZERO3, assert_parity

from hpctrain.testing.parity import check_parity

pytestmark = pytest.mark.mpi

CASES = [
    "parallel.context=4",
    f"parallel.context=4 parallel.expert=4 {CAPACITY}",
    f"parallel.context=2 parallel.expert=2 {SIGMOID} {SWIGLU}",
    f"parallel.context=2 parallel.tensor=2 parallel.expert=2 parallel.expert_tensor=2 {CAPACITY}",
    "parallel.context=2 parallel.pipeline=2 parallel.expert=2",
    f"parallel.context=2 parallel.expert=2 {ZERO3}",
    f"parallel.context=2 parallel.expert=4 {ZERO1}",
]


def test_four_ranks():
    assert_parity(check_parity(4, JOB, *[case.split() for case in CASES], steps=5, learns=0.05))
