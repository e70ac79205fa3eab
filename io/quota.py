"""What a file system's quotas leave this user, where the kernel or Lustre's own tool says it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.io.storage import file_system

_QUOTACTL_FD = 443
"""Number of the system call, the same on every architecture (Linux 5.14 and later)."""
_GETQUOTA = 0x800007
_KINDS = {0: "user", 1: "group", 2: "project"}
_BLOCK = struct.Struct("=8QI4x")
"""struct if_dqblk: hard and soft limit in KiB, bytes in use, three numbers of inodes, the time
until which the soft limit may be exceeded, another for inodes, and which of them are valid."""
_FSGETXATTR = 0x801C581F
_ATTRIBUTES = struct.Struct("=5I8x")
"""struct fsxattr, the fourth number of which is the project."""
_HARD_LIMIT_BYPASSED = 24
"""CAP_SYS_RESOURCE."""


@dataclass(frozen=True, slots=True)
class Left:
    """Bytes that may still be written, and whose quota it is: user, group or project."""

    bytes: int
    whose: str


def quota_left(folder: Path) -> Left | None:
    """The tightest quota that counts for new files in a directory; None where there is none, or
    nobody says.

    Kernel quotas (ext4, XFS, tmpfs …) are asked for by quotactl_fd(2), Lustre's by ``lfs quota``.
    Processes with CAP_SYS_RESOURCE may write beyond kernel quotas, so for them there is none.
    """
    found = list(_lustre(folder) if file_system(folder) == "lustre" else _kernel(folder))
    return min(found, key=lambda left: left.bytes, default=None)


def _kernel(folder: Path) -> Iterator[Left]:
    if _may_exceed():
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        owners = {0: os.geteuid(), 1: os.getegid(), 2: _project(descriptor)}
        for kind, owner in owners.items():
            if owner is not None:
                left = _ask(descriptor, kind, owner)
                if left is not None:
                    yield Left(left, _KINDS[kind])
    finally:
        os.close(descriptor)


def _ask(descriptor: int, kind: int, owner: int) -> int | None:
    library = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.create_string_buffer(_BLOCK.size)
    command = ctypes.c_uint(_GETQUOTA << 8 | kind)
    done = library.syscall(
        ctypes.c_long(_QUOTACTL_FD), ctypes.c_uint(descriptor), command, ctypes.c_int(owner), answer
    )
    if done != 0:
        return None
    hard, soft, used, _, _, _, grace_ends, *_ = _BLOCK.unpack(answer.raw)
    limits = [hard] if hard else []
    if soft and grace_ends and time.time() > grace_ends:
        limits.append(soft)
    return max(0, min(limits) * 1024 - used) if limits else None


def _project(descriptor: int) -> int | None:
    answer = bytearray(_ATTRIBUTES.size)
    try:
        fcntl.ioctl(descriptor, _FSGETXATTR, answer)
    except OSError:
        return None
    number: int = _ATTRIBUTES.unpack(answer)[3]
    return number or None


def _may_exceed() -> bool:
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/self/status").read_text()
        effective = int(text.partition("CapEff:")[2].split()[0], 16)
        return bool(effective >> _HARD_LIMIT_BYPASSED & 1)
    return False


def _lustre(folder: Path) -> Iterator[Left]:
    if shutil.which("lfs") is None:
        return
    for option, owner, whose in (("-u", os.geteuid(), "user"), ("-g", os.getegid(), "group")):
        command = ["lfs", "quota", "-q", option, str(owner), str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return
        left = parse_lustre(done.stdout) if done.returncode == 0 else None
        if left is not None:
            yield Left(left, whose)


def parse_lustre(text: str) -> int | None:
    """Bytes left by ``lfs quota -q``: path, KiB in use (with a star beyond the quota), quota,
    limit, …; None without a limit."""
    words = text.split()
    with contextlib.suppress(ValueError, IndexError):
        used, limit = int(words[1].rstrip("*")), int(words[3])
        return max(0, limit - used) * 1024 if limit else None
    return None
