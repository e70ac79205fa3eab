"""Stopping and going on: bit for bit on the same layout, whatever ended the run."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from hpctrain.testing.jobs import make_run, run_job, start_run

pytestmark = pytest.mark.mpi


def numbers(run):
    """What must be equal to the last bit."""
    by_step = {s.step: (s.loss, s.grad_norm, s.lr, s.tokens) for s in run.read_steps()}
    return [by_step[step] for step in sorted(by_step)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tokens):
    from conftest import JOB

    folder = tmp_path_factory.mktemp("straight")
    (folder / "tokens.h5").symlink_to(tokens)
    return numbers(run_job(JOB, folder, ranks=2))


def ranks_of(process) -> list[psutil.Process]:
    """The Python ranks below mpiexec."""
    parent = psutil.Process(process.pid)
    return [p for p in parent.children(recursive=True) if "python" in p.name()]


def wait_for_step(run, step: int, process, timeout: float = 150.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        last = run.last_step()
        if last is not None and last.step >= step:
            return
        time.sleep(0.02)
    pytest.fail(f"step {step} not reached; exit {process.poll()}")


def wait_for_checkpoint(run, step: int, process, timeout: float = 150.0) -> None:
    """Saving goes on in the background: a step being done does not make it durable."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        state = run.read_state()
        if state is not None and state.durable_step >= step:
            return
        time.sleep(0.02)
    pytest.fail(f"checkpoint {step} not durable; exit {process.poll()}")


@pytest.mark.parametrize(
    ("sharding", "ranks"), [("none", 2), ("none", 4), ("zero3", 2), ("zero3", 4)]
)
def test_a_stopped_run_goes_on_bit_for_bit(folder, job, straight, sharding, ranks):
    # With four ranks the rounding of a sum depends on where in a bucket it stands.
    options = (f"parallel.sharding={sharding}", "checkpoint.every=7")
    whole = numbers(run_job(job, folder, options[0], ranks=ranks))
    run = make_run(job, folder, *options, f"ranks_per_node={ranks}")
    run.stop_file.touch()  # agreed on at the first step boundary: stop, save, exit 75
    process = start_run(run, ranks)
    assert process.wait(60) == 75
    state = run.read_state()
    assert state is not None
    assert state.status == "stopped"
    run.stop_file.unlink()
    run_job(job, folder, *options, ranks=ranks, run=run)
    assert numbers(run) == whole
    if (sharding, ranks) == ("none", 2):
        assert whole == straight, "and two runs of one job are equal"


@pytest.mark.parametrize("which", ["one rank", "all ranks"])
def test_a_killed_run_goes_on_bit_for_bit(folder, job, straight, which):
    run = make_run(job, folder, "checkpoint.every=3", "ranks_per_node=2", "name=killed")
    process = start_run(run, 2)
    wait_for_step(run, random.randint(4, 15), process)
    wait_for_checkpoint(run, 3, process)
    ranks = ranks_of(process)
    for rank in ranks if which == "all ranks" else random.sample(ranks, 1):
        rank.kill()
    assert process.wait(60) != 0
    process = start_run(run, 2)
    assert process.wait(120) == 0
    resumed = [event for event in run.read_events() if event.kind == "resumed"]
    assert len(resumed) == 1
    assert resumed[0].data["step"] % 3 == 0
    assert numbers(run) == straight


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_one_rank_stops_all_at_one_step(folder, job, straight, number):
    run = make_run(job, folder, "ranks_per_node=2")
    process = start_run(run, 2)
    wait_for_step(run, 2, process)
    ranks_of(process)[1].send_signal(number)
    assert process.wait(60) == 75
    state = run.read_state()
    assert state is not None
    assert state.status == "stopped"
    assert number.name in state.reason
    assert state.durable_step == state.step < 20
    process = start_run(run, 2)
    assert process.wait(60) == 0
    assert numbers(run) == straight


def test_the_deadline_needs_no_signal(folder, job):
    run = make_run(job, folder, "train.steps=100000", "ranks_per_node=2")
    process = start_run(run, 2, env={"HPCTRAIN_DEADLINE": str(time.time() + 8)})
    assert process.wait(60) == 75
    state = run.read_state()
    assert state is not None
    assert "walltime" in state.reason
    assert state.durable_step == state.step > 0


@pytest.mark.parametrize(
    ("first", "second"), [((2, "zero3"), (1, "none")), ((1, "none"), (4, "zero2"))]
)
def test_another_layout_goes_on_with_the_same_samples(folder, job, straight, first, second):
    ranks, sharding = first
    half = ("train.steps=20", "checkpoint.every=10")
    run = make_run(job, folder, *half, f"parallel.sharding={sharding}", f"ranks_per_node={ranks}")
    process = start_run(run, ranks)
    wait_for_checkpoint(run, 10, process)
    for rank in ranks_of(process):
        rank.kill()
    process.wait(60)
    ranks, sharding = second
    run_job(job, folder, *half, f"parallel.sharding={sharding}", ranks=ranks, run=run)
    for (loss, norm, lr, tokens), reference in zip(numbers(run), straight, strict=True):
        assert loss == pytest.approx(reference[0], abs=1e-5)
        assert norm == pytest.approx(reference[1], rel=1e-4)
        assert (lr, tokens) == reference[2:]


def test_a_damaged_checkpoint_is_passed_over_and_named(folder, job, straight):
    run = make_run(job, folder, "checkpoint.every=5", "ranks_per_node=2", "checkpoint.keep=3")
    process = start_run(run, 2)
    wait_for_checkpoint(run, 10, process)
    for rank in ranks_of(process):
        rank.kill()
    process.wait(60)
    newest = max(run.checkpoints.glob("step" + "[0-9]" * 8), key=lambda p: p.name)
    (data,) = newest.glob("*.h5")
    damage(data)
    process = start_run(run, 2)
    assert process.wait(120) == 0
    events = {event.kind: event for event in run.read_events()}
    assert events["checkpoint_skipped"].data["step"] == int(newest.name[4:])
    assert events["resumed"].data["step"] == int(newest.name[4:]) - 5
    assert numbers(run) == straight


def damage(path: Path) -> None:
    """Flip one bit in the middle of the file."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 16]))


def test_a_loss_that_is_not_finite_never_reaches_a_checkpoint(folder, job):
    run = run_job(job, folder, "train.lr=1e30", "checkpoint.every=1", "train.clip=null", expect=6)
    (failure,) = run.read_failures()
    assert "not finite" in failure.message
    state = run.read_state()
    assert state is not None
    assert f"checkpoint is step {state.durable_step}" in failure.message
