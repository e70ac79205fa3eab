"""SlurmClient on a real cluster: states, their sources, and what is true after scancel."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.errors import Exit, SchedulerError
from hpctrain.slurm.answers import (
    JobInfo,
    parse_fields,
    parse_gpus,
    parse_time,
    parse_time_limit,
)
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.reasons import why_failed, why_pending
from hpctrain.testing.slurm import SlurmCluster

Factory = Callable[..., SlurmCluster]


@pytest.fixture
def client(slurm_cluster: SlurmCluster) -> SlurmClient:
    return SlurmClient(slurm_cluster.env)


@pytest.fixture(autouse=True)
def no_jobs_left(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    yield
    if "slurm_cluster" in request.fixturenames:
        request.getfixturevalue("slurm_cluster").cancel_all()


def known(client: SlurmClient, job_id: int | str) -> JobInfo:
    info = client.state(str(job_id))
    assert info is not None
    return info


def test_slurm_is_available_where_it_answers(client: SlurmClient) -> None:
    assert client.why_unavailable() is None
    assert client.available()
    assert client.cluster() == "local"


def test_why_slurm_is_not_available(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    assert SlurmClient({"PATH": str(tmp_path)}).why_unavailable() == "no sbatch on PATH"
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\n")
    nobody = SlurmClient(
        slurm_cluster.env | {"SLURM_CONF": str(tmp_path / "slurm.conf")}, timeout=1
    )
    assert (nobody.why_unavailable() or "").startswith("sinfo --noheader --format=%P: ")
    assert not nobody.available()


def test_states_from_held_to_over(client: SlurmClient, slurm_cluster: SlurmCluster) -> None:
    held = slurm_cluster.submit("#!/bin/bash\n", "-H", "-t7", "-N2", "-o/dev/null")
    info = known(client, held)
    assert (info.state, info.reason, info.source) == ("PENDING", "JobHeldUser", "squeue")
    assert (info.time_limit, info.nodes, info.active) == (420, "", True)
    assert why_pending(info.reason) == "it is held: scontrol release it (JobHeldUser)"

    before = time.time()
    job = slurm_cluster.submit("#!/bin/bash\nsleep 30\n", "-N2", "-t5", "-o/dev/null")
    slurm_cluster.wait_job(job, "RUNNING", timeout=30)
    info = known(client, job)
    assert (info.state, info.nodes, info.source) == ("RUNNING", "node[1-2]", "squeue")
    assert info.start is not None
    assert info.end is not None
    assert before - 2 <= info.start <= time.time() + 1
    assert info.end - info.start == 300
    assert why_failed(info) == ""

    assert client.cancel(str(job)) == "cancelled"
    slurm_cluster.wait_job(job, "CANCELLED", timeout=30)
    info = known(client, job)
    assert (info.state, info.source, info.final, info.active) == (
        "CANCELLED", "scontrol", True, False,
    )  # fmt: skip
    assert why_failed(info) == "cancelled"
    assert client.cancel(str(job)) == "over"
    assert client.cancel(str(held)) == "cancelled"
    assert why_failed(known(client, held)) == "cancelled before it started"


@pytest.mark.parametrize(
    ("body", "state", "code", "words"),
    [
        ("exit 0", "COMPLETED", 0, ""),
        ("exit 75", "FAILED", 75, "stopped early and resumable (exit code 75)"),
        ("exit 6", "FAILED", 6, "exit code 6"),
        ("exit 143", "FAILED", 143, "a rank was ended by SIGTERM (exit code 143)"),
        ("kill -9 $$", "FAILED", 0, "the batch script was ended by signal 9"),
    ],
)
def test_ends_in_words(
    client: SlurmClient, slurm_cluster: SlurmCluster, body: str, state: str, code: int, words: str
) -> None:
    job = slurm_cluster.submit(f"#!/bin/bash\n{body}\n", "-o/dev/null")
    slurm_cluster.wait_job(job, state, timeout=30)
    info = known(client, job)
    assert (info.state, info.exit_code) == (state, code)
    assert why_failed(info) == words


def test_missing_log_directory_is_explained(
    client: SlurmClient, slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = slurm_cluster.submit("#!/bin/bash\n", f"-o{tmp_path}/none/x.log")
    slurm_cluster.wait_job(job, "FAILED", timeout=30)
    assert "its directory is missing" in why_failed(known(client, job))


def test_unknown_job_is_unknown_and_scancel_is_not_believed(
    client: SlurmClient, slurm_cluster: SlurmCluster
) -> None:
    assert slurm_cluster.run("scancel", "4", check=False).returncode == 0  # the fault
    assert client.state("4") is None
    assert client.cancel("4") == "unknown"
    with pytest.raises(SchedulerError, match="no job 4"):
        client.signal("4", "USR1")


def test_signal_reaches_the_ranks(
    client: SlurmClient, slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = (
        "#!/bin/bash\nsrun bash -c 'trap \"echo got > " + str(tmp_path) + '/got; exit 0" USR1; '
        "touch " + str(tmp_path) + "/up; while :; do sleep 0.1; done' & wait\n"
    )
    job = slurm_cluster.submit(script, "-o/dev/null")
    deadline = time.monotonic() + 20
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    client.signal(str(job), "USR1")
    slurm_cluster.wait_job(job, "COMPLETED", timeout=30)
    assert (tmp_path / "got").read_text() == "got\n"
    with pytest.raises(SchedulerError, match="is COMPLETED: no signal was sent"):
        client.signal(str(job), "USR1")


def test_callers_defaults_for_commands_do_not_reach_them(slurm_cluster: SlurmCluster) -> None:
    job = slurm_cluster.submit("#!/bin/bash\n", "-H", "-o/dev/null")
    spoilt = slurm_cluster.env | {
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_STATES": "RUNNING",
        "SCANCEL_INTERACTIVE": "1",
        "SCANCEL_STATE": "RUNNING",
        "SINFO_FORMAT": "%a",
        "SLURM_TIME_FORMAT": "%s",
    }
    client = SlurmClient(spoilt)
    assert known(client, job).state == "PENDING"
    assert client.cancel(str(job)) == "cancelled"
    assert known(client, job).state == "CANCELLED"


def test_overriding_variables_are_named_and_leaks_dropped(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    caller = slurm_cluster.env | {
        "SBATCH_TIMELIMIT": "3", "SLURM_CPU_BIND": "none", "SLURM_NTASKS": "9", "PMI_RANK": "4",
        "KEPT": "yes, this",
    }  # fmt: skip
    client = SlurmClient(caller)
    script = tmp_path / "job"
    out = tmp_path / "out"
    script.write_text(f"#!/bin/bash\n#SBATCH -t 10 -o {out}\nenv -0\n")
    submitted = client.submit(script, directory=tmp_path)
    assert submitted.warnings == (
        "SBATCH_TIMELIMIT=3 in your environment overrides the batch script: unset "
        "SBATCH_TIMELIMIT to have the job file apply",
    )
    slurm_cluster.wait_job(int(submitted.job_id), "COMPLETED", timeout=30)
    assert known(client, submitted.job_id).time_limit == 180
    env = dict(item.partition("=")[::2] for item in out.read_text().split("\0"))
    assert env["KEPT"] == "yes, this"
    assert "SLURM_CPU_BIND" not in env
    assert "PMI_RANK" not in env
    assert env["SLURM_SUBMIT_DIR"] == str(tmp_path)
    assert "SLURM_NTASKS" not in env or env["SLURM_NTASKS"] == "1"


@pytest.mark.parametrize(
    ("options", "words", "advice"),
    [
        ("--partition=nope", "nvalid partition", "slurm.partition"),
        ("--time=2:00:00", "Requested time limit is invalid", "slurm.time"),
        ("--nodes=9", "Node count specification invalid", "nodes"),
        ("--constraint=zz", "Invalid feature", None),
    ],
)
def test_refusals_carry_slurms_words_and_what_to_do(
    client: SlurmClient, tmp_path: Path, options: str, words: str, advice: str | None
) -> None:
    script = tmp_path / "job"
    script.write_text(f"#!/bin/bash\n#SBATCH {options}\n")
    with pytest.raises(SchedulerError, match=words) as error:
        client.submit(script)
    assert error.value.exit_code == Exit.SCHEDULER
    assert error.value.message.startswith(f"sbatch --parsable {script}: ")
    if advice is not None:
        assert (error.value.hint or "").startswith(advice)


def test_partitions_and_nodes(client: SlurmClient) -> None:
    partitions = {one.name: one for one in client.partitions()}
    assert set(partitions) == {"batch", "short", "single", "low", "urgent"}
    batch, single = partitions["batch"], partitions["single"]
    assert (batch.default, batch.state, batch.max_time, batch.default_time) == (
        True, "UP", 3600, 600,
    )  # fmt: skip
    assert (batch.max_nodes, batch.min_nodes, batch.total_nodes) == (None, 1, 4)
    assert (single.default, single.max_nodes) == (False, 1)
    assert partitions["short"].max_time == 120
    groups = [group for group in client.nodes() if group.partition == "batch"]
    assert [(g.count, g.cpus, g.memory_mb, g.gpus) for g in groups] == [(4, 8, 4000, 0)]


def test_job_that_slurm_has_forgotten(slurm_cluster_factory: Factory, tmp_path: Path) -> None:
    """Only the completion log knows it, or nothing does; and a controller that is gone is not
    the same as a job that is gone."""
    log = tmp_path / "jobcomp.log"
    cluster = slurm_cluster_factory(
        Path(tempfile.mkdtemp(dir="/tmp")), nodes=1, gpus=2, extra_conf=f"JobCompLoc={log}"
    )
    client = SlurmClient(cluster.env, timeout=2)
    assert [group.gpus for group in client.nodes() if group.partition == "batch"] == [2]
    job = cluster.submit("#!/bin/bash\nexit 3\n", "-o/dev/null")
    cluster.wait_job(job, "FAILED", timeout=30)
    cluster.stop()
    with pytest.raises(SchedulerError, match="squeue"):
        client.state("1")
    cluster.start()  # with an empty state
    info = known(client, job)
    assert (info.state, info.source) == ("FAILED", "sacct --completion")
    assert (info.nodes, info.exit_code) == ("node1", None)
    assert info.start is not None
    assert why_failed(info) == "it failed; Slurm does not say how"
    log.unlink()
    assert client.state(str(job)) is None
    shutil.rmtree(cluster.root, ignore_errors=True)


def test_commands_that_hang_end_with_the_timeout(tmp_path: Path) -> None:
    slow = tmp_path / "squeue"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    client = SlurmClient({"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=0.2)
    began = time.monotonic()
    with pytest.raises(SchedulerError, match=r"squeue .*: no answer within 0\.2 s"):
        client._squeue("1")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5:00", 300), ("1:00:00", 3600), ("00:05:00", 300), ("2-00:00:00", 172800),
        ("1-02:03:04", 93784), ("UNLIMITED", None), ("NOT_SET", None), ("NONE", None), ("", None),
        ("Partition_Limit", None),
    ],
)  # fmt: skip
def test_time_limits_as_slurm_prints_them(text: str, seconds: int | None) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("(null)", 0), ("gpu:4", 4), ("gpu:a100:4(S:0-1)", 4), ("gpu", 1), ("nvme:1,gpu:h100:8", 8),
        ("gpu:a100:2,gpu:v100:3", 5), ("gpu:a100_3g.20gb:7(S:0)", 7), ("craynetwork:4", 0),
        ("gpumem:80", 0),
    ],
)  # fmt: skip
def test_gpus_of_a_gres_list(gres: str, count: int) -> None:
    assert parse_gpus(gres) == count


def test_fields_and_times_that_are_none() -> None:
    assert parse_fields("A=1 B=x y=z C:D=(null) E=") == {
        "A": "1", "B": "x", "y": "z", "C:D": "(null)", "E": "",
    }  # fmt: skip
    assert parse_time("Unknown") is None
    assert parse_time("N/A") is None
    assert parse_time("") is None


def test_states_that_nobody_knows_are_shown() -> None:
    info = JobInfo("1", "QUANTUM_FLUX", reason="Entangled")
    assert not info.active
    assert not info.final
    assert why_failed(info) == "QUANTUM_FLUX (Entangled)"
    assert why_pending("Wormhole") == "Wormhole"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "jobs of higher priority are before it (Priority)"),
        ("QOSMaxNodePerUserLimit", "a limit of its quality of service is reached"),
        ("AssocGrpGRES", "a limit of your account is reached"),
        ("ReqNodeNotAvail, UnavailableNodes:node[1-2]", "nodes that it asks for are down"),
        ("None", "the scheduler has not looked at it yet"),
        ("PartitionTimeLimit", "its walltime is longer than its partition allows"),
    ],
)
def test_reasons_in_words(reason: str, words: str) -> None:
    assert why_pending(reason).startswith(words)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (JobInfo("1", "TIMEOUT", time_limit=3600), "had stopped: 0-01:00:00"),
        (JobInfo("1", "NODE_FAIL"), "a node failed"),
        (JobInfo("1", "OUT_OF_MEMORY"), "slurm.memory"),
        (JobInfo("1", "CANCELLED", nodes="n1", cancelled_by="1000"), "cancelled by user 1000"),
        (JobInfo("1", "PREEMPTED"), "higher priority"),
        (JobInfo("1", "FAILED", exit_code=0, signal=53), "0:53"),
    ],
)
def test_other_ends_in_words(info: JobInfo, words: str) -> None:
    assert words in why_failed(info)
