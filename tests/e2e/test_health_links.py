"""Real hosts behind real links: a link that is slow before the start or grows slow while the job
runs, told from a slow rank and named; a directory that one host may only read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from life_helpers import Life, wait_for
from life_tokens import make_tokens

from hpctrain.records import EventRecord
from hpctrain.testing import hosts
from hpctrain.testing.slurm import SlurmCluster, unavailable

pytestmark = [  # make life
    pytest.mark.whole,
    pytest.mark.slurm,
    pytest.mark.network,
    pytest.mark.timeout(400),
]
JOB = """\
name: links
nodes: 3
ranks_per_node: 1
model: {layers: 1, hidden: 128, heads: 2, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 16}
train: {steps: 100000, global_batch: 6, lr: 1e-3}
checkpoint: {every: 100000}
slurm: {time: 10m, margin: 30s, cpus_per_task: 1, max_restarts: 0}
health: {stragglers: 8, preflight: true, bad_below: 0.25}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if (reason := unavailable() or hosts.unavailable()) is not None:
        pytest.skip(f"no hosts here: {reason}")
    one = SlurmCluster(nodes=3, cpus=1, netns=True, rate="1gbit", env={"OMP_NUM_THREADS": "1"})
    with one as started:
        yield started


@pytest.fixture(autouse=True)
def alike(cluster: SlurmCluster) -> Iterator[None]:
    """Each test leaves idle nodes behind links of one rate."""
    yield
    assert cluster.hosts is not None
    cluster.cancel_all()
    cluster.hosts.set_rate("1gbit")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


def test_a_slow_link_is_named_while_the_job_runs(
    cluster: SlurmCluster, tokens: Path, tmp_path: Path
) -> None:
    assert cluster.hosts is not None
    life = Life(cluster, tmp_path / "links", tokens, JOB).submit()
    life.reaches(16)

    def told() -> list[EventRecord]:
        found = [e for e in life.run.read_events() if e.kind == "straggler"]
        return [e for e in found if e.data["slow"] == "link"]

    assert told() == []
    cluster.hosts.set_rate("20mbit", 3)
    slowed = time.time()
    wait_for(told, 90, life.tell)
    first = told()[0]
    assert first.message.endswith("a link is slow; it is that of node3")
    assert first.time > slowed
    life.call("cancel", life.run.id, "--now")


def test_a_slow_link_is_found_before_the_first_step(
    cluster: SlurmCluster, tokens: Path, tmp_path: Path
) -> None:
    assert cluster.hosts is not None
    cluster.hosts.set_rate("20mbit", 2)
    life = Life(cluster, tmp_path / "links", tokens, JOB).submit("train.steps=2")
    life.ends("finished")
    found = json.loads((life.run.health / "preflight.json").read_text())
    assert found["bad_nodes"] == ["node2"]
    assert found["seconds"] < 20
    links = {node["name"]: node["link"] for node in found["nodes"]}
    # 1 MiB each way: at most 2.5 MB/s over a link of 20 Mbit/s.
    assert links["node2"] < 3e6 < 10e6 < min(links["node1"], links["node3"])
    (told,) = [e.message for e in life.run.read_events() if "its messages" in e.message]
    assert told.startswith("preflight: node2: its messages to other nodes go at 2.")


def test_a_directory_that_one_node_may_only_read(
    cluster: SlurmCluster, tokens: Path, tmp_path: Path
) -> None:
    """Its node is named with the path; told to do without such nodes, the run goes on."""
    assert cluster.hosts is not None
    saves = tmp_path / "saves"
    saves.mkdir()
    cluster.hosts.run(2, "mount", "-t", "tmpfs", "-o", "ro", "none", str(saves))
    two = ("nodes=2", "train.global_batch=4", "train.steps=3", f"checkpoint.path={saves}")
    refused = Life(cluster, tmp_path / "refused", tokens, JOB).submit(*two)
    status = refused.ends("failed")
    assert status["exit_code"] == 3
    assert f"preflight: node2: {saves}: Read-only file system" in status["reason"]
    without = Life(cluster, tmp_path / "without", tokens, JOB).submit(
        *two, "health.exclude_bad_nodes=true", "slurm.max_restarts=2"
    )
    without.ends("finished")
    (restart,) = without.run.read_restarts()
    assert (restart.why, restart.action, list(restart.excluded)) == (
        "bad_nodes",
        "successor",
        ["node2"],
    )
    jobs = [e.data["nodes"] for e in without.run.read_events() if e.kind == "job"]
    assert jobs == ["node[1-2]", "node[1,3]"]
    assert without.run.last_step().step == 3  # type: ignore[union-attr]
