"""Tensor and sequence parallelism against one rank: losses and every gradient."""

from __future__ import annotations

import pytest

from hpctrain.testing.parity import check_parity

pytestmark = pytest.mark.mpi

JOB = """\
model: {layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab_size: 61, dropout: 0.1}
data: {path: none, sequence_length: 24}
train: {steps: 10, global_batch: 8, micro_batch: 1, lr: 3e-3}
"""
LLAMA = [
    "model.position=rotary",
    "model.norm=rmsnorm",
    "model.activation=swiglu",
    "model.bias=false",
]


def assert_parity(*reports):
    for report in reports:
        assert report["loss"] < 1e-5, report
        assert report["norm"] < 1e-4, report
        assert report["gradient"] < 1e-4, report


def layouts(*texts: str) -> list[list[str]]:
    return [text.split() for text in texts]


def test_two_ranks():
    cases = layouts(
        "parallel.tensor=2",
        "parallel.tensor=2 parallel.sequence=false",
        "parallel.tensor=2 model.tied_embeddings=false",
    )
    cases += [["parallel.tensor=2", *LLAMA], ["parallel.tensor=2", "model.kv_heads=1", *LLAMA]]
    assert_parity(*check_parity(2, JOB, *cases))


def test_three_ranks_share_unevenly():
    """4 heads, 128 channels and 61 tokens over 3 ranks: nothing divides."""
    cases = layouts("parallel.tensor=3", "parallel.tensor=3 parallel.sequence=false")
    cases += [["parallel.tensor=3", "model.kv_heads=4", *LLAMA]]
    assert_parity(*check_parity(3, JOB, *cases))


def test_four_ranks_with_data_parallelism():
    cases = layouts(
        "parallel.tensor=4",  # fewer key-value heads than ranks
        "parallel.tensor=2 parallel.data=2",
        "parallel.tensor=2 parallel.sharding=zero2",
        "parallel.tensor=2 parallel.sharding=zero3",
        "parallel.tensor=2 parallel.sharding=zero3 model.tied_embeddings=false",
    )
    assert_parity(*check_parity(4, JOB, *cases))


def test_eight_ranks_with_hybrid_sharding():
    cases = layouts(
        "parallel.tensor=2 parallel.sharding=zero3 parallel.shard=2",
        "parallel.tensor=4 parallel.sharding=zero2 train.micro_batch=4",
    )
    assert_parity(*check_parity(8, JOB, *cases, steps=6, learns=0.1))
