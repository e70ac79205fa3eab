"""Real ranks that hang in three ways: the watchdog names who, where and in which collective."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from life_tokens import make_tokens

from hpctrain.health.heartbeat import read_heartbeats
from hpctrain.rundir import RunDir
from hpctrain.testing.ranks import unavailable

pytestmark = [
    pytest.mark.whole,  # make life
    pytest.mark.mpi,
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
]
JOB = """\
name: hang
model: {layers: 1, hidden: 16, heads: 2, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 16}
train: {steps: 100000, global_batch: 6, micro_batch: 2, lr: 1e-2, loss: "faulty:loss"}
checkpoint: {every: 1000000}
health: {hang_after: 3, heartbeat: 0.5}
ranks_per_node: 3
"""
FAULTS = ("sleep", "skip", "freeze")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hangs")
    make_tokens(folder)
    shutil.copy(Path(__file__).with_name("faulty.py"), folder)
    return folder


@pytest.fixture(scope="module")
def hung(folder: Path) -> dict[str, tuple[RunDir, int]]:
    """Three runs whose rank 1 hangs after step 5, and their exit codes."""
    command = [sys.executable, "-m", "hpctrain", "submit", "job.yaml", "--launcher", "local"]
    started = {}
    for fault in FAULTS:
        (folder / fault).mkdir()
        (folder / fault / "job.yaml").write_text(JOB)
        for name in ("tokens.h5", "faulty.py"):
            (folder / fault / name).symlink_to(folder / name)
        started[fault] = subprocess.Popen(
            [*command, "--set", f"env.FAULTS=5:1:{fault}"],
            cwd=folder / fault,
            stdout=subprocess.DEVNULL,
            stderr=(folder / fault / "stderr").open("wb"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    found = {}
    for fault, process in started.items():
        try:
            code = process.wait(150)
        finally:
            process.kill()
        (run,) = RunDir.all(folder / fault / "runs")
        found[fault] = (run, code)
    return found


def report(run: RunDir) -> str:
    path = run.health / "hang-0.txt"
    assert path.exists(), run.rank_log(0).read_text()[-3000:]
    return path.read_text()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hang_is_reported_and_ends_the_job(
    hung: dict[str, tuple[RunDir, int]], fault: str
) -> None:
    run, code = hung[fault]
    text = report(run)
    assert code == 6, text
    failure, *others = run.read_failures(0)
    # A rank may yet see its peer go before it is ended itself.
    assert all("closed by peer" in one.message for one in others), others
    assert (failure.error, failure.rank) == ("HangError", 1)
    assert "hang in step" in failure.message
    last = run.last_step()
    assert last is not None
    # From the last step to the report: 3 s of patience, and what the others need to say so.
    assert failure.time - last.time < 30
    assert "where the ranks stand:" in text
    beats = {beat.rank: beat for beat in read_heartbeats(run)}
    assert set(beats) == {0, 1, 2}
    assert beats[0].step >= 5


def test_a_rank_that_sleeps_is_named_with_its_stack(
    hung: dict[str, tuple[RunDir, int]],
) -> None:
    text = report(hung["sleep"][0])
    assert "rank 1 on" in text.splitlines()[2]
    assert "sleep_for_ever" in text.splitlines()[2]
    assert "all_reduce number" in text
    assert "ranks 0,2 in it, rank 1 not arrived" in text
    # The rank looks into the run's records for the step, which are written a little later.
    assert re.search("forward_backward of step [67]", text)
    assert 'faulty.py", line' in text


def test_a_rank_that_skips_a_collective_is_named_with_the_collective(
    hung: dict[str, tuple[RunDir, int]],
) -> None:
    text = report(hung["skip"][0])
    line = text.splitlines()[1]
    assert "all_reduce number" in line
    assert "(ranks 0-2)" in line
    assert "rank 1 not arrived" in line
    assert "rank 1 on" in text.splitlines()[2]


def test_a_rank_that_is_stopped_cannot_speak_and_its_neighbours_do(
    hung: dict[str, tuple[RunDir, int]],
) -> None:
    text = report(hung["freeze"][0])
    assert "rank 1 on" in text
    assert "does not answer: its process is T (stopped)" in text
