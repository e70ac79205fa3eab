"""Real runs on this machine through the installed program: real MPI ranks, signals, files.

Slow (about ten seconds a test): every incarnation starts Python, MPI and torch anew.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpctrain.rundir import RunDir

pytestmark = pytest.mark.mpi

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
JOB = """\
name: tiny
model: {layers: 1, hidden: 16, heads: 2, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 16}
train: {steps: 12, global_batch: 4, lr: 1e-3}
checkpoint: {every: 5, keep: 3}
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    (directory / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    call("data", "tokenize", "text.txt", "-o", "tokens.h5", cwd=directory)
    return directory / "tokens.h5"


@pytest.fixture
def here(tmp_path: Path, tokens: Path) -> Iterator[Path]:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "tokens.h5").symlink_to(tokens)
    yield tmp_path
    for run in RunDir.all(tmp_path / "runs"):  # what a failed test leaves behind
        for process in ranks_of(run):
            process.kill()


def call(*arguments: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [HPCTRAIN, *arguments], cwd=cwd, capture_output=True, text=True, timeout=150,
        env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [HPCTRAIN, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=ENVIRONMENT,
    )  # fmt: skip


def answer(command: str, cwd: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(command, "--json", cwd=cwd).stdout)
    return found


def wait_for(what: Callable[[], Any], seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


def the_run(here: Path) -> RunDir:
    (run,) = RunDir.all(here / "runs")
    return run


def ranks_of(run: RunDir) -> list[psutil.Process]:
    """Rank processes of a run that are alive."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if str(run.root) in command and "mpiexec" not in command[0]:
            found.append(process)
    return found


def at_step(here: Path, step: int) -> Callable[[], bool]:
    def reached() -> bool:
        runs = RunDir.all(here / "runs")
        last = runs[0].last_step() if runs else None
        return last is not None and last.step >= step

    return reached


def test_a_run_from_submit_to_report(here: Path) -> None:
    done = call("submit", "job.yaml", "--set", "ranks_per_node=2", cwd=here)
    run = the_run(here)
    lines = done.stdout.splitlines()
    assert lines[0] == f"run {run.id}"  # first, so that nothing can lose it
    assert f"  hpctrain report {run.id}" in lines
    assert len(lines) - lines.index("next:") == 4
    assert re.search(r"step 12/12  loss \d\.\d{4}  \S+ tokens/s", done.stderr)
    assert "\x1b" not in done.stdout + done.stderr  # not a terminal: no colour, no spinner

    status = answer("status", here)
    assert (status["status"], status["step"], status["exit_code"]) == ("finished", 12, 0)
    assert (status["world_size"], status["launcher"], status["durable_step"]) == (2, "local", 12)
    report = answer("report", here)
    records = list(run.read_steps())
    assert [record.step for record in records] == list(range(1, 13))
    assert report["last_loss"] == records[-1].loss
    assert report["tokens"] == 12 * 4 * 16
    assert report["attempts"][0]["ended"] == "finished"

    provenance = json.loads(run.provenance.read_text())
    assert provenance["job_text"] == JOB
    assert provenance["overrides"] == ["ranks_per_node=2"]
    assert provenance["sources"]["ranks_per_node"]["kind"] == "set"
    assert provenance["caller"]["argv"][1:3] == ["submit", "job.yaml"]
    assert provenance["directory"] == str(here)

    again = call("resume", run.id, cwd=here, code=2)
    assert "nothing is left to do: the checkpoint is of step 12" in again.stderr


def test_ctrl_c_on_a_terminal_stops_resumably_and_resume_goes_on(here: Path) -> None:
    environment = {**ENVIRONMENT, "NO_COLOR": "1", "COLUMNS": "100", "TERM": "xterm"}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(here)
        os.execve(
            HPCTRAIN, ["hpctrain", "submit", "job.yaml", "--set", "train.steps=100000"], environment
        )  # fmt: skip
    os.set_blocking(terminal, False)
    shown = bytearray()

    def read() -> bool:
        """Take what the program writes; whether it has closed its side."""
        try:
            while data := os.read(terminal, 65536):
                shown.extend(data)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    wait_for(lambda: read() or at_step(here, 7)())
    # A terminal sends Ctrl-C to the whole foreground group: the ranks must not be in it.
    os.write(terminal, b"\x03")
    wait_for(read)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    text = shown.decode()
    assert "asked all ranks to checkpoint and stop" in text
    assert re.search(r"running .*step \d+/100000", text)
    assert not re.search(r"\x1b\[[0-9;]*3\d", text), "NO_COLOR was not honoured"

    run = the_run(here)
    state = run.read_state()
    assert state is not None
    assert (state.status, state.durable_step) == ("stopped", state.step)
    stopped = state.step
    assert answer("status", here)["exit_code"] == 75

    # Damage the newest checkpoint: resume says so, takes the one before, and ends.
    newest = run.checkpoints / f"step{stopped:08d}" / "tensors.h5"
    newest.write_bytes(newest.read_bytes()[:-100])
    older = max(
        int(path.name[4:]) for path in run.checkpoints.glob("step*") if path != newest.parent
    )
    done = call("resume", run.id, "--set", f"train.steps={stopped + 3}", cwd=here)
    assert f"the checkpoint of step {stopped} is passed over: " in done.stderr
    assert f"from the checkpoint of step {older}, " in done.stderr
    assert f"changed: train.steps was 100000, is {stopped + 3}" in done.stderr
    state = run.read_state()
    assert state is not None
    assert (state.status, state.step, state.resumed_from) == ("finished", stopped + 3, older)
    assert [launch.attempt for launch in run.read_launches()] == [0, 1]
    report = answer("report", here)
    assert report["attempts"][1]["first_step"] == older + 1
    resumes = json.loads(run.provenance.read_text())["resumes"]
    assert resumes[0]["overrides"] == [f"train.steps={stopped + 3}"]
    assert resumes[0]["from_step"] == older


def test_a_second_ctrl_c_ends_all_ranks_at_once(here: Path) -> None:
    process = start(
        "submit", "job.yaml", "--set", "ranks_per_node=2", "--set", "train.steps=100000", cwd=here
    )
    wait_for(at_step(here, 1))
    run = the_run(here)
    ranks = ranks_of(run)
    assert len(ranks) == 2
    for rank in ranks:  # as a hanging collective would: no rank comes to its next step
        rank.suspend()
    process.send_signal(signal.SIGINT)
    wait_for(run.stop_file.exists)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert ranks_of(run) == []
    assert "status      cancelled" in output
    assert answer("status", here)["status"] == "cancelled"


def test_a_killed_rank_ends_the_run_and_the_status_says_so(here: Path) -> None:
    done = call(
        "submit", "job.yaml", "--no-wait", "--set", "ranks_per_node=2",
        "--set", "train.steps=100000", "--set", "checkpoint.keep=1000", cwd=here,
    )  # fmt: skip
    run = the_run(here)
    assert done.stdout.splitlines()[0] == f"run {run.id}"
    wait_for(at_step(here, 6))
    assert answer("status", here)["status"] == "running"
    refused = call("resume", run.id, cwd=here, code=2)
    assert "is not over: it is running" in refused.stderr
    ranks_of(run)[1].kill()
    wait_for(lambda: answer("status", here)["status"] != "running")
    status = answer("status", here)
    assert (status["status"], status["exit_code"]) == ("failed", 6)
    assert status["durable_step"] >= 5
    wait_for(lambda: ranks_of(run) == [])
    # One checkpoint on, and from a given step.
    done = call(
        "resume", run.id, "--from", "5", "--set", "train.steps=8", "--set", "ranks_per_node=1",
        cwd=here,
    )  # fmt: skip
    assert "from the checkpoint of step 5, as asked" in done.stderr
    state = run.read_state()
    assert state is not None
    assert (state.status, state.step, state.resumed_from) == ("finished", 8, 5)
    assert run.read_launches()[1].world_size == 1


def test_an_error_of_the_ranks_is_the_error_of_the_command(here: Path) -> None:
    done = call(
        "submit", "job.yaml", "--set", "data.sequence_length=1e6", "--set", "model.position=none",
        cwd=here, code=2,
    )  # fmt: skip
    status = answer("status", here)
    assert (status["status"], status["exit_code"]) == ("failed", 2)
    assert status["failure"]["rank"] == 0
    assert status["failure"]["host"] == os.uname().nodename
    assert status["reason"] in done.stdout
    logs = call("logs", cwd=here)
    assert "rank 0 failed" in logs.stdout


def test_cancel_of_a_run_in_the_background(here: Path) -> None:
    call("submit", "job.yaml", "--no-wait", "--set", "train.steps=100000", cwd=here)
    run = the_run(here)
    wait_for(at_step(here, 1))
    call("cancel", run.id, cwd=here)
    wait_for(lambda: answer("status", here)["status"] == "stopped")
    assert answer("status", here)["reason"].startswith("stop file")
