"""A link that grows slow while a job runs, between real hosts: told from a slow rank, and named."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from life_helpers import Life, wait_for
from life_tokens import make_tokens

from hpctrain.testing.slurm import SlurmCluster

pytestmark = [pytest.mark.whole, pytest.mark.slurm, pytest.mark.network]  # make life
JOB = """\
name: links
nodes: 3
ranks_per_node: 1
model: {layers: 1, hidden: 128, heads: 2, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 16}
train: {steps: 100000, global_batch: 6, lr: 1e-3}
checkpoint: {every: 100000}
slurm: {time: 10m, margin: 30s, cpus_per_task: 1, max_restarts: 0}
health: {stragglers: 8, preflight: true}
"""


def test_a_slow_link_is_named_while_the_job_runs(
    slurm_cluster_factory: Callable[..., SlurmCluster], tmp_path: Path
) -> None:
    cluster = slurm_cluster_factory(nodes=3, cpus=1, netns=True, rate="1gbit")
    assert cluster.hosts is not None
    tokens = make_tokens(tmp_path)
    life = Life(cluster, tmp_path / "links", tokens, JOB).submit()
    life.reaches(16)
    assert [e for e in life.run.read_events() if e.kind == "straggler"] == []
    cluster.hosts.set_rate("20mbit", 3)
    slowed = time.time()

    def told() -> object:
        return [e for e in life.run.read_events() if e.kind == "straggler"]

    wait_for(told, 90, life.tell)
    event = life.run.read_events()[-1]
    first = next(e for e in life.run.read_events() if e.kind == "straggler")
    assert first.data["slow"] == "link", event
    assert first.message.endswith("a link is slow; it is that of node3")
    assert first.time > slowed
    life.call("cancel", life.run.id, "--now")
    shutil.rmtree(tmp_path / "links", ignore_errors=True)
