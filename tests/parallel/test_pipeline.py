"""Pipelines against one rank: losses, norms and every gradient, for every schedule.

Starting ranks takes longer than training them, so all layouts of a number of ranks share a start.

The model has a tied output layer, dropout, grouped-query attention and micro-batches that are
accumulated; nine layers do not divide evenly over the stages.
"""

from __future__ import annotations

from itertools import chain

import pytest

from hpctrain.schedule import names
from hpctrain.testing.parity import check_parity

pytestmark = pytest.mark.mpi

# Epsilon: where a gradient is zero but for rounding, AdamW would make a full step of the rounding.
JOB = """\
model: {layers: 9, hidden: 16, heads: 4, kv_heads: 2, vocab_size: 61, dropout: 0.1}
data: {path: none, sequence_length: 12}
train: {steps: 10, global_batch: 12, micro_batch: 3, lr: 7e-3, eps: 1e-6}
"""
LLAMA = (
    "train.lr=5e-3 model.position=rotary model.norm=rmsnorm model.activation=swiglu "
    "model.bias=false"
)
UNTIED = "model.tied_embeddings=false"


def cases(pipeline: int, *texts: str) -> list[str]:
    """Layouts; the first word of each is the schedule's name."""
    return [f"parallel.pipeline={pipeline} parallel.schedule.name={text}" for text in texts]


TWO_RANKS = {
    "every schedule": cases(2, *names()),
    "chunks and micro-batches": cases(
        2,
        f"gpipe train.micro_batch=12 {UNTIED}",  # m = 1
        "1f1b train.micro_batch=4",  # m = 3, odd
        "1f1b+2bp parallel.stage_layers=[7,2]",
        "zb-h1 train.micro_batch=6",  # as many micro-batches as ranks
        "zb-h2 train.micro_batch=2",
        f"zb-v train.micro_batch=4 {UNTIED} {LLAMA}",
        "interleaved parallel.chunks=4 train.micro_batch=2",
        "bfs parallel.chunks=3",
        "hanayo parallel.chunks=4 train.micro_batch=4",
        "bitpipe parallel.chunks=4 train.micro_batch=2",
        "zeropp parallel.chunks=3 parallel.schedule.options.unit=2 train.micro_batch=2",
        "layered parallel.chunks=4 parallel.stage_layers=[1,1,1,1,2,1,1,1]",
    ),
    # Less is kept, nothing changes: dropout draws the same masks again.
    "recompute and offload": [
        *cases(
            2,
            "1f1b parallel.recompute=block",
            "zb-v parallel.recompute=block",
            "zb-h1 parallel.recompute=full",
            "interleaved parallel.offload=0.5 parallel.chunks=3",
            "gpipe parallel.offload=1 parallel.recompute=full",
            "zb-v parallel.offload=1 train.micro_batch=2",
        ),
        "parallel.data=2 parallel.recompute=block",
        "parallel.data=2 parallel.recompute=full",
        "parallel.sharding=zero3 parallel.recompute=block",
    ],
}
BARRIERS = "parallel.schedule.options.barriers=2"
TENSOR, ZERO2, ZERO3 = "parallel.tensor=2", "parallel.sharding=zero2", "parallel.sharding=zero3"
FOUR_RANKS = {
    "every schedule": cases(
        4,
        *names(),  # m = 4
        "1f1b train.micro_batch=3",  # m = 8
        "interleaved train.micro_batch=3",
        "zb-h1 train.micro_batch=8",  # fewer micro-batches than ranks
        "zb-v train.micro_batch=4",
        "v-min train.micro_batch=3",
        "bitpipe train.micro_batch=2",
    ),
    "tensor and data parallelism": cases(
        2,
        "zb-v parallel.data=2",
        "bitpipe parallel.data=2 train.micro_batch=1",
        f"1f1b {ZERO2}",
        f"zb-h1 {ZERO2}",
        f"zb-v {ZERO3}",
        f"interleaved {ZERO3} parallel.recompute=block",
        f"bitpipe {ZERO3}",
        f"1f1b {TENSOR}",
        f"zb-v {TENSOR}",
        f"v-half {TENSOR} parallel.sequence=false {UNTIED}",
        f"zb-h1 {TENSOR} parallel.overlap=true",
        "zb-v parallel.sharding=zero1",
        "1f1b parallel.sharding=zero1 train.optimizer=muon train.micro_batch=4",
    ),
    # Embedding and output layer over all ranks; 61 tokens do not divide.
    "vocabulary": [
        *cases(4, f"1f1b+vocab {BARRIERS}", f"zb-v+vocab {UNTIED}", "bfs+vocab"),
        *cases(
            2,
            f"1f1b+vocab {TENSOR}",
            f"interleaved+vocab {BARRIERS} {TENSOR} {UNTIED}",
            f"1f1b+2bp+vocab {BARRIERS} {ZERO3}",
            "gpipe+vocab parallel.data=2",
        ),
    ],
}
EIGHT_RANKS = [
    *cases(
        2,
        f"1f1b {TENSOR} parallel.data=2",
        f"zb-v {TENSOR} {ZERO3}",
        f"zb-h1 {ZERO2} parallel.shard=2",
        f"bitpipe {ZERO3} parallel.shard=2",
    ),
    *cases(4, f"v-min {TENSOR}", f"zb-v {ZERO3} parallel.stage_layers=[1,1,1,2,1,1,1,1]"),
]


def run(ranks: int, layouts: list[str], job: str = JOB, **options) -> dict[str, dict]:
    """Reports by layout."""
    found = check_parity(ranks, job, *(text.split() for text in layouts), **options)
    return dict(zip(layouts, found, strict=True))


def assert_parity(reports: dict[str, dict]) -> None:
    limits = {"loss": 1e-5, "norm": 1e-4, "gradient": 1e-4}
    worse = [
        f"{layout}: {key} {report[key]:.2g} ({report['worst']})"
        for layout, report in reports.items()
        for key, limit in limits.items()
        if not report[key] < limit
    ]
    assert not worse, "\n".join(worse)


@pytest.fixture(scope="module")
def two_ranks():
    return run(2, [*chain(*TWO_RANKS.values())], timeout=380, learns=0.1, steps=5)


@pytest.fixture(scope="module")
def four_ranks():
    job = JOB.replace("global_batch: 12, micro_batch: 3", "global_batch: 24, micro_batch: 6")
    return run(4, [*chain(*FOUR_RANKS.values())], job, timeout=380, learns=0.1, steps=5)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", TWO_RANKS)
def test_two_ranks(two_ranks, group):
    assert_parity({layout: two_ranks[layout] for layout in TWO_RANKS[group]})


@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", FOUR_RANKS)
def test_four_ranks(four_ranks, group):
    assert_parity({layout: four_ranks[layout] for layout in FOUR_RANKS[group]})


def test_three_dimensions_on_eight_ranks():
    job = JOB.replace("global_batch: 12, micro_batch: 3", "global_batch: 8, micro_batch: 1")
    assert_parity(run(8, EIGHT_RANKS, job, steps=5, learns=0.05))
