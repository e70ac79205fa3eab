"""Run the commands of a test world in a clean environment."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.errors import HpctrainError


def search_path() -> str:
    """PATH of a test world: this Python's own programs, the caller's, the system's."""
    found = [str(Path(sys.executable).parent), *os.get_exec_path(), "/usr/sbin", "/sbin"]
    return os.pathsep.join(dict.fromkeys(found))


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """A whole environment: PATH, who the user is, and ``extra``.

    Nothing else of the caller's gets in, so that a Slurm or MPI around the tests cannot reach
    into them.
    """
    me = pwd.getpwuid(os.getuid())
    return {
        "PATH": search_path(),
        "HOME": me.pw_dir,
        "USER": me.pw_name,
        "LOGNAME": me.pw_name,
        "LANG": "C.UTF-8",
        **extra,
    }


def run_command(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    error: type[HpctrainError],
    input: str | None = None,
    timeout: float = 60.0,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its output as text.

    Args:
        argv: program and arguments.
        env: its whole environment.
        cwd: its working directory.
        error: class of the errors raised.
        input: text for its stdin, which is empty otherwise.
        timeout: seconds after which it is killed.
        check: raise where the exit status is not 0.

    Raises:
        HpctrainError: of class ``error``: it failed or ran out of time; says what it printed.
    """
    try:
        done = subprocess.run(
            argv,
            input=input or "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            cwd=cwd,
            env=env,
        )
    except subprocess.TimeoutExpired as exc:
        said = b"\n".join(filter(None, (exc.stdout, exc.stderr))).decode(errors="replace")
        raise error(f"{list(argv)} ran over {timeout:g} s", hint=said) from None
    if check and done.returncode != 0:
        raise error(f"{list(argv)} ended {done.returncode}", hint=done.stdout + done.stderr)
    return done
