"""Names, commit, retention and leftovers in a directory of checkpoints; file-system calls only."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from hpctrain.errors import CheckpointError
from hpctrain.io.manifest import read_manifest

LATEST = "latest"
_STEP = re.compile(r"step(\d{8,})")
_WRITER = r"(?P<host>.+)\.(?P<pid>\d+)\.(?P<started>\d+)\.\w+"
_ASIDE = re.compile(r"step\d{8,}\.tmp-" + _WRITER)
_PASSING = re.compile(
    rf"\.(?:trash-step\d{{8,}}\.|replaced-(?P<name>step\d{{8,}})\.|{LATEST}-)(?:{_WRITER}|\w+)"
)
LEASE_SECONDS = 600.0
"""A writer on another host that has written nothing for so long is taken for dead."""


def step_name(step: int) -> str:
    return f"step{step:08d}"


def step_of(name: str) -> int | None:
    """Step of a checkpoint's directory name, None where it is not one."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def writer() -> str:
    """This process as it stands in the names of what it writes before the commit."""
    pid = os.getpid()
    return f"{os.uname().nodename}.{pid}.{_started(pid) or 0}"


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks, so that a reused pid is told apart."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return int(stream.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def fsync_path(path: Path) -> None:
    """fsync a directory: a name in it is durable only then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file and fsync it.

    Raises:
        OSError: names the file.
    """
    try:
        with path.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_durably(path: Path, data: bytes) -> None:
    """Write a small file aside, fsync it and give it its name: it is there whole or not at all.

    Raises:
        OSError: names the file.
    """
    beside = path.with_name(f".{path.name}")
    try:
        write_durably(beside, data)
        beside.rename(path)
        fsync_path(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def committed(root: Path) -> dict[int, Path]:
    """Checkpoint directories by step."""
    try:
        entries = [
            (match, path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name))
        ]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {int(match[1]): path for match, path in entries if match and path.is_dir()}


def _sequences(root: Path) -> dict[int, int | None]:
    """Commit number of each step; None where the manifest cannot be read."""
    found: dict[int, int | None] = {}
    for step, path in committed(root).items():
        try:
            found[step] = read_manifest(path).sequence
        except CheckpointError:
            found[step] = None
    return found


def last_sequence(root: Path) -> int:
    return max((number for number in _sequences(root).values() if number is not None), default=0)


def by_commit(root: Path) -> list[int]:
    """Steps, most recently committed first.

    That is not the highest step where training went back to an older one.
    """
    return [step for step, _ in commits(root)]


def commits(root: Path) -> list[tuple[int, float]]:
    """Steps with the numbers of their saves, most recently committed first.

    A checkpoint with no readable manifest is placed right after the highest step below its own.
    """
    sequences = _sequences(root)
    keys: dict[int, float] = {}
    for step, number in sequences.items():
        if number is None:
            below = [n for s, n in sequences.items() if s < step and n is not None]
            keys[step] = max(below, default=0) + 0.5
        else:
            keys[step] = float(number)
    return sorted(keys.items(), key=lambda item: (item[1], item[0]), reverse=True)


def commit(root: Path, written: Path, step: int) -> None:
    """Give a finished directory its name, durably, and move the pointer."""
    final = root / step_name(step)
    replaced = None
    own = f"{writer()}.{secrets.token_hex(3)}"
    if final.exists():
        replaced = root / f".replaced-{final.name}.{own}"
        final.rename(replaced)
    written.rename(final)
    fsync_path(root)
    pointer = root / f".{LATEST}-{own}"
    write_durably(pointer, f"{final.name}\n".encode())
    pointer.replace(root / LATEST)
    fsync_path(root)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def remove(root: Path, step: int) -> None:
    """Remove a checkpoint; an interruption leaves nothing that looks like one."""
    trash = root / f".trash-{step_name(step)}.{writer()}.{secrets.token_hex(3)}"
    (root / step_name(step)).rename(trash)
    shutil.rmtree(trash)


def leftovers(root: Path) -> list[str]:
    """Names of what is being written, or was left behind by a writer that died."""
    try:
        names = sorted(path.name for path in root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for name in names if _ASIDE.fullmatch(name) or _PASSING.fullmatch(name)]


def clean(root: Path, *, elsewhere_only: bool = False) -> list[str]:
    """Remove what writers that died left behind; a line about each thing.

    A writer on this host is dead where its process is gone. One on another host cannot be asked:
    it is dead when it has written nothing for LEASE_SECONDS.

    Args:
        root: directory of the checkpoints.
        elsewhere_only: what writers on this host are at is left alone, and what is left is not
            told; for a writer that tidies up while it is at work itself.
    """
    try:
        entries = sorted(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    lines = []
    for path in entries:
        name = path.name
        aside, passing = _ASIDE.fullmatch(name), _PASSING.fullmatch(name)
        match = aside or passing
        if match is None or (elsewhere_only and match["host"] in (None, os.uname().nodename)):
            continue
        busy = _busy(root, path, match)
        if busy is not None:
            if not elsewhere_only:
                lines.append(f"left {name}: {busy}")
        elif aside:
            shutil.rmtree(path)
            lines.append(f"removed {name}: its writer died before the commit")
        elif passing and passing["name"] is not None:
            # Between the two renames of a replacement there is no checkpoint of that step.
            if not (root / passing["name"]).exists():
                path.rename(root / passing["name"])
                lines.append(f"restored {passing['name']}: its replacement was never committed")
            else:
                shutil.rmtree(path)
                lines.append(f"removed {name}: it was replaced")
        elif path.is_dir():
            shutil.rmtree(path)
            lines.append(f"removed {name}: its removal was interrupted")
        else:
            path.unlink()
            lines.append(f"removed {name}: its writer died")
    return lines


def _busy(root: Path, path: Path, match: re.Match[str]) -> str | None:
    """Why a writer has to be taken for alive; None where it is dead, or not known."""
    host = match["host"]
    if host is None:
        return None
    if host == os.uname().nodename:
        pid = int(match["pid"])
        alive = pid != os.getpid() and _started(pid) == int(match["started"])
        return f"process {pid} is still writing it" if alive else None
    age = _clock(root) - _last_written(path)
    if age >= LEASE_SECONDS:
        return None
    return (
        f"its writer on {host} was at work {max(age, 0):.0f} s ago; it goes when nothing was "
        f"written for {LEASE_SECONDS:.0f} s"
    )


def _last_written(path: Path) -> float:
    """When the directory or anything in it was last written."""
    newest = path.lstat().st_mtime
    if path.is_dir():
        for entry in os.scandir(path):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return newest


def _clock(root: Path) -> float:
    """The time by the file system's own clock, which may be another host's."""
    probe = root / f".clock-{secrets.token_hex(3)}"
    try:
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink()
    except OSError:
        return time.time()
