"""Runs that are broken from within and from outside reach their last step with no hand on them,
on a real Slurm, and with the curve of a run that nobody disturbed, to the last bit.

All runs live on one cluster at the same time: a requeued job waits for seconds, and the others
use them. `make life` runs them; in the suite tests/slurm/test_jobs_go_on.py has every way of
ending, with ranks that do nothing else.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from life_helpers import HPCTRAIN, STEPS, Life, wait_for
from life_tokens import make_tokens

from hpctrain.cli.launch import create
from hpctrain.cli.prepare import prepare
from hpctrain.launchers import SrunLauncher, batch_hook, rank_program
from hpctrain.machine import load_site
from hpctrain.records import read_json, write_json
from hpctrain.scaling.array import array_script, shape_of
from hpctrain.slurm import SlurmClient, render
from hpctrain.slurm.submit import add_launch, write_script
from hpctrain.spec import read_job
from hpctrain.testing.slurm import SlurmCluster, unavailable

pytestmark = [pytest.mark.whole, pytest.mark.slurm, pytest.mark.timeout(400)]
# What waits for a test keeps away from the nodes of what does not.
HELD = 'slurm.sbatch_options=["--exclude=node[1-2,5-20]"]'

SLOWED = """\
name: slowed
nodes: 4
ranks_per_node: 1
model: {module: "slowed:build"}
data: {path: tokens.h5, sequence_length: 16}
train: {steps: 3, global_batch: 8, lr: 1e-2}
slurm: {time: 5m, margin: 30s, cpus_per_task: 1, partition: slowed}
health: {preflight: true, exclude_bad_nodes: true, bad_below: 0.25}
env: {SLOW_NODE: node12}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if (reason := unavailable()) is not None:
        pytest.skip(f"no Slurm cluster here: {reason}")
    more = "\n".join(
        f"PartitionName={name} Nodes=node[{nodes}] MaxTime=60 DefaultTime=10 PriorityTier=10"
        for name, nodes in (("elastic", "9-10"), ("slowed", "11-15"), ("wide", "16"))
    )
    with SlurmCluster(nodes=20, cpus=2, env={"OMP_NUM_THREADS": "1"}, extra_conf=more) as started:
        yield started


@pytest.fixture(scope="module")
def lives(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Life]:
    """All runs, submitted; the tests look at how they end."""
    folder = tmp_path_factory.mktemp("lives")
    tokens = make_tokens(folder)

    def life(name: str, *sets: str) -> None:
        found[name] = Life(cluster, folder / name.replace(" ", "-"), tokens).submit(*sets)

    # Two checkpoints lie between two faults of those that count as no progress without one.
    faults = "8:1:raise,18:0:leave,28:1:kill,33:1:signal,38:0:signals,53:0:exit"
    found: dict[str, Life] = {}
    life("straight")
    life("inside", f"env.FAULTS={faults}", "env.PACE=0.05")
    life(
        "outside", "slurm.partition=low", 'slurm.sbatch_options=["--exclude=node[1-4,9-20]"]',
        'env.HOLD="3,7,14,22"', "health.hang_after=0",
    )  # fmt: skip
    life("at once", "env.FAULTS=0:1:raise,0:0:raise,0:1:leave")
    life("typo", "env.FAULTS=7:1:typo")
    life("successors", "slurm.requeue=false", "env.FAULTS=7:1:raise,15:0:signal")
    life("walltime", "slurm.time=1m", "slurm.margin=35s", "env.PACE=0.5")
    life("deaf", "slurm.time=1m", "slurm.margin=30s", "env.FAULTS=7:1:sleep", "health.hang_after=0")
    life("read-only", "checkpoint.path=/proc/checkpoints", "health.preflight=true")
    life("hang", "env.FAULTS=9:1:freeze", "health.hang_after=4")
    life(
        "daemon", 'slurm.sbatch_options=["--exclude=node[1-16]"]', "env.HOLD=7",
        "health.hang_after=0",
    )  # fmt: skip
    life("cancelled", "env.HOLD=6", "health.hang_after=0", HELD)
    life(
        "elastic", "slurm.nodes=1-2", "slurm.partition=elastic", "env.FAULTS=9:0:raise",
        "slurm.sbatch_options=[]", "train.micro_batch=auto", "env.PACE=0.3",
    )  # fmt: skip
    found |= array(cluster, folder, tokens)
    packed = found["packed"] = Life(cluster, folder / "packed", tokens)
    archive = pack_environment(packed.folder)
    packed.submit(
        "nodes=1", "ranks_per_node=2", f"python_env.archive={archive}", "train.steps=3",
        f"python_env.path={packed.folder}/local", "slurm.sbatch_options=[]", "slurm.partition=wide",
    )  # fmt: skip
    slowed = found["slow node"] = Life(cluster, folder / "slowed", tokens, SLOWED)
    shutil.copy(Path(__file__).with_name("slowed.py"), slowed.folder)
    # Takes one of the two nodes of the elastic job while that waits for its restart.
    elastic = int(found["elastic"].run.read_launches()[0].job_id)
    cluster.wait_job(elastic, "RUNNING", timeout=60)
    cluster.submit(
        "#!/bin/bash\nsleep 40\n", "-pelastic", "--nodelist=node10", "--exclusive", "-o/dev/null"
    )
    return found


def array(cluster: SlurmCluster, folder: Path, tokens: Path) -> dict[str, Life]:
    """Three runs as the tasks of one job."""
    lives = {f"task {n}": Life(cluster, folder / f"task{n}", tokens) for n in range(3)}
    client = SlurmClient(cluster.env)
    specs, runs, shapes = [], [], set()
    for life in lives.values():
        held = ["env.HOLD=7", "health.hang_after=0"] if life is lives["task 2"] else []
        prepared = prepare(read_job(str(life.folder / "job.yaml"), [HELD, *held]), life.folder)
        run = create(prepared, life.folder / "runs", ["test"])
        launcher = SrunLauncher(prepared.machine, mpich_wheel=True)
        script = render(prepared.job.spec, run, rank_program(run), launcher, batch_hook())
        write_script(run.script, script)
        origin = read_json(run.provenance) or {}
        write_json(run.provenance, origin | {"import_paths": [str(life.folder)]})
        specs.append(prepared.job.spec)
        runs.append(run)
        shapes.add(shape_of(script))
    path = folder / "array.sbatch"
    log = folder / "array"
    path.write_text(array_script("tasks", shapes.pop(), [run.root for run in runs], log, None))
    submitted = client.submit(path)
    for task, (run, spec) in enumerate(zip(runs, specs, strict=True)):
        add_launch(run, spec, f"{submitted.job_id}_{task}", "local")
    return lives


def straight(lives: dict[str, Life]) -> list[tuple[int, float | None, float | None]]:
    """The curve of the run that nobody disturbs."""
    lives["straight"].ends("finished")
    return lives["straight"].curve()


def pack_environment(folder: Path) -> Path:
    """A relocatable environment as small as can be: its python is the one that tests."""
    binaries = folder / "pack" / "bin"
    binaries.mkdir(parents=True)
    python = binaries / "python"
    python.write_text(f'#!/bin/sh\necho "from $0" >> {folder}/ran\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    shutil.copy(HPCTRAIN, binaries / "hpctrain")
    with tarfile.open(folder / "env.tar.gz", "w:gz") as archive:
        archive.add(binaries, "bin")
    return folder / "env.tar.gz"


def test_ranks_run_from_an_environment_that_was_sent_to_the_node(lives: dict[str, Life]) -> None:
    life = lives["packed"]
    life.ends("finished")
    ran = (life.folder / "ran").read_text().splitlines()
    job = life.run.read_launches()[0].job_id
    assert ran == [f"from {life.folder}/local/hpctrain-env-{job}/bin/python"] * 2
    assert not list((life.folder / "local").glob("*.tar.gz"))


def test_a_run_that_nobody_disturbs_leaves_no_ledger(lives: dict[str, Life]) -> None:
    straight = lives["straight"]
    assert straight.ends("finished")["step"] == STEPS
    assert not straight.run.restarts.exists()
    assert [one.automatic for one in straight.run.read_launches()] == [False]


def test_this_cluster_describes_itself(cluster: SlurmCluster, lives: dict[str, Life]) -> None:
    life = lives["straight"]
    life.call("site", "probe", "ours")
    machine = load_site(life.folder / "ours.yaml")
    assert machine.scheduling.default_partition == "batch"
    assert machine.scheduling.longest_walltime(1, "short") == 120
    assert machine.scheduling.partitions["single"].max_nodes == 1
    assert machine.network.nodes == 20
    said = life.call("submit", "job.yaml", "--dry-run", "--set", "machine=./ours.yaml",
                     "--set", "slurm.partition=short", code=3).stderr  # fmt: skip
    assert "partition short: walltime 0-00:30:00 asked, 0-00:02:00 is the longest" in said


def test_slurmctld_restart_requeue_preemption_and_a_lost_node(
    cluster: SlurmCluster, lives: dict[str, Life]
) -> None:
    life = lives["outside"]
    life.held(3)
    cluster.restart_controller()
    life.go(3)
    life.held(7)
    (launch,) = life.run.read_launches()
    cluster.run("scontrol", "requeue", launch.job_id)
    life.go(7)
    life.held(14)
    nodes = cluster.job(int(launch.job_id)).nodes
    urgent = cluster.submit(
        "#!/bin/bash\nsleep 1\n",
        "-purgent",
        f"--nodelist={nodes}",
        "-N2",
        "--exclusive",
        "-o/dev/null",
    )
    life.go(14)
    cluster.wait_job(urgent, "COMPLETED", timeout=60)
    # The ranks may have come to step 22 before they were preempted.
    wait_for(lambda: len(life.run.read_launches()) == 3, 120, life.tell)
    (life.run.root / "held-22").unlink(missing_ok=True)
    life.held(22)
    lost = int(
        cluster.job(int(launch.job_id)).nodes.strip("node[]").replace(",", "-").split("-")[1]
    )
    cluster.kill_node(lost)
    life.go(22)
    life.ends("finished")
    assert life.whys() == ["requeued", "preempted", "node_failure"]
    assert life.curve() == straight(lives)
    launches, restarts = life.run.read_launches(), life.run.read_restarts()
    assert [one.attempt for one in launches] == [0, 1, 2, 3]
    assert [one.restart for one in launches] == [0, 1, 2, 3]
    assert {one.job_id for one in launches} == {launch.job_id}
    assert {one.action for one in restarts} == {"slurm"}
    assert f"node{lost}" in restarts[2].nodes or "[" in restarts[2].nodes
    assert restarts[2].seconds_lost > 0
    status = life.status()
    assert status["restarts"] == 3


def test_a_slurmd_that_dies_with_its_rank_and_tells_nobody(
    cluster: SlurmCluster, lives: dict[str, Life]
) -> None:
    """The other rank loses its peer, or the controller the node, whichever comes first."""
    life = lives["daemon"]
    life.held(7)
    (launch,) = life.run.read_launches()
    assert cluster.job(int(launch.job_id)).nodes == "node[17-18]"
    cluster.kill_node(18, tell=False)
    life.go(7)
    life.ends("finished")
    assert life.whys()
    assert set(life.whys()) <= {"rank_failure", "node_failure"}, life.tell()
    assert life.curve() == straight(lives)
    jobs = [one.data["nodes"] for one in life.run.read_events() if one.kind == "job"]
    assert "node18" not in jobs[-1]
    assert jobs[-1] in ("node[17,19]", "node[19-20]")


def test_ranks_that_raise_leave_die_or_get_a_signal(
    lives: dict[str, Life],
) -> None:
    life = lives["inside"]
    life.ends("finished")
    assert life.whys() == ["rank_failure"] * 3 + ["signal", "walltime", "rank_failure"], life.tell()
    assert life.curve() == straight(lives)
    restarts = life.run.read_restarts()
    assert [one.action for one in restarts] == ["requeue"] * len(restarts)
    steps = [one.from_step for one in restarts]
    assert steps == sorted(set(steps))
    assert all(one.step - one.from_step <= 10 for one in restarts)
    # Asked to stop, the ranks checkpoint where they are: nothing is lost.
    assert all(one.from_step == one.step for one in restarts[3:5])
    assert "node on fire" in restarts[0].reason
    assert "a rank was killed or left without a word" in restarts[2].reason
    assert "SystemExit" in restarts[5].reason
    assert all(one.seconds_lost >= 0 for one in restarts)
    log = life.run.job_log.read_text()
    assert all(f", restart {count}, " in log for count in range(len(restarts) + 1))


def test_a_job_that_fails_at_once_stops_after_one_more_try(lives: dict[str, Life]) -> None:
    life = lives["at once"]
    status = life.ends("failed")
    assert "no progress" in status["reason"]
    assert status["exit_code"] == 6
    restarts = life.run.read_restarts()
    assert [one.action for one in restarts] == ["requeue", "stop"]
    assert [one.from_step for one in restarts] == [0, 0]


def test_an_error_of_the_code_is_not_tried_again(lives: dict[str, Life]) -> None:
    life = lives["typo"]
    status = life.ends("failed")
    assert "NameError" in status["reason"]
    assert [one.action for one in life.run.read_restarts()] == ["stop"]
    assert len(life.run.read_launches()) == 1


def test_an_array_in_which_the_last_task_alone_is_signalled(
    cluster: SlurmCluster, lives: dict[str, Life]
) -> None:
    """The number of the last task's job is that of the array: requeued by it, all would be."""
    tasks = [lives[f"task {number}"] for number in range(3)]
    tasks[2].held(7)
    last = tasks[2].run.read_launches()[0].job_id
    cluster.run("scancel", "--batch", "--signal=USR1", last)
    tasks[2].go(7)
    for task in tasks:
        task.ends("finished")
        assert task.curve() == straight(lives)
    assert [task.whys() for task in tasks] == [[], [], ["walltime"]]
    assert [one.job_id for one in tasks[2].run.read_launches()] == [last, last]


def test_where_requeue_is_off_successors_follow(lives: dict[str, Life]) -> None:
    life = lives["successors"]
    life.ends("finished")
    assert life.curve() == straight(lives)
    launches, restarts = life.run.read_launches(), life.run.read_restarts()
    assert [one.action for one in restarts] == ["successor"] * 2
    assert [one.job_id for one in launches] == [
        restarts[0].job_id, restarts[0].next_job_id, restarts[1].next_job_id,
    ]  # fmt: skip
    assert len({one.job_id for one in launches}) == 3
    assert [one.automatic for one in launches] == [False, True, True]


def test_a_short_walltime_takes_several_jobs(lives: dict[str, Life]) -> None:
    """A minute of walltime of which 35 s are margin, and steps that take longer than the rest."""
    life = lives["walltime"]
    life.ends("finished")
    whys = life.whys()
    assert whys
    assert set(whys) == {"walltime"}
    assert life.curve() == straight(lives)
    assert all(one.from_step == one.step for one in life.run.read_restarts())


def test_ranks_that_do_not_stop_in_the_margin_cost_the_run_nothing_else(
    lives: dict[str, Life],
) -> None:
    """No watchdog looks: the script ends them six seconds before Slurm would, and goes on."""
    life = lives["deaf"]
    life.ends("finished")
    restarts = life.run.read_restarts()
    # The walltime of the others was announced while their ranks still listened.
    assert {one.why for one in restarts} <= {"walltime", "signal"}
    (late,) = [one for one in restarts if "had not stopped" in one.reason]
    assert (late.why, late.action) == ("walltime", "requeue")
    assert late.step - late.from_step < 10
    jobs = [e.time for e in life.run.read_events() if e.kind == "job"]
    assert 50 < late.time - jobs[late.attempt] < 70
    assert life.curve() == straight(lives)


def test_scancel_ends_a_run_with_a_checkpoint(
    cluster: SlurmCluster, lives: dict[str, Life]
) -> None:
    life = lives["cancelled"]
    life.held(6)
    (launch,) = life.run.read_launches()
    cluster.run("scancel", launch.job_id)
    life.go(6)
    status = life.ends("stopped", "cancelled")
    assert status["durable_step"] == status["step"] >= 6
    (restart,) = life.run.read_restarts()
    assert (restart.action, restart.why) == ("stop", "signal")
    assert "scancel" in restart.reason
    life.call("resume", life.run.id)
    life.ends("finished")
    assert life.curve() == straight(lives)


def test_a_range_of_nodes_follows_what_there_is(lives: dict[str, Life]) -> None:
    """One or two nodes of a partition of two, one of which another job takes meanwhile."""
    life = lives["elastic"]
    life.ends("finished")
    (told,) = [event for event in life.run.read_events() if event.kind == "elastic"]
    assert told.message == (
        "1 node now, 2 before: global batch 8 in 2 micro-batches of 4 on 1 data-parallel rank; "
        "learning rate and order of samples as before"
    )
    jobs = [one.data["nodes"] for one in life.run.read_events() if one.kind == "job"]
    assert jobs == ["node[9-10]", "node9"]
    for (step, loss, norm), (step_, loss_, norm_) in zip(
        life.curve(), straight(lives), strict=True
    ):
        assert step == step_
        assert loss == pytest.approx(loss_, abs=1e-4)
        assert norm == pytest.approx(norm_, rel=1e-3)


def test_a_path_that_cannot_be_written_is_named(lives: dict[str, Life]) -> None:
    life = lives["read-only"]
    status = life.ends("failed")
    assert status["exit_code"] == 3
    assert "/proc/checkpoints: " in status["reason"]
    assert [one.action for one in life.run.read_restarts()] == ["stop"]
    assert not list(life.run.read_steps())


def test_a_rank_that_is_stopped_is_found_and_the_run_goes_on(lives: dict[str, Life]) -> None:
    life = lives["hang"]
    life.ends("finished")
    assert life.whys() == ["hang"]
    (restart,) = life.run.read_restarts()
    assert "rank 1 on node" in restart.reason
    assert "does not answer" in restart.reason
    assert restart.time - max(s.time for s in life.run.read_steps() if s.time < restart.time) < 30
    assert life.curve() == straight(lives)


def test_a_node_slowed_on_purpose_is_found_and_left_out(
    cluster: SlurmCluster, lives: dict[str, Life]
) -> None:
    """Alone on the cluster, for the nodes share the processors that are measured."""
    cluster.cancel_all()
    life = lives["slow node"].submit()
    life.ends("finished")
    (told,) = [e for e in life.run.read_events() if e.kind == "ended"]
    assert "preflight: bad nodes node12: node12: computes at" in told.message
    (restart,) = life.run.read_restarts()
    assert (restart.why, restart.action, restart.excluded) == ("bad_nodes", "successor", ["node12"])
    first, second = [e for e in life.run.read_events() if e.kind == "job"]
    assert (first.data["nodes"], second.data["nodes"]) == ("node[11-14]", "node[11,13-15]")
    seconds = [e.data["seconds"] for e in life.run.read_events() if e.kind == "preflight"]
    assert all(one < 20 for one in seconds)
