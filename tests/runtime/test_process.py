"""How a rank's process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.testing.ranks import environment, mpiexec

LEAVES = """
import atexit, concurrent.futures, os, pathlib, sys, threading, time
from mpi4py import MPI
from hpctrain.runtime.process import leave

class Late:
    def __del__(self):
        os.abort()  # what a library's thread does that outlives the interpreter

late = Late()
here = pathlib.Path(sys.argv[1])
rank = MPI.COMM_WORLD.rank
atexit.register(lambda: (here / f"handler{rank}").write_text(str(MPI.Is_finalized())))
def work():
    time.sleep(0.2)
    (here / f"thread{rank}").touch()
threading.Thread(target=work).start()
pool = concurrent.futures.ThreadPoolExecutor(2)  # one that nobody shuts down
pool.submit(int).result()
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print(f"said by {rank};", end="")
WAY(7 if rank else 0)
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("way", "ends_well"), [("leave", True), ("sys.exit", False)])
def test_a_rank_ends_without_taking_the_interpreter_down(
    tmp_path: Path, way: str, ends_well: bool
) -> None:
    """What it does leave: its threads' work, exit handlers, its output and its exit code."""
    program = tmp_path / "leaves.py"
    program.write_text(LEAVES.replace("WAY", way))
    command = [mpiexec() or "mpiexec", "-n", "2", sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode == 7) is ends_well
    if ends_well:
        for rank in (0, 1):
            assert (tmp_path / f"handler{rank}").read_text() == "False"
            assert (tmp_path / f"thread{rank}").exists()
            assert f"said by {rank};" in done.stdout
