"""Checkpoints of ragged shards: bit for bit on the same ranks, right on other ones.

Slow for a reason: each case is three whole jobs on real ranks.
"""

from __future__ import annotations

import pydoc_data.topics
import shutil

import pytest

from hpctrain.io.corpus import open_sources, tokenize
from hpctrain.io.encoders import ByteEncoder
from hpctrain.rundir import RunDir
from hpctrain.testing.jobs import run_job

pytestmark = pytest.mark.mpi

JOB = """\
name: ragged
model: {layers: 2, hidden: 32, heads: 4, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 32, shuffle_block: 4}
train: {steps: 8, global_batch: 6, lr: 3e-3, schedule: constant}
parallel: {sharding: zero1}
checkpoint: {every: 5}
"""
OPTIMIZERS = {
    "adamw": (),
    "muon": ("train.optimizer.kind=muon",),
    "adamw8bit": ("train.optimizer.kind=adamw8bit", "train.optimizer.block=64"),
    # Row blocks of the first matrices lie on several ranks; roots are older than the checkpoint.
    "shampoo": (
        "train.optimizer.kind=shampoo",
        "train.optimizer.block=16",
        "train.optimizer.interval=5",
        "train.optimizer.damping=1e-4",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ragged")
    text = folder / "text.txt"
    text.write_text("".join(pydoc_data.topics.topics.values())[:20_000])
    tokenize(open_sources([text], "text", "text"), folder / "tokens.h5", ByteEncoder())
    return folder


def losses(run) -> list[float]:
    by_step = {step.step: step.loss for step in run.read_steps()}
    return [by_step[number] for number in range(1, 9)]


def interrupted(run, name: str):
    """A copy of a run as it was after step 5."""
    copy = RunDir(shutil.copytree(run.root, run.root.with_name(name)))
    copy.metrics.unlink()
    newest = max(copy.checkpoints.iterdir(), key=lambda path: path.name)
    shutil.rmtree(newest)
    return copy


def after(run) -> dict[int, float]:
    """Losses of the steps taken by the last incarnation."""
    return {step.step: step.loss for step in run.read_steps()}


@pytest.mark.timeout(420)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumes_exactly_here_and_rightly_elsewhere(folder, optimizer):
    options = (*OPTIMIZERS[optimizer], f"name={optimizer}")
    straight = run_job(JOB, folder, *options, ranks=2)
    expected = losses(straight)
    here, there = interrupted(straight, f"{optimizer}-2"), interrupted(straight, f"{optimizer}-3")
    found = after(run_job(JOB, folder, *options, ranks=2, run=here))
    assert found == dict(zip((6, 7, 8), expected[5:], strict=True))
    # Other owners, and in one case none: every box is found by its name.
    sharding = "none" if optimizer == "muon" else "zero1"
    options = (*options, f"parallel.sharding={sharding}")
    found = after(run_job(JOB, folder, *options, ranks=3, run=there))
    assert list(found) == [6, 7, 8]
    assert list(found.values()) == pytest.approx(expected[5:], abs=1e-5)
    if optimizer == "muon":
        other = interrupted(straight, "muon-adamw")
        run_job(JOB, folder, "name=adamw", ranks=2, run=other, expect=5)
        assert any("optimizer/exp_avg/layers" in f.message for f in other.read_failures())
