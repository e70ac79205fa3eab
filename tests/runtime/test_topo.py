"""``hpctrain topo``: planned places from a description, and what real ranks measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_rank_programs import measure_two_hosts

JOB = """\
name: places
machine: {machine}
nodes: {nodes}
ranks_per_node: {per_node}
model: {{layers: 8, hidden: 64, heads: 8, vocab_size: 256}}
parallel: {{tensor: {tensor}, pipeline: {pipeline}, sharding: none}}
data: {{path: tokens.h5, sequence_length: 32}}
train: {{steps: 5, global_batch: 8, lr: 1e-3}}
slurm: {{account: project, time: 1h}}
"""
HPCTRAIN = Path(sys.executable).with_name("hpctrain")


def topo(*arguments, expect=0, **kwargs):
    done = subprocess.run(
        [HPCTRAIN, "topo", *map(str, arguments)],
        capture_output=True, text=True, timeout=170, **kwargs,
    )  # fmt: skip
    assert done.returncode == expect, done.stderr
    return done


@pytest.fixture
def job(tmp_path):
    def write(machine="frontier", nodes=4, per_node=8, tensor=8, pipeline=2):
        path = tmp_path / "job.yaml"
        text = JOB.format(
            machine=machine, nodes=nodes, per_node=per_node, tensor=tensor, pipeline=pipeline
        )
        path.write_text(text)
        return path

    return write


def test_ranks_of_a_site_have_its_cores_devices_and_cards(job):
    found = json.loads(topo(job(), "--json").stdout)
    assert found["schema_version"] == 1
    assert len(found["ranks"]) == 32
    # The user guide's low-noise layout: the first rank's cores are nearest to GCD 4.
    assert found["ranks"][0] == {
        "rank": 0, "node": 0, "host": "node 0", "cores": "1-7", "device": "4", "nic": "hsn2",
        "coordinates": {"pp": 0, "dp_replicate": 0, "tp": 0},
    }  # fmt: skip
    assert found["ranks"][31]["coordinates"] == {"pp": 1, "dp_replicate": 1, "tp": 7}
    assert [rank["node"] for rank in found["ranks"][6:10]] == [0, 0, 1, 1]


def test_axes_have_their_groups_and_slowest_link(job):
    axes = {axis["axis"]: axis for axis in json.loads(topo(job(), "--json").stdout)["axes"]}
    assert set(axes) == {"pp", "dp_replicate", "tp"}
    tp, pp = axes["tp"], axes["pp"]
    assert (tp["size"], tp["groups"], tp["nodes"], tp["link"]) == (8, 4, 1, "node")
    assert tp["bandwidth"] == 50e9
    assert (pp["size"], pp["groups"], pp["nodes"], pp["link"]) == (2, 16, 2, "rail")
    assert pp["bandwidth"] == 25e9
    assert tp["measured"] is None


def test_text_shows_one_line_a_rank_and_stops(job):
    lines = topo(job(nodes=8)).stdout.splitlines()
    assert "... 32 more; --all shows them" in lines
    assert sum("hsn" in line for line in lines) == 32
    everything = topo(job(nodes=8), "--all").stdout
    assert sum("hsn" in line for line in everything.splitlines()) == 64


def test_without_a_job_a_machine_has_one_rank_a_device():
    found = json.loads(topo("--machine", "leonardo", "--nodes", 3, "--json").stdout)
    assert len(found["ranks"]) == 12
    assert found["layout"]["dp_shard"] == 12
    assert found["axes"][0]["nodes"] == 3


def test_it_starts_without_heavy_libraries(job):
    code = (
        "import sys; from hpctrain.cli import main\n"
        f"sys.argv = ['hpctrain', 'topo', {str(job())!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'mpi4py', 'h5py') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("machine")
    assert done.stderr.strip().endswith("[]")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--set", "nodes=2"), 2, "none is given"),
        (("job", "--machine", "frontier"), 2, "--set machine=NAME"),
        (("--machine", "frontire"), 2, "did you mean frontier?"),
        (("job", "--measure"), 3, "neither frontier nor an allocation of Slurm"),
    ],
)
def test_what_it_cannot_do_is_said(job, arguments, code, words):
    path = job()
    done = topo(*[path if one == "job" else one for one in arguments], expect=code)
    assert words in done.stderr
    assert done.stdout == ""


@pytest.mark.mpi
def test_measuring_on_this_machine(job, tmp_path):
    path = job(machine="local", nodes=1, per_node=4, tensor=2, pipeline=2)
    found = json.loads(topo(path, "--measure", "--json", cwd=tmp_path).stdout)
    links = found["links"]
    assert links["ranks"] == [0, 1, 2, 3]
    for i in range(4):
        for j in range(4):
            rate, latency = links["bandwidth"][i][j], links["latency"][i][j]
            if i == j:
                assert rate is latency is None
            else:
                assert rate > 1e6
                assert 0 < latency < 1
    for axis in found["axes"]:
        pairs = [(0, 1), (1, 0), (2, 3), (3, 2)] if axis["axis"] == "tp" else [
            (0, 2), (2, 0), (1, 3), (3, 1)]  # fmt: skip
        assert axis["measured"] == min(links["bandwidth"][a][b] for a, b in pairs)
    assert [cost["name"] for cost in found["groups"]["each"]] == ["alone", "pp", "tp"]
    assert found["groups"]["seconds"] > 0
    assert {rank["host"] for rank in found["ranks"]} != {""}
    assert list(tmp_path.iterdir()) == [path], "nothing is left behind"


@pytest.mark.mpi
def test_links_between_hosts_are_told_from_those_inside(run_ranks, hosts_factory):
    hosts = hosts_factory(2, rate="200mbit")
    found = run_ranks(4, measure_two_hosts, launcher=hosts.launcher(per_host=2))
    answer = found[0]["answer"]
    assert [rank["host"] for rank in answer["ranks"]] == ["node1", "node1", "node2", "node2"]
    rates = answer["links"]["bandwidth"]
    for a, b in ((0, 2), (2, 0), (1, 3), (3, 1), (0, 3), (1, 2)):
        # 25 MB/s with headers; a message as large as the link's bucket may look a bit faster.
        assert 15e6 < rates[a][b] < 27e6
    for a, b in ((0, 1), (1, 0), (2, 3), (3, 2)):
        assert rates[a][b] > 3 * rates[0][2]
    # On the same hosts: gloo's flat reduce-scatter passes 3/2 of the message over the link
    # (it is an all-reduce), two levels half of it.
    seconds = found[0]["seconds"]
    assert seconds["reduce_scatter"]["hierarchical"] < seconds["reduce_scatter"]["flat"] / 1.5
    assert seconds["all_reduce"]["hierarchical"] < seconds["all_reduce"]["flat"]
    for rank in found:
        assert rank["wrong"] == []


@pytest.mark.slurm
def test_measuring_in_an_allocation(slurm_cluster, job, tmp_path):
    path = job(machine="local", nodes=2, per_node=2, tensor=2, pipeline=1)
    script = f"#!/bin/bash\n{HPCTRAIN} topo {path} --measure --json > answer.json\n"
    number = slurm_cluster.submit(
        script, "-N2", "--ntasks-per-node=2", "--output=out", cwd=tmp_path
    )
    slurm_cluster.wait_job(number, "COMPLETED", timeout=120)
    found = json.loads((tmp_path / "answer.json").read_text())
    assert [rank["node"] for rank in found["ranks"]] == [0, 0, 1, 1]
    assert len({rank["host"] for rank in found["ranks"]}) == 2
    assert all(axis["measured"] > 0 for axis in found["axes"])
