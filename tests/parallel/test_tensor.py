"""Tensor and sequence parallelism against one rank: losses and every gradient."""

from __future__ import annotations

import pytest

from hpctrain.testing.jobs import run_job
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
        "parallel.tensor=2 parallel.overlap=true train.micro_batch=4",
        "parallel.tensor=2 parallel.overlap=true train.micro_batch=8 parallel.sequence=false",
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


OWN = """\
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, width), nn.GELU(), nn.Linear(width, 10)) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

def build(width=21):
    return Net(width)

class Data:
    def __len__(self):
        return 512

    def __getitem__(self, index):
        x = torch.randn(10, generator=torch.Generator().manual_seed(index))
        return x, x.cumsum(0)

def data():
    return Data()

def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])
"""
OWN_JOB = """\
name: own
model: {module: "own_net:build"}
data: {module: "own_net:data"}
train: {steps: 12, global_batch: 32, lr: 1e-2, loss: "own_net:loss"}
"""
PLAN = "parallel.tensor_plan={column: [blocks.*.0], row: [blocks.*.2]}"


def test_a_users_linears_are_cut_by_name(tmp_path):
    """21 channels over 2 ranks, with DDP beside; the same losses as one rank alone."""
    (tmp_path / "own_net.py").write_text(OWN)
    alone = run_job(OWN_JOB, tmp_path)
    cut = run_job(OWN_JOB, tmp_path, "parallel.tensor=2", PLAN, ranks=4)
    pairs = list(zip(alone.read_steps(), cut.read_steps(), strict=True))
    assert pairs[-1][0].loss < 0.7 * pairs[0][0].loss
    for one, four in pairs:
        assert four.loss == pytest.approx(one.loss, abs=1e-5)
        assert four.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    # A checkpoint of the cut model goes on uncut.
    more = run_job(OWN_JOB, tmp_path, "train.steps=14", run=cut)
    assert [step.step for step in more.read_steps()][-2:] == [13, 14]


def test_a_plan_that_names_nothing_is_refused(tmp_path):
    (tmp_path / "own_net.py").write_text(OWN)
    plan = "parallel.tensor_plan={column: [layers.*.fc1]}"
    run = run_job(OWN_JOB, tmp_path, "parallel.tensor=2", plan, ranks=2, expect=2)
    message = run.read_failures()[0].message
    assert "names no linear" in message
    assert "blocks.0.0" in message
