"""Whole jobs: the interval they find by themselves, and storage that fails them."""

from __future__ import annotations

import itertools
import pydoc_data.topics
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.comm import SoloCommunicator
from hpctrain.io.corpus import open_sources, tokenize
from hpctrain.io.encoders import ByteEncoder
from hpctrain.rundir import RunDir
from hpctrain.testing.jobs import run_job

pytestmark = pytest.mark.mpi
JOB = """\
name: saving
model: {layers: 2, hidden: 32, heads: 4, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 32, shuffle_block: 4}
train: {steps: 60, global_batch: 2, lr: 3e-3}
checkpoint: {every: 5}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saving")
    (folder / "text.txt").write_text("".join(pydoc_data.topics.topics.values())[:20_000])
    sources = open_sources([folder / "text.txt"], "text", "text")
    tokenize(sources, folder / "tokens.h5", ByteEncoder())
    return folder


def events(run: RunDir, kind: str) -> list[str]:
    return [event.message for event in run.read_events() if event.kind == kind]


def durable(run: RunDir) -> list[int]:
    return [event.data["step"] for event in run.read_events() if event.kind == "checkpoint"]


def test_the_interval_follows_from_cost_and_mtbf(folder: Path) -> None:
    """Daly's, from what the job says that it measured; and the steps saved are its multiples."""
    options = (
        "checkpoint.every=auto",
        "checkpoint.mtbf=1m",
        "train.steps=700",
        "train.log_every=100",
    )
    run = run_job(JOB, folder, *options)
    assert durable(run)[0] == 5  # the first is taken early, to learn its cost
    changes = [event for event in run.read_events() if event.kind == "checkpoint_interval"]
    assert changes
    pattern = re.compile(
        r"every (\d+) steps from now on, every (\d+) before: one costs (\S+) s and is durable "
        r"after (\S+) s, a step takes (\S+) s, checkpoint.mtbf is 60 s"
    )
    for change in changes:
        found = pattern.fullmatch(change.message)
        assert found is not None, change.message
        every, _, cost, duration, step = map(float, found.groups())
        half = cost / 120
        daly = (120 * cost) ** 0.5 * (1 + half**0.5 / 3 + half / 9) - cost
        right = max(daly, 1.1 * duration) / step
        # The numbers are printed with three digits, and the interval is rounded to a step.
        assert every == pytest.approx(max(1, right), rel=0.02, abs=0.6), change.message
    first = changes[0].data["step"]
    every = int(changes[0].message.split()[1])
    until = changes[1].data["step"] if len(changes) > 1 else 10**9
    saved = [step for step in durable(run) if first + every < step < min(until, 700)]
    # A step more or less is not worth an event, but moves the multiples.
    gaps = [later - step for step, later in itertools.pairwise(saved)]
    assert all(0.8 * every <= gap <= 2 * every + 1 for gap in gaps), (every, saved)


@contextmanager
def mounted(root: Path, options: str) -> Iterator[None]:
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"SKIPPED: a full disk needs root to mount a tmpfs: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(root)], check=True)


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_full_disk_ends_the_job_or_does_not_as_it_says(
    folder: Path, tmp_path: Path, on_error: str
) -> None:
    """Room for one checkpoint of 0.9 MB, which stays, and never for a second."""
    disk = tmp_path / "disk"
    with mounted(disk, "size=1500k"):
        options = (f"checkpoint.path={disk}", f"checkpoint.on_error={on_error}", "train.steps=12")
        run = run_job(JOB, folder, *options, expect=0 if on_error == "continue" else 5)
        failed = events(run, "checkpoint_failed")
        assert len(failed) == (2 if on_error == "continue" else 1)
        for message, step in zip(failed, (10, 12), strict=False):
            assert f"the checkpoint of step {step} was not written" in message
            assert re.search(rf"{disk}: [\d.]+ KiB wanted, [\d.]+ KiB free", message), message
        assert CheckpointStore(disk, SoloCommunicator()).latest_good() == (5, [])
        assert sorted(p.name for p in disk.iterdir()) == ["latest", "step00000005"]
        state = run.read_state()
        assert state is not None
        assert state.durable_step == 5
        if on_error == "continue":
            assert len(list(run.read_steps())) == 12
        else:
            (failure,) = run.read_failures()
            assert "not written" in failure.message
