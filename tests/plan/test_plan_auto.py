"""``parallel: auto``: the search chooses what a job leaves open."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli.prepare import prepare
from hpctrain.errors import ImpossibleError, UsageError
from hpctrain.machine import get_machine
from hpctrain.plan.auto import ROOM
from hpctrain.plan.plan import job_space, make_plan
from hpctrain.plan.search import search
from hpctrain.rundir import RunDir
from hpctrain.spec import parse_job

JOB = """\
machine: dgx-a100
nodes: 2
model: llama-8b
data: {path: t.h5, sequence_length: 4096}
parallel: auto
train: {steps: 100, global_batch: 64, precision: bf16}
"""


def prepared(*overrides: str, text: str = JOB):
    return prepare(parse_job(text, overrides=overrides), Path("/"))


def planned(job):
    return make_plan(job.job.spec, job.machine, alternatives=0)


def test_the_choice_is_the_searchs_and_fits():
    job = prepared()
    spec = job.job.spec
    assert spec.parallel.layout == "given", "ranks and later readers see an ordinary layout"
    assert isinstance(spec.parallel.data, int) and isinstance(spec.train.micro_batch, int)
    plan = planned(job)
    assert plan.used <= ROOM * plan.limit, "with room to spare"
    best = search(plan.work, 16, job_space(spec), keep=1, room=ROOM * plan.limit).best[0]
    assert plan.step.seconds == pytest.approx(best.seconds)
    # nobody would have fared better with the layout that a job has without a word
    plain = planned(prepared("parallel={sharding: zero3}", "train.micro_batch=1"))
    assert plan.step.seconds < plain.step.seconds
    where = job.job.source("parallel.tensor")
    assert where.kind == "resolved" and "planner" in where.where


def test_what_a_job_gives_beside_it_stays():
    job = prepared("parallel.tensor=4", "parallel.sharding=zero3", "train.micro_batch=1")
    parallel = job.job.spec.parallel
    assert (parallel.tensor, parallel.sharding) == (4, "zero3")
    assert job.job.spec.train.micro_batch == 1
    assert job.job.source("parallel.tensor").kind == "set"
    assert prepared("parallel.pipeline=4").job.spec.parallel.pipeline == 4
    shared = prepared("parallel.context=4").job.spec.parallel
    assert (shared.context.size, shared.context.method) == (4, "ring")
    assert shared.tensor * shared.pipeline * 4 * shared.data == 16


def test_experts_are_spread_too():
    """46.7B parameters, of which 45B are in experts, do not fit on one device."""
    mixtral = ("model=mixtral-8x7b", "machine=dgx-h100", "train.global_batch=64")
    spec = prepared(*mixtral).job.spec
    assert spec.parallel.expert > 1 or spec.parallel.tensor > 1 or spec.parallel.sharding == "zero3"
    fixed = prepared(*mixtral, "parallel.expert=8", "parallel.sharding=zero1").job.spec
    assert fixed.parallel.expert == 8
    with pytest.raises(ImpossibleError, match="parallel: auto: no layout"):
        prepared(
            *mixtral, "parallel={layout: auto, expert: 1, tensor: 1, pipeline: 1, sharding: none}"
        )


def test_optimizers_of_matrices_get_them_whole():
    small = ("model=gpt2-124m", "data.sequence_length=1024")
    parallel = prepared(*small, "train.optimizer=muon").job.spec.parallel
    assert parallel.tensor == 1 and parallel.sharding in ("none", "zero1")
    # 8B parameters and their gradients in fp32 fit only where an axis cuts matrices
    assert prepared().job.spec.parallel.sharding in ("zero2", "zero3")
    muon = prepared("train.optimizer=muon").job.spec.parallel
    assert muon.pipeline > 1 and muon.tensor == 1 and muon.sharding in ("none", "zero1")


def test_a_resolved_job_is_read_back_as_it_is():
    from hpctrain.spec.load import dump_job

    spec = prepared().job.spec
    assert prepared(text=dump_job(spec)).job.spec == spec


def test_what_cannot_be_is_said():
    with pytest.raises(ImpossibleError, match=r"parallel: auto: no layout of 8 .* GiB") as caught:
        prepared("model=gpt-1t", "nodes=1")
    assert "nearest possible: about" in (caught.value.hint or "")
    with pytest.raises(UsageError, match=r"parallel.chunks: parallel.layout: auto works this out"):
        prepared("parallel.chunks=2")
    with pytest.raises(UsageError, match=r"parallel.data: parallel.layout: auto works this out"):
        prepared("parallel.data=4")
    with pytest.raises(UsageError, match="the planner knows no shape"):
        prepared("model={module: my.model:build}")


@pytest.mark.parametrize("machine", ["frontier", "local"])
def test_on_other_machines(machine):
    small = ("model=gpt2-124m", "data.sequence_length=256", "train.global_batch=16")
    nodes = ("nodes=1", "ranks_per_node=2") if machine == "local" else ()
    job = prepared(f"machine={machine}", *small, *nodes)
    plan = planned(job)
    assert plan.fits
    assert plan.strategy.layout.world_size == job.ranks
    assert get_machine(machine).name == job.machine.name


@pytest.mark.mpi
def test_the_chosen_layout_trains(tmp_path):
    """From ``hpctrain submit`` to a finished run of two local ranks."""

    def hpctrain(*words: str) -> str:
        program = Path(sys.executable).parent / "hpctrain"
        done = subprocess.run(
            [program, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    words = random.Random(0).choices(["one", "two", "three"], k=2000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    hpctrain("data", "tokenize", "text.txt", "-o", "tokens.h5")
    job = """\
name: chosen
machine: local
ranks_per_node: 2
model: {layers: 2, hidden: 32, heads: 4, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 32}
parallel: {layout: auto, tensor: 2}
train: {steps: 2, global_batch: 8, lr: 1e-3}
"""
    (tmp_path / "job.yaml").write_text(job)
    hpctrain("submit", "job.yaml")
    (run,) = RunDir.all(tmp_path / "runs")
    state = run.read_state()
    assert state is not None and state.status == "finished"
    resolved = parse_job(run.job.read_text()).spec
    assert resolved.parallel.layout == "given"
    assert (resolved.parallel.tensor, resolved.parallel.data) == (2, 1), "what was given stays"
    asked = prepare(parse_job(job, overrides=()), tmp_path).job.spec
    assert resolved.parallel == asked.parallel
    last = run.last_step()
    assert last is not None and last.step == 2
