"""The command line against a real Slurm: sbatch, squeue, scancel and real ranks under srun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.rundir import RunDir
from hpctrain.testing.slurm import SlurmCluster

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
JOB = """\
name: tiny
nodes: 2
ranks_per_node: 1
model: {layers: 1, hidden: 16, heads: 2, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 16}
train: {steps: 12, global_batch: 4, lr: 1e-3}
checkpoint: {every: 5, keep: 100}
slurm: {time: 10m, cpus_per_task: 1}
"""


class Site:
    """A directory on the cluster's login node, and the program run there."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory

    def call(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = self.cluster.run(HPCTRAIN, *arguments, cwd=self.directory, check=False, timeout=170)
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.call("status", "--json").stdout)
        return found

    def becomes(self, *states: str, seconds: float = 90.0) -> dict[str, Any]:
        return wait_for(lambda: (s := self.status())["status"] in states and s, seconds)

    @property
    def run(self) -> RunDir:
        (run,) = RunDir.all(self.directory / "runs")
        return run

    def at_step(self, step: int) -> bool:
        last = self.run.last_step()
        return last is not None and last.step >= step


def wait_for(what: Callable[[], Any], seconds: float = 160.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    (directory / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    subprocess.run(
        [HPCTRAIN, "data", "tokenize", "text.txt", "-o", "tokens.h5"], cwd=directory, check=True
    )
    return directory / "tokens.h5"


@pytest.fixture
def site(slurm_cluster: SlurmCluster, tmp_path: Path, tokens: Path) -> Iterator[Site]:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "tokens.h5").symlink_to(tokens)
    yield Site(slurm_cluster, tmp_path)
    slurm_cluster.cancel_all()


def test_auto_is_slurm_and_wait_stays_to_the_summary(site: Site) -> None:
    done = site.call("submit", "job.yaml", "--wait")
    run, lines = site.run, done.stdout.splitlines()
    assert lines[0] == f"run {run.id}"
    launch = run.read_launches()[0]
    assert lines[1] == f"job {launch.job_id}"
    assert "status      finished" in lines
    assert re.search(r"step 12/12  loss \d", done.stderr)
    status = site.status()
    assert (status["status"], status["launcher"], status["world_size"]) == ("finished", "slurm", 2)
    assert status["job_id"] == launch.job_id
    assert (status["step"], status["durable_step"], status["exit_code"]) == (12, 12, 0)
    assert "finished: all 12 steps" in site.call("logs").stdout
    assert run.script.read_text().startswith("#!/bin/bash")


def test_a_run_is_seen_cancelled_and_resumed(site: Site) -> None:
    done = site.call("submit", "job.yaml", "--set", "train.steps=100000")
    assert done.stdout.splitlines()[1] == f"job {site.run.read_launches()[0].job_id}"
    running = site.becomes("running")
    assert (running["slurm_state"], running["exit_code"]) == ("RUNNING", None)
    assert re.fullmatch(r"node\[?\d.*", running["nodes"])
    wait_for(lambda: site.at_step(6))
    refused = site.call("resume", site.run.id, code=2)
    assert "is not over" in refused.stderr
    site.call("cancel", site.run.id)
    stopped = site.becomes("stopped")
    assert (stopped["exit_code"], stopped["durable_step"]) == (75, stopped["step"])
    # The job leaves the queue by itself.
    job = int(site.run.read_launches()[0].job_id)
    site.cluster.wait_job(job, "COMPLETED", "FAILED", timeout=60)
    more = stopped["step"] + 3
    done = site.call("resume", site.run.id, "--set", f"train.steps={more}", "--wait")
    assert f"from the checkpoint of step {stopped['step']}, " in done.stderr
    finished = site.status()
    assert (finished["status"], finished["step"], finished["attempt"]) == ("finished", more, 1)
    assert finished["resumed_from"] == stopped["step"]


def test_a_waiting_job_says_why_and_is_cancelled_at_once(site: Site) -> None:
    site.call("submit", "job.yaml", "--set", "slurm.sbatch_options=[--begin=now+1hour]")
    status = site.status()
    assert (status["status"], status["slurm_state"]) == ("pending", "PENDING")
    assert "BeginTime" in status["reason"]
    done = site.call("cancel", site.run.id)
    assert "is cancelled; last checkpoint: none" in done.stdout
    assert site.status()["status"] == "cancelled"


def test_ctrl_c_while_waiting_leaves_the_job_alone(site: Site) -> None:
    process = subprocess.Popen(
        [HPCTRAIN, "submit", "job.yaml", "--wait", "--set", "train.steps=100000"],
        cwd=site.directory, env=site.cluster.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("run ")
    assert process.stdout.readline().startswith("job ")
    wait_for(lambda: site.at_step(1))
    process.send_signal(signal.SIGINT)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the job goes on without you" in said
    assert f"hpctrain cancel {site.run.id}" in output
    assert site.status()["status"] == "running"
    site.call("cancel", site.run.id, "--now")
    assert site.status()["status"] in ("stopped", "cancelled")


def test_a_failing_rank_is_named_after_the_job_is_gone(site: Site) -> None:
    site.call("submit", "job.yaml", "--wait", "--set", "train.global_batch=1000000", code=3)
    status = site.status()
    assert (status["status"], status["exit_code"]) == ("failed", 3)
    assert status["failure"]["host"].startswith("node")
    assert status["reason"].startswith("rank ")


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        (["slurm.partition=short", "slurm.time=1h"], 3, "slurm.time"),
        (["nodes=40", "train.global_batch=40"], 3, "nodes"),
        (["slurm.sbatch_options=[--gres=nothing:1]"], 4, "gres"),
    ],
)
def test_what_cannot_run_is_refused_and_leaves_nothing(
    site: Site, overrides: list[str], code: int, said: str
) -> None:
    sets = [part for override in overrides for part in ("--set", override)]
    done = site.call("submit", "job.yaml", *sets, code=code)
    assert said in done.stderr
    assert RunDir.all(site.directory / "runs") == []
    queue = site.cluster.run("squeue", "-h").stdout
    assert queue == ""


def test_overriding_variables_are_named(site: Site) -> None:
    done = site.cluster.run(
        HPCTRAIN, "submit", "job.yaml", "--set", "slurm.sbatch_options=[--begin=now+1hour]",
        cwd=site.directory, env={"SBATCH_COMMENT": "x"},
    )  # fmt: skip
    assert "SBATCH_COMMENT=x in your environment overrides the batch script" in done.stderr


def test_doctor_sees_the_cluster_and_its_pmi(site: Site) -> None:
    answer = json.loads(site.call("doctor", "--json").stdout)
    found = {one["topic"]: one for one in answer["findings"]}
    assert found["Slurm"]["verdict"] == "ok"
    assert "batch*" in found["Slurm"]["found"]
    assert "pmi2" in found["srun --mpi"]["found"]


def test_without_a_cluster_slurm_is_an_error_and_auto_is_local(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    environment = {**os.environ, "PATH": str(Path(sys.executable).parent)}
    for arguments, code, said in (
        (["--launcher", "slurm"], 4, "Slurm does not answer"),
        (["--set", "machine=frontier", "--set", "slurm.account=abc", "--set",
          "ranks_per_node=8", "--set", "train.global_batch=16"], 4,
         "machine frontier runs jobs by Slurm"),
        ([], 2, "data.path: no file"),
    ):  # fmt: skip
        done = subprocess.run(
            [HPCTRAIN, "submit", "job.yaml", *arguments], cwd=tmp_path, env=environment,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert said in done.stderr
    assert not (tmp_path / "runs").exists()
