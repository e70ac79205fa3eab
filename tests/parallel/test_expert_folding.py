"""Attention and experts laid on the same ranks in ways of their own, against one rank.

Every pair of a dense layout (tp, cp, dp) and an expert layout (etp, ep, edp) that share a pipeline,
on 8 ranks, by ``make whole``. The suite takes a sample in which every degree of one side meets
several of the other. On 4 ranks, of which two are
taken for a node, what else experts are combined with.
"""

from __future__ import annotations

import pytest
from test_expert import CAPACITY, JOB, SIGMOID, SWIGLU, ZERO1, ZERO2, ZERO3, assert_parity

from hpctrain.testing.parity import check_parity

pytestmark = pytest.mark.mpi

EIGHT = JOB.replace("heads: 4", "heads: 8").replace("experts: 6", "experts: 8")
EIGHT = EIGHT.replace("micro_batch: 2", "micro_batch: 1").replace("layers: 3", "layers: 8")
EIGHT = EIGHT.replace("shared: 1, dense_layers: 1", "shared: 1")
EIGHT = EIGHT.replace("sequence_length: 12", "sequence_length: 16")
HYBRID = f"{ZERO3} parallel.shard=2"
LEVELS = "parallel.dispatch.kind=hierarchical"


def triples(size: int) -> list[tuple[int, int, int]]:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return [(a, b, size // (a * b)) for a in divisors for b in divisors if size % (a * b) == 0]


def pairs() -> list[str]:
    """Every dense layout with every expert layout, sharding and routing in turn."""
    turns = ["", ZERO3, CAPACITY, ZERO1, f"{SIGMOID} {SWIGLU}", ZERO2]
    found = []
    for pp in (1, 2, 4, 8):
        for tp, cp, dp in triples(8 // pp):
            for etp, ep, _ in triples(8 // pp):
                schedule = ("1f1b", "zb-v", "interleaved")[len(found) % 3]
                if pp == 8:
                    schedule = "1f1b"
                found.append(
                    f"parallel.tensor={tp} parallel.context={cp} parallel.data={dp} "
                    f"parallel.pipeline={pp} parallel.expert={ep} parallel.expert_tensor={etp} "
                    f"parallel.schedule.name={schedule} {turns[len(found) % len(turns)]}"
                )
    return found


def fold(tp: int, cp: int, dp: int, pp: int, etp: int, ep: int, *more: str) -> str:
    return (
        f"parallel.tensor={tp} parallel.context={cp} parallel.data={dp} parallel.pipeline={pp} "
        f"parallel.expert={ep} parallel.expert_tensor={etp} {' '.join(more)}"
    )


SAMPLE = [
    fold(1, 1, 8, 1, 2, 2),
    fold(2, 1, 4, 1, 1, 8, CAPACITY),
    fold(2, 2, 2, 1, 2, 2, HYBRID),
    fold(4, 2, 1, 1, 1, 4, SIGMOID, SWIGLU),
    fold(1, 2, 2, 2, 4, 1, "parallel.schedule.name=zb-v"),
    fold(1, 4, 1, 2, 1, 2, ZERO3, CAPACITY),
]
FOUR = {
    "two levels": [
        f"parallel.expert=4 {LEVELS}",
        f"parallel.expert=4 {LEVELS} parallel.dispatch.chunks=2 {CAPACITY}",
        f"parallel.expert=4 parallel.tensor=2 {LEVELS}",
    ],
    "sharding": [
        f"parallel.expert=2 {ZERO1} {SIGMOID}",
        f"parallel.expert=2 {ZERO3} {CAPACITY}",
        f"parallel.expert=2 parallel.expert_tensor=2 {ZERO2}",
        f"parallel.expert=2 {HYBRID}",
        f"parallel.tensor=2 parallel.expert=4 {ZERO3} {SWIGLU}",
        f"parallel.tensor=2 {ZERO1}",
        f"parallel.tensor=2 parallel.expert=2 {ZERO3} parallel.dispatch=slice",
    ],
    "pipelines": [
        "parallel.pipeline=2 parallel.expert=2",
        f"parallel.pipeline=2 parallel.expert=2 parallel.schedule.name=zb-h1 {CAPACITY}",
        f"parallel.pipeline=2 parallel.tensor=2 parallel.expert=2 parallel.dispatch=slice "
        f"parallel.schedule.name=zb-v model.layers=4 {SIGMOID}",
        f"parallel.pipeline=2 parallel.expert=2 {ZERO3} parallel.recompute=block",
        f"parallel.pipeline=2 parallel.expert=2 parallel.schedule.name=bitpipe model.layers=4 "
        f"{SIGMOID}",
        f"parallel.pipeline=2 parallel.expert_tensor=2 {ZERO1}",
    ],
}


@pytest.fixture(scope="module")
def four_ranks():
    layouts = [text.split() for group in FOUR.values() for text in group]
    return check_parity(4, JOB, *layouts, timeout=380, learns=0.1, steps=4, per_node=2)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", FOUR)
def test_four_ranks(four_ranks, group):
    wanted = {" ".join(text.split()) for text in FOUR[group]}
    assert_parity([report for report in four_ranks if report["layout"] in wanted])


def on_eight_ranks(layouts: list[str], timeout: float) -> None:
    split = (text.split() for text in layouts)
    assert_parity(check_parity(8, EIGHT, *split, steps=3, learns=0.02, timeout=timeout))


@pytest.mark.timeout(420)
def test_a_sample_of_pairs():
    on_eight_ranks(SAMPLE, timeout=400)


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sixth", range(6))
def test_every_pair(sixth):
    found = pairs()
    on_eight_ranks(found[sixth * len(found) // 6 : (sixth + 1) * len(found) // 6], timeout=1700)


def test_there_are_as_many_pairs_as_there_should_be():
    """Factorisations of 8/pp into (tp, cp, dp), times those into (etp, ep, edp)."""
    assert len(pairs()) == 10 * 10 + 6 * 6 + 3 * 3 + 1 * 1
