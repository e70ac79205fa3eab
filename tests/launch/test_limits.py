"""Impossible requests are refused before sbatch, each limit with its key and source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from launch_helpers import site, spec_of

from hpctrain.errors import Exit, ImpossibleError
from hpctrain.machine import Machine, get_machine
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.limits import check
from hpctrain.spec import parse_job
from hpctrain.testing.slurm import SlurmCluster


@pytest.fixture
def client(slurm_cluster: SlurmCluster) -> SlurmClient:
    return SlurmClient(slurm_cluster.env)


@pytest.fixture(scope="module")
def local() -> Machine:
    return get_machine("local")


def refused(machine: Machine, client: SlurmClient | None, **keys: Any) -> list[str]:
    slurm = {"cpus_per_task": 1, **keys.pop("slurm", {})}
    with pytest.raises(ImpossibleError) as error:
        check(spec_of(machine, slurm=slurm, **keys), machine, client)
    assert error.value.exit_code == Exit.IMPOSSIBLE
    return error.value.message.splitlines()


def test_possible_job_passes(local: Machine, client: SlurmClient) -> None:
    full = spec_of(
        local, nodes=4, ranks_per_node=4,
        train={"steps": 1, "global_batch": 16},
        slurm={"time": "1h", "cpus_per_task": 2, "memory": "4000MiB", "partition": "batch"},
    )  # fmt: skip
    assert check(full, local, client) == []
    several = spec_of(
        local, nodes=2, ranks_per_node=1, slurm={"cpus_per_task": 1, "partition": "single,batch"}
    )
    assert check(several, local, client) == []


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"slurm": {"partition": "btach"}},
            "slurm.partition: no partition 'btach'; did you mean batch? there are batch, low, "
            "short, single, urgent [scontrol show partition]",
        ),
        (
            {"slurm": {"time": "61m"}},
            "slurm.time: partition batch: walltime 0-01:01:00 asked, 0-01:00:00 is the longest "
            "[MaxTime=0-01:00:00, scontrol show partition]",
        ),
        (
            {"nodes": 2, "slurm": {"partition": "single"}},
            "nodes: partition single: 2 nodes asked, 1 are the most of a job "
            "[MaxNodes=1, scontrol show partition]",
        ),
        (
            {"nodes": 5},
            "nodes: partition batch: 5 nodes asked, it has 4 "
            "[TotalNodes=4, scontrol show partition]",
        ),
        (
            {"ranks_per_node": 3, "slurm": {"cpus_per_task": 3}},
            "slurm.cpus_per_task: partition batch: 3 ranks a node with 3 cores each "
            "(slurm.cpus_per_task) are 9 cores asked, the largest node has 8 [CPUs, sinfo]",
        ),
        (
            {"slurm": {"memory": "4001MiB"}},
            "slurm.memory: partition batch: 3.9 GiB a node asked, the largest node has 3.9 GiB "
            "[memory, sinfo]",
        ),
        (
            {"slurm": {"sbatch_options": ["--gres=gpu:a100:2"]}},
            "slurm.sbatch_options.0: partition batch: 2 GPUs a node asked, the largest node has 0 "
            "[GPUs, sinfo]",
        ),
        (
            {"slurm": {"partition": "short"}},
            "slurm.margin: partition short: 120 s for the last checkpoint leave nothing of its "
            "default walltime 0-00:01:00; give slurm.time [DefaultTime=0-00:01:00, scontrol show "
            "partition]",
        ),
        (
            {"slurm": {"time": "2m", "margin": 120}},
            "slurm.margin: 120 s for the last checkpoint leave nothing of the walltime 0-00:02:00 "
            "[slurm.time]",
        ),
    ],
)
def test_each_limit_with_key_and_source(
    local: Machine, client: SlurmClient, keys: dict[str, Any], line: str
) -> None:
    keys = {"ranks_per_node": 1, **keys}
    assert refused(local, client, **keys) == [line]


def test_all_limits_at_once_at_their_place_in_the_file(local: Machine, client: SlurmClient) -> None:
    job = parse_job("nodes: 9\nmodel: gpt2-124m\ndata: {path: x, sequence_length: 8}\n"
                    "train: {steps: 1, global_batch: 9}\nslurm: {time: 2h}\n")  # fmt: skip
    spec = spec_of(
        local, nodes=9, ranks_per_node=1, slurm={"time": "2h", "cpus_per_task": 1},
        train={"steps": 1, "global_batch": 9},
    )  # fmt: skip
    with pytest.raises(ImpossibleError) as error:
        check(spec, local, client, locate=job.locate)
    lines = error.value.message.splitlines()
    assert [line.partition(": p")[0] for line in lines] == [
        "job.yaml:1:1: nodes", "job.yaml:5:9: slurm.time",
    ]  # fmt: skip


def test_what_one_of_several_partitions_can_run_is_possible(
    local: Machine, client: SlurmClient
) -> None:
    lines = refused(
        local, client, nodes=2, ranks_per_node=1, slurm={"partition": "single,short", "time": "3m"}
    )
    assert [line.partition(":")[0] for line in lines] == ["nodes", "slurm.time"]


def test_sbatch_itself_refuses_what_we_refuse(
    local: Machine, client: SlurmClient, slurm_cluster: SlurmCluster
) -> None:
    """Where this cluster enforces limits at submission, both say no to the same requests."""
    for options in (["-t61"], ["-N2", "-psingle"], ["-N5"], ["-N1", "-n3", "-c3"], ["--mem=4001"]):
        done = slurm_cluster.run("sbatch", *options, input="#!/bin/bash\n", check=False, timeout=20)
        assert done.returncode != 0, options


def test_gpus_of_nodes_are_counted(
    slurm_cluster_factory: Callable[..., SlurmCluster], local: Machine
) -> None:
    cluster = slurm_cluster_factory(nodes=2, gpus=4, gpu_type="a100")
    client = SlurmClient(cluster.env)
    for options in (
        ["--gpus-per-node=4"], ["--gres=gpu:a100:4"], ["--gpus-per-task=1"], ["--gpus=8"],
        ["--gpus-per-node=a100:4"],
    ):  # fmt: skip
        spec = spec_of(
            local, nodes=2, ranks_per_node=4,
            slurm={"cpus_per_task": 1, "sbatch_options": options},
        )  # fmt: skip
        assert check(spec, local, client) == []
    for options in (["--gpus-per-node=5"], ["--gpus=9"], ["--gres=gpu:5"]):
        (line,) = refused(
            local, client, nodes=2, ranks_per_node=4, slurm={"sbatch_options": options}
        )
        assert "5 GPUs a node asked, the largest node has 4 [GPUs, sinfo]" in line
    (line,) = refused(
        local, client, nodes=1, ranks_per_node=5, slurm={"srun_options": ["--gpus-per-task=1"]}
    )
    assert line.startswith("slurm.srun_options.0: ")


def test_limits_of_the_machines_file_hold_without_slurm() -> None:
    machine = site()
    lines = refused(
        machine, None, nodes=3, slurm={"time": "3h", "account": "a"},
        train={"steps": 1, "global_batch": 12},
    )  # fmt: skip
    assert lines == [
        "slurm.time: partition batch: walltime 0-03:00:00 asked, 0-02:00:00 is the longest on 3 "
        "nodes (jobs of 5 nodes and more may) [limits of the tests]"
    ]
    (line,) = refused(machine, None, ranks_per_node=5)
    assert line.startswith("ranks_per_node: machine testsite: 5 ranks a node, but a node has 4")
    assert line.endswith("[machine testsite: node of the tests]")


def test_uncertain_limits_only_warn() -> None:
    machine = site()
    spec = spec_of(
        machine, nodes=3, train={"steps": 1, "global_batch": 12}, slurm={"partition": "maybe"}
    )
    (warning,) = check(spec, machine, None)
    assert "3 nodes asked, 2 are the most" in warning
    assert "low confidence" in warning
