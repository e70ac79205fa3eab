"""Real ranks of which one is slow and one computes something else: both are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from life_tokens import make_tokens

from hpctrain.rundir import RunDir
from hpctrain.testing.jobs import run_job
from hpctrain.testing.ranks import unavailable

pytestmark = [
    pytest.mark.whole,  # make life
    pytest.mark.mpi,
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
]
JOB = """\
name: watched
model: {layers: 1, hidden: 16, heads: 2, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 16}
train: {steps: 12, global_batch: 8, micro_batch: 1, lr: 1e-2, loss: "faulty:loss"}
checkpoint: {every: 1000}
health: {stragglers: 6, preflight: true}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, RunDir]:
    """The same four ranks without and with a look at their gradients every 4 steps."""
    folder = tmp_path_factory.mktemp("watched")
    shutil.copy(Path(__file__).with_name("faulty.py"), folder)
    make_tokens(folder)
    env = {"SLEEPY": "2", "NOISY": "3"}
    plain = run_job(JOB, folder, "health.stragglers=0", ranks=4, env={"NOISY": "3"})
    watched = run_job(JOB, folder, "health.dispersion=4", ranks=4, env=env)
    return plain, watched


def test_looking_changes_nothing(runs: tuple[RunDir, RunDir]) -> None:
    curves = [[(s.step, s.loss, s.grad_norm) for s in run.read_steps()] for run in runs]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 12


def test_the_rank_with_another_gradient_is_named(runs: tuple[RunDir, RunDir]) -> None:
    _, watched = runs
    lines = (watched.health / "dispersion.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [one["step"] for one in found] == [4, 8, 12]
    for one in found:
        assert len(one["losses"]) == len(one["norms"]) == len(one["cosines"]) == 4
        assert max(one["losses"]) == one["losses"][3]
        assert one["norms"][3] > 5 * max(one["norms"][:3])
        # The mean gradient is nearly that of the loud rank.
        assert one["cosines"][3] == max(one["cosines"])
        assert -1 <= one["direction"] <= 1
    told = [event for event in watched.read_events() if event.kind == "inconsistent"]
    # Once a rank may stand out by chance: the second look names it.
    assert [(event.data["step"], event.data["rank"]) for event in told] == [(8, 3), (12, 3)]


def test_the_slow_rank_is_named(runs: tuple[RunDir, RunDir]) -> None:
    _, watched = runs
    told = [event for event in watched.read_events() if event.kind == "straggler"]
    assert {event.data["slow"] for event in told} == {"rank"}
    # On a machine that does other things as well another rank may be slow for a while.
    slow = [event for event in told if event.data["ranks"] == [2]]
    assert [event.data["ranks"] for event in told].count([2]) >= len(told) / 2
    assert all("rank 2 on" in one.message and "computes for" in one.message for one in slow)


def test_a_preflight_of_one_node_takes_seconds(runs: tuple[RunDir, RunDir]) -> None:
    for run in runs:
        found = json.loads((run.health / "preflight.json").read_text())
        assert found["seconds"] < 20
        (node,) = found["nodes"]
        assert node["ranks"] == 4
        assert node["flops"] > 1e8
        assert node["write"] > 0
        assert found["bad_nodes"] == []


def test_only_whole_gradients_can_be_compared(tmp_path: Path) -> None:
    from hpctrain.errors import ImpossibleError
    from hpctrain.testing.jobs import make_run

    with pytest.raises(ImpossibleError, match=r"health\.dispersion: gradients are compared where"):
        make_run(JOB, tmp_path, "health.dispersion=4", "parallel.sharding=zero3", "nodes=2")
