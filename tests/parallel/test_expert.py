"""Experts on many ranks against one: losses and every gradient, for layouts of all kinds.

All layouts of a number of ranks share a start. Each batch has more sequences than ranks, so that
nothing depends on where a sequence lies; what a router does with it is a function of it alone.
"""

from __future__ import annotations

import pytest

from hpctrain.testing.parity import check_parity

pytestmark = pytest.mark.mpi

# Epsilon: where a gradient is zero but for rounding, AdamW would make a full step of the rounding.
JOB = """\
model:
  layers: 3
  hidden: 16
  heads: 4
  kv_heads: 2
  vocab_size: 61
  dropout: 0.1
  init_std: 0.1
  moe: {experts: 6, top_k: 2, hidden: 24, shared: 1, dense_layers: 1, balance: 0.02, z_loss: 1e-3}
data: {path: none, sequence_length: 12}
train: {steps: 5, global_batch: 8, micro_batch: 2, lr: 5e-3, eps: 1e-6}
"""
CAPACITY = "model.moe.capacity=0.8"
SIGMOID = "model.moe.router=sigmoid model.moe.bias_rate=0.01 model.moe.top_k=3"
SWIGLU = "model.activation=swiglu model.bias=false model.norm=rmsnorm"
TENSOR, EXPERT = "parallel.tensor=2", "parallel.expert=2"
ZERO1, ZERO2, ZERO3 = (f"parallel.sharding=zero{stage}" for stage in (1, 2, 3))


def pipeline(ranks: int, schedule: str) -> str:
    return f"parallel.pipeline={ranks} parallel.schedule.name={schedule}"


TWO_RANKS = {
    "data parallelism alone": [
        "parallel.data=2",
        f"parallel.data=2 {CAPACITY}",
        f"parallel.data=2 {SIGMOID} {SWIGLU}",
        f"{ZERO1} train.micro_batch=4",
        f"{ZERO3} parallel.recompute=block",
    ],
    "expert parallelism": [
        EXPERT,
        f"{EXPERT} {CAPACITY} train.micro_batch=4",
        f"{EXPERT} {SIGMOID} {SWIGLU}",
        f"{EXPERT} model.moe.experts=5 parallel.dispatch.chunks=3",
        f"{EXPERT} parallel.recompute=block {SIGMOID}",
        f"{EXPERT} {ZERO1}",
        f"{EXPERT} {ZERO3}",
        "parallel.expert_tensor=2",
        f"parallel.expert_tensor=2 {ZERO3} {SWIGLU}",
    ],
    "tensor parallelism": [
        TENSOR,
        f"{TENSOR} parallel.sequence=false {CAPACITY}",
        f"{TENSOR} {EXPERT} {CAPACITY}",
        f"{TENSOR} {EXPERT} parallel.sequence=false {SIGMOID}",
        f"{TENSOR} parallel.expert_tensor=2 {SWIGLU}",
        f"{TENSOR} {EXPERT} parallel.dispatch=slice",
        f"{TENSOR} {EXPERT} parallel.dispatch=slice parallel.sequence=false {CAPACITY}",
    ],
    "pipelines": [
        pipeline(2, "1f1b"),
        f"{pipeline(2, 'zb-h1')} {SIGMOID}",
        f"{pipeline(2, 'bitpipe')} train.micro_batch=1 model.layers=4 {SIGMOID}",
    ],
    "copies": [
        f"{EXPERT} parallel.dispatch.copies=1 {ZERO3} {CAPACITY} model.moe.hidden=6",
        f"{EXPERT} parallel.dispatch.copies=3 {SWIGLU} model.moe.hidden=6 parallel.recompute=block",
    ],
}


def assert_parity(reports):
    limits = {"loss": 1e-5, "norm": 1e-4, "gradient": 1e-4}
    worse = [
        f"{report['layout']}: {key} {report[key]:.2g} ({report['worst']})"
        for report in reports
        for key, limit in limits.items()
        if not report[key] < limit
    ]
    assert not worse, "\n".join(worse)


@pytest.fixture(scope="module")
def two_ranks():
    layouts = [text.split() for group in TWO_RANKS.values() for text in group]
    return check_parity(2, JOB, *layouts, steps=5, timeout=380, learns=0.1)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", TWO_RANKS)
def test_two_ranks(two_ranks, group):
    wanted = set(TWO_RANKS[group])
    assert_parity([report for report in two_ranks if report["layout"] in wanted])
