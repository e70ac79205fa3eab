"""Sweeps with real ranks: on this machine one after another, on Slurm as arrays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.launchers import LocalLauncher

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
ROOT = Path(__file__).parents[2]
JOB = """\
name: tiny
ranks_per_node: 1
model: {layers: 1, hidden: 16, heads: 2, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 16}
train: {steps: 6, global_batch: 4, lr: 1e-3}
slurm: {time: 5m, cpus_per_task: 1}
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    command = [HPCTRAIN, "data", "tokenize", "text.txt", "-o", "tokens.h5"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "tokens.h5"


@pytest.fixture
def folder(tmp_path, tokens):
    (tmp_path / "tokens.h5").symlink_to(tokens)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def test_a_failed_point_stops_no_other_and_is_run_again(folder):
    (folder / "sweep.yaml").write_text(
        "job: job.yaml\nkind: strong\naxes: {ranks_per_node: [1, 2, 3]}\n"
    )
    # Samples so long that the file holds fewer than a batch, which only ranks can find.
    (folder / "bad.yaml").write_text(
        "job: job.yaml\nset: {train.steps: 6}\nzip: [{ranks_per_node: [1, 2], "
        "data.sequence_length: [3000, 16]}]\n"
    )

    def call(*arguments, code=0):
        done = subprocess.run(
            [HPCTRAIN, *arguments], cwd=folder, capture_output=True, text=True, timeout=170,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    done = call("sweep", "bad.yaml", code=6)
    lines = done.stdout.splitlines()
    assert lines[-2].startswith("p000-1 ranks_per_node=1 data.sequence_length=3000: failed")
    assert lines[-1].startswith("p001-1 ranks_per_node=2 data.sequence_length=16: finished")
    rows = json.loads(call("sweep", "status", "--json").stdout)["runs"]
    assert [row["status"] for row in rows] == ["failed", "finished"]
    # Resuming starts the failed point in a new directory, and only that.
    done = call("sweep", "resume", "bad", code=6)
    again = json.loads(call("sweep", "status", "--json").stdout)["runs"]
    assert again[0]["run"] != rows[0]["run"]
    assert again[1]["run"] == rows[1]["run"]

    done = call("sweep", "sweep.yaml", "--dry-run")
    assert "p002 ranks_per_node=3 cannot run" in done.stderr
    assert len(list((folder / "runs").iterdir())) == 1


def test_ranks_are_pinned_to_cores_of_their_own(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    spec = SimpleNamespace(nodes=1, ranks_per_node=min(2, len(cores)))
    mine = [[core] for core in cores[: spec.ranks_per_node]]
    launcher = LocalLauncher.find(os.environ, cores=mine)
    # A file each: what two ranks print may come in one line.
    code = (
        "import os; open(f'{os.getpid()}.cores', 'w').write(str(sorted(os.sched_getaffinity(0))))"
    )
    show = [sys.executable, "-c", code]
    subprocess.run(launcher.command(spec, show), cwd=tmp_path, check=True, timeout=60)
    found = [path.read_text().strip() for path in tmp_path.glob("*.cores")]
    assert sorted(found) == sorted(str(one) for one in mine)
    # More ranks than cores were given for: nothing is pinned.
    spec.ranks_per_node = len(mine) + 1
    assert "taskset" not in " ".join(launcher.command(spec, show))


@pytest.mark.timeout(240)
def test_points_of_one_shape_are_one_array_on_a_real_slurm(slurm_cluster, folder):
    (folder / "sweep.yaml").write_text(
        "job: job.yaml\nkind: grid\naxes: {nodes: [1, 2], train.lr: [1e-3, 2e-3]}\n"
        "when: nodes == 1 or train.lr == 2e-3\n"
    )

    def call(*arguments, code=0):
        done = slurm_cluster.run(
            HPCTRAIN, *arguments, cwd=folder, check=False, timeout=170,
            env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    assert "--yes" in call("sweep", "sweep.yaml", "--launcher", "slurm", code=2).stderr
    try:
        done = call("sweep", "sweep.yaml", "--launcher", "slurm", "--yes")
        # Two points on one node are an array, the one on two nodes a job of its own.
        assert "array " in done.stdout and ": 2 runs" in done.stdout
        assert "job " in done.stdout
        deadline = time.monotonic() + 150
        while True:
            rows = json.loads(call("sweep", "status", "--json").stdout)["runs"]
            if all(row["status"] == "finished" for row in rows):
                break
            assert time.monotonic() < deadline, rows
            assert not any(row["status"] == "failed" for row in rows), rows
            time.sleep(1)
        assert len(rows) == 3
        (sweep,) = (folder / "runs").iterdir()
        launches = sorted(
            json.loads((sweep / row["run"] / "launch.jsonl").read_text())["job_id"] for row in rows
        )
        assert sum("_" in job_id for job_id in launches) == 2
        assert "nothing is missing" in call("sweep", "resume", sweep.name).stdout
        # max_queued: one job at a time, the rest is said to be left
        (folder / "few.yaml").write_text(
            "job: job.yaml\naxes: {train.lr: [1e-3, 2e-3]}\nmax_queued: 1\n"
        )
        done = call("sweep", "few.yaml", "--launcher", "slurm", "--yes")
        assert "1 run is left for when the queue has room" in done.stdout
        # What Slurm refuses is failed, and resumed later; the others are submitted.
        (folder / "refused.yaml").write_text("job: job.yaml\naxes: {slurm.reservation: [nosuch]}\n")
        done = call("sweep", "refused.yaml", "--launcher", "slurm", "--yes", code=4)
        assert "not submitted: sbatch" in done.stderr
        rows = json.loads(call("sweep", "status", "refused", "--json").stdout)["runs"]
        assert [row["status"] for row in rows] == ["failed"]
    finally:
        slurm_cluster.cancel_all()
