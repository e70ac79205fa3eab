"""The pytest plugin, in sessions of its own as a user's project would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.testing.slurm import unavailable

INNER = """
import pytest

def test_needs_cluster(slurm_cluster):
    assert slurm_cluster.run("srun", "-n1", "echo", "hello").stdout == "hello\\n"

def test_needs_own_cluster(slurm_cluster_factory):
    assert slurm_cluster_factory(nodes=1).nodes_up() == {1}

@pytest.mark.mpi
def test_needs_mpi():
    pytest.skip("no mpiexec")

def test_needs_nothing():
    pytest.skip("not today")
"""


def pytest_session(
    where: Path, *options: str, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    (where / "slurm").mkdir(exist_ok=True)
    # A directory called like a marker must not count as one.
    (where / "slurm/test_inner.py").write_text(INNER)
    (where / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(where)],
        cwd=where,
        env=None if path is None else {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_without_slurm_the_skip_is_loud(tmp_path: Path) -> None:
    done = pytest_session(tmp_path, path=str(tmp_path))
    assert done.returncode == 0
    assert "4 skipped" in done.stdout
    loud = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED ")]
    assert len(loud) == 2
    assert loud[0] == "SKIPPED MPI TESTS: no mpiexec (1 test)"
    assert loud[1].startswith("SKIPPED SLURM TESTS: no Slurm cluster here: not installed: ")
    assert "sbatch" in loud[1]
    assert loud[1].endswith("(Debian: apt install slurm-wlm munge) (2 tests)")


@pytest.mark.parametrize(("require", "code"), [("slurm", 1), ("network", 1), ("", 0)])
def test_required_tests_may_not_be_skipped(tmp_path: Path, require: str, code: int) -> None:
    done = pytest_session(tmp_path, f"--hpctrain-require={require}", path=str(tmp_path))
    assert done.returncode == code, done.stdout
    loud = f"REQUIRED {require.upper()} TESTS did not all run (--hpctrain-require)"
    assert (loud in done.stdout) == bool(code)


def test_unknown_requirement_is_named(tmp_path: Path) -> None:
    done = pytest_session(tmp_path, "--hpctrain-require=slrum")
    assert done.returncode == 4
    assert "['slrum'] is none of slurm, mpi, network" in done.stderr


def test_fixtures_give_the_marker(tmp_path: Path) -> None:
    done = pytest_session(tmp_path, "-m", "not slurm")
    assert "2 skipped, 2 deselected" in done.stdout
    assert "SKIPPED SLURM TESTS" not in done.stdout


@pytest.mark.slurm
@pytest.mark.skipif(unavailable() is not None, reason=f"no Slurm cluster here: {unavailable()}")
def test_fixtures_start_and_stop_clusters(tmp_path: Path) -> None:
    done = pytest_session(tmp_path, "-k", "cluster", "--hpctrain-require=slurm")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_loading_the_plugin_is_cheap() -> None:
    code = (
        "import sys, hpctrain.testing.plugin;"
        "print([m for m in ('torch', 'numpy', 'mpi4py', 'h5py', 'pydantic',"
        " 'hpctrain.testing.slurm', 'hpctrain.testing.ranks') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
