"""Whole jobs on documents of their own lengths: two ranks that share them, then one alone.

Slow for a reason: three jobs on real ranks.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil

import pytest

from hpctrain.io.corpus import open_sources, tokenize
from hpctrain.io.encoders import ByteEncoder
from hpctrain.rundir import RunDir
from hpctrain.testing.jobs import run_job
from hpctrain.train.sequences import SequenceSource

pytestmark = pytest.mark.mpi

JOB = """\
name: each
model: {layers: 2, hidden: 32, heads: 4, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 48, documents: each, shuffle_block: 4}
train: {steps: 6, global_batch: 6, lr: 3e-3, schedule: constant}
checkpoint: {every: 3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("each")
    draw = random.Random(0)
    texts = ["abcdefghij "[: draw.randint(2, 11)] * draw.choice((1, 1, 2, 9)) for _ in range(80)]
    lines = folder / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenize(open_sources([lines], "jsonl", "text"), folder / "tokens.h5", ByteEncoder())
    return folder


@pytest.mark.timeout(300)
def test_two_ranks_train_as_one_and_one_goes_on_from_two(folder):
    layout = ("parallel.context=2", "parallel.sharding=zero1")
    both = list(run_job(JOB, folder, *layout, ranks=2).read_steps())
    run = run_job(JOB, folder, *layout, "train.steps=3", "checkpoint.every=3", ranks=2)
    alone = list(run_job(JOB, folder).read_steps())
    assert alone[-1].loss < alone[0].loss - 0.3
    assert [step.loss for step in both] == pytest.approx([s.loss for s in alone], abs=1e-5)
    assert [step.tokens for step in both] == [step.tokens for step in alone]
    source = SequenceSource(str(folder / "tokens.h5"), 48, 256)
    assert len(set(source.lengths.tolist())) > 8 and source.lengths.max() == 48
    steps = {step.tokens - before.tokens for before, step in itertools.pairwise(alone)}
    assert len(steps) > 1, "steps have as many tokens as their documents"
    assert both[0].comm["cp"]["bytes"] > 0
    copy = RunDir(shutil.copytree(run.root, run.root.with_name("one")))
    copy.metrics.unlink()
    more = list(run_job(JOB, folder, run=copy).read_steps())
    assert [step.step for step in more] == [4, 5, 6]
    assert [step.loss for step in more] == pytest.approx([s.loss for s in alone[3:]], abs=1e-5)
