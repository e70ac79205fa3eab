"""A rank as a process: where its output goes and what it leaves behind when it fails."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.errors import Exit, HpctrainError
from hpctrain.records import FailureRecord, write_json


def redirect_output(path: Path) -> None:
    """Append this process's stdout and stderr (C libraries' too) to a file, line by line."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def record_failure(
    path: Path, error: BaseException, *, rank: int, host: str, attempt: int, step: int
) -> None:
    """Write the FailureRecord of an exception; never raises.

    What the watchdog has written about this rank stays: that it fails afterwards, woken up to be
    killed, is no news.
    """
    user_error = isinstance(error, HpctrainError)
    record = FailureRecord(
        rank=rank,
        host=host,
        time=time.time(),
        error=type(error).__name__,
        message=str(error),
        traceback="" if user_error else "".join(traceback.format_exception(error)),
        attempt=attempt,
        step=step,
        pid=os.getpid(),
    )
    with contextlib.suppress(OSError):
        if not path.exists():
            write_json(path, record.to_dict())
    text = str(error) if user_error else record.traceback
    with contextlib.suppress(OSError, ValueError):
        print(f"rank {rank} failed:\n{text}", file=sys.stderr, flush=True)  # noqa: T201


def abort(comm: Any | None, code: Exit) -> NoReturn:
    """End every rank of the job now; no collective is entered and no cleanup can hang."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if comm is not None:
        with contextlib.suppress(Exception):
            comm.Abort(int(code))
    os._exit(int(code))


def leave(code: int) -> NoReturn:
    """End this rank in good order: its threads and exit handlers, MPI, then the process, at once.

    The interpreter is not taken down: a thread of a communication library that still lets go of
    a tensor then needs an interpreter that is no longer there, and the process of a rank that
    did all its work ends by SIGABRT.
    """
    from mpi4py import MPI

    # As the interpreter does it first: pools of threads are told to end, and all are waited for.
    threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
    # C's exit and not _exit: MPICH takes leave of its process manager in an exit handler, and
    # mpiexec kills the other ranks where one goes without. Python's lock stays with this thread,
    # for libraries' destructors let go of tensors too.
    ctypes.PyDLL(None).exit(code)
    raise AssertionError("exit does not return")
