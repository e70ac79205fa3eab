"""``hpctrain site``: machines as data: which there are, what is known, a new one from a node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli import output
from hpctrain.cli.options import json_option
from hpctrain.errors import SchedulerError, UsageError

if TYPE_CHECKING:
    from hpctrain.machine import Fact, Machine


@click.group(short_help="List, show and check machines, or describe a new one.")
def command() -> None:
    """Machines that jobs can name: `machine: frontier`, or the path of a file of your own.

    Every value says where it was read, when, and how far it can be trusted. Values of low
    confidence are shown, never rendered into a job, and refuse nothing.
    """


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from hpctrain.machine import machine_names

    return [name for name in machine_names() if name.startswith(incomplete)]


@command.command("list", short_help="The machines that come with hpctrain.")
@json_option
def list_(as_json: bool) -> None:
    """A line a machine; `doubtful` counts its values of low confidence."""
    from hpctrain.machine import get_machine, machine_names

    rows: list[dict[str, Any]] = []
    for name in machine_names():
        machine = get_machine(name)
        rows.append(
            {
                "name": name,
                "title": machine.title,
                "kind": machine.kind,
                "aliases": list(machine.aliases),
                "devices": machine.node.devices,
                "as_of": max((d for block in _blocks(machine) if (d := block.as_of)), default=None),
                "doubtful": len(machine.low_confidence()),
            }
        )
    if as_json:
        output.emit_json({"machines": rows})
        return
    output.table(
        ["machine", "devices a node", "read", "doubtful", "what"],
        [
            [r["name"], str(r["devices"]), str(r["as_of"] or "-"), str(r["doubtful"]), r["title"]]
            for r in rows
        ],
        right=(1, 3),
    )


@command.command("show", short_help="All that is known of a machine, and from where.")
@click.argument("name", metavar="NAME", shell_complete=_complete)
@click.option("--low", is_flag=True, help="Only values of low confidence.")
@json_option
def show(name: str, low: bool, as_json: bool) -> None:
    """Every value of NAME with its source and confidence.

    NAME is a machine, an alias of one, or the path of a file.
    """
    from hpctrain.machine import get_machine

    machine = get_machine(name)
    facts = machine.low_confidence() if low else machine.facts()
    if as_json:
        output.emit_json({"name": machine.name, "facts": [_fact(one) for one in facts]})
        return
    output.line(f"{machine.name}: {machine.title}")
    block = source = ""
    for fact in facts:
        head, _, rest = fact.path.partition(".")
        if head != block:
            output.line()
            output.line(head)
            block, source = head, ""
        origin = str(fact.provenance)
        if origin != source:
            source = origin
            output.line(f"  # {origin}")
        mark = "   (low: shown, not relied on)" if fact.provenance.confidence == "low" else ""
        output.line(f"  {rest or head} = {_value(fact.value)}{mark}")
    for note in [*machine.notes, *(n for one in _blocks(machine) for n in one.notes)]:
        output.line(f"  note: {note}")


@command.command("check", short_help="Whether a site file is right.")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@json_option
def check(file: Path, as_json: bool) -> None:
    """Read FILE, name every fault with its line, and say what is left open.

    Ends with 2 where there are faults.
    """
    from hpctrain.machine import load_site

    machine = load_site(file)
    low, open_ = machine.low_confidence(), _open(machine)
    if as_json:
        output.emit_json({"name": machine.name, "low": [_fact(one) for one in low], "open": open_})
        return
    output.line(f"{file}: machine {machine.name}, {len(machine.facts())} values")
    for one in low:
        output.line(f"  low confidence: {one.path} = {_value(one.value)} [{one.provenance.source}]")
    for path, why in open_.items():
        output.line(f"  not known: {path}: {why}")


@command.command("probe", short_help="Write a site file from the node you stand on.")
@click.argument("name", metavar="NAME")
@click.option(
    "-o", "--output", "target", type=click.Path(path_type=Path), default=None,
    help="File to write.  [default: NAME.yaml]",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace it where it exists.")
def probe(name: str, target: Path | None, force: bool) -> None:
    """Describe this node and this Slurm as a site file, to be completed by hand.

    Run it on a compute node (`srun -N1 hpctrain site probe NAME`): a login node often has
    other hardware. Cores, NUMA domains, memory, GPUs and network cards come from the kernel,
    partitions and their limits from scontrol, numbers of nodes from sinfo.
    """
    import time

    import yaml

    from hpctrain.machine.compare import partitions_from_scontrol, site_document
    from hpctrain.machine.probe import probe_node
    from hpctrain.slurm.client import SlurmClient

    path = target or Path(f"{name}.yaml")
    if path.exists() and not force:
        raise UsageError(f"{path} exists", hint="another -o, or --force")
    client = SlurmClient(os.environ)
    partitions: dict[str, dict[str, Any]] | None = None
    nodes: int | None = None
    try:
        partitions = partitions_from_scontrol(client.partition_text())
        groups = client.nodes()
        default = next((p for p, v in partitions.items() if v.get("default")), None)
        nodes = sum(group.count for group in groups if group.partition == default) or None
    except SchedulerError as error:
        output.warn(f"no limits: {error.message}")
    document = site_document(
        probe_node(), name, as_of=time.strftime("%Y-%m-%d"), partitions=partitions or None
    )
    if nodes is not None:
        document["network"]["nodes"] = nodes
        document["network"]["source"] = "fabric not known to the probe; nodes from sinfo"
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    path.write_text(f"# Written by hpctrain site probe; null is for you to fill in.\n{text}")
    output.line(f"wrote {path}")
    output.line(f"  hpctrain site check {path}")


def _blocks(machine: Machine) -> list[Any]:
    found = [
        machine.node, machine.network, machine.affinity, machine.launch, machine.rendering,
        machine.scheduling, machine.storage, machine.containers,
    ]  # fmt: skip
    return [block for block in found if block is not None]


def _fact(fact: Fact) -> dict[str, Any]:
    return {
        "path": fact.path,
        "value": fact.value if isinstance(fact.value, int | float | bool) else str(fact.value),
        "source": fact.provenance.source,
        "as_of": fact.provenance.as_of,
        "confidence": fact.provenance.confidence,
    }


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


_WANTED = {
    "node.device.peak_flops": "plans have no model FLOP utilisation",
    "node.device.memory_bytes": "plans cannot say whether a job fits",
    "links.node.bandwidth": "plans guess the time of communication inside a node",
    "launch.mpi": "srun --mpi= is left to the site's default",
    "scheduling.partitions": "limits are asked of Slurm only",
    "storage.checkpoint_area": "nobody says where checkpoints should go",
}


def _open(machine: Machine) -> dict[str, str]:
    """What a file leaves open, and what follows from that."""
    stated = [fact.path for fact in machine.facts()]
    return {
        path: why
        for path, why in _WANTED.items()
        if not any(one == path or one.startswith(f"{path}.") for one in stated)
    }
