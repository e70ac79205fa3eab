"""Start a program so that it and all its descendants can be ended, and nothing else can.

Slurm's daemons start programs that leave their parent, their session and their name behind
(slurmstepd does all three), so neither a process group nor a look through the process table
finds them reliably. The kernel can: a *child subreaper* (``prctl(2)``) becomes the parent of
every orphan below it. Each daemon therefore runs under a keeper, a tiny process that is such a
subreaper. To end a daemon with everything it ever started, the keeper kills its own children,
adopts theirs, and goes on until it has none. It signals only its own unreaped children, by
number, so no other process of this machine can be hit, not even after a number is reused.

The keeper holds one end of a pipe to the process that started it. When that process is gone,
however it went, the pipe closes and the keeper ends everything: no test run leaves daemons.

This file is also the keeper's program. It is run by its path and uses the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

_PR_SET_CHILD_SUBREAPER = 36
_GIVE_UP_S = 30.0


class Kept:
    """A program and its descendants, in a session of their own, under a keeper.

    Args:
        argv: the program and its arguments; it has to stay in the foreground.
        env: its whole environment.
        log: file that its stdout and stderr are appended to.
        cwd: its working directory.
    """

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path
    ) -> None:
        self.argv = tuple(argv)
        self.log = log
        with log.open("ab") as sink:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *argv],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process number of the keeper."""
        return self._keeper.pid

    @property
    def returncode(self) -> int | None:
        """Exit status once the program and all descendants have ended, else None."""
        return self._keeper.poll()

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM to the program; after it ended or ``grace_s`` seconds, end what is left."""
        self._tell(f"{grace_s}\n".encode())

    def kill(self) -> None:
        """SIGKILL to the program and all descendants."""
        self._tell(b"")

    def _tell(self, message: bytes) -> None:
        pipe = self._keeper.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            if message and not pipe.closed:
                pipe.write(message)
                pipe.flush()
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
        self._keeper.wait()

    def __enter__(self) -> Kept:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()


def _children() -> Iterator[int]:
    me = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            stat = Path("/proc", name, "stat").read_text(errors="replace")
            # pid (comm) state ppid ...; comm may hold blanks and parentheses itself.
            if int(stat.rpartition(")")[2].split()[1]) == me:
                yield int(name)


def _reap(program: int, status: int | None) -> tuple[int | None, bool]:
    """Collect ended children; the program's status, and whether any child is left."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return status, True
            if pid == program:
                status = os.waitstatus_to_exitcode(wait_status)
    return status, False


def _end_all(program: int, status: int | None, grace_s: float) -> int | None:
    left = True
    if grace_s and status is None:
        os.kill(program, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while left and status is None and time.monotonic() < deadline:
            time.sleep(0.01)
            status, left = _reap(program, status)
    deadline = time.monotonic() + _GIVE_UP_S
    while left and time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        status, left = _reap(program, status)
    return status


def _keep(argv: Sequence[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    term = {"seen": False}
    signal.signal(signal.SIGTERM, lambda *_: term.update(seen=True))
    program = subprocess.Popen(argv, stdin=subprocess.DEVNULL).pid
    status, left, grace_s = None, True, 0.0
    while left and not term["seen"]:
        ready, _, _ = select.select([0, wake_r], [], [])
        if wake_r in ready:
            os.read(wake_r, 4096)
            status, left = _reap(program, status)
        if 0 in ready:
            grace_s = float(os.read(0, 64) or 0)
            break
    if left:
        status = _end_all(program, status, grace_s)
    status = 1 if status is None else status
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(_keep(sys.argv[1:]))
