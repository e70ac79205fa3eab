"""Parity: every way of sharing the data gives the loss of one rank, step by step."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from hpctrain.io.order import SampleOrder
from hpctrain.io.tokens import TokenFile
from hpctrain.model.build import build_model
from hpctrain.records import read_json, read_lines
from hpctrain.spec import read_job
from hpctrain.testing.jobs import run_job

pytestmark = pytest.mark.mpi
LOSS = 1e-5
NORM = 1e-4  # relative


def losses(run):
    return [step.loss for step in run.read_steps()]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, tokens):
    """Losses and gradient norms of one rank."""
    from conftest import JOB

    folder = tmp_path_factory.mktemp("one")
    (folder / "tokens.h5").symlink_to(tokens)
    return list(run_job(JOB, folder).read_steps())


@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel_ranks_match_one_rank(folder, job, one_rank, ranks, sharding):
    whole = sharding == "none"  # whole gradients can be compared, which must not change them
    looks = ["health.dispersion=10", "health.preflight=true"] if whole else []
    run = run_job(job, folder, f"parallel.sharding={sharding}", *looks, ranks=ranks)
    steps = list(run.read_steps())
    assert len(steps) == len(one_rank) == 20
    if whole:
        found = list(read_lines(run.health / "dispersion.jsonl"))
        assert [(one["step"], len(one["norms"])) for one in found] == [(10, ranks), (20, ranks)]
        assert all(0 < one["direction"] <= 1 for one in found)
        (node,) = (read_json(run.health / "preflight.json") or {})["nodes"]
        assert node["ranks"] == ranks
    assert one_rank[-1].loss < one_rank[0].loss - 1.0, "the loss has to fall for this to mean much"
    for step, reference in zip(steps, one_rank, strict=True):
        assert step.loss == pytest.approx(reference.loss, abs=LOSS)
        assert step.grad_norm == pytest.approx(reference.grad_norm, rel=NORM)
        assert step.tokens == reference.tokens == step.step * 8 * 32


def test_the_gradients_of_a_step_are_counted_once(folder, job):
    """DDP hands in every gradient once a step, however many micro-batches there are."""
    run = run_job(job, folder, "train.steps=6", ranks=2)
    parameters = read_job(run.job).spec.model.transformer().parameters
    tensors = len(list(build_model(read_job(run.job).spec).parameters()))
    for step in run.read_steps():
        counted = step.comm["dp_replicate"]
        # float32 gradients, and DDP's own map of the parameters that took part (int32 each).
        assert counted["bytes"] in (4 * parameters, 4 * parameters + 4 * tensors)
        assert 0 < counted["seconds"] < 60


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_accumulation_does_not_change_the_step(folder, job, one_rank, micro_batch):
    run = run_job(job, folder, f"train.micro_batch={micro_batch}")
    for step, reference in zip(run.read_steps(), one_rank, strict=True):
        assert step.loss == pytest.approx(reference.loss, abs=LOSS)


def test_bf16_stays_near_fp32(folder, job, one_rank):
    for sharding in ("none", "zero3"):
        run = run_job(job, folder, "train.precision=bf16", f"parallel.sharding={sharding}", ranks=2)
        for step, reference in zip(run.read_steps(), one_rank, strict=True):
            assert step.loss == pytest.approx(reference.loss, abs=0.05)


def test_the_whole_loop_matches_plain_pytorch(folder, job):
    """The same training written out with torch alone, but for weights and order of samples."""
    run = run_job(job, folder, "model.dropout=0", "train.weight_decay=0.1")
    spec = read_job(run.job).spec
    model = build_model(spec)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    file = TokenFile(spec.data.path, 32)
    order = SampleOrder(len(file), seed=0, block=4)
    found = []
    for step in range(20):
        rows = torch.from_numpy(file.read(order.indices(8 * step, 8)).astype("int64"))
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        number = step + 1
        cosine = 0.5 * (1 + math.cos(math.pi * (number - 5) / 15))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (number / 5 if number < 5 else cosine)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert losses(run) == pytest.approx(found, abs=LOSS)


def test_a_rank_says_what_it_needs_when_sizes_differ(folder, job):
    """Two ranks for a job of four: an error that names both numbers, within 30 s, and no run."""
    from hpctrain.testing.jobs import make_run, start_run

    run = make_run(job, folder, "ranks_per_node=4")
    process = start_run(run, 2)
    assert process.wait(30) == 3
    failures = run.read_failures()
    assert "planned for 4 ranks, but MPI started 2" in failures[0].message
    assert run.last_step() is None


def test_singletons_under_srun_are_named(folder, job):
    """What srun without the right --mpi does: MPI sees one rank where srun started two."""
    from hpctrain.testing.jobs import make_run

    run = make_run(job, folder, "ranks_per_node=2")
    env = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "run", str(run.root)],
        env={**os.environ, **env},
        timeout=30,
        capture_output=True,
    )
    assert done.returncode == 3
    (failure,) = run.read_failures()
    assert "srun started 2 tasks, but MPI sees 1 rank" in failure.message
    assert Path(run.rank_log(0)).read_text().count("set slurm.mpi") >= 1
