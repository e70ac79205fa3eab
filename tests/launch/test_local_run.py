"""Runs on this machine: real mpiexec, real ranks, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launch_helpers import HOSTILE_ENV, spec_of

from hpctrain.errors import UsageError
from hpctrain.launchers.local_run import LocalProcess, local_alive, outcome, start
from hpctrain.machine import get_machine
from hpctrain.records import FailureRecord, LaunchRecord, StateRecord, write_json
from hpctrain.rundir import RunDir

pytestmark = pytest.mark.mpi
ENVIRON = {"PATH": os.environ["PATH"], "SLURM_NTASKS": "7", "PMI_RANK": "3"}
Ranks = Callable[..., LocalProcess]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create("r", tmp_path)


@pytest.fixture
def ranks(run: RunDir, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Start ranks that execute a piece of Python with comm, rank, out and run at hand."""
    started: list[LocalProcess] = []

    def begin(count: int, code: str, **keys: object) -> LocalProcess:
        head = """
            import json, os, signal, sys, time
            from pathlib import Path
            from mpi4py import MPI
            from hpctrain.rundir import RunDir
            from hpctrain.records import StateRecord
            comm = MPI.COMM_WORLD
            rank = comm.rank
            run = RunDir(Path(sys.argv[1]))
            out = lambda name, value: (run.root / f"{name}{rank}").write_text(json.dumps(value))
            def state(word):
                run.write_state(StateRecord(word, 1, 2, time.time(), comm.size))
            """
        script = tmp_path / "rank.py"
        script.write_text(textwrap.dedent(head) + textwrap.dedent(code))
        spec = spec_of(get_machine("local"), ranks_per_node=count, **keys)
        process = start(spec, run, [sys.executable, str(script), str(run.root)], ENVIRON)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()


def read(run: RunDir, name: str, rank: int) -> object:
    return json.loads((run.root / f"{name}{rank}").read_text())


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(run: RunDir, *names: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not all((run.root / name).exists() for name in names):
        assert time.monotonic() < deadline, run.job_log.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_get_the_jobs_values_byte_for_byte(run: RunDir, ranks: Ranks, count: int) -> None:
    env = HOSTILE_ENV
    process = ranks(
        count,
        """
        leaks = [n for n in os.environ if n.startswith("SLURM")]
        out("env", [dict(os.environ), leaks, comm.size])
        print("hello from", rank)
        state("finished")
        """,
        env=env,
    )
    assert process.wait(60) == 0, run.job_log.read_text()
    for rank in range(count):
        found, leaks, size = read(run, "env", rank)  # type: ignore[misc]
        assert {name: found.get(name) for name in env} == env
        assert leaks == []
        assert size == count
    assert sorted(run.job_log.read_text().splitlines()) == [
        f"hello from {rank}" for rank in range(count)
    ]


def test_launch_record_is_there_before_the_ranks_and_names_the_process(
    run: RunDir, ranks: Ranks
) -> None:
    process = ranks(
        2,
        """
        out("launches", [launch.to_dict() for launch in run.read_launches()])
        state("finished")
        """,
    )
    assert local_alive(process.launch) is True
    assert process.wait(60) == 0
    seen = read(run, "launches", 1)
    assert seen == [process.launch.to_dict()]
    assert process.launch.attempt == 0
    assert process.launch.world_size == 2
    assert process.launch.host == socket.gethostname()
    assert local_alive(process.launch) is False
    again = start(
        spec_of(get_machine("local"), ranks_per_node=1),
        run, [sys.executable, "-c", ""], ENVIRON, restore=5,
    )  # fmt: skip
    again.wait(30)
    assert (again.launch.attempt, again.launch.restore) == (1, 5)
    assert len(run.read_launches()) == 2


def test_nothing_starts_where_the_starter_dies_before_writing_it_down(run: RunDir) -> None:
    (run.root / "launch.jsonl").symlink_to(
        run.root / "none" / "x"
    )  # writing the LaunchRecord fails
    spec = spec_of(get_machine("local"), ranks_per_node=1)
    started = run.root / "started"
    before = psutil.Process().children()
    with pytest.raises(OSError, match="No such file"):
        start(spec, run, ["/usr/bin/touch", str(started)], ENVIRON)
    assert not started.exists()
    assert psutil.Process().children() == before


def test_program_that_does_not_exist_is_named_in_the_log(run: RunDir) -> None:
    spec = spec_of(get_machine("local"), ranks_per_node=1)
    assert start(spec, run, ["/no/such/program"], ENVIRON).wait(10) == 127
    assert "/no/such/program: No such file or directory" in run.job_log.read_text()


def test_stop_file_stops_ranks_gracefully_and_is_gone_for_the_next_start(
    run: RunDir, ranks: Ranks
) -> None:
    code = """
        state("running"); out("up", 1)
        while not run.stop_file.exists():
            time.sleep(0.05)
        time.sleep(0.3 * rank)
        comm.Barrier()
        if rank == 0:
            state("stopped")
        comm.Barrier()
        out("saved", 1)
        sys.exit(75)
        """
    process = ranks(2, code)
    wait_for(run, "up0", "up1")
    assert process.terminate(30) == 75
    assert run.read_state().status == "stopped"  # type: ignore[union-attr]
    assert (run.root / "saved0").exists()
    assert (run.root / "saved1").exists()
    assert run.stop_file.exists()
    second = ranks(2, "out('stop', run.stop_file.exists()); state('finished')")
    assert second.wait(60) == 0
    assert read(run, "stop", 0) is False


def test_ranks_that_do_not_stop_are_killed_after_the_grace(run: RunDir, ranks: Ranks) -> None:
    process = ranks(
        2,
        """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        out("up", os.getpid())
        time.sleep(600)
        """,
    )
    wait_for(run, "up0", "up1")
    pids = [read(run, "up", rank) for rank in range(2)]
    # hydra gives each rank a session of its own: the launcher's process group has none of them.
    assert all(os.getpgid(pid) != process.launch.pid for pid in pids)  # type: ignore[arg-type]
    began = time.monotonic()
    assert process.terminate(0.5) == 128 + signal.SIGKILL
    assert time.monotonic() - began < 10
    assert not any(alive(pid) for pid in pids)  # type: ignore[arg-type]
    assert local_alive(process.launch) is False


def test_sigterm_and_sigusr1_to_mpiexec_reach_the_ranks(run: RunDir, ranks: Ranks) -> None:
    process = ranks(
        2,
        """
        got = []
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: got.append(number))
        out("up", 1)
        while len(got) < 2:
            time.sleep(0.05)
        out("got", got)
        comm.Barrier()
        state("stopped")
        """,
    )
    wait_for(run, "up0", "up1")
    os.kill(process.launch.pid, signal.SIGUSR1)
    time.sleep(0.3)
    os.kill(process.launch.pid, signal.SIGTERM)
    assert process.wait(30) == 75
    for rank in range(2):
        assert read(run, "got", rank) == [signal.SIGUSR1, signal.SIGTERM]


def test_another_process_can_watch_and_stop_the_run(run: RunDir, ranks: Ranks) -> None:
    process = ranks(
        1,
        """
        out("up", 1)
        while not run.stop_file.exists():
            time.sleep(0.05)
        state("stopped")
        sys.exit(75)
        """,
    )
    wait_for(run, "up0")
    code = (
        "import sys; from pathlib import Path; from hpctrain.rundir import RunDir\n"
        "from hpctrain.launchers.local_run import LocalProcess\n"
        "run = RunDir(Path(sys.argv[1]))\n"
        "other = LocalProcess.attach(run, run.read_launches()[-1])\n"
        "print(other.poll(), other.terminate(30))\n"
    )
    # The child is only reaped by its parent, which has to be asked meanwhile.
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run.root)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert process.wait(30) == 75
        assert other.stdout is not None
        assert other.stdout.read() == "None 75\n"


def test_run_of_another_host_cannot_be_attached(run: RunDir) -> None:
    launch = LaunchRecord(0, "local", 0.0, 1, pid=1, host="elsewhere")
    assert local_alive(launch) is None
    with pytest.raises(UsageError, match="was started on elsewhere"):
        LocalProcess.attach(run, launch)


def test_reused_process_number_is_not_taken_for_the_run() -> None:
    me = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    host = socket.gethostname()
    right = LaunchRecord(0, "local", 0.0, 1, pid=os.getpid(), pid_started=int(me[19]), host=host)
    assert local_alive(right) is True
    wrong = LaunchRecord(0, "local", 0.0, 1, pid=os.getpid(), pid_started=1, host=host)
    assert local_alive(wrong) is False


def test_rank_that_fails_is_told_from_one_that_leaves_early(run: RunDir, ranks: Ranks) -> None:
    """MPICH's mpiexec ends all ranks when one has left after finalize, and may then report 0."""
    process = ranks(
        3,
        """
        state("running")
        comm.Barrier()
        MPI.Finalize()
        if rank == 1:
            time.sleep(0.7)
            os._exit(6)
        os._exit(0)
        """,
    )
    assert process.wait(60) == 6


@pytest.mark.parametrize(
    ("status", "word", "fresh", "failure", "expected"),
    [
        (9, "finished", True, False, 0),
        (9, "stopped", True, False, 75),
        (137, "stopped", True, False, 75),
        (0, "running", True, False, 6),
        (0, "stopped", False, False, 0),
        (5, "running", True, True, 5),
        (9, "running", True, True, 6),
        (9, "running", True, False, 6),
        (-9, "running", True, False, 6),
        (-9, "stopped", False, False, 137),
        (3, "finished", False, False, 3),
        (None, "running", True, False, 6),
    ],
)
def test_outcome_trusts_what_the_ranks_wrote_before_the_launchers_status(
    run: RunDir, status: int | None, word: str, fresh: bool, failure: bool, expected: int
) -> None:
    launch = LaunchRecord(2, "local", 1000.0, 2)
    time_ = 1001.0 if fresh else 999.0
    run.write_state(StateRecord(word, 1, 2, time_, 2))  # type: ignore[arg-type]
    if failure:
        record = FailureRecord(1, "h", 1.0, "ValueError", "x", "", attempt=2)
        write_json(run.failure(2, 1), record.to_dict())
    assert outcome(run, launch, status) == expected
