"""What a test world could leave on this machine."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path


def processes_of(root: Path) -> list[str]:
    """Processes that have ``root`` in their command, environment, directory or open files."""
    needle = str(root).encode()
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        if proc.name == str(os.getpid()):
            continue
        try:
            told = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
            told += os.readlink(proc / "cwd").encode()
            told += b"".join(os.readlink(fd).encode() for fd in (proc / "fd").iterdir())
        except OSError:
            continue
        if needle in told:
            found.append(f"process {proc.name} {(proc / 'cmdline').read_bytes()!r}")
    return found


def traces_of(root: Path, link: str | None = None) -> list[str]:
    """Processes and mounts under ``root``, ``root`` itself, and the network link ``link``."""
    found = processes_of(root)
    found += [
        mount for mount in Path("/proc/mounts").read_text().splitlines() if str(root) in mount
    ]
    if root.exists():
        found.append(f"directory {root}")
    if link is not None:
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
        found += [line for line in links.stdout.splitlines() if link in line]
    return found


def wait_until_gone(root: Path, timeout: float = 20.0) -> None:
    """Wait until no process of ``root`` is left."""
    deadline = time.monotonic() + timeout
    while left := processes_of(root):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def runs(word: str) -> bool:
    """Whether a process of this machine has ``word`` as an argument."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in file.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False
