"""Runs that are broken from within and from outside reach their last step with no hand on them,
on a real Slurm, and with the curve of a run that nobody disturbed, to the last bit.

All runs live on one cluster at the same time: a requeued job waits for seconds, and the others
use them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from life_helpers import JOB, STEPS, Life, make_tokens

from hpctrain.testing.slurm import SlurmCluster, unavailable

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if (reason := unavailable()) is not None:
        pytest.skip(f"no Slurm cluster here: {reason}")
    with SlurmCluster(nodes=8, cpus=2, env={"OMP_NUM_THREADS": "1"}) as started:
        yield started


@pytest.fixture(scope="module")
def lives(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Life]:
    """All runs, submitted; the tests look at how they end."""
    folder = tmp_path_factory.mktemp("lives")
    tokens = make_tokens(folder)

    def life(name: str, *sets: str, job: str = JOB) -> Life:
        return Life(cluster, folder / name, tokens, job).submit(*sets)

    return {
        "outside": life(
            "outside", "slurm.partition=low", 'slurm.sbatch_options=["--exclude=node[1-4]"]',
            "env.PACE=0.25",
        ),
        "inside": life(
            "inside", "env.FAULTS=7:1:raise,12:0:leave,17:1:kill,22:1:signal,27:0:signals,32:0:exit"
        ),
        "straight": life("straight"),
        "at once": life("at-once", "env.FAULTS=0:1:raise,0:0:raise,0:1:leave"),
        "typo": life("typo", "env.FAULTS=7:1:typo"),
    }  # fmt: skip


def test_a_run_that_nobody_disturbs_leaves_no_ledger(lives: dict[str, Life]) -> None:
    straight = lives["straight"]
    assert straight.ends("finished")["step"] == STEPS
    assert not straight.run.restarts.exists()
    assert [one.automatic for one in straight.run.read_launches()] == [False]


def test_slurmctld_restart_requeue_preemption_and_a_lost_node(
    cluster: SlurmCluster, lives: dict[str, Life]
) -> None:
    life = lives["outside"]
    life.reaches(3)
    cluster.restart_controller()
    life.reaches(7)
    (launch,) = life.run.read_launches()
    cluster.run("scontrol", "requeue", launch.job_id)
    life.reaches(14)
    nodes = cluster.job(int(launch.job_id)).nodes
    urgent = cluster.submit(
        "#!/bin/bash\nsleep 1\n", "-purgent", f"--nodelist={nodes}", "-N2", "-n4", "-o/dev/null"
    )
    cluster.wait_job(urgent, "COMPLETED", timeout=60)
    life.reaches(22)
    lost = int(
        cluster.job(int(launch.job_id)).nodes.strip("node[]").replace(",", "-").split("-")[1]
    )
    cluster.kill_node(lost)
    life.ends("finished")
    assert life.whys() == ["requeued", "preempted", "node_failure"]
    assert life.curve() == lives["straight"].curve()
    launches, restarts = life.run.read_launches(), life.run.read_restarts()
    assert [one.attempt for one in launches] == [0, 1, 2, 3]
    assert [one.restart for one in launches] == [0, 1, 2, 3]
    assert {one.job_id for one in launches} == {launch.job_id}
    assert {one.action for one in restarts} == {"slurm"}
    assert f"node{lost}" in restarts[2].nodes or "[" in restarts[2].nodes
    assert restarts[2].seconds_lost > 0
    status = life.status()
    assert status["restarts"] == 3


def test_ranks_that_raise_leave_die_or_get_a_signal(lives: dict[str, Life]) -> None:
    life = lives["inside"]
    life.ends("finished")
    assert life.whys() == ["rank_failure"] * 3 + ["signal", "walltime", "rank_failure"], life.tell()
    assert life.curve() == lives["straight"].curve()
    restarts = life.run.read_restarts()
    assert [one.action for one in restarts] == ["requeue"] * 6
    assert [one.from_step for one in restarts[:3]] == [5, 10, 15]
    # Asked to stop, the ranks checkpoint where they are: nothing is lost.
    assert all(one.from_step == one.step for one in restarts[3:5])
    assert "node on fire" in restarts[0].reason
    assert "SystemExit" in restarts[5].reason
    assert all(one.seconds_lost >= 0 for one in restarts)
    log = life.run.job_log.read_text()
    assert all(f", restart {count}, " in log for count in range(7))


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
