"""``hpctrain topo``: which rank sits where, who talks to whom over which link, how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli import output
from hpctrain.cli.options import job_argument, json_option, set_option
from hpctrain.units import format_bytes

if TYPE_CHECKING:
    from hpctrain.cli.topology import Axis, Topology

_SHOWN = 32


@click.command(short_help="Show ranks, their places and groups, and what links them.")
@job_argument(required=False)
@set_option
@click.option("--machine", metavar="NAME", help="Without a job: the machine. [local]")
@click.option("--nodes", type=click.IntRange(min=1), help="Without a job: its nodes. [1]")
@click.option("--all", "all_ranks", is_flag=True, help=f"All ranks, not the first {_SHOWN}.")
@click.option(
    "--measure",
    is_flag=True,
    help="Start the ranks (here, or in the Slurm allocation this shell is in) and measure the "
    "links between them.",
)
@json_option
def command(
    job: str | None,
    overrides: tuple[str, ...],
    machine: str | None,
    nodes: int | None,
    all_ranks: bool,
    measure: bool,
    as_json: bool,
) -> None:
    """Show where the ranks of a job sit and what links the groups of each axis.

    Without a job: one rank a device of a machine. Speeds are those of the machine's
    description, bytes a second one way; with --measure also those found between the ranks, and
    warnings where the description and the nodes differ.
    """
    from hpctrain.cli import topology

    planned = topology.plan(job, overrides, machine, nodes)
    found = topology.measured(planned) if measure else planned
    if as_json:
        output.emit_json(found.to_dict())
        return
    _print(found, None if all_ranks else _SHOWN)


def _print(found: Topology, most: int | None) -> None:
    machine, ranks = found.machine, found.ranks
    output.pairs(
        [
            ("machine", f"{machine.name}: {machine.title}"),
            (
                "ranks",
                f"{found.size} on {found.nodes} node{'s' * (found.nodes > 1)}, "
                f"{found.ranks_per_node} a node: {found.grid.layout.describe()}",
            ),
            ("device", machine.node.device.name),
        ]
    )
    output.line()
    axes = [axis.axis for axis in found.axes]
    rows = ranks if most is None else ranks[:most]
    output.table(
        ("rank", "host", "cores", "device", "NIC", *axes),
        [
            (
                str(rank.rank),
                rank.host,
                rank.cores,
                rank.device,
                rank.nic,
                *(str(rank.coordinates[axis]) for axis in axes),
            )
            for rank in rows
        ],
        right=(0, *range(5, 5 + len(axes))),
    )
    if len(rows) < found.size:
        output.line(f"... {found.size - len(rows)} more; --all shows them")
    if found.axes:
        output.line()
        headers = ["axis", "ranks", "groups", "nodes", "slowest link", "described"]
        output.table(
            headers + (["measured"] if found.links else []),
            [_axis(axis, bool(found.links)) for axis in found.axes],
            right=(1, 2, 3),
        )
    if found.links:
        _print_links(found.links)
    if found.groups:
        output.line()
        output.line(
            f"groups: {found.groups['count']} a rank, made in "
            f"{found.groups['seconds'] * 1e3:.0f} ms with "
            f"{format_bytes(max(0, found.groups['rss_bytes']))} of memory on the slowest and the "
            "largest rank"
        )
    for warning in found.warnings:
        output.warn(warning)


def _axis(axis: Axis, measured: bool) -> tuple[str, ...]:
    row = (
        axis.axis,
        str(axis.size),
        str(axis.groups),
        str(axis.nodes),
        axis.link.replace("_", " "),
        _rate(axis.bandwidth),
    )
    return (*row, _rate(axis.measured)) if measured else row


def _print_links(links: dict[str, Any]) -> None:
    """The matrix of bandwidths, from the row's rank to the column's, and the latencies."""
    if len(links["ranks"]) < 2:
        return
    output.line()
    output.line("bandwidth from the rank of a row to that of a column, MB/s")
    headers = ["", *(str(rank) for rank in links["ranks"])]
    rows = [
        (str(rank), *("-" if one is None else f"{one / 1e6:.0f}" for one in row))
        for rank, row in zip(links["ranks"], links["bandwidth"], strict=True)
    ]
    output.table(headers, rows, right=range(len(headers)))
    known = sorted(one for row in links["latency"] for one in row if one is not None)
    output.line(
        f"latency {known[0] * 1e6:.0f} to {known[-1] * 1e6:.0f} us, "
        f"median {known[len(known) // 2] * 1e6:.0f} us"
    )


def _rate(value: float | None) -> str:
    return "not known" if value is None else f"{value / 1e9:.3g} GB/s"
