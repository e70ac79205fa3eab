"""Runs on a real Slurm that a person takes up again, on other nodes and in other layouts.

What goes on by itself is in test_slurm_goes_on.py; here max_restarts is 0.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import subprocess
import sys
import time
from collections.abc import Callable
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

    def call(
        *arguments: str, code: int = 0, timeout: float = 170
    ) -> subprocess.CompletedProcess[str]:
        done = slurm_cluster.run(HPCTRAIN, *arguments, cwd=tmp_path, check=False, timeout=timeout)
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    call.run = lambda: RunDir.all(tmp_path / "runs")[-1]
    call.status = lambda: json.loads(call("status", "--json").stdout)
    yield call
    slurm_cluster.cancel_all()


def curve(run: RunDir) -> list[tuple[float, float]]:
    by_step = {step.step: (step.loss, step.grad_norm) for step in run.read_steps()}
    return [by_step[step] for step in sorted(by_step)]


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def wait_for(what: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
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
    assert time.monotonic() - began < 150  # the other one would wait for ever
    failure = login.status()["failure"]
    assert (failure["rank"], failure["error"]) == (1, "RuntimeError")
    assert failure["host"].startswith("node")
    text = login("status").stdout
    assert "rank 1" in text
    assert "node on fire" in text


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("nodes", "then", "pipeline"),
    [
        pytest.param(2, 1, 2, id="tensor 2, pipeline 2"),
        pytest.param(4, 4, 4, marks=pytest.mark.whole, id="tensor 2, pipeline 2, data 2"),
    ],
)
def test_several_dimensions_killed_and_resumed_in_others(login, nodes, then, pipeline):
    """Ranks that die; then a pipeline without tensor parallelism, on half as many nodes or all."""
    login("submit", "job.yaml", "--set", f"nodes={nodes}", "--set", "parallel.tensor=2",
          "--set", "parallel.pipeline=2")  # fmt: skip
    run = login.run()
    wait_for(lambda: any(e.kind == "checkpoint" for e in run.read_events()), seconds=200)
    for process in ranks_of(run).values():
        process.kill()
    wait_for(lambda: login.status()["status"] in ("failed", "finished"))
    assert login.status()["status"] == "failed"
    done = login("resume", run.id, "--set", f"nodes={then}", "--set", "parallel.tensor=1",
                 "--set", f"parallel.pipeline={pipeline}", "--wait")  # fmt: skip
    assert "checkpoint of step" in done.stderr
    # The same job on one rank.
    login("submit", "job.yaml", "--set", "nodes=1", "--set", "ranks_per_node=1", "--wait")
    alone = curve(login.run())
    assert len(curve(run)) == len(alone) == STEPS
    for (loss, norm), (loss_, norm_) in zip(curve(run), alone, strict=True):
        assert loss == pytest.approx(loss_, abs=1e-4)
        assert norm == pytest.approx(norm_, rel=1e-3)


@pytest.mark.whole
@pytest.mark.timeout(1500)
def test_five_dimensions_stopped_by_the_walltime_and_resumed_in_others(login):
    """16 ranks on 4 nodes, all five axes, until the walltime; then 8 on 2, laid out anew."""
    model = settings(
        "model.moe={experts: 8, top_k: 2, hidden: 32, shared: 1}",
        "train.schedule=constant",
        "train.lr=3e-3",
    )
    first = settings(
        "nodes=4", "ranks_per_node=4", "train.steps=100000", "slurm.time=4m", "slurm.margin=90s",
        "parallel={tensor: 2, context: 2, pipeline: 2, expert: 4, sharding: zero1}",
    )  # fmt: skip
    login("submit", "job.yaml", *model, *first)
    run = login.run()
    wait_for(lambda: login.status()["status"] in ("stopped", "failed", "finished"), seconds=400)
    assert login.status()["status"] == "stopped", login("status").stdout
    [stopped] = [event for event in run.read_events() if event.kind == "stopped"]
    assert "walltime" in stopped.message
    reached = len(curve(run))
    assert reached >= 1
    steps = f"train.steps={reached + 4}"
    then = settings(
        "nodes=2", "ranks_per_node=4", steps, "slurm.time=10m", "parallel.tensor=1",
        "parallel.expert=2", "parallel.expert_tensor=2", "parallel.sharding=zero3",
    )  # fmt: skip
    done = login("resume", run.id, *then, "--wait", timeout=500)
    assert f"checkpoint of step {reached}" in done.stderr
    one = settings("nodes=1", "ranks_per_node=1", steps)
    login("submit", "job.yaml", *model, *one, "--wait")
    alone = curve(login.run())
    assert len(curve(run)) == len(alone) == reached + 4
    for (loss, norm), (loss_, norm_) in zip(curve(run), alone, strict=True):
        assert loss == pytest.approx(loss_, abs=1e-4)
        assert norm == pytest.approx(norm_, rel=1e-3)
