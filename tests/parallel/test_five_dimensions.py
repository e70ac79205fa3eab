"""All five axes at once on 16 ranks, and experts in every family of pipelines, against one rank.

With ``make whole``: sixteen ranks take minutes on two cores. The suite has the same on eight and
four ranks in test_expert_folding.py.
"""

from __future__ import annotations

import pytest
from test_expert import CAPACITY, SIGMOID, SWIGLU, ZERO1, ZERO2, ZERO3, assert_parity
from test_expert_folding import EIGHT, JOB, fold

from hpctrain.schedule import names
from hpctrain.testing.parity import check_parity

pytestmark = [pytest.mark.mpi, pytest.mark.whole]

BLOCK = "parallel.recompute=block"


def schedule(name: str) -> str:
    return f"parallel.schedule.name={name}"


# tp, cp, dp, pp beside etp, ep: eight ranks a stage, or four in four stages.
FIVE = [
    fold(2, 2, 2, 2, 1, 2, schedule("1f1b")),
    fold(2, 2, 2, 2, 1, 8, schedule("interleaved"), CAPACITY),
    fold(2, 2, 2, 2, 2, 2, schedule("zb-v"), ZERO3),
    fold(2, 2, 2, 2, 2, 4, schedule("zb-h1"), SIGMOID, SWIGLU),
    fold(2, 2, 2, 2, 4, 2, schedule("gpipe"), BLOCK),
    fold(2, 2, 2, 2, 1, 4, schedule("bitpipe"), ZERO1, CAPACITY),
    fold(2, 2, 2, 2, 8, 1, schedule("bfs"), ZERO2, SIGMOID),
    fold(1, 4, 2, 2, 2, 2, schedule("v-half"), ZERO3, BLOCK),
    fold(4, 1, 2, 2, 1, 4, schedule("zb-h2"), CAPACITY, "parallel.context=1"),
    fold(2, 1, 2, 4, 1, 4, schedule("hanayo"), SIGMOID),
    fold(1, 2, 2, 4, 2, 2, schedule("v-min"), ZERO3, CAPACITY),
    fold(2, 2, 1, 4, 1, 2, schedule("1f1b+2bp"), SWIGLU, BLOCK),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("third", range(3))
def test_sixteen_ranks(third: int) -> None:
    job = EIGHT.replace("global_batch: 8", "global_batch: 16")
    split = (text.split() for text in FIVE[4 * third : 4 * third + 4])
    assert_parity(check_parity(16, job, *split, steps=3, learns=0.02, timeout=1100))


@pytest.mark.timeout(1800)
def test_every_family_of_pipelines_with_experts() -> None:
    turns = ["", CAPACITY, SIGMOID, ZERO3, BLOCK]
    layouts = [
        f"parallel.pipeline=2 parallel.expert=2 {schedule(name)} model.layers=8 "
        f"{turns[number % len(turns)]}"
        for number, name in enumerate([*names(), "1f1b+2bp", "1f1b+vocab"])
    ]
    assert len(layouts) >= 16
    split = (text.split() for text in layouts)
    assert_parity(check_parity(4, JOB, *split, steps=3, learns=0.05, timeout=1700))
