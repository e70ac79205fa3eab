"""``hpctrain site``, the budget, and what explains a line of a script."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli import main
from hpctrain.cli.elastic import Given, possible
from hpctrain.cli.launch import check_budget
from hpctrain.cli.prepare import Prepared, load
from hpctrain.errors import ImpossibleError
from hpctrain.machine import load_site, machine_names
from hpctrain.records import LaunchRecord, RestartRecord, StateRecord
from hpctrain.rundir import RunDir

JOB = """\
machine: frontier
nodes: 2
model: {layers: 1, hidden: 16, heads: 2, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 16}
train: {steps: 12, global_batch: 48}
slurm: {account: x, time: 1h}
"""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)

    def run(*arguments: str, code: int = 0) -> Result:
        done = CliRunner().invoke(main, list(arguments))
        assert done.exit_code == code, done.output + done.stderr
        return done

    return run


def test_list_names_every_machine(call: Callable[..., Result]) -> None:
    answer = json.loads(call("site", "list", "--json").stdout)
    assert [one["name"] for one in answer["machines"]] == list(machine_names())
    frontier = next(one for one in answer["machines"] if one["name"] == "frontier")
    assert (frontier["devices"], frontier["aliases"]) == (8, ["olcf-frontier"])


def test_show_marks_what_is_not_certain(call: Callable[..., Result]) -> None:
    text = call("site", "show", "olcf-frontier").stdout
    line = next(one for one in text.splitlines() if "peak_flops.bf16" in one)
    assert line.endswith("(low: shown, not relied on)")
    low = json.loads(call("site", "show", "frontier", "--low", "--json").stdout)["facts"]
    assert low
    assert {one["confidence"] for one in low} == {"low"}
    assert "did you mean frontier?" in call("site", "show", "frontir", code=2).stderr


def test_check_names_faults_with_their_line(call: Callable[..., Result]) -> None:
    Path("bad.yaml").write_text(
        "base: dgx-h100\nname: bad\nnode:\n  source: x\n  confidence: high\n  devises: 3\n"
    )
    said = call("site", "check", "bad.yaml", code=2).stderr
    assert "bad.yaml:6" in said
    assert "did you mean devices?" in said
    assert "cannot be read" in call("site", "check", "missing.yaml", code=2).stderr


def test_probe_writes_a_file_that_loads(call: Callable[..., Result]) -> None:
    call("site", "probe", "ours")
    machine = load_site(Path("ours.yaml"))
    assert machine.name == "ours"
    assert machine.node.cores >= 1
    assert "exists" in call("site", "probe", "ours", code=2).stderr
    call("site", "check", "ours.yaml")


def test_a_line_of_the_script_is_explained(call: Callable[..., Result]) -> None:
    text = call("explain", "NCCL_NET", "job.yaml").stdout
    assert text.startswith("export NCCL_NET=OFI\n")
    assert "docs.olcf.ornl.gov" in text
    one = call("explain", "NCCL_NET", "job.yaml", "--set", "nodes=1").stdout
    assert one.startswith("export NCCL_NET=Socket\n")
    lines = json.loads(call("explain", "script", "job.yaml", "--json").stdout)["lines"]
    assert all(line["why"] and line["source"] for line in lines)
    assert "no key" in call("explain", "NCCL_NIX", "job.yaml", code=2).stderr


def test_a_walltime_over_the_bin_is_refused_with_its_source(call: Callable[..., Result]) -> None:
    sets = ("--set", "slurm.time=4h", "--set", "train.global_batch=92x".replace("x", "0"))
    said = call("submit", "job.yaml", "--dry-run", "--set", "slurm.time=4h", code=3).stderr
    assert "0-02:00:00 is the longest on 2 nodes (jobs of 92 nodes and more may)" in said
    assert "docs.olcf.ornl.gov/systems/frontier_user_guide.html" in said
    more = ("--set", "nodes=92", "--set", "train.global_batch=736", *sets[:2])
    call("submit", "job.yaml", "--dry-run", *more)


def test_node_counts_that_a_job_cannot_use(tmp_path: Path) -> None:
    """48 samples on 8 ranks a node: 1, 2, 3 and 6 nodes divide, 4 and 5 do not."""
    given = Given(JOB.replace("nodes: 2", "nodes: 1"), "job.yaml", tmp_path, ("slurm.nodes=1-6",))
    fits, reasons = possible(given, range(1, 7))
    assert sorted(fits) == [1, 2, 3, 6]
    assert sorted(reasons) == [4, 5]
    assert "do not divide over 32 data-parallel ranks" in reasons[4]
    # The micro-batch of the most nodes: one sample a rank on 6 nodes, more of them on fewer.
    assert {n: one.job.spec.train.micro_batch for n, one in fits.items()} == {
        1: 1,
        2: 1,
        3: 1,
        6: 1,
    }
    explicit = Given(JOB, "job.yaml", tmp_path, ("train.micro_batch=3", "nodes=1"))
    assert sorted(possible(explicit, range(1, 4))[0]) == [1, 2]


def test_a_range_of_nodes_begins_with_the_most(call: Callable[..., Result]) -> None:
    sets = ("--set", "slurm.nodes=1-3", "--set", "nodes=3")
    assert "#SBATCH --nodes=1-3\n" in call("submit", "job.yaml", "--dry-run", *sets).stdout
    said = call("submit", "job.yaml", "--dry-run", "--set", "slurm.nodes=4-8", code=2).stderr
    assert "nodes is 2, which is not within slurm.nodes 4-8" in said
    for wrong in ("8-4", "0-3", "4", "a-b"):
        said = call(
            "submit", "job.yaml", "--dry-run", "--set", f"slurm.nodes={wrong}", code=2
        ).stderr
        assert "slurm.nodes" in said


def test_a_budget_of_node_hours(call: Callable[..., Result]) -> None:
    def prepared(*sets: str) -> Prepared:
        return load("job.yaml", sets)

    check_budget(prepared(), yes=False)
    check_budget(prepared("slurm.max_node_hours=2"), yes=False)
    with pytest.raises(ImpossibleError, match=r"2 nodes for 0-01:00:00 are 2 node-hours, 1\.5 are"):
        check_budget(prepared("slurm.max_node_hours=1.5"), yes=False)
    check_budget(prepared("slurm.max_node_hours=1.5"), yes=True)
    with pytest.raises(ImpossibleError, match=r"slurm\.time does not say"):
        check_budget(prepared("slurm.max_node_hours=1", "slurm.time=null"), yes=False)
    elastic = ("slurm.nodes=1-6", "nodes=1", "slurm.max_node_hours=5")
    with pytest.raises(ImpossibleError, match="6 nodes"):
        check_budget(prepared(*elastic), yes=False)
    dry = ("submit", "job.yaml", "--dry-run", "--set", "slurm.max_node_hours=1.5")
    warned = call(*dry)
    assert "are 2 node-hours, 1.5 are allowed" in warned.stderr
    assert warned.stdout.startswith("#!/bin/bash")
    assert "node-hours" not in call(*dry, "--yes").stderr


def make_run(folder: Path, name: str, status: str, step: int) -> RunDir:
    run = RunDir.create(name, folder)
    run.job.write_text("{}")
    run.provenance.write_text("{}")
    run.add_launch(LaunchRecord(0, "local", time.time() - 60, 2, host="elsewhere"))
    run.write_state(StateRecord(status, step, 40, time.time(), 2, "why not", durable_step=5))  # type: ignore[arg-type]
    return run


def test_overviews_of_a_tree_of_runs(call: Callable[..., Result], tmp_path: Path) -> None:
    done = make_run(tmp_path / "runs" / "a", "one", "finished", 40)
    alive = make_run(tmp_path / "runs" / "b" / "c", "two", "running", 7)
    done.add_restart(RestartRecord(0, 1.0, "preempted", "", "slurm", 5, 9, "node1", 61.0))
    make_run(done.checkpoints, "inside", "running", 1)  # inside a run nothing is looked for
    history = call("history").stdout.splitlines()
    assert len(history) == 3
    row = next(line for line in history if "one" in line)
    assert f"a/{done.id}" in row
    assert "40/40" in row
    assert "1m01s" in row
    top = call("top").stdout
    assert f"b/c/{alive.id}" in top
    assert done.id not in top
    assert "1 run, 1 over" in top
    assert len(json.loads(call("top", "--all", "--json").stdout)["runs"]) == 2
    assert "no such directory" in call("history", "nowhere", code=2).stderr
