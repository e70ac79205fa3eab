"""status, report, logs, cancel, resume on run directories written by hand: what they say is
known from the records alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli import main
from hpctrain.machine import get_machine
from hpctrain.records import (
    EventRecord,
    FailureRecord,
    LaunchRecord,
    RunStatus,
    StateRecord,
    StepRecord,
    append_line,
    write_json,
)
from hpctrain.rundir import RunDir
from hpctrain.spec import dump_job, parse_job, resolve

JOB = """\
name: tiny
ranks_per_node: 2
model: {layers: 2, hidden: 32, heads: 2, vocab_size: 256, max_positions: 32}
data: {path: /tokens.h5, sequence_length: 32}
train: {steps: 40, global_batch: 8}
"""
T0 = 1_700_000_000.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    found = RunDir.create("tiny", tmp_path / "runs")
    job = resolve(parse_job(JOB), get_machine("local"), tmp_path)
    found.job.write_text(dump_job(job.spec))
    write_json(found.provenance, {"steps": 40})
    return found


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a launcher that is alive."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def launched(run: RunDir, attempt: int = 0, **more: Any) -> None:
    values: dict[str, Any] = {
        "launcher": "local", "submitted": T0, "world_size": 2, "pid": 2**22 + 1,
        "pid_started": 1, "host": socket.gethostname(),
    }  # fmt: skip
    run.add_launch(LaunchRecord(attempt=attempt, **(values | more)))


def stated(run: RunDir, status: RunStatus, step: int, **more: Any) -> None:
    values: dict[str, Any] = {"time": T0 + step, "world_size": 2, "total_steps": 40}
    run.write_state(StateRecord(status=status, step=step, **(values | more)))


def stepped(run: RunDir, step: int, loss: float | None, **more: Any) -> None:
    values: dict[str, Any] = {
        "time": T0 + step, "lr": 1e-3, "grad_norm": 1.0, "tokens": 256 * step,
        "step_seconds": 1.0, "tokens_per_second": 256.0,
    }  # fmt: skip
    append_line(run.metrics, StepRecord(step=step, loss=loss, **(values | more)))


def failed(run: RunDir, rank: int, when: float, *, attempt: int = 0, **more: Any) -> None:
    values: dict[str, Any] = {
        "host": f"node{rank}", "error": "RuntimeError", "message": f"no {rank}\nmore",
        "traceback": "", "step": 7,
    }  # fmt: skip
    record = FailureRecord(rank=rank, time=when, attempt=attempt, **(values | more))
    write_json(run.failure(attempt, rank), record.to_dict())


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def status(*arguments: str) -> dict[str, Any]:
    result = invoke("status", "--json", *arguments)
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    assert answer["schema_version"] == 1
    return answer


# ---- status -------------------------------------------------------------------------------


def test_a_run_that_was_never_started(run: RunDir) -> None:
    answer = status()
    assert (answer["run"], answer["status"], answer["step"]) == (run.id, "created", 0)
    assert (answer["total_steps"], answer["exit_code"]) == (40, None)


def test_a_running_run(run: RunDir, sleeper: subprocess.Popen[bytes]) -> None:
    launched(run, pid=sleeper.pid, pid_started=ticks(sleeper.pid))
    stated(run, "running", 10, durable_step=8)
    for step in range(1, 13):
        stepped(run, step, 6.0 - 0.1 * step, time=T0 + 2 * step)
    answer = status()
    assert answer["status"] == "running"
    # Two seconds a step by the clock, although a step itself took one.
    assert (answer["step"], answer["seconds_left"]) == (12, 56.0)
    assert answer["loss"] == pytest.approx(4.8)
    assert answer["tokens_per_second"] == 256.0
    assert (answer["durable_step"], answer["exit_code"], answer["failure"]) == (8, None, None)
    text = invoke("status").stdout
    assert "step        12 of 40 (30 %)" in text
    assert "checkpoint  step 8" in text


def test_a_launcher_that_died_silently_is_a_lost_run(run: RunDir) -> None:
    launched(run)
    stated(run, "running", 10)
    answer = status()
    assert (answer["status"], answer["exit_code"]) == ("failed", 6)
    assert answer["reason"].startswith("lost: ")


def test_a_reused_process_number_is_not_the_run(
    run: RunDir, sleeper: subprocess.Popen[bytes]
) -> None:
    launched(run, pid=sleeper.pid, pid_started=ticks(sleeper.pid) - 1)
    stated(run, "running", 10)
    assert status()["status"] == "failed"


def test_a_launcher_on_another_host_is_believed(run: RunDir) -> None:
    launched(run, host="elsewhere")
    stated(run, "running", 10)
    assert status()["status"] == "running"


def test_the_first_failing_rank_is_named_with_its_host(run: RunDir) -> None:
    launched(run)
    stated(run, "running", 7)
    failed(run, 3, T0 + 9.0)
    failed(run, 1, T0 + 8.5)
    failed(run, 0, T0 + 9.5)
    answer = status()
    assert (answer["status"], answer["exit_code"]) == ("failed", 6)
    assert answer["reason"] == "rank 1 on node1 at step 7: RuntimeError: no 1"
    assert answer["failed_ranks"] == [1, 3, 0]
    assert "also failed  ranks 3, 0" in invoke("status").stdout


def test_a_failure_of_an_earlier_attempt_is_history(run: RunDir) -> None:
    launched(run)
    failed(run, 1, T0 + 8.5)
    launched(run, attempt=1, submitted=T0 + 100)
    stated(run, "finished", 40, time=T0 + 200)
    answer = status()
    assert (answer["status"], answer["attempt"], answer["failure"]) == ("finished", 1, None)


@pytest.mark.parametrize(
    ("error", "code"), [("CheckpointError", 5), ("ImpossibleError", 3), ("ValueError", 6)]
)
def test_the_exit_code_is_that_of_the_first_error(run: RunDir, error: str, code: int) -> None:
    launched(run)
    failed(run, 0, T0, error=error)
    assert status()["exit_code"] == code


@pytest.mark.parametrize(
    ("word", "code"), [("finished", 0), ("stopped", 75), ("cancelled", 75), ("failed", 6)]
)
def test_final_states_are_kept(run: RunDir, word: RunStatus, code: int) -> None:
    launched(run)
    stated(run, word, 20, reason="because")
    answer = status()
    assert (answer["status"], answer["exit_code"], answer["reason"]) == (word, code, "because")


def test_a_loss_that_is_not_finite_is_null_in_json(run: RunDir) -> None:
    launched(run)
    stated(run, "failed", 3)
    stepped(run, 3, None)
    assert status()["loss"] is None
    assert "loss        not finite" in invoke("status").stdout


def test_runs_are_found_by_path_start_and_age(run: RunDir, tmp_path: Path) -> None:
    old = RunDir(tmp_path / "runs" / "other-20200101-000000-abcd")
    old.root.mkdir()
    old.job.write_text(run.job.read_text())
    write_json(old.provenance, {})
    assert status()["run"] == run.id
    assert status("other")["run"] == old.id
    assert status(str(old.root))["run"] == old.id
    assert status("--runs", str(tmp_path / "runs"), "tiny")["run"] == run.id
    for missing in ("nothing", "--runs=/nowhere"):
        result = invoke("status", missing)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "no run" in result.stderr


def test_watch_prints_changes_until_the_end(run: RunDir) -> None:
    launched(run, host="elsewhere")
    stated(run, "running", 1)

    def finish() -> None:
        time.sleep(1.0)
        stated(run, "finished", 40)

    thread = threading.Thread(target=finish)
    thread.start()
    result = invoke("status", "--watch", "--json")
    thread.join()
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["status"] for line in lines] == ["running", "finished"]


# ---- report -------------------------------------------------------------------------------


def report() -> dict[str, Any]:
    result = invoke("report", "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_report_of_two_attempts(run: RunDir) -> None:
    # Attempt 0 does steps 1 to 12 and checkpoints at 8; attempt 1 goes on from there.
    launched(run, submitted=T0)
    for step in range(1, 13):
        slow = {"tokens_per_second": 10.0, "step_seconds": 25.6} if step <= 5 else {}
        stepped(run, step, 6.0 - 0.1 * step, time=T0 + step, data_seconds=0.25, **slow)
    run.add_event(
        EventRecord("checkpoint", T0 + 8, "", 0, {"step": 8, "bytes": 1000, "seconds": 2.0})
    )
    run.add_event(EventRecord("stopped", T0 + 12, "", 0))
    launched(run, attempt=1, submitted=T0 + 100, world_size=4)
    for step in range(9, 21):
        speed = 10.0 if step <= 13 else 512.0
        comm = {"dp": {"calls": 1.0, "bytes": 8.0, "seconds": 0.5}}
        stepped(run, step, 5.0 - 0.1 * step, time=T0 + 100 + step, tokens_per_second=speed,
                memory_bytes=step, comm=comm, checkpoint_seconds=0.125)  # fmt: skip
    run.add_event(
        EventRecord("checkpoint", T0 + 120, "", 1, {"step": 20, "bytes": 2000, "seconds": 3.0})
    )
    stated(run, "stopped", 20, time=T0 + 121, durable_step=20)

    answer = report()
    assert (answer["steps"], answer["first_step"], answer["last_step"]) == (20, 1, 20)
    assert answer["first_loss"] == pytest.approx(5.9)
    assert answer["last_loss"] == answer["lowest_loss"] == pytest.approx(3.0)
    # Steady: 6 to 8 at 256 tokens/s, 14 to 20 at 512; the first five of each start are not.
    assert answer["tokens_per_second"] == 512.0
    assert answer["step_seconds_median"] == 1.0
    assert answer["memory_bytes"] == 20
    # 5·25.6 + 3·1 + 12·1 seconds of steps, of which 8·0.25 waiting and 12·0.5 communication.
    assert answer["time"] == pytest.approx(
        {"data": 2.0, "comm dp": 6.0, "compute": 143.0 - 8.0, "checkpoint": 1.5}
    )
    assert [one["step"] for one in answer["checkpoints"]] == [8, 20]
    assert answer["checkpoints"][1] == {"step": 20, "bytes": 2000, "seconds": 3.0}
    first, second = answer["attempts"]
    assert (first["first_step"], first["last_step"], first["ended"]) == (1, 12, "stopped")
    assert (second["first_step"], second["last_step"], second["world_size"]) == (9, 20, 4)
    # 2 blocks of width 32: 12·32² + 13·32 each, final norm 2·32, embeddings (256 + 32)·32.
    assert answer["parameters"] == 2 * (12 * 1024 + 13 * 32) + 64 + 288 * 32
    # Six FLOPs a weight of the matrices and 12·layers·hidden·sequence (Narayanan et al. 2021).
    flops = 6 * (2 * 12 * 1024 + 32 * 256) + 12 * 2 * 32 * 32
    assert answer["model_flops_per_second"] == pytest.approx(512.0 * flops)

    text = invoke("report").stdout
    assert "loss          5.9000 at step 1, 3.0000 at step 20, lowest 3.0000" in text
    assert "checkpoints   2 written, last durable step 20, 2.0 KiB in 3 s" in text
    table = text.splitlines()[-3:]
    assert table[0].split() == ["attempt", "launcher", "started", "ranks", "steps", "ended"]
    assert table[1].split()[-2:] == ["1-12", "stopped"]
    assert table[2].split()[-3:] == ["4", "9-20", "stopped"]


def test_report_of_a_run_without_steps(run: RunDir) -> None:
    launched(run)
    stated(run, "starting", 0)
    answer = report()
    assert (answer["steps"], answer["last_loss"], answer["tokens_per_second"]) == (0, None, None)
    assert "none of 40 yet" in invoke("report").stdout


# ---- logs ---------------------------------------------------------------------------------


@pytest.fixture
def logged(run: RunDir) -> RunDir:
    launched(run)
    stated(run, "finished", 40)
    run.job_log.write_text("launcher\n")
    run.rank_log(0).write_text("".join(f"zero {i}\n" for i in range(5)))
    run.rank_log(1).write_bytes("one é\n".encode() + b"\xff\n")
    return run


def test_logs_of_launcher_and_rank_0(logged: RunDir) -> None:
    result = invoke("logs", "-n", "2")
    assert result.stdout == "launcher\nzero 3\nzero 4\n"
    assert result.stderr.splitlines() == ["==> logs/job.log <==", "==> logs/rank00000.log <=="]


def test_logs_of_one_rank_are_its_bytes(logged: RunDir) -> None:
    result = invoke("logs", "--rank", "1")
    assert result.stdout_bytes == "one é\n".encode() + b"\xff\n"
    assert result.stderr == ""


def test_logs_show_the_rank_that_failed_first(logged: RunDir) -> None:
    failed(logged, 1, T0)
    assert "one é" in invoke("logs").stdout


def test_logs_of_a_rank_without_one(logged: RunDir) -> None:
    result = invoke("logs", "--rank", "7")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no log of rank 7; ranks 0 to 1 have one" in result.stderr


def test_logs_as_json(logged: RunDir) -> None:
    answer = json.loads(invoke("logs", "--json", "-n", "1").stdout)
    assert [file["rank"] for file in answer["files"]] == [None, 0]
    assert [file["text"] for file in answer["files"]] == ["launcher\n", "zero 4\n"]


def test_follow_prints_what_comes_and_ends_with_the_run(run: RunDir) -> None:
    launched(run, host="elsewhere")
    stated(run, "running", 1)
    run.rank_log(0).write_text("first\n")

    def go_on() -> None:
        time.sleep(1.0)
        with run.rank_log(0).open("a") as stream:
            stream.write("second\n")
        stated(run, "finished", 40)

    thread = threading.Thread(target=go_on)
    thread.start()
    result = invoke("logs", "-f")
    thread.join()
    assert result.stdout == "first\nsecond\n"


# ---- cancel and resume: what they refuse --------------------------------------------------


def test_cancel_asks_by_the_stop_file(run: RunDir) -> None:
    launched(run, host="elsewhere")
    stated(run, "running", 10)
    assert not run.stop_file.exists()
    assert invoke("cancel", run.id).exit_code == 0
    assert run.stop_file.exists()


def test_cancel_now_cannot_reach_another_host(run: RunDir) -> None:
    launched(run, host="elsewhere")
    stated(run, "running", 10)
    result = invoke("cancel", run.id, "--now")
    assert result.exit_code == 2
    assert "elsewhere" in result.stderr


def test_cancel_now_ends_the_processes(run: RunDir, sleeper: subprocess.Popen[bytes]) -> None:
    launched(run, pid=sleeper.pid, pid_started=ticks(sleeper.pid))
    stated(run, "running", 10, durable_step=8)
    result = invoke("cancel", run.id, "--now")
    assert result.exit_code == 0, result.output
    assert sleeper.wait(10) == -9
    assert "is cancelled; last checkpoint: step 8" in result.stdout
    assert status()["status"] == "cancelled"
    again = invoke("cancel", run.id)
    assert (again.exit_code, again.stdout) == (0, "")
    assert "over already: cancelled" in again.stderr


def test_cancel_wants_a_run(run: RunDir) -> None:
    assert invoke("cancel").exit_code == 2


def test_resume_refuses_a_run_that_is_not_over(
    run: RunDir, sleeper: subprocess.Popen[bytes]
) -> None:
    launched(run, pid=sleeper.pid, pid_started=ticks(sleeper.pid))
    stated(run, "running", 10)
    result = invoke("resume", run.id)
    assert result.exit_code == 2
    assert f"run {run.id} is not over: it is running" in result.stderr
    assert len(run.read_launches()) == 1


def _given(run: RunDir) -> None:
    write_json(
        run.provenance,
        {
            "steps": 40, "job_text": JOB, "job_file": "job.yaml", "overrides": [],
            "directory": str(run.root), "resumes": [],
        },
    )  # fmt: skip
    launched(run)
    stated(run, "stopped", 20)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.layers=3", "model.layers was 2, is 3"),
        ("model.vocab_size=512", "model.vocab_size was 256, is 512"),
        ("data.sequence_length=16", "data.sequence_length was 32, is 16"),
        ("model.norm=rmsnorm", "model.norm was layernorm, is rmsnorm"),
    ],
)
def test_resume_refuses_another_model(run: RunDir, override: str, said: str) -> None:
    _given(run)
    result = invoke("resume", run.id, "--set", override)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(run.read_launches()) == 1


def test_resume_from_a_step_that_is_not_there(run: RunDir) -> None:
    _given(run)
    result = invoke("resume", run.id, "--from", "7")
    assert result.exit_code == 5
    assert "no checkpoint of step 7" in result.stderr
    assert "steps that there are: none" in result.stderr
    assert invoke("resume", run.id, "--from", "x").exit_code == 2


def test_resume_says_why_damaged_checkpoints_are_passed_over(run: RunDir) -> None:
    _given(run)
    for step in (10, 20):
        (run.checkpoints / f"step{step:08d}").mkdir(parents=True)
    result = invoke("resume", run.id)
    assert result.exit_code == 5
    assert "the checkpoint of step 20 is passed over: " in result.stderr
    assert "none of 2 checkpoints" in result.stderr
    assert os.listdir(run.failures_dir) == []


# ---- run ----------------------------------------------------------------------------------


def test_run_of_something_else_says_who_starts_ranks(tmp_path: Path) -> None:
    result = invoke("run", str(tmp_path))
    assert result.exit_code == 2
    assert "not a run directory" in result.stderr
