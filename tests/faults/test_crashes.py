"""Two hundred crashes and storage faults of real ranks; a thousand by ``make faults``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("crash_harness.py")
ROUNDS = 200


@pytest.mark.timeout(900)  # two to four minutes: every round starts, harms and checks a run
def test_no_committed_checkpoint_is_ever_lost() -> None:
    command = [sys.executable, str(HARNESS), "--rounds", str(ROUNDS), "--seed", "20260131"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=880)
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    assert answer["faults"] == []
    assert answer["rounds"] == ROUNDS
    # The suite did what it says: every harm, saves that failed, restarts from every level.
    without_root = {"full"}
    assert all(count > 5 for harm, count in answer["harm"].items() if harm not in without_root)
    assert answer["commits"] > ROUNDS
    assert answer["failed_saves"] > ROUNDS / 10
    assert answer["finished"] > 5
    sources = " ".join(answer["resumed_from"])
    for words in ("memory", "storage", "partner", "parallel file system"):
        assert words in sources
