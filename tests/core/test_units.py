"""Walltimes, sizes and counts against the forms of sbatch(1) and plain arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.units import (
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
    format_walltime,
    parse_bytes,
    parse_count,
    parse_walltime,
)

DAY = 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        # the six forms of sbatch --time
        ("90", 90 * 60),
        ("30:15", 30 * 60 + 15),
        ("12:00:00", 12 * 3600),
        ("2-12", 2 * DAY + 12 * 3600),
        ("1-12:30", DAY + 12 * 3600 + 30 * 60),
        ("1-12:30:20", DAY + 12 * 3600 + 30 * 60 + 20),
        # amounts with units
        ("1h30m", 5400),
        ("2d", 2 * DAY),
        ("45m", 2700),
        ("90s", 90),
        ("1d2h3m4s", DAY + 2 * 3600 + 3 * 60 + 4),
        (90, 90 * 60),
        ("100:00:00", 360000),
    ],
)
def test_walltime_forms(text, seconds):
    assert parse_walltime(text) == seconds


@pytest.mark.parametrize("text", ["1:30", "10:00", "0:45", "23:59"])
def test_hours_or_minutes_is_refused_as_ambiguous(text):
    with pytest.raises(ValueError, match="ambiguous"):
        parse_walltime(text)


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "29s", "00:00:29", "0-0", "1:2:3:4", "-5", "1.5h", "12:60:00", "1e3", "h"],
)
def test_not_a_walltime(text):
    with pytest.raises(ValueError, match=r"walltime|no limit"):
        parse_walltime(text)


@given(st.integers(60, 400 * DAY))
def test_walltime_round_trip(seconds):
    text = format_walltime(seconds)
    assert parse_walltime(text) == seconds
    days, clock = text.split("-")
    hours, minutes, rest = (int(part) for part in clock.split(":"))
    assert int(days) * DAY + hours * 3600 + minutes * 60 + rest == seconds
    assert hours < 24


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("64MiB", 64 * 2**20),
        ("64M", 64 * 10**6),
        ("1.5 GB", 1_500_000_000),
        ("1e9", 10**9),
        ("2TiB", 2 * 2**40),
        ("0.5KiB", 512),
        (1e9, 10**9),
        ("10kb", 10_000),
    ],
)
def test_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5", "12 parsecs", "1e400", "nan", "0.3KiB"])
def test_not_bytes(text):
    with pytest.raises(ValueError, match=r"size|bytes|large"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "count"), [("1000", 1000), ("1e9", 10**9), ("2.5M", 2_500_000), ("1.3B", 13 * 10**8)]
)
def test_counts(text, count):
    assert parse_count(text) == count


def test_text_for_people():
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(999) == "999 B"
    assert format_count(124_439_808) == "124M"
    assert format_duration(0.85) == "850 ms"
    assert format_duration(185) == "3m05s"
    assert format_duration(3 * DAY + 4 * 3600) == "3d04h"


def test_measured_seconds_have_three_digits():
    assert format_seconds(1.1504) == "1.15 s"
    assert format_seconds(8.0) == "8 s"
    assert format_seconds(0.0831) == "83.1 ms"
    assert format_seconds(12e-6) == "12 us"
    assert format_seconds(12345.6) == "12346 s"
