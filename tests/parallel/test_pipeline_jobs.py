"""Whole jobs with pipelines: any layout's checkpoint goes on in any other, users' own models."""

from __future__ import annotations

import pydoc_data.topics
from itertools import pairwise

import pytest

from hpctrain.io.corpus import open_sources, tokenize
from hpctrain.io.encoders import ByteEncoder
from hpctrain.testing.jobs import run_job

pytestmark = pytest.mark.mpi

JOB = """\
name: pipeline
model: {layers: 8, hidden: 16, heads: 4, kv_heads: 2, vocab_size: 256, dropout: 0.1}
data: {path: tokens.h5, sequence_length: 16, shuffle_block: 4}
train: {steps: 9, global_batch: 8, micro_batch: 1, lr: 5e-3, eps: 1e-6,
  schedule: constant}
checkpoint: {every: 3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "text.txt").write_text("".join(pydoc_data.topics.topics.values())[:20_000])
    sources = open_sources([folder / "text.txt"], "text", "text")
    tokenize(sources, folder / "tokens.h5", ByteEncoder())
    return folder


def words(text: str) -> list[str]:
    return [f"parallel.{word}" for word in text.split()]


def numbers(run) -> list[tuple[float, float]]:
    by_step = {step.step: (step.loss, step.grad_norm) for step in run.read_steps()}
    return [by_step[step] for step in sorted(by_step)]


@pytest.mark.timeout(400)
def test_any_layout_goes_on_in_any_other(folder):
    """4 stages and 2 copies, then 2 stages, 2 tensor ranks and 2 copies, then one rank."""
    reference = numbers(run_job(JOB, folder))
    parts = [
        (8, "pipeline=4 data=2 schedule=zb-v sharding=zero3"),
        (8, "tensor=2 pipeline=2 data=2 schedule.name=1f1b+vocab"),
        (1, ""),
    ]
    run = None
    for part, (ranks, layout) in enumerate(parts, start=1):
        more = [*words(layout), f"train.steps={3 * part}"]
        run = run_job(JOB, folder, *more, ranks=ranks, run=run, timeout=200)
    assert run is not None
    resumed = [event.data["step"] for event in run.read_events() if event.kind == "resumed"]
    assert resumed == [3, 6]
    found = numbers(run)
    assert len(found) == len(reference) == 9
    for (loss, norm), (right_loss, right_norm) in zip(found, reference, strict=True):
        assert loss == pytest.approx(right_loss, abs=1e-5)
        assert norm == pytest.approx(right_norm, rel=1e-4)


OWN = """
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def model(width=16):
    blocks = [Block(width) for _ in range(4)]
    # The last two are narrower: what passes between the stages changes its form.
    return nn.Sequential(
        nn.Embedding(256, width), *blocks, nn.Linear(width, 8), nn.Linear(8, 256)
    )
"""


def test_a_sequential_model_of_ones_own(folder):
    (folder / "own_sequential.py").write_text(OWN)
    head, _, rest = JOB.partition("model:")
    job = f"{head}model: {{module: 'own_sequential:model'}}\n{rest.partition(chr(10))[2]}"
    reference = numbers(run_job(job, folder))
    assert all(later < earlier for (earlier, _), (later, _) in pairwise(reference[::4]))
    layouts = [
        (2, "pipeline=2 schedule=zb-v"),
        (2, "pipeline=2 schedule=1f1b recompute=block emulate=0.001"),
        (4, "pipeline=2 schedule=zb-h1 sharding=zero2"),
    ]
    for ranks, layout in layouts:
        found = numbers(run_job(job, folder, *words(layout), ranks=ranks))
        for (loss, norm), (right_loss, right_norm) in zip(found, reference, strict=True):
            assert loss == pytest.approx(right_loss, abs=1e-5), layout
            assert norm == pytest.approx(right_norm, rel=1e-4), layout
