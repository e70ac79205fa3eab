"""ZeRO-1 and matrix optimizers on ragged shards against one rank: losses and every gradient."""

from __future__ import annotations

import pytest

from hpctrain.testing.parity import check_parity

pytestmark = pytest.mark.mpi

JOB = """\
model: {layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab_size: 61, dropout: 0.1}
data: {path: none, sequence_length: 24}
train: {steps: 10, global_batch: 8, micro_batch: 1, lr: 3e-3}
"""
MUON = "train.optimizer.kind=muon"
# Inverse roots amplify the rounding of gradients, which any sum over ranks changes: by up to
# 1/sqrt(damping) of both sides together.
SHAMPOO = (
    "train.optimizer.kind=shampoo train.optimizer.block=24 train.optimizer.interval=3 "
    "train.optimizer.damping=1e-4"
)


def assert_parity(*reports):
    for report in reports:
        assert report["loss"] < 1e-5, report
        assert report["norm"] < 1e-4, report
        assert report["gradient"] < 1e-4, report


def layouts(*texts: str) -> list[list[str]]:
    return [text.split() for text in texts]


CASES = (
    "parallel.sharding=zero1",
    f"parallel.sharding=zero1 {MUON}",
    f"parallel.sharding=zero1 {SHAMPOO}",
)


def test_two_ranks():
    cases = layouts(
        *CASES,
        f"parallel.sharding=none {MUON}",
        "parallel.sharding=zero3 parallel.prefetch=2 model.layers=4",
        f"parallel.sharding=zero1 model.tied_embeddings=false {MUON}",
    )
    assert_parity(*check_parity(2, JOB, *cases))


def test_ragged_shards_change_no_bit():
    """Against the same ranks without sharding; here with the default damping."""
    default = SHAMPOO.replace("1e-4", "1e-6")
    # 32 columns: two rows a block of 64; 96 columns would be two rows for three blocks.
    quantised = "train.optimizer.kind=adamw8bit train.optimizer.block=64"
    for optimizer in ("", MUON, default, quantised):
        cases = layouts(
            f"parallel.sharding=zero1 {optimizer}", f"parallel.sharding=none {optimizer}"
        )
        sharded, whole = check_parity(3, JOB.replace("batch: 8", "batch: 9"), *cases)
        assert sharded["losses"] == whole["losses"]


def test_four_ranks_alone_and_with_tensor_or_pipeline():
    cases = layouts(
        *CASES,
        "parallel.sharding=zero1 parallel.tensor=2",
        "parallel.sharding=zero1 parallel.pipeline=2",
        f"parallel.sharding=zero1 parallel.pipeline=2 {MUON}",
    )
    assert_parity(*check_parity(4, JOB, *cases))


def test_gradients_of_several_nodes_go_in_two_levels():
    """Two nodes of two ranks each; buckets and units are large enough for it to pay."""
    job = JOB.replace("hidden: 32", "hidden: 192").replace("layers: 2", "layers: 1")
    cases = layouts("parallel.data=4", "parallel.sharding=zero3", "parallel.sharding=zero2")
    reports = check_parity(4, job, *cases, steps=5, per_node=2)
    assert_parity(*reports)
    for report, axis in zip(reports, ("dp_replicate", "dp_shard", "dp_shard"), strict=True):
        assert {axis, f"{axis}/inside", f"{axis}/across"} <= set(report["axes"]), report["axes"]
