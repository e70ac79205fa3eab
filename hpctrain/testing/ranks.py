"""Run a function on real MPI ranks from a test and get each rank's result back.

::

    def sum_of_ranks(offset: int) -> int:
        from mpi4py import MPI
        return MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + offset)

    def test_sum():
        assert run_ranks(3, sum_of_ranks, 10) == [33, 33, 33]

The function is found again by its file and name in the ranks, so it must stand at the top of
its module. Arguments and results travel as JSON.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.runtime.environment import within_one_machine


class RanksFailed(AssertionError):
    """The ranks failed, or did not end in time; carries what they printed."""


def mpiexec() -> str | None:
    """The mpiexec beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def unavailable() -> str | None:
    """Why MPI ranks cannot be started here, or None."""
    if mpiexec() is None:
        return "no mpiexec: pip install 'hpctrain[local]'"
    return None


def environment(*, one_machine: bool = True) -> dict[str, str]:
    """The caller's environment, and one thread for each of many ranks on few cores.

    Args:
        one_machine: the ranks are all on this one, and in its network.
    """
    found = {**os.environ, "OMP_NUM_THREADS": "1"}
    return found | within_one_machine(found) if one_machine else found


def run_ranks(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank; results in the order of ranks.

    Args:
        ranks: MPI ranks to start.
        function: a function at the top of a module.
        args, kwargs: JSON-able.
        timeout: seconds until the ranks are killed.
        env: further environment variables.
        launcher: tokens before the program; mpiexec -n ``ranks`` by default.

    Raises:
        RanksFailed: a rank raised, the launcher failed, or time ran out.
    """
    start = launcher or [mpiexec() or "mpiexec", "-n", str(ranks)]
    with tempfile.TemporaryDirectory(prefix="hpctrain-ranks-") as folder:
        call = {
            "file": inspect.getfile(function),
            "name": function.__qualname__,
            "args": args,
            "kwargs": kwargs,
            "results": folder,
        }
        (Path(folder) / "call.json").write_text(json.dumps(call))
        command = [*start, sys.executable, "-m", "mpi4py", "-m", __name__, folder]
        process = subprocess.Popen(
            command,
            env={**environment(one_machine=launcher is None), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            message = f"{ranks} ranks of {function.__qualname__} not done in {timeout} s"
            raise RanksFailed(f"{message}\n{output}") from None
        if process.returncode != 0:
            message = f"{ranks} ranks of {function.__qualname__}: exit {process.returncode}"
            raise RanksFailed(f"{message}\n{output}")
        files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        missing = [path.stem for path in files if not path.exists()]
        if missing:
            raise RanksFailed(f"no result of rank {', '.join(missing)}\n{output}")
        return [json.loads(path.read_text()) for path in files]


def _main(folder: Path) -> None:
    import importlib.util

    from mpi4py import MPI

    from hpctrain.runtime.process import leave

    call = json.loads((folder / "call.json").read_text())
    sys.path.insert(0, str(Path(call["file"]).parent))  # as pytest does for its own modules
    spec = importlib.util.spec_from_file_location("_hpctrain_ranks_target", call["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = getattr(module, call["name"])(*call["args"], **call["kwargs"])
    aside = folder / f"{MPI.COMM_WORLD.rank}.tmp"
    aside.write_text(json.dumps(result))
    aside.replace(folder / f"{MPI.COMM_WORLD.rank}.json")
    leave(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
