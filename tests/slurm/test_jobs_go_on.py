"""Real batch scripts on a real Slurm with ranks that do nothing but end in every way: the script,
its hooks, the ledger. What real training makes of it is in tests/e2e/test_slurm_goes_on.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import pytest

from hpctrain.cli.launch import create
from hpctrain.cli.prepare import prepare
from hpctrain.cli.view import look
from hpctrain.launchers import SrunLauncher, batch_hook
from hpctrain.rundir import RunDir
from hpctrain.slurm import SlurmClient, render, submit
from hpctrain.spec import read_job
from hpctrain.testing.slurm import SlurmCluster, unavailable

pytestmark = pytest.mark.slurm
JOB = """\
name: l
nodes: 1
ranks_per_node: 1
model: {layers: 1, hidden: 16, heads: 2, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 16}
train: {steps: 10, global_batch: 4}
slurm: {time: 5m, margin: 30s, cpus_per_task: 1}
"""
RANK = """\
import os, signal, sys, time
from pathlib import Path
from hpctrain.records import FailureRecord, StateRecord, StepRecord, append_line, write_json
from hpctrain.rundir import RunDir
run, mode = RunDir(Path(sys.argv[1])), sys.argv[2]
n = len(run.read_launches()) - 1
first = n == 0
for i in range(1, 4):
    append_line(run.metrics, StepRecord(3 * n + i, time.time(), 1.0, 0.1, 1.0, 1, 0.1, 1.0))
def state(status, reason=""):
    run.write_state(StateRecord(status, 3 * n + 3, 10, time.time(), 1, reason))
def fail(error):
    record = FailureRecord(0, "h", time.time(), error, "on fire", "", attempt=n)
    write_json(run.failure(n, 0), record.to_dict())
    sys.exit(6)
got = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: got.append(1))
state("running")
(run.root / f"up{n}").touch()
if mode == "deadline" and first:
    state("stopped", "deadline: the walltime ends within the margin")
    sys.exit(75)
if mode in ("raise", "successor") and first or mode == "always":
    fail("RuntimeError")
if mode == "typo":
    fail("TypeError")
if mode == "exit" and first:
    os._exit(3)
if mode in ("scancel", "preempt", "requeue", "elastic") and first:
    while not got:
        time.sleep(0.05)
    state("stopped", "signal SIGTERM: cancelled, preempted or requeued by the scheduler")
    sys.exit(75)
if mode == "node" and first:
    time.sleep(600)
state("finished")
"""
# Way of ending -> overrides of the job, why and what followed, and the status at the end.
WAYS: dict[str, tuple[tuple[str, ...], list[tuple[str, str]], str]] = {
    "deadline": ((), [("walltime", "requeue")], "finished"),
    "raise": ((), [("rank_failure", "requeue")], "finished"),
    "exit": ((), [("rank_failure", "requeue")], "finished"),
    "successor": (("slurm.requeue=false",), [("rank_failure", "successor")], "finished"),
    "typo": ((), [("rank_failure", "stop")], "failed"),
    "always": ((), [("rank_failure", "requeue"), ("rank_failure", "stop")], "failed"),
    "scancel": ((), [("signal", "stop")], "stopped"),
    "preempt": (("slurm.partition=low",), [("preempted", "slurm")], "finished"),
    "requeue": ((), [("requeued", "slurm")], "finished"),
    "node": ((), [("node_failure", "slurm")], "finished"),
    "elastic": (
        ("slurm.nodes=1-2", "nodes=2", "slurm.partition=pair"),
        [("requeued", "slurm")],
        "finished",
    ),
}
PAIR = (len(WAYS) + 2, len(WAYS) + 3)
"""Nodes that the job of a range has for itself, until one of them is taken."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if (reason := unavailable()) is not None:
        pytest.skip(f"no Slurm cluster here: {reason}")
    pair = f"PartitionName=pair Nodes=node[{PAIR[0]}-{PAIR[1]}] PriorityTier=10 PreemptMode=OFF"
    with SlurmCluster(nodes=PAIR[1], cpus=1, extra_conf=pair) as started:
        yield started


@pytest.fixture(scope="module")
def runs(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """A run a way of ending, all at the same time; nobody's hand is on them after this."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "job.yaml").write_text(JOB)
    (folder / "rank.py").write_text(RANK)
    client = SlurmClient(cluster.env)
    found, jobs = {}, {}
    for mode, (sets, _, _) in WAYS.items():
        prepared = prepare(read_job(folder / "job.yaml", sets), folder)
        with pytest.MonkeyPatch.context() as here:
            here.chdir(folder)  # the run remembers where it was submitted
            run = create(prepared, folder / "runs" / mode, ["test"])
        program = [sys.executable, str(folder / "rank.py"), str(run.root), mode]
        launcher = SrunLauncher(prepared.machine, mpich_wheel=False)
        script = render(prepared.job.spec, run, program, launcher, batch_hook())
        done = submit(prepared.job.spec, run, script, client, directory=folder)
        found[mode], jobs[mode] = run, int(done.launch.job_id)
    for mode in ("scancel", "preempt", "requeue", "node", "elastic"):
        wait_for((found[mode].root / "up0").exists, found[mode])
    cluster.run("scancel", str(jobs["scancel"]))
    taken = cluster.job(jobs["preempt"]).nodes
    urgent = "#!/bin/bash\nsleep 2\n"
    cluster.submit(urgent, "-purgent", "--exclusive", f"--nodelist={taken}", "-o/dev/null")
    cluster.run("scontrol", "requeue", str(jobs["requeue"]))
    # One of its nodes goes to another job as soon as it is free.
    last = f"--nodelist=node{PAIR[1]}"
    cluster.submit("#!/bin/bash\nsleep 60\n", "-purgent", last, "-o/dev/null")
    cluster.run("scontrol", "requeue", str(jobs["elastic"]))
    cluster.kill_node(int(cluster.job(jobs["node"]).nodes.removeprefix("node")))
    return found


def wait_for(what: Callable[[], bool], run: RunDir, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, run.job_log.read_text()
        time.sleep(0.2)


@pytest.mark.parametrize("mode", WAYS)
def test_a_run_goes_on_or_stops(
    cluster: SlurmCluster, runs: dict[str, RunDir], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    run, (_, expected, status) = runs[mode], WAYS[mode]
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    wait_for(lambda: look(run).status == status, run)
    if status != "finished":  # the ledger follows the ranks' last word
        wait_for(lambda: bool(run.read_restarts()), run)
    restarts, launches = run.read_restarts(), run.read_launches()
    told = run.job_log.read_text()
    assert [(one.why, one.action) for one in restarts] == expected, told
    assert [one.attempt for one in launches] == list(range(len(launches)))
    follows = [one.action != "stop" for one in restarts]
    assert len(launches) == 1 + sum(follows)
    assert [one.automatic for one in launches] == [False] + [True] * sum(follows)
    same = [one.job_id == launches[0].job_id for one in launches[1:]]
    assert same == [mode != "successor"] * len(same)
    assert all(one.nodes.startswith("node") for one in restarts)
    assert look(run).restarted == sum(follows)
    if mode == "elastic":
        nodes = [one.data["nodes"] for one in run.read_events() if one.kind == "job"]
        assert nodes == [f"node[{PAIR[0]}-{PAIR[1]}]", f"node{PAIR[0]}"]
        told = [one.message for one in run.read_events() if one.kind == "elastic"]
        assert [one.partition(":")[0] for one in told] == ["1 node now, 2 before"]
