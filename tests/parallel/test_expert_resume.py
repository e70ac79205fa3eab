"""A job with experts, checkpointed in one layout, goes on in others as if nothing had happened.

Slow for a reason: each case is a whole job on real ranks.
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
name: experts
model:
  layers: 4
  hidden: 32
  heads: 4
  vocab_size: 256
  moe:
    {experts: 6, top_k: 2, hidden: 32, shared: 1, capacity: 1.1, router: sigmoid, bias_rate: 0.02}
data: {path: tokens.h5, sequence_length: 32, shuffle_block: 4}
train: {steps: 8, global_batch: 8, micro_batch: 2, lr: 3e-3, schedule: constant}
checkpoint: {every: 5}
"""
FIRST = "parallel.tensor=2 parallel.expert=4 parallel.sharding=zero3"
OTHERS = {
    "a pipeline of two": (2, "parallel.pipeline=2 parallel.schedule=zb-v"),
    "channels of experts shared": (4, "parallel.expert_tensor=2 parallel.sharding=zero1"),
}


@pytest.mark.timeout(420)
def test_goes_on_in_other_layouts(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(pydoc_data.topics.topics.values())[:20_000])
    tokenize(open_sources([text], "text", "text"), tmp_path / "tokens.h5", ByteEncoder())
    alone = {step.step: step for step in run_job(JOB, tmp_path).read_steps()}
    assert alone[8].loss < alone[1].loss - 0.2
    run = run_job(JOB, tmp_path, *FIRST.split(), ranks=4)
    found = {step.step: step for step in run.read_steps()}
    assert found.keys() == alone.keys()
    for name, (ranks, options) in OTHERS.items():
        copy = RunDir(shutil.copytree(run.root, run.root.with_name(name.replace(" ", "-"))))
        copy.metrics.unlink()
        shutil.rmtree(max(copy.checkpoints.iterdir(), key=lambda path: path.name))
        after = run_job(JOB, tmp_path, *options.split(), ranks=ranks, run=copy).read_steps()
        assert [step.step for step in after] == [6, 7, 8], name
        found |= {(name, step.step): step for step in after}
    for key, step in found.items():
        right = alone[key if isinstance(key, int) else key[1]]
        assert step.loss == pytest.approx(right.loss, abs=1e-5), key
        assert step.grad_norm == pytest.approx(right.grad_norm, rel=1e-4), key
        assert step.experts == pytest.approx(right.experts, abs=0.02), key
        assert step.experts["busiest"] > 1 and step.experts["dropped"] > 0.01, key
