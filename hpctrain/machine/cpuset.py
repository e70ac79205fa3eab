"""Linux cpu lists (``0-3,8,64-67``) and the masks that srun takes."""

from __future__ import annotations

import re
from collections.abc import Iterable


def parse_cpuset(text: str) -> tuple[int, ...]:
    """CPU numbers of a cpu list in ascending order; an empty list is no CPU.

    Raises:
        ValueError: not a cpu list.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        if not part.strip():
            continue
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"{text!r} is not a cpu list; write 0-7 or 0-7,64-71")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{text!r}: the range {part.strip()} runs backwards")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def format_cpuset(cpus: Iterable[int]) -> str:
    """The shortest cpu list of the given CPUs."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def cpu_mask(cpus: Iterable[int]) -> str:
    """Hexadecimal mask of the CPUs without 0x, as in ``srun --cpu-bind=mask_cpu:``."""
    mask = 0
    for cpu in cpus:
        mask |= 1 << cpu
    return f"{mask:x}"
