"""Damage, dead writers and failing storage: nothing committed is lost, nothing bad is taken."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoint_rank_programs import numbers, save_on_full_disk, save_small, small

from hpctrain.errors import CheckpointError
from hpctrain.io import directory, quota
from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.comm import SoloCommunicator
from hpctrain.io.recover import Recovery
from hpctrain.testing import ranks

PROGRAMS = Path(__file__).with_name("checkpoint_rank_programs.py")


def small_store(root: Path, steps: tuple[int, ...] = (1, 2)) -> CheckpointStore:
    store = CheckpointStore(root, SoloCommunicator(), keep=5)
    for step in steps:
        rank_state = {"generator": np.arange(100, dtype=np.uint8)}
        store.save(step, small(step), scalars={"step": step, "lr": 0.1}, per_rank=rank_state)
    return store


@pytest.mark.parametrize("files", ["one", "rank"])
def test_a_thousand_damages_are_found_before_a_step_is_taken(tmp_path: Path, files: str) -> None:
    """Flipped bits, truncated and deleted files, 500 on each kind of checkpoint: what a run asks
    when it starts never names the damaged one, and says which file it was."""
    if files == "one":
        small_store(tmp_path)
    else:
        ranks.run_ranks(2, save_small, str(tmp_path), files)
    store = CheckpointStore(tmp_path, SoloCommunicator())
    assert _chosen(store) == (2, [])
    paths = sorted((tmp_path / "step00000002").iterdir())
    assert len(paths) == (3 if files == "one" else 5)
    dice = random.Random(1)
    counts = dict.fromkeys(("flip", "truncate", "delete"), 0)
    for _ in range(500):
        # Each file is hit as often as the others, however small it is.
        path = dice.choice(paths)
        how = dice.choices(tuple(counts), (8, 3, 1))[0]
        counts[how] += 1
        size = path.stat().st_size
        position, bit = dice.randrange(size), dice.randrange(8)
        data = path.read_bytes()
        if how == "flip":
            _flip(path, position, bit)
        elif how == "truncate":
            path.write_bytes(data[:position])
        else:
            path.unlink()
        step, skipped = _chosen(store)
        assert (step, [s for s, _ in skipped]) == (1, [2]), (path.name, how, position, bit)
        assert str(path.parent) in skipped[0][1]
        path.write_bytes(data)
    assert all(count > 20 for count in counts.values())
    assert _chosen(store) == (2, [])


def _chosen(store: CheckpointStore) -> tuple[int, list[tuple[int, str]]]:
    """What a run that starts now would go on from, as the trainer asks for it."""
    recovery = Recovery(store, [], 0)
    choice = recovery.find()
    assert choice is not None
    with recovery.open(choice) as reader:
        assert reader.step == choice.step
    return choice.step, recovery.skipped


def _flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ (1 << bit)]))


def test_reading_verifies_too(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    with store.open(2) as reader:
        start = reader.manifest.tensors["model/w"].extents[0].start
    _flip(tmp_path / "step00000002" / "tensors.h5", start + 8, 3)
    with store.open(2) as reader:
        assert reader.read("model/b", (0,), (30,))[0] == 2
        with pytest.raises(
            CheckpointError, match=r"extent model/w\[0:40, 0:30\] at byte \d+: chec"
        ):
            reader.read("model/w", (20, 0), (1, 30))


@pytest.mark.parametrize("keep", [0, 1, 100, 4096, -1])
def test_truncation_is_found(tmp_path: Path, keep: int) -> None:
    store = small_store(tmp_path)
    for path in sorted((tmp_path / "step00000002").iterdir()):
        data = path.read_bytes()
        if keep < len(data):
            path.write_bytes(data[:keep])
            step, skipped = store.latest_good(verify=False)
            assert (step, [s for s, _ in skipped]) == (1, [2]), path.name
            path.write_bytes(data)
    assert store.latest_good() == (2, [])


def test_missing_files_are_found(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    for path in sorted((tmp_path / "step00000002").iterdir()):
        aside = tmp_path / "aside"
        path.rename(aside)
        step, skipped = store.latest_good(verify=False)
        assert step == 1
        assert f"{path}: No such file or directory" in skipped[0][1]
        with pytest.raises(CheckpointError, match="No such file"):
            store.open(2)
        aside.rename(path)


def test_a_newer_format_is_refused_in_words(tmp_path: Path) -> None:
    store = small_store(tmp_path, (1,))
    from hpctrain.io.manifest import seal

    folder = tmp_path / "step00000001"
    text = (
        (folder / "manifest.json").read_text().replace('"format_version": 1', '"format_version": 2')
    )
    (folder / "manifest.json").write_text(text)
    (folder / "manifest.json.xxh3").write_text(seal(text.encode()))
    with pytest.raises(CheckpointError, match="format version 2; this hpctrain reads 1"):
        store.open(1)


def test_no_checkpoints_at_all(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none", SoloCommunicator())
    assert store.latest_good() == (None, [])
    assert store.steps() == []
    assert store.clean() == []


def test_leftovers_are_removed_and_named(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    host = os.uname().nodename
    dead = f"step00000003.tmp-{host}.{_dead_pid()}.12345.abc123"
    elsewhere = "step00000003.tmp-no-such-host.1.2.abc123"
    at_work = "step00000004.tmp-another-host.1.2.abc123"
    alive = f"step00000003.tmp-{host}.{os.getppid()}.{directory._started(os.getppid())}.abc123"
    moving = f".latest-{host}.{os.getppid()}.{directory._started(os.getppid())}.abc123"
    for name in (dead, elsewhere, at_work, alive, ".trash-step00000000.abc123"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors.h5").write_bytes(b"half")
    (tmp_path / ".latest-abc123").write_text("step")
    (tmp_path / moving).write_text("step")
    # Another host's writer cannot be asked: what it wrote last says whether it is alive.
    long_ago = time.time() - directory.LEASE_SECONDS - 5
    for path in (tmp_path / elsewhere / "tensors.h5", tmp_path / elsewhere, tmp_path / at_work):
        os.utime(path, (long_ago, long_ago))
    lines = store.clean()
    kept = ["latest", "step00000001", "step00000002", alive, at_work, moving]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    assert len(lines) == 7
    for name in (alive, at_work, moving):
        assert any(line.startswith(f"left {name}: ") for line in lines)
    assert "its writer on another-host was at work 0 s ago" in " ".join(lines)
    assert sum(line.startswith("removed ") for line in lines) == 4
    assert store.latest_good() == (2, [])
    # It dies; the next save that is durable takes it away, and what is at work here stays.
    os.utime(tmp_path / at_work / "tensors.h5", (long_ago, long_ago))
    os.utime(tmp_path / at_work, (long_ago, long_ago))
    store.keep = 2
    report = store.save(5, small(5), scalars={}, per_rank={})
    assert report.warnings == (f"removed {at_work}: its writer died before the commit",)
    kept = ["latest", "step00000002", "step00000005", alive, moving]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def _dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_step_whose_replacement_never_came_is_restored(tmp_path: Path) -> None:
    """A crash between the two renames that replace a step."""
    store = small_store(tmp_path)
    (tmp_path / "step00000002").rename(tmp_path / ".replaced-step00000002.abc123")
    assert store.clean() == ["restored step00000002: its replacement was never committed"]
    assert store.latest_good() == (2, [])


def test_killed_at_any_moment_every_commit_survives(tmp_path: Path) -> None:
    dice = random.Random(5)
    for round_ in range(10):
        root = tmp_path / str(round_)
        command = [sys.executable, str(PROGRAMS), str(root)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n"
        time.sleep(dice.uniform(0, 0.15))
        child.send_signal(signal.SIGKILL)
        committed = [1, *map(int, child.stdout.read().split())]
        child.wait()
        store = CheckpointStore(root, SoloCommunicator(), keep=2)
        store.clean()
        assert not [path for path in root.iterdir() if not path.name.startswith(("step", "latest"))]
        assert not list(root.glob("*.tmp-*"))
        step, skipped = store.latest_good()
        # The commit may have happened and its line not.
        assert step in (committed[-1], committed[-1] + 1)
        assert skipped == []
        with store.open(step) as reader:
            found = reader.read("model/w", (0, 0), (3000, 1000))
        expected = numbers([3000, 1000])
        expected[0, 0] = step
        assert np.array_equal(found, expected)
        shutil.rmtree(root)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts tmpfs file systems with given options; needs root."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        root = tmp_path / f"mount{len(mounted)}"
        root.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"SKIPPED: a full disk needs root to mount a tmpfs: {done.stderr.strip()}")
        mounted.append(root)
        return root

    yield mount
    for root in mounted:
        subprocess.run(["umount", str(root)], check=True)


def test_too_little_space_is_seen_before_anything_is_written(
    tmpfs: Callable[[str], Path],
) -> None:
    result = save_on_full_disk(str(tmpfs("size=2m") / "checkpoints"), False, 8)
    assert "checkpoints: 8.0 MiB wanted, 1.9 MiB free" in result["told"]
    assert result["left"] == ["latest", "step00000001"]
    assert (result["step"], result["skipped"]) == (1, [])


# Eight inodes: the root, the directory, a checkpoint and its three files, latest, and one left.
@pytest.mark.parametrize("options", ["size=2m", "size=64m,nr_inodes=8"])
def test_a_disk_that_fills_up(tmpfs: Callable[[str], Path], options: str) -> None:
    """No space for data (a quota that statvfs does not know of), or for another file."""
    result = save_on_full_disk(str(tmpfs(options) / "checkpoints"), True, 8)
    assert "the checkpoint of step 2 was not written" in result["told"]
    assert "No space left on device" in result["told"]
    assert "/checkpoints/step00000002.tmp-" in result["told"]
    assert result["left"] == ["latest", "step00000001"]
    assert (result["step"], result["skipped"]) == (1, [])


def test_read_only(tmpfs: Callable[[str], Path]) -> None:
    root = tmpfs("size=2m")
    store = small_store(root, (1,))
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system") as caught:
        small_store(root, (2,))
    assert str(root) in caught.value.message
    assert store.latest_good() == (1, [])


def test_a_quota_is_seen_before_anything_is_written(tmpfs: Callable[[str], Path]) -> None:
    """A user's quota on a tmpfs, which root is not held to: the ranks are somebody else."""
    root = tmpfs("size=64m,usrquota,usrquota_block_hardlimit=4m")
    (root / "checkpoints").mkdir()
    os.chown(root / "checkpoints", 65534, 65534)
    code = (
        "import json, os, sys, checkpoint_rank_programs as programs; os.setgid(65534); "
        "os.setuid(65534); "
        "print(json.dumps(programs.save_on_full_disk(sys.argv[1], False, 8)))"
    )
    command = [sys.executable, "-c", code, str(root / "checkpoints")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROGRAMS.parent)
    assert "8.0 MiB wanted, 3.9 MiB left of the user's quota" in done.stdout


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("     /lustre  4194304  0  8388608  -  9  0  0  -\n", 4 << 30),
        ("     /lustre  8388609* 0  8388608  -  9  0  0  -\n", 0),
        ("     /lustre  4194304  0  0  -  9  0  0  -\n", None),
        ("Unexpected quotactl error: Operation not supported\n", None),
    ],
)
def test_what_lustre_says_of_a_quota(text: str, left: int | None) -> None:
    assert quota.parse_lustre(text) == left
