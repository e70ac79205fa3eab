"""The local Slurm cluster is a real one, keeps to itself and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from testing_traces import processes_of, traces_of, wait_until_gone

import hpctrain
from hpctrain.errors import SchedulerError, UsageError
from hpctrain.testing.slurm import SlurmCluster
from hpctrain.testing.slurmjobs import Job
from hpctrain.testing.wait import wait_until

NODES = {"node1", "node2", "node3", "node4"}
WHO_AM_I = "from mpi4py import MPI; w = MPI.COMM_WORLD; print(w.rank, w.size, flush=True)"


def test_srun_reaches_every_node(slurm_cluster: SlurmCluster) -> None:
    done = slurm_cluster.run(
        "srun", "-N4", "--ntasks-per-node=1", "sh", "-c", "echo $SLURMD_NODENAME $(hostname)"
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {node for node, _ in lines} == NODES
    assert {host for _, host in lines} == {os.uname().nodename}


def test_batch_job_runs_and_its_output_and_status_are_there(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = (
        "#!/bin/bash\necho on $SLURM_JOB_NUM_NODES nodes with $SLURM_CPUS_ON_NODE cpus\nexit 7\n"
    )
    job_id = slurm_cluster.submit(script, "-N2", "-c8", "-n2", "-oout", cwd=tmp_path)
    job = slurm_cluster.wait_job(job_id, "FAILED", timeout=30)
    assert (job.exit_code, job.signal, job.reason) == (7, 0, "NonZeroExitCode")
    assert (tmp_path / "out").read_text() == "on 2 nodes with 8 cpus\n"
    # Without an accounting database, from the completion log.
    sacct = slurm_cluster.run("sacct", "-c", "-n", "-P", "-j", str(job_id), "-o", "State,NNodes")
    assert sacct.stdout.split() == ["FAILED|2"]


def test_waiting_for_the_wrong_state_says_what_happened(slurm_cluster: SlurmCluster) -> None:
    job_id = slurm_cluster.submit("#!/bin/bash\nexit 3\n", "-o/dev/null")
    with pytest.raises(SchedulerError, match=f"job {job_id} is FAILED, wanted COMPLETED") as err:
        slurm_cluster.wait_job(job_id, "COMPLETED", timeout=30)
    assert "ExitCode=3:0" in str(err.value)


@pytest.mark.mpi
def test_mpi_ranks_find_each_other_only_through_pmi(slurm_cluster: SlurmCluster) -> None:
    command = ["--kill-on-bad-exit=1", sys.executable, "-m", "mpi4py", "-c", WHO_AM_I]
    ranks = slurm_cluster.run("srun", "--mpi=pmi2", "-N4", "--ntasks-per-node=2", *command)
    assert sorted(ranks.stdout.splitlines()) == [f"{rank} 8" for rank in range(8)]
    # The fault that a launcher has to guard against: no PMI, eight worlds of one.
    alone = slurm_cluster.run("srun", "--mpi=none", "-N4", "--ntasks-per-node=2", *command)
    assert alone.stdout.splitlines() == ["0 1"] * 8


@pytest.mark.mpi
def test_shared_memory_split_separates_nodes_of_one_machine(slurm_cluster: SlurmCluster) -> None:
    code = (
        "from mpi4py import MPI; import os; w = MPI.COMM_WORLD;"
        "n = w.Split_type(MPI.COMM_TYPE_SHARED);"
        "print(os.environ['SLURM_NODEID'], os.environ['SLURM_LOCALID'], n.rank, n.size, flush=True)"
    )
    done = slurm_cluster.run(
        "srun",
        "--mpi=pmi2",
        "-N2",
        "--ntasks-per-node=3",
        sys.executable,
        "-m",
        "mpi4py",
        "-c",
        code,
    )
    expected = [f"{node} {local} {local} 3" for node in range(2) for local in range(3)]
    assert sorted(done.stdout.splitlines()) == expected


def test_limits_of_partitions_are_enforced(slurm_cluster: SlurmCluster) -> None:
    hold = "#!/bin/bash\nsleep 60\n"
    for options in (
        ["-N5"],
        ["-pshort", "-t3"],
        ["-psingle", "-N2"],
        ["-N1", "-n1", "-c9"],
        ["-N1", "--mem=5000"],
        ["--gres=gpu:1"],
    ):
        with pytest.raises(SchedulerError, match="sbatch"):
            slurm_cluster.submit(hold, *options)


def test_urgent_jobs_requeue_low_ones(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = "#!/bin/bash\nsleep 60\n"
    low = slurm_cluster.submit(script, "-plow", "-N4", "--exclusive", "-oout", cwd=tmp_path)
    slurm_cluster.wait_job(low, "RUNNING", timeout=30)
    urgent = slurm_cluster.submit("#!/bin/bash\nsleep 60\n", "-purgent", "-N4", "-o/dev/null")
    slurm_cluster.wait_job(urgent, "RUNNING", timeout=60)
    assert slurm_cluster.wait_job(low, "PENDING", timeout=30).restarts == 1
    slurm_cluster.cancel_all()
    assert slurm_cluster.job(low).state == "CANCELLED"
    assert slurm_cluster.run("squeue", "-h").stdout == ""


def test_killed_node_requeues_its_job_and_comes_back(
    slurm_cluster_factory: type[SlurmCluster], tmp_path: Path
) -> None:
    cluster = slurm_cluster_factory(nodes=3, cpus=2)
    script = (
        "#!/bin/bash\necho ${SLURM_RESTART_COUNT-none} $SLURM_JOB_NODELIST\n"
        "srun sh -c 'touch started.$SLURM_PROCID; sleep 60'\n"
    )
    job_id = cluster.submit(
        script, "-N2", "--ntasks-per-node=1", "--open-mode=append", "-oout", cwd=tmp_path
    )
    assert cluster.wait_job(job_id, "RUNNING", timeout=30).nodes == "node[1-2]"
    wait_until(lambda: len(list(tmp_path.glob("started.*"))) == 2)
    cluster.kill_node(2)
    assert cluster.nodes_up() == {1, 3}
    cluster.wait_job(job_id, "PENDING", timeout=30)
    job = cluster.wait_job(job_id, "RUNNING", timeout=60)
    assert (job.nodes, job.restarts) == ("node[1,3]", 1)
    cluster.start_node(2)
    assert cluster.nodes_up() == {1, 2, 3}
    before = cluster.job(job_id)
    cluster.restart_controller()
    assert cluster.job(job_id).state == before.state == "RUNNING"
    cluster.down_node(3)
    assert cluster.nodes_up() == {1, 2}
    cluster.resume_node(3)
    assert cluster.nodes_up() == {1, 2, 3}
    lines = re.findall("^(?:none|1) .*", (tmp_path / "out").read_text(), re.M)
    assert lines == ["none node[1-2]", "1 node[1,3]"]


def test_killing_a_node_ends_detached_ranks_of_that_node_only(
    slurm_cluster_factory: type[SlurmCluster], tmp_path: Path
) -> None:
    cluster = slurm_cluster_factory(nodes=2)
    # A rank that leaves its session and its parent, as daemons of user programs do.
    rank = f"setsid sh -c 'echo $$ > {tmp_path}/'$SLURMD_NODENAME'; sleep 300 & wait' & wait"
    cluster.submit(
        '#!/bin/bash\nsrun bash -c "$RANK"\n',
        "-N2", "--ntasks-per-node=1", "-o/dev/null", f"--export=ALL,RANK={rank}",
    )  # fmt: skip
    files = [tmp_path / "node1", tmp_path / "node2"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    pids = [int(file.read_text()) for file in files]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    cluster.kill_node(2, tell=False)
    assert Path(f"/proc/{pids[0]}").exists()
    assert not Path(f"/proc/{pids[1]}").exists()


@pytest.mark.mpi
def test_two_clusters_do_not_disturb_each_other(
    slurm_cluster: SlurmCluster, slurm_cluster_factory: type[SlurmCluster]
) -> None:
    other = slurm_cluster_factory(nodes=2, cpus=4)
    command = ["srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "--ntasks-per-node=2"]
    program = [sys.executable, "-m", "mpi4py", "-c", WHO_AM_I]
    running = [
        subprocess.Popen(
            [*command, f"-N{nodes}", *program],
            env=cluster.env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for cluster, nodes in ((slurm_cluster, 4), (other, 2))
    ]
    outs = [process.communicate(timeout=60)[0] for process in running]
    assert sorted(outs[0].splitlines()) == [f"{rank} 8" for rank in range(8)]
    assert sorted(outs[1].splitlines()) == [f"{rank} 4" for rank in range(4)]
    job_id = other.submit("#!/bin/bash\nsleep 60\n", "-o/dev/null")
    with pytest.raises(SchedulerError, match="Invalid job id"):
        slurm_cluster.job(job_id)
    other.stop()
    assert slurm_cluster.nodes_up() == {1, 2, 3, 4}


def test_gpus_are_seen_by_ranks_as_on_a_real_node(
    slurm_cluster_factory: type[SlurmCluster],
) -> None:
    cluster = slurm_cluster_factory(
        nodes=2, gpus=4, gpu_type="a100", gpu_flags="nvidia_gpu_env", extra_conf="KillWait=1"
    )
    done = cluster.run(
        "srun", "-N2", "--ntasks-per-node=4", "--gpus-per-task=1",
        "sh", "-c", "echo $SLURM_LOCALID $CUDA_VISIBLE_DEVICES ${ROCR_VISIBLE_DEVICES-unset}",
    )  # fmt: skip
    expected = [f"{local} {local} unset" for local in range(4) for _ in range(2)]
    assert sorted(done.stdout.splitlines()) == expected
    assert cluster.run("sinfo", "-h", "-p", "batch", "-o", "%G").stdout.strip() == "gpu:a100:4"
    config = cluster.run("scontrol", "show", "config").stdout
    assert re.search(r"^KillWait += 1 sec$", config, re.M)


def test_stop_leaves_no_process_no_file_no_mount(
    slurm_cluster_factory: type[SlurmCluster],
) -> None:
    cluster = slurm_cluster_factory(nodes=2)
    root = cluster.root
    job_id = cluster.submit("#!/bin/bash\nsrun sleep 300\n", "-N2", "--ntasks-per-node=1")
    cluster.wait_job(job_id, "RUNNING", timeout=30)
    # Daemons with their keepers, and the job's: 2 sleep, 2 slurmstepd, srun.
    wait_until(lambda: len(processes_of(root)) >= 2 * 4 + 5)
    cluster.stop()
    assert traces_of(root) == []
    cluster.stop()
    with pytest.raises(UsageError, match="not started"):
        _ = cluster.env


def test_cluster_ends_with_the_process_that_started_it(slurm_cluster: SlurmCluster) -> None:
    code = (
        "from hpctrain.testing.slurm import SlurmCluster; import time\n"
        "cluster = SlurmCluster(nodes=1).start()\n"
        "cluster.submit('#!/bin/bash\\nsrun sleep 300\\n')\n"
        "print(cluster.root, flush=True); time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        root = Path(owner.stdout.readline().strip())
        assert len(processes_of(root)) >= 3
        owner.send_signal(signal.SIGKILL)
    wait_until_gone(root)
    shutil.rmtree(root)
    assert slurm_cluster.nodes_up() == {1, 2, 3, 4}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_works_for_an_ordinary_user(slurm_cluster: SlurmCluster) -> None:
    code = (
        "from hpctrain.testing.slurm import SlurmCluster; import os\n"
        "with SlurmCluster(nodes=2) as c:\n"
        "    job = c.submit('#!/bin/bash\\nsrun true\\n', '-N2', '--ntasks-per-node=1')\n"
        "    c.wait_job(job, 'COMPLETED')\n"
        "    print(os.getuid(), c.run('srun', '-n1', 'id', '-u').stdout)\n"
    )
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    path = str(Path(hpctrain.__file__).parents[1])
    become += ["env", f"PYTHONPATH={path}", "PYTHONDONTWRITEBYTECODE=1"]
    enter = "import sys, hpctrain.testing.slurm; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3"):
        probe = subprocess.run([*become, python, "-c", enter], check=False, capture_output=True)
        if probe.returncode == 0:
            break
    else:
        pytest.skip("no Python >= 3.11 that user 65534 may run and read hpctrain with")
    done = subprocess.run(
        [*become, python, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["65534", "65534"], "")
    assert slurm_cluster.nodes_up() == {1, 2, 3, 4}


def test_environment_holds_nothing_of_the_caller(
    slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "99-0")
    monkeypatch.setenv("PMI_RANK", "5")
    assert not [key for key in slurm_cluster.env if key.startswith(("SBATCH", "PMI", "SLURM_J"))]
    done = slurm_cluster.run("srun", "-n1", "sh", "-c", "echo $SLURM_JOB_ID ${PMI_RANK-unset}")
    job_id, pmi_rank = done.stdout.split()
    assert job_id != "1"
    assert pmi_rank == "unset"


def test_errors_of_the_caller_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nodes is 0; a cluster needs at least 1"):
        SlurmCluster(nodes=0)
    with pytest.raises(UsageError, match="Unix sockets allow 60"):
        SlurmCluster(tmp_path / ("x" * 60)).start()


def test_job_line_with_blanks_and_equal_signs_in_values() -> None:
    job = Job.parse(
        "JobId=12 JobName=a b UserId=me(1) Priority=4 JobState=PENDING Reason=BeginTime "
        "Restarts=2 ExitCode=0:9 ReqNodeList=(null) NodeList=(null) TRES=cpu=2,mem=1M "
        "Command=/tmp/a dir/job x=y StdOut=/tmp/out"
    )
    assert (job.id, job.state, job.reason, job.restarts) == (12, "PENDING", "BeginTime", 2)
    assert (job.exit_code, job.signal, job.nodes) == (0, 9, "")
    assert job.fields["JobName"] == "a b"
    assert job.fields["TRES"] == "cpu=2,mem=1M"
