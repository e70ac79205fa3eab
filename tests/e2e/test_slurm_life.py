"""Runs on a real Slurm that a person takes up again, on other nodes and in other layouts.

What goes on by itself is in test_slurm_goes_on.py; here max_restarts is 0.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hpctrain.io.corpus import open_sources, tokenize
from hpctrain.io.encoders import ByteEncoder
from hpctrain.rundir import RunDir

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
STEPS = 20
JOB = f"""\
name: life
nodes: 2
ranks_per_node: 2
model: {{layers: 4, hidden: 32, heads: 4, vocab_size: 256, dropout: 0.1}}
data: {{path: tokens.h5, sequence_length: 32}}
train: {{steps: {STEPS}, global_batch: 8, micro_batch: 1, lr: 1e-2}}
checkpoint: {{every: 5}}
slurm: {{time: 5m, margin: 30s, cpus_per_task: 1, max_restarts: 0}}
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text("".join(pydoc_data.topics.topics.values())[:30_000])
    sources = open_sources([folder / "text.txt"], "text", "text")
    tokenize(sources, folder / "tokens.h5", ByteEncoder())
    return folder / "tokens.h5"


@pytest.fixture
def login(slurm_cluster, tmp_path, tokens):
    """Call hpctrain on the login node of the cluster, in a directory with a job."""
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "tokens.h5").symlink_to(tokens)

    def call(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = slurm_cluster.run(HPCTRAIN, *arguments, cwd=tmp_path, check=False, timeout=170)
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    call.run = lambda: RunDir.all(tmp_path / "runs")[-1]
    call.status = lambda: json.loads(call("status", "--json").stdout)
    yield call
    slurm_cluster.cancel_all()


def curve(run: RunDir) -> list[tuple[float, float]]:
    by_step = {step.step: (step.loss, step.grad_norm) for step in run.read_steps()}
    return [by_step[step] for step in sorted(by_step)]


def wait_for_step(run: RunDir, step: int, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while (last := run.last_step()) is None or last.step < step:
        assert time.monotonic() < deadline, f"step {step} not reached"
        time.sleep(0.05)


def ranks_of(run: RunDir) -> dict[int, psutil.Process]:
    """Processes of the run on this host, by rank."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if str(run.root) in command and "run" in command and "srun" not in command[0]:
            environment = process.environ()
            if "SLURM_PROCID" in environment:
                found[int(environment["SLURM_PROCID"])] = process
    return found


def test_the_first_rank_that_raises_is_named_with_its_host(login, tmp_path):
    (tmp_path / "faulty.py").write_text(
        "import os\n"
        "from hpctrain.model.transformer import next_token_loss\n"
        "count = [0]\n"
        "def loss(model, batch):\n"
        "    count[0] += 1\n"
        "    if os.environ['SLURM_PROCID'] == '1' and count[0] > 4:\n"
        "        raise RuntimeError('node on fire')\n"
        "    return next_token_loss(model(batch[0]), batch[1])\n"
    )
    began = time.monotonic()
    login("submit", "job.yaml", "--set", "train.loss=faulty:loss", "--set", "model.dropout=0",
          "--set", "ranks_per_node=1", "--wait", code=6)  # fmt: skip
    assert time.monotonic() - began < 90
    failure = login.status()["failure"]
    assert (failure["rank"], failure["error"]) == (1, "RuntimeError")
    assert failure["host"].startswith("node")
    text = login("status").stdout
    assert "rank 1" in text
    assert "node on fire" in text


@pytest.mark.timeout(400)
def test_three_dimensions_killed_and_resumed_in_others(login):
    """8 ranks on 4 nodes (tensor 2, pipeline 2, data 2) whose ranks die; then 4 ranks on 2 nodes
    (pipeline 4)."""
    three = ("--set", "nodes=4", "--set", "parallel.tensor=2", "--set", "parallel.pipeline=2")
    login("submit", "job.yaml", *three)
    run = login.run()
    wait_for_step(run, 6, seconds=170)
    for process in ranks_of(run).values():
        process.kill()
    deadline = time.monotonic() + 60
    while login.status()["status"] not in ("failed", "finished"):
        assert time.monotonic() < deadline, "the others hang"
        time.sleep(0.5)
    assert login.status()["status"] == "failed"
    done = login("resume", run.id, "--set", "nodes=2", "--set", "parallel.tensor=1",
                 "--set", "parallel.pipeline=4", "--wait")  # fmt: skip
    assert "checkpoint of step" in done.stderr
    # The same job on one rank.
    login("submit", "job.yaml", "--set", "nodes=1", "--set", "ranks_per_node=1", "--wait")
    alone = curve(login.run())
    assert len(curve(run)) == len(alone) == STEPS
    for (loss, norm), (loss_, norm_) in zip(curve(run), alone, strict=True):
        assert loss == pytest.approx(loss_, abs=1e-4)
        assert norm == pytest.approx(norm_, rel=1e-3)
