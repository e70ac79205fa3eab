"""The launcher's process of a local run: start, recognise it later, end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpctrain.records import LaunchRecord


@contextmanager
def held(
    tokens: Sequence[str], *, log: Path, env: Mapping[str, str], directory: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], None]]]:
    """A launcher that begins only when it is released, so that it can be written down first.

    It runs in a session of its own, its output appended to ``log``: a terminal's Ctrl-C and
    its closing reach only ``hpctrain submit``, which decides what they mean; the run outlives
    it. Should we die before the release, nothing is started.

    Yields:
        The process, and the function that releases it.
    """
    with log.open("ab") as stream:
        # After the exec it is the launcher itself, with the same pid and start time.
        child = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _ && exec "$@" </dev/null', "hpctrain", *tokens],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=directory,
            start_new_session=True,
        )
    assert child.stdin is not None

    def release() -> None:
        assert child.stdin is not None
        child.stdin.write(b"go\n")
        child.stdin.close()

    try:
        yield child, release
    finally:
        if not child.stdin.closed:
            child.stdin.close()  # never released: read fails and the shell ends
            child.wait()


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks (``/proc/PID/stat``, field 22), 0 where it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def alive(launch: LaunchRecord) -> bool | None:
    """Whether the launcher of a local run still runs; None where that cannot be seen from here."""
    if launch.host != socket.gethostname():
        return None
    fields = _stat(launch.pid)
    # A zombie has ended; in a container without an init it may stay one for ever.
    return bool(fields) and fields[0] not in "ZX" and int(fields[19]) == launch.pid_started


def end(launch: LaunchRecord, patience: float = 5.0) -> bool:
    """End a local run's launcher and its ranks now; whether they are gone.

    SIGKILL to the session's processes: a rank takes SIGTERM as a request to checkpoint.
    """
    if not alive(launch):
        return True
    members = _session(launch.pid)
    deadline = time.monotonic() + patience
    for pid in members:
        _signal(pid, signal.SIGKILL)
    while time.monotonic() < deadline:
        if not alive(launch) and not any(_running(pid) for pid in members):
            return True
        time.sleep(0.05)
    return False


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the third on, empty where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    # The second field is the name in parentheses and may hold blanks and parentheses.
    return text.rpartition(")")[2].split()


def _running(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def _session(leader: int) -> list[int]:
    """The leader and all processes of its session or below it, children last."""
    parents: dict[int, list[int]] = {}
    found = {leader}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
            if int(fields[3]) == leader:
                found.add(int(entry.name))
    # hydra gives its proxies and ranks sessions or groups of their own: follow the tree too.
    queue = list(found)
    while queue:
        for child in parents.get(queue.pop(), []):
            if child not in found:
                found.add(child)
                queue.append(child)
    return [leader, *sorted(found - {leader})]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
