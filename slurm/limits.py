"""Requests that can never run, found before they are submitted.

Slurm itself lets some of them pend for ever, and ``sbatch --test-only`` misses a walltime above
the partition's.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.errors import ImpossibleError
from hpctrain.launchers.shape import cores_per_rank, ranks_per_node
from hpctrain.launchers.srun import cores_source, split_option
from hpctrain.units import format_bytes, format_walltime

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.slurm.answers import NodeGroup, Partition
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.spec import JobSpec


@dataclass(frozen=True, slots=True)
class _Broken:
    key: str
    text: str
    source: str


def check(
    spec: JobSpec,
    machine: Machine,
    client: SlurmClient | None,
    *,
    locate: Callable[[str, str], object] | None = None,
) -> list[str]:
    """Compare a resolved job with the limits of its machine and of the Slurm that answers.

    Args:
        spec: a resolved job.
        machine: its machine.
        client: None checks against the machine's file alone (local runs, dry runs).
        locate: ``Job.locate``, which puts the place in the job file before a message.

    Returns:
        Warnings: limits that are broken but of which the machine's file is not certain.

    Raises:
        ImpossibleError: every limit that is broken, each with key and source.
        SchedulerError: Slurm does not answer.
    """
    broken = list(_own(spec))
    warnings = []
    slurm = spec.slurm
    violations = machine.scheduling.check(
        spec.nodes, slurm.time, slurm.partition, slurm.qos, account=slurm.account or ""
    )
    if client is None and machine.kind == "local":
        violations = []
    for violation in violations:
        if violation.certain:
            broken.append(_Broken(_key(violation.text), violation.text, violation.source))
        else:
            warnings.append(f"{violation}: not certain, so the job is submitted all the same")
    try:
        machine.check_ranks_per_node(ranks_per_node(spec))
    except ImpossibleError as error:
        source = f"machine {machine.name}: {machine.node.source}"
        broken.append(_Broken("ranks_per_node", error.message, source))
    if client is not None:
        broken += _against_slurm(spec, machine, client)
    if not broken:
        return warnings
    place = locate or (lambda key, message: f"{key}: {message}")
    lines = [str(place(one.key, f"{one.text} [{one.source}]")) for one in broken]
    raise ImpossibleError("\n".join(lines))


def _own(spec: JobSpec) -> Iterator[_Broken]:
    slurm = spec.slurm
    if slurm.time is not None and slurm.margin >= slurm.time:
        yield _Broken(
            "slurm.margin",
            f"{math.ceil(slurm.margin)} s for the last checkpoint leave nothing of the walltime "
            f"{format_walltime(slurm.time)}",
            "slurm.time",
        )


def _key(text: str) -> str:
    """Key of the job file that a limit of a machine file is about."""
    if "walltime" in text:
        return "slurm.time"
    if "account" in text:
        return "slurm.account"
    return "nodes"


def _against_slurm(spec: JobSpec, machine: Machine, client: SlurmClient) -> Iterator[_Broken]:
    partitions = client.partitions()
    wanted = spec.slurm.partition or machine.scheduling.default_partition
    # A job may name several, of which Slurm takes one.
    names = wanted.split(",") if wanted else [p.name for p in partitions if p.default]
    known = {partition.name: partition for partition in partitions}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            mean = f"did you mean {near[0]}? " if near else ""
            yield _Broken(
                "slurm.partition",
                f"no partition {name!r}; {mean}there are {', '.join(sorted(known)) or 'none'}",
                "scontrol show partition",
            )
    groups = client.nodes()
    found = [
        list(_partition(spec, machine, known[name], groups)) for name in names if name in known
    ]
    # What one of several partitions can run is possible.
    if found and all(found):
        for broken in found:
            yield from broken


def _partition(
    spec: JobSpec, machine: Machine, partition: Partition, groups: list[NodeGroup]
) -> Iterator[_Broken]:
    slurm = spec.slurm
    name = f"partition {partition.name}"
    asked = f"{spec.nodes} node{'s' * (spec.nodes > 1)} asked"

    def broken(key: str, text: str, field: str) -> _Broken:
        return _Broken(key, f"{name}: {text}", f"{field}, scontrol show partition")

    if partition.state != "UP":
        yield broken("slurm.partition", f"it is {partition.state}", f"State={partition.state}")
    if partition.max_nodes is not None and spec.nodes > partition.max_nodes:
        most = partition.max_nodes
        yield broken("nodes", f"{asked}, {most} are the most of a job", f"MaxNodes={most}")
    if spec.nodes < partition.min_nodes:
        fewest = partition.min_nodes
        yield broken("nodes", f"{asked}, {fewest} are the fewest of a job", f"MinNodes={fewest}")
    if spec.nodes > partition.total_nodes:
        total = partition.total_nodes
        yield broken("nodes", f"{asked}, it has {total}", f"TotalNodes={total}")
    longest = partition.max_time
    if slurm.time is not None and longest is not None and slurm.time > longest:
        text = format_walltime(longest)
        yield broken(
            "slurm.time",
            f"walltime {format_walltime(slurm.time)} asked, {text} is the longest",
            f"MaxTime={text}",
        )
    default = partition.default_time or longest
    if slurm.time is None and default is not None and slurm.margin >= default:
        yield broken(
            "slurm.margin",
            f"{math.ceil(slurm.margin)} s for the last checkpoint leave nothing of its default "
            f"walltime {format_walltime(default)}; give slurm.time",
            f"DefaultTime={format_walltime(default)}",
        )
    yield from _nodes(spec, machine, partition, groups)


def _nodes(
    spec: JobSpec, machine: Machine, partition: Partition, groups: list[NodeGroup]
) -> Iterator[_Broken]:
    """Whether enough nodes hold what is asked of each."""
    ranks, cores = ranks_per_node(spec), cores_per_rank(spec, machine)
    memory = -(-(spec.slurm.memory or 0) // 2**20)
    gpu_key, gpus = _gpus(spec, machine, ranks)
    mine = [group for group in groups if group.partition == partition.name]
    if not mine or spec.nodes > partition.total_nodes:
        return
    cores_key = "ranks_per_node" if spec.slurm.cpus_per_task is None else "slurm.cpus_per_task"
    asked = (
        (
            cores_key,
            ranks * cores,
            [group.cpus for group in mine],
            f"{ranks} rank{'s' * (ranks > 1)} a node with {cores} core{'s' * (cores > 1)} each "
            f"({cores_source(spec, machine)}) are {ranks * cores} cores",
            str,
            "CPUs",
        ),
        (
            "slurm.memory",
            memory,
            [group.memory_mb for group in mine],
            f"{format_bytes(memory * 2**20)} a node",
            lambda value: format_bytes(value * 2**20),
            "memory",
        ),
        (
            gpu_key,
            gpus,
            [group.gpus for group in mine],
            f"{gpus} GPU{'s' * (gpus > 1)} a node",
            str,
            "GPUs",
        ),
    )
    for key, want, have, text, show, what in asked:
        fitting = sum(g.count for g, value in zip(mine, have, strict=True) if value >= want)
        if fitting >= spec.nodes:
            continue
        most = show(max(have))
        left = f"the largest node has {most}" if not fitting else f"only {fitting} nodes have them"
        yield _Broken(key, f"partition {partition.name}: {text} asked, {left}", f"{what}, sinfo")


def _gpus(spec: JobSpec, machine: Machine, ranks: int) -> tuple[str, int]:
    """Key and number of GPUs a node that the options of job and machine ask for."""
    options = [
        (f"machine {machine.name}", option.tokens)
        for option in (*machine.sbatch_options(spec.nodes), *machine.srun_options(spec.nodes))
    ]
    for field in ("sbatch_options", "srun_options"):
        options += [
            (f"slurm.{field}.{index}", split_option(text))
            for index, text in enumerate(getattr(spec.slurm, field))
        ]
    key, most = "slurm.sbatch_options", 0
    for origin, tokens in options:
        text = "=".join(tokens)
        found = re.match(
            r"--(gpus-per-node|gpus-per-task|gpus|gres)=(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d+)", text
        )
        if not found or (found[1] == "gres" and "gpu" not in text):
            continue
        number = int(found[2])
        if found[1] == "gpus-per-task":
            number *= ranks
        elif found[1] == "gpus":
            number = -(-number // spec.nodes)
        if number > most:
            key, most = origin if origin.startswith("slurm.") else "machine", number
    return key, most
