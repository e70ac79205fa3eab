"""The examples of docs/testing.md, run as a user's tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.testing import hosts, ranks, slurm

DOC = Path(__file__).parents[2] / "docs/testing.md"


@pytest.mark.slurm
@pytest.mark.mpi
@pytest.mark.network
def test_examples_of_the_page_pass(tmp_path: Path) -> None:
    missing = [reason for part in (slurm, hosts, ranks) if (reason := part.unavailable())]
    if missing:
        pytest.skip("; ".join(missing))
    examples = re.findall(r"^```python\n(.*?)^```$", DOC.read_text(), re.M | re.S)
    for i, example in enumerate(examples):
        (tmp_path / f"test_example_{i}.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(
        rf"^{len(re.findall('^def test_', ''.join(examples), re.M))} passed", done.stdout, re.M
    )


def test_calls_named_in_the_page_exist() -> None:
    table = DOC.read_text()
    for name in re.findall(r"`(\w+)\(", table):
        owners = (slurm.SlurmCluster, hosts.Hosts, slurm, hosts, ranks)
        assert any(hasattr(owner, name) for owner in owners), name
