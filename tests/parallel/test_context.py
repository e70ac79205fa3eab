"""Context parallelism against one rank: losses, norms and every gradient."""

from __future__ import annotations

import pytest

from hpctrain.errors import ImpossibleError
from hpctrain.testing.parity import _spec, check_parity

pytestmark = pytest.mark.mpi

# Epsilon: where a gradient is zero but for rounding, AdamW would make a full step of the rounding.
JOB = """\
model: {layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab_size: 61, dropout: 0.1}
data: {path: none, sequence_length: 24}
train: {steps: 5, global_batch: 8, micro_batch: 1, lr: 7e-3, eps: 1e-6}
"""
LLAMA = "model.position=rotary model.norm=rmsnorm model.activation=swiglu model.bias=false"
ODD = "data.sequence_length=23"
EACH = "data.documents=each model.dropout=0"
DOCUMENTS = "data.documents=separate"
RING = "parallel.context=2"
ULYSSES = "parallel.context.size=2 parallel.context.method=ulysses"
TWO_LEVEL = "parallel.context.size=4 parallel.context.method=two-level parallel.context.inner=2"
OVERLAP = "parallel.overlap=true parallel.sequence=false train.micro_batch=4"
LINEAR = "model.attention=linear"
PIPE = "parallel.pipeline=2 parallel.schedule"


def check(ranks: int, *texts: str) -> None:
    cases = [text.split() for text in texts]
    for report in check_parity(ranks, JOB, *cases, steps=5, learns=0.05):
        assert report["loss"] < 1e-5, report
        assert report["norm"] < 1e-4, report
        assert report["gradient"] < 1e-4, report


def test_two_ranks():
    check(
        2,
        f"{RING} train.micro_batch=4",
        f"{RING} {ODD} {LLAMA}",
        f"{RING} parallel.sharding=zero3 {DOCUMENTS} parallel.stream=5",
        f"{RING} parallel.sharding=zero1 parallel.recompute=block",
        ULYSSES,
        f"{ULYSSES} {ODD} {LLAMA}",
        f"{ULYSSES} model.kv_heads=1",  # both ranks need the same key-value head
        f"{ULYSSES} model.hidden=24 model.heads=3 model.kv_heads=3",  # two heads and one
        f"{RING} model.heads=1 model.kv_heads=1 model.dropout=0",
        f"{RING} data.sequence_length=3 train.global_batch=32 train.micro_batch=16",
        f"{RING} train.global_batch=1 train.lr=1e-2",  # fewer samples than ranks
    )


def test_four_ranks():
    check(
        4,
        "parallel.context=4",
        f"parallel.context=4 parallel.context.both_ways=true data.sequence_length=21 {LLAMA}",
        TWO_LEVEL,
        f"{TWO_LEVEL} {ODD}",
        f"parallel.context=4 {DOCUMENTS}",
        f"{TWO_LEVEL} {DOCUMENTS} {ODD} {LLAMA}",
        f"{ULYSSES} {DOCUMENTS} parallel.tensor=2 parallel.stream=5",
        f"{RING} {DOCUMENTS} {PIPE}=zb-h1 parallel.stream=7 {ODD}",
        f"parallel.context=4 {EACH} train.global_batch=12 parallel.sharding=zero1",
        f"{RING} parallel.data=2 {EACH} parallel.recompute=block {LLAMA}",
        f"{RING} {EACH} parallel.tensor=2 parallel.sequence=false parallel.stream=5",
        f"parallel.context=4 {EACH} train.global_batch=1",  # some ranks may have nothing
        f"{RING} parallel.tensor=2 {LLAMA}",
        f"{RING} parallel.tensor=2 {OVERLAP} {ODD}",
        f"{ULYSSES} parallel.tensor=2 model.kv_heads=1",
        f"{RING} {PIPE}=1f1b",
        f"{RING} {PIPE}=zb-v model.layers=4 {ODD}",
        f"{RING} {PIPE}=1f1b+vocab",
        f"{ULYSSES} {PIPE}=1f1b parallel.sharding=zero3 parallel.recompute=block",
        f"{RING} parallel.data=2",
        f"parallel.context=4 {LINEAR} {ODD}",
        f"{RING} {LINEAR} parallel.tensor=2 model.position=none parallel.stream=4",
        f"{RING} {LINEAR} {PIPE}=1f1b",
        f"{RING} parallel.sharding=zero3",
        f"{RING} parallel.sharding=zero2 parallel.shard=1",
        f"{RING} parallel.sharding=zero1",
    )


def test_eight_ranks_on_five_axes():
    check(
        8,
        f"{RING} parallel.tensor=2 {PIPE}=1f1b",
        f"{RING} parallel.sharding=zero3 parallel.shard=2",
        f"{TWO_LEVEL} parallel.context.both_ways=true parallel.tensor=2 {LLAMA}",
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("parallel.context=4 data.sequence_length=3", ["sequence_length = 3", "3 can"]),
        (f"{ULYSSES} model.heads=1 model.kv_heads=1", ["2 ranks exchange heads", "has 1", "ring"]),
        (f"{RING} parallel.tensor=2 data.sequence_length=26", ["26", "2 context-parallel", "24"]),
        (f"{RING} {PIPE}=1f1b+vocab {ODD}", ["+vocab", "23"]),
        (f"{ULYSSES} {LINEAR}", ["linear hands a state", "method: ring"]),
        (f"{RING} {LINEAR} {DOCUMENTS}", ["from document to document", "joined"]),
        (f"{RING} {EACH} parallel.sharding=zero3", ["micro-batches", "zero2 or zero3", "joined"]),
        ("parallel.context.size=4 parallel.context.method=two-level parallel.context.inner=3",
         ["3 ranks do not divide the 4"]),
    ],
)  # fmt: skip
def test_refused_with_a_reason(layout, words):
    with pytest.raises(ImpossibleError) as caught:
        _spec(JOB, 4, layout.split())
    for word in words:
        assert word in str(caught.value)


def test_a_users_model_is_refused():
    job = "model: {module: 'a:b'}\ndata: {path: none, sequence_length: 8}\n"
    job += "train: {steps: 1, global_batch: 2}\nparallel: {context: 2}\n"
    with pytest.raises(ImpossibleError, match="a model of your own"):
        _spec(job, 2, [])
