"""``hpctrain calibrate``: measure this node, and write a site file that the planner uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli import output
from hpctrain.cli.options import json_option
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.plan.measured import Measurements, Solved
    from hpctrain.plan.platform import Platform

_FILE = click.Path(dir_okay=False, path_type=Path)
_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_MIB = 1 << 20


@click.command(short_help="Measure this node for the planner.")
@click.option("--machine", "name", default="local", show_default=True, help="Its site file.")
@click.option("--output", "target", metavar="FILE", type=_FILE, help="[NAME-measured.yaml]")
@click.option(
    "--storage",
    metavar="DIR",
    type=_DIRECTORY,
    default=".",
    show_default=True,
    help="Directory of checkpoints, whose write speed is measured.",
)
@click.option(
    "--quick", is_flag=True, help="Smaller products, messages and files, in seconds: a first look."
)
@json_option
def command(name: str, target: Path | None, storage: Path, quick: bool, as_json: bool) -> None:
    """Measure matrix products, attention, memory, launches, collectives and files of this node.

    Takes about a minute, on a node of its own. Writes a site file based on --machine; name that
    file as `machine:` in a job, and `hpctrain plan` uses what was measured and says so.
    """
    from hpctrain.machine import get_machine
    from hpctrain.plan.job import platform_of
    from hpctrain.plan.measured import solve
    from hpctrain.plan.software import DEFAULT_STACK, calibration, stack

    machine = get_machine(name)
    ranks = _ranks(machine)
    platform = platform_of(machine, ranks)
    found, device = _measure(machine, ranks, storage, quick)
    base = calibration(platform.family, DEFAULT_STACK).values
    solved = solve(found, platform, base, stack(DEFAULT_STACK).attention)
    path = target or Path(f"{machine.name}-measured.yaml")
    path.write_text(_site_file(machine, ranks, device, found, solved), encoding="utf-8")
    if as_json:
        output.emit_json(
            {"file": str(path), "device": device, "values": solved.values, "spread": solved.spread}
        )
        return
    output.pairs(_rows(platform, found, solved))
    output.note(f"wrote {path}: name it as machine in a job, for example machine: ./{path.name}")


def _ranks(machine: Machine) -> int:
    """Ranks that a node runs: one a device, and two on a host that has none."""
    if machine.node.device.vendor == "cpu":
        return min(2, machine.node.cores or 2)
    return machine.devices_per_node


def _measure(machine: Machine, ranks: int, storage: Path, quick: bool) -> tuple[Measurements, str]:
    import torch

    from hpctrain.plan.measured import SHAPES, Measurements
    from hpctrain.runtime import node_rates as measure

    gpu = torch.cuda.is_available()
    if machine.node.device.vendor != "cpu" and not gpu:
        raise UsageError(
            f"machine {machine.name} has {machine.node.device.name}, but torch sees no device here",
            hint="run it on a compute node, for example with srun, with the job's own Python",
        )
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    if not gpu:
        # a rank's own share of the cores
        torch.set_num_threads(max(1, (machine.node.usable_cores or ranks) // ranks))
    dtype = torch.bfloat16 if gpu else torch.float32
    less = 2 if quick else 1  # of every side
    times, parts = (4, less) if gpu else (1, 2 * less)
    shapes = [(m * times // parts, n * times // parts, k * times // parts) for m, n, k in SHAPES]
    sequence, heads, head_dim = (8192 // less, 16, 128) if gpu else (1024 // less, 4, 64)
    forward, _ = measure.attention(device, dtype, sequence, heads, head_dim)
    seconds, moved = measure.elementwise(device, dtype, (256 if gpu else 8) * _MIB)
    local = min(ranks, torch.cuda.device_count()) if gpu else ranks
    gathers = {}
    if local > 1:
        sizes = [_MIB // 4, 4 * _MIB, (256 if gpu else 32) * _MIB // less**2]
        gathers[local] = tuple(measure.gathers(device.type, local, sizes))
    found = Measurements(
        products=tuple(measure.products(device, dtype, shapes)),
        attention=(sequence, heads, head_dim, forward),
        stream=(moved, seconds),
        block_seconds=measure.launches(device, dtype),
        gathers=gathers,
        write=measure.write_rate(storage, (1024 if gpu else 64) * _MIB // less**2),
        dtype="bf16" if gpu else "fp32",
        element_bytes=2.0 if gpu else 4.0,
    )
    return found, measure.device_name(device)


def _site_file(
    machine: Machine, ranks: int, device: str, found: Measurements, solved: Solved
) -> str:
    import datetime
    import socket

    import yaml

    from hpctrain.plan.software import DEFAULT_STACK

    document: dict[str, Any] = {
        "base": machine.name,
        "name": f"{machine.name}-measured"[:60],
        "title": f"{machine.title}, measured on {socket.gethostname()}",
        "measured": {
            "source": f"hpctrain calibrate on {socket.gethostname()}",
            "as_of": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "confidence": "high",
            "device": device,
            "stack": DEFAULT_STACK,
            "ranks_per_node": ranks,
            "values": {k: float(f"{v:.4g}") for k, v in sorted(solved.values.items())},
            "spread": float(f"{solved.spread:.3g}"),
            "write_bandwidth": None if found.write is None else float(f"{found.write:.4g}"),
        },
    }
    return yaml.safe_dump(document, sort_keys=False)


def _rows(platform: Platform, found: Measurements, solved: Solved) -> list[tuple[str, str]]:
    from hpctrain.plan.text import flops
    from hpctrain.units import format_bytes, format_seconds

    values = solved.values
    peak = platform.peak_flops(found.dtype)
    rows = [
        ("products", f"{flops(values['gemm'] * peak)}, {values['gemm']:.0%} of {flops(peak)}"),
        (
            "memory",
            f"{values['memory'] * platform.memory_bandwidth / 1e9:.3g} GB/s, "
            f"{values['memory']:.0%} of {platform.memory_bandwidth / 1e9:.3g}",
        ),
        ("launches", f"{format_seconds(values['layer_seconds'])} a block"),
    ]
    if "link" in values:
        rows.append(
            (
                "links",
                f"{values['link'] * platform.link_bandwidth / 1e9:.3g} GB/s, "
                f"{format_seconds(values['hop_seconds'])} a hop",
            )
        )
    if found.write is not None:
        rows.append(("files", f"{format_bytes(found.write)}/s"))
    rows.append(("spread", f"{solved.spread:.0%}"))
    return rows
