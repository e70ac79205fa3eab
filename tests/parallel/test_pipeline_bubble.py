"""The bubble of real ranks, messages and all, is the simulator's; see the benchmark for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "pipeline_bubble.py"


@pytest.mark.timeout(300)
def test_measured_bubbles():
    """Slow because layers have to sleep long against the noise of a busy machine."""
    options = ["--schedule", "1f1b", "--schedule", "zb-v", "--seconds", "0.06", "--json"]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    by_name = {found["schedule"]: found for found in json.loads(done.stdout)["schedules"]}
    # Closed forms: (p-1)/(m+p-1) of 1F1B, and of ZB-V (p-1)/(6m+p-1), for p = 4 and m = 8.
    assert by_name["1f1b"]["measured"] == pytest.approx(3 / 11, abs=0.03)
    assert by_name["zb-v"]["measured"] == pytest.approx(3 / 51, abs=0.03)
    assert by_name["zb-v"]["measured"] <= by_name["1f1b"]["measured"] / 3
