"""Rendered scripts on a real cluster: what reaches the ranks, how they stop, what is reported."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from launch_helpers import HOSTILE_ENV, script_of, spec_of

from hpctrain.launchers import batch_hook
from hpctrain.machine import get_machine
from hpctrain.records import StateRecord
from hpctrain.rundir import RunDir
from hpctrain.runtime.environment import within_one_machine
from hpctrain.slurm import SlurmClient, Submission, submit
from hpctrain.slurm.answers import parse_time, parse_time_limit
from hpctrain.slurm.quoting import log_pattern, sbatch_quote
from hpctrain.testing.slurm import SlurmCluster, unavailable
from hpctrain.testing.slurmjobs import Job
from hpctrain.units import format_walltime, parse_walltime

Submit = Callable[..., Submission]
SHORT = {"cpus_per_task": 1, "time": "10m", "margin": 30}
STOPS = """
    def note(number, frame):
        if not got:  # srun sends SIGTERM to those that are left when the first leaves
            (run.root / f"got-{rank}").write_text(signal.Signals(number).name)
        got.append(number)
    got = []
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, note)
    (run.root / f"up{rank}").touch()
    while not got:
        time.sleep(0.05)
    time.sleep(0.2)
    if rank == 0:
        run.write_state(StateRecord("stopped", 1, 2, time.time(), 4))
    time.sleep(0.4 * rank)
    sys.exit(75)
    """


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create("r", tmp_path)


@pytest.fixture
def submitted(slurm_cluster: SlurmCluster, run: RunDir, tmp_path: Path) -> Iterator[Submit]:
    """Submit ranks that execute a piece of Python, with ``rank`` and ``run`` at hand."""

    def go(
        code: str, *, where: RunDir = run, caller: dict[str, str] | None = None, **keys: Any
    ) -> Submission:
        head = """
            import json, os, signal, sys, time
            from pathlib import Path
            from hpctrain.rundir import RunDir
            from hpctrain.records import StateRecord
            rank = int(os.environ["SLURM_PROCID"])
            run = RunDir(Path(sys.argv[1]))
            """
        program = tmp_path / "rank.py"
        program.write_text(textwrap.dedent(head) + textwrap.dedent(code))
        keys = {"nodes": 2, "ranks_per_node": 2, "slurm": SHORT, **keys}
        machine = get_machine("local")
        spec = spec_of(machine, **keys)
        tokens = [sys.executable, str(program), str(where.root)]
        script = script_of(spec, machine, where, tokens, mpich_wheel=True, hook=batch_hook())
        client = SlurmClient(slurm_cluster.env | (caller or {}))
        return submit(spec, where, script, client, directory=tmp_path)

    yield go
    slurm_cluster.cancel_all()


def ended(cluster: SlurmCluster, submission: Submission, *states: str, seconds: float = 60) -> Job:
    return cluster.wait_job(int(submission.launch.job_id), *states, timeout=seconds)


def wait_for(run: RunDir, *names: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not all((run.root / name).exists() for name in names):
        assert time.monotonic() < deadline, run.job_log.read_text()
        time.sleep(0.05)


@pytest.mark.mpi
def test_hostile_values_reach_every_rank_and_leaks_none(
    slurm_cluster: SlurmCluster, submitted: Submit, tmp_path: Path
) -> None:
    run = RunDir.create("r", tmp_path / '100%j it\'s "x" #y $z \\ ü')
    caller = {
        "SLURM_CPU_BIND": "map_cpu:0", "SLURM_NTASKS": "9", "SLURM_MEM_BIND": "local",
        "PMI_RANK": "5", "PMIX_RANK": "5", "HPCTRAIN_DEADLINE": "1", "SBATCH_EXPORT": "NONE",
    }  # fmt: skip
    code = """
        from mpi4py import MPI
        import subprocess
        ranks = MPI.COMM_WORLD
        found = dict(os.environ)
        found["affinity"] = len(os.sched_getaffinity(0))
        found["mpi"] = [ranks.rank, ranks.size]
        (run.root / f"env{rank}").write_text(json.dumps(found))
        """
    before = time.time()
    alone = within_one_machine({})  # the cluster's, which SBATCH_EXPORT keeps back
    done = submitted(
        code, where=run, caller=caller, env=HOSTILE_ENV | alone,
        name="it's a \n test".replace("\n", " "),
        slurm={**SHORT, "comment": "a \"b\" 'c' #d $e \\f"},
    )  # fmt: skip
    assert [warning.split()[0] for warning in done.warnings] == ["SBATCH_EXPORT=NONE"]
    job = slurm_cluster.wait_job(
        int(done.launch.job_id), "COMPLETED", "FAILED", "CANCELLED", timeout=60
    )
    log = run.job_log.read_text()
    assert job.state == "COMPLETED", log
    assert job.fields["JobName"] == "it-s-a-test"
    assert job.fields["Comment"].strip() == "a \"b\" 'c' #d $e \\f"
    for rank in range(4):
        found = json.loads((run.root / f"env{rank}").read_text())
        assert {name: found.get(name) for name in HOSTILE_ENV} == HOSTILE_ENV
        assert found["mpi"] == [rank, 4]
        assert found["SLURM_NODEID"] == str(rank // 2)
        assert found["SLURM_CPUS_PER_TASK"] == "1"
        assert found["OMP_NUM_THREADS"] == "1"
        deadline = float(found["HPCTRAIN_DEADLINE"])
        assert before + 570 - 2 <= deadline <= time.time() + 570 + 1
        for leak in ("PMIX_RANK", "SLURM_MEM_BIND", "SLURM_EXPORT_ENV"):
            assert leak not in found
    assert log.splitlines()[0].startswith(
        f"hpctrain: job {done.launch.job_id} on node[1-2], restart 0, "
    )
    assert "ended with exit code 0" in log.splitlines()[-1]
    assert run.read_launches() == [done.launch]
    assert (done.launch.cluster, done.launch.world_size) == ("local", 4)
    assert run.script.stat().st_mode & 0o777 == 0o600


def test_path_is_there_even_where_the_caller_exports_nothing(
    slurm_cluster: SlurmCluster, submitted: Submit, run: RunDir
) -> None:
    code = '(run.root / f"path{rank}").write_text(os.environ["PATH"])'
    done = submitted(code, caller={"SBATCH_EXPORT": "NIL", "LEAK": "1"})
    ended(slurm_cluster, done, "COMPLETED")
    assert "/usr/bin" in (run.root / "path3").read_text()


@pytest.mark.parametrize(
    ("options", "state", "name"),
    [
        (["--batch", "--signal=USR1"], "FAILED", "SIGUSR1"),  # what --signal=B:USR1 does
        (["--full", "--signal=TERM"], "FAILED", None),
        ([], "CANCELLED", None),  # SIGCONT and SIGTERM to ranks and script, then SIGKILL
        (["--signal=USR2"], "FAILED", "SIGUSR2"),
    ],
)
def test_signals_reach_the_ranks_and_the_job_ends_resumable(
    slurm_cluster: SlurmCluster, submitted: Submit, run: RunDir,
    options: list[str], state: str, name: str | None,
) -> None:  # fmt: skip
    """The ranks leave one after the other with 75: srun kills the later ones and reports 143."""
    done = submitted(STOPS)
    wait_for(run, "up0", "up1", "up2", "up3")
    slurm_cluster.run("scancel", *options, done.launch.job_id)
    job = ended(slurm_cluster, done, state)
    assert job.exit_code == 75, run.job_log.read_text()
    for rank in range(4):
        got = (run.root / f"got-{rank}").read_text()
        assert got in ("SIGUSR1", "SIGTERM") if name is None else got == name
    assert "ended with exit code 75" in run.job_log.read_text()


def test_walltime_signal_comes_before_the_end(
    slurm_cluster: SlurmCluster, submitted: Submit, run: RunDir
) -> None:
    """One minute of walltime, a margin of 50 s: Slurm looks every 30 s, so after 10 s at most."""
    began = time.monotonic()
    done = submitted(STOPS, slurm={**SHORT, "time": "1m", "margin": 50})
    job = ended(slurm_cluster, done, "FAILED", "TIMEOUT", seconds=90)
    assert (job.state, job.exit_code) == ("FAILED", 75)
    assert time.monotonic() - began < 55
    assert (run.root / "got-3").read_text() == "SIGUSR1"


def test_stopped_of_an_earlier_start_does_not_hide_a_failure(
    slurm_cluster: SlurmCluster, submitted: Submit, run: RunDir
) -> None:
    run.write_state(StateRecord("stopped", 1, 2, time.time(), 4))
    done = submitted("time.sleep(0.2 * rank); sys.exit(6 if rank == 3 else 0)")
    assert ended(slurm_cluster, done, "FAILED").exit_code == 6


def test_killed_rank_ends_all_in_seconds(
    slurm_cluster: SlurmCluster, submitted: Submit, run: RunDir
) -> None:
    code = """
        (run.root / f"up{rank}").touch()
        if rank == 2:
            while not all((run.root / f"up{r}").exists() for r in range(4)):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """
    done = submitted(code)
    wait_for(run, "up0", "up1", "up2", "up3")
    began = time.monotonic()
    job = ended(slurm_cluster, done, "FAILED")
    assert time.monotonic() - began < 15
    assert job.exit_code in (137, 143)


def test_second_start_appends_to_the_log_and_clears_the_stop_file(
    slurm_cluster: SlurmCluster, submitted: Submit, run: RunDir
) -> None:
    code = (
        'print("rank", rank, run.stop_file.exists(), run.read_launches()[-1].attempt, flush=True)'
    )
    first = submitted(code)
    ended(slurm_cluster, first, "COMPLETED")
    run.stop_file.touch()
    second = submitted(code)
    ended(slurm_cluster, second, "COMPLETED")
    assert (first.launch.attempt, second.launch.attempt) == (0, 1)
    ranks = sorted(line for line in run.job_log.read_text().splitlines() if line.startswith("rank"))
    assert ranks == [f"rank {r} False {attempt}" for r in range(4) for attempt in range(2)]


def test_requeue_runs_the_same_script_again(
    slurm_cluster: SlurmCluster, submitted: Submit, run: RunDir
) -> None:
    code = """
        (run.root / f"up{rank}-{os.environ.get('SLURM_RESTART_COUNT', '0')}").touch()
        time.sleep(600 if "SLURM_RESTART_COUNT" not in os.environ else 0)
        """
    done = submitted(code)
    wait_for(run, "up0-0", "up3-0")
    slurm_cluster.run("scontrol", "requeue", done.launch.job_id)
    wait_for(run, "up0-1", "up3-1", seconds=60)
    ended(slurm_cluster, done, "COMPLETED")
    log = run.job_log.read_text()
    assert ", restart 0, " in log
    assert ", restart 1, " in log


def test_two_jobs_at_once_on_one_host(
    slurm_cluster: SlurmCluster, submitted: Submit, tmp_path: Path
) -> None:
    runs = [RunDir.create(name, tmp_path) for name in "ab"]
    code = """
        from mpi4py import MPI
        ranks = MPI.COMM_WORLD
        total = ranks.allreduce(ranks.rank)
        (run.root / f"sum{rank}").write_text(str([total, ranks.size]))
        """
    jobs = [submitted(code, where=run) for run in runs]
    for job, run in zip(jobs, runs, strict=True):
        ended(slurm_cluster, job, "COMPLETED")
        assert [(run.root / f"sum{rank}").read_text() for rank in range(4)] == ["[6, 4]"] * 4


# ---- Slurm's own readers --------------------------------------------------------------------

ONE_LINE = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x00\r\n"), max_size=60
)
SETTINGS = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@SETTINGS
@given(text=st.one_of(ONE_LINE, st.text(st.sampled_from("a \t#\"'\\$%-="), max_size=20)))
def test_sbatch_reads_a_quoted_token_as_it_was(slurm_cluster: SlurmCluster, text: str) -> None:
    line = sbatch_quote(f"--comment={text}|", "x")
    job = slurm_cluster.submit(f"#!/bin/bash\n#SBATCH -H -o /dev/null\n#SBATCH {line}\n")
    shown = slurm_cluster.run("scontrol", "show", "job", str(job)).stdout
    slurm_cluster.run("scancel", str(job))
    assert f"Comment={text}|" in shown


@settings(SETTINGS, max_examples=12)
@given(folder=st.text(st.sampled_from("a %jux\\\"'#$é"), min_size=1, max_size=12))
def test_log_lands_in_a_directory_of_any_name(
    slurm_cluster: SlurmCluster, tmp_path: Path, folder: str
) -> None:
    log = tmp_path / f"x{folder}" / "job.log"
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    option = sbatch_quote(f"--output={log_pattern(str(log))}", "x")
    job = slurm_cluster.submit(f"#!/bin/bash\n#SBATCH {option}\necho here\n")
    slurm_cluster.wait_job(job, "COMPLETED", timeout=30)
    assert log.read_text() == "here\n"


@pytest.fixture(scope="module")
def long_cluster() -> Iterator[SlurmCluster]:
    """A partition without a time limit."""
    if (reason := unavailable()) is not None:
        pytest.skip(f"no Slurm cluster here: {reason}")
    with SlurmCluster(
        nodes=1, extra_conf="PartitionName=long Nodes=ALL MaxTime=INFINITE State=UP"
    ) as cluster:
        yield cluster


def limit_of(cluster: SlurmCluster, time: str) -> int | None:
    job = cluster.submit("#!/bin/bash\n", "-H", "-plong", f"--time={time}", "-o/dev/null")
    shown = cluster.job(job).fields["TimeLimit"]
    cluster.run("scancel", str(job))
    return parse_time_limit(shown)


@pytest.mark.slurm
@SETTINGS
@given(seconds=st.integers(60, 400 * 86400))
def test_walltimes_that_we_print_slurm_reads(long_cluster: SlurmCluster, seconds: int) -> None:
    """Slurm counts in minutes and rounds up."""
    assert limit_of(long_cluster, format_walltime(seconds)) == math.ceil(seconds / 60) * 60


@pytest.mark.slurm
@SETTINGS
@given(
    days=st.integers(0, 99), hours=st.integers(0, 23), minutes=st.integers(0, 59),
    seconds=st.integers(0, 59), form=st.integers(0, 5),
)  # fmt: skip
def test_slurms_six_forms_mean_to_us_what_they_mean_to_slurm(
    long_cluster: SlurmCluster, days: int, hours: int, minutes: int, seconds: int, form: int
) -> None:
    text = (
        f"{minutes + 1}", f"{minutes + 60}:{seconds:02d}", f"{hours}:{minutes:02d}:{seconds:02d}",
        f"{days}-{hours}", f"{days}-{hours}:{minutes:02d}",
        f"{days}-{hours:02d}:{minutes:02d}:{seconds:02d}",
    )[form]  # fmt: skip
    assume(form in (0, 1) or days + hours + minutes > 0)  # less than a minute is refused
    assert limit_of(long_cluster, text) == math.ceil(parse_walltime(text) / 60) * 60


def test_times_are_local_as_slurm_prints_them(slurm_cluster: SlurmCluster) -> None:
    job = slurm_cluster.submit("#!/bin/bash\n", "-H", "-o/dev/null")
    shown = slurm_cluster.job(job).fields["SubmitTime"]
    slurm_cluster.run("scancel", str(job))
    submitted = parse_time(shown)
    assert submitted is not None
    assert abs(submitted - time.time()) < 5
