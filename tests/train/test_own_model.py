"""A user's own model, data and loss, as the documented example gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpctrain.testing.jobs import run_job

pytestmark = pytest.mark.mpi
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own_model.py").write_text((EXAMPLES / "own_model.py").read_text())
    return tmp_path


@pytest.mark.parametrize(("ranks", "sharding"), [(1, "none"), (2, "none"), (2, "zero3")])
def test_the_example_learns(folder, ranks, sharding):
    run = run_job(
        (EXAMPLES / "own_model.yaml").read_text(),
        folder,
        f"parallel.sharding={sharding}",
        ranks=ranks,
    )
    losses = [step.loss for step in run.read_steps()]
    assert len(losses) == 60
    assert losses[0] == pytest.approx(torch.log(torch.tensor(4.0)).item(), abs=0.2)
    assert losses[-1] < 0.6
    state = run.read_state()
    assert state is not None
    assert (state.status, state.step, state.durable_step) == ("finished", 60, 60)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.module=own_model:nothing", "has nothing named 'nothing'"),
        ("model.module=not_there:build", "no module named 'not_there'"),
        ("model.args={channels: 0, classes: x}", "model.module: own_model:build"),
        ("data.module=own_model:build", "data.module"),
        ("train.loss.module=own_model:torch", "torch"),
        ("train.global_batch=8192", "8192 samples a step, but the data holds only 4096"),
    ],
)
def test_a_fault_in_the_users_code_is_told_as_such(folder, change, words):
    code = 3 if "holds only" in words else 2
    run = run_job((EXAMPLES / "own_model.yaml").read_text(), folder, change, ranks=1, expect=code)
    (failure,) = run.read_failures()
    assert words in failure.message
    assert failure.traceback == ""


def test_an_exception_in_the_users_code_keeps_its_traceback(folder):
    with (folder / "own_model.py").open("a") as stream:
        stream.write("\n\ndef broken(model, batch):\n    raise RuntimeError('out of cheese')\n")
    job = (EXAMPLES / "own_model.yaml").read_text()
    loss = "train.loss={module: own_model:broken}"
    run = run_job(job, folder, loss, ranks=2, expect=6)
    failures = run.read_failures(attempt=0)
    assert failures[0].error == "RuntimeError"
    assert failures[0].message == "out of cheese"
    assert "in broken" in failures[0].traceback
    assert json.loads(run.failure(0, failures[0].rank).read_text())["host"]
