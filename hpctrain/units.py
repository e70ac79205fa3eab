"""Walltimes, byte sizes and counts: read what people write, print what Slurm reads.

Walltimes are seconds, sizes are bytes, both ``int``.
"""

from __future__ import annotations

import re

_BYTE_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "p": 10**15,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
    "pi": 2**50,
}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)"
_UNIT_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_walltime(text: str | int) -> int:
    """Seconds of a walltime.

    Takes Slurm's six forms (``sbatch --time``: minutes, minutes:seconds,
    hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds) and
    amounts with units (``1h30m``, ``2d``). A bare ``A:B`` with ``A`` under 24 is refused:
    Slurm reads it as minutes and seconds, people as hours and minutes.

    Raises:
        ValueError: not a walltime, ambiguous, or shorter than a minute.
    """
    raw = str(text).strip()
    seconds = _walltime_seconds(raw)
    if seconds < 60:
        raise ValueError(
            f"{raw!r} is {seconds} s: Slurm counts in minutes and rounds this to no limit; "
            "give at least one minute"
        )
    return seconds


def _walltime_seconds(raw: str) -> int:
    if re.fullmatch(r"\d+", raw):
        return int(raw) * 60
    if match := re.fullmatch(r"(\d+):([0-5]?\d)", raw):
        first, second = int(match[1]), int(match[2])
        if first < 24:
            raise ValueError(
                f"{raw!r} is ambiguous: Slurm reads {first} minutes {second} seconds; write "
                f"00:{first:02d}:{second:02d} for that, or {first}h{second}m"
            )
        return first * 60 + second
    if match := re.fullmatch(r"(\d+):([0-5]?\d):([0-5]?\d)", raw):
        return int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3])
    if match := re.fullmatch(r"(\d+)-(\d{1,2})(?::([0-5]?\d)(?::([0-5]?\d))?)?", raw):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return days * 86400 + hours * 3600 + minutes * 60 + seconds
    units = re.fullmatch(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m(?:in)?)?\s*(?:(\d+)s)?", raw)
    if raw and units:
        amounts = zip("dhms", units.groups(), strict=True)
        return sum(_UNIT_SECONDS[unit] * int(amount or 0) for unit, amount in amounts)
    raise ValueError(
        f"{raw!r} is not a walltime; write 90 (minutes), 01:30:00, 1-12 (days-hours), 1-12:30, "
        "1-12:30:00, 1h30m or 2d"
    )


def format_walltime(seconds: int) -> str:
    """``D-HH:MM:SS``, the form that every Slurm command reads the same way."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24)
    return f"{day}-{hour:02d}:{minute:02d}:{second:02d}"


def format_duration(seconds: float) -> str:
    """Short text for people: ``850 ms``, ``42 s``, ``3m05s``, ``2h10m``, ``3d04h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_seconds(seconds: float) -> str:
    """What was measured, with three digits: ``14.7 s``, ``83.1 ms``, ``12 us``."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * scale >= 1.0:
            return f"{seconds * scale:.3g} {unit}" if abs(seconds) < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} us"


def parse_bytes(text: str | int | float) -> int:
    """Bytes of ``64MiB``, ``1.5 GB``, ``4096`` or ``1e9``.

    Raises:
        ValueError: not a size, negative, or not a whole number of bytes.
    """
    raw = str(text).strip()
    match = re.fullmatch(_NUMBER + r"\s*([kKmMgGtTpP]i?)?[bB]?", raw)
    if not match:
        raise ValueError(f"{raw!r} is not a size in bytes; write 4096, 64MiB, 1.5GB or 1e9")
    return _whole(float(match[1]) * _BYTE_UNITS[(match[2] or "").lower()], raw, "bytes")


def parse_count(text: str | int | float) -> int:
    """A whole number from ``1000``, ``1e9``, ``2.5M`` or ``1.3B`` (powers of ten).

    Raises:
        ValueError: not a count, negative, or not whole.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    raw = str(text).strip().replace("_", "")
    match = re.fullmatch(_NUMBER + r"\s*([kKmMbBgGtT])?", raw)
    if not match:
        raise ValueError(f"{raw!r} is not a count; write 1000, 1e9, 2.5M or 1.3B")
    return _whole(float(match[1]) * _COUNT_UNITS[(match[2] or "").lower()], raw, "units")


def _whole(value: float, raw: str, what: str) -> int:
    if value > 2**63:
        raise ValueError(f"{raw!r} is too large")
    if abs(value - round(value)) > 1e-6 * max(1.0, value):
        raise ValueError(f"{raw!r} is not a whole number of {what}")
    return round(value)


def format_bytes(count: float) -> str:
    """``1.5 GiB``: binary units, as memory and files are counted."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} PiB"


def format_count(count: float) -> str:
    """``1.3B``, ``124M``, ``12.5K``: parameters, tokens."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.3g}"
