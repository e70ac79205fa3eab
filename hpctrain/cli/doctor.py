"""``hpctrain doctor``: what this machine has and what is missing."""

from __future__ import annotations

import click

from hpctrain.cli import output
from hpctrain.cli.options import json_option


@click.command(short_help="Check what this machine has and what is missing.")
@json_option
def command(as_json: bool) -> None:
    """Check MPI, Slurm, GPUs, HDF5, file systems and limits of the host you are on.

    Each line is ok, a warning with what to do, or missing. Compute nodes may differ from a
    login node: run it there too, for example with srun.
    """
    import socket

    from hpctrain.cli.checks import findings

    found = list(findings())
    counts = {
        verdict: sum(one.verdict == verdict for one in found)
        for verdict in ("ok", "warning", "missing")
    }
    if as_json:
        rows = [{name: getattr(one, name) for name in one.__slots__} for one in found]
        output.emit_json({"host": socket.gethostname(), "counts": counts, "findings": rows})
        return
    width = max(len(one.topic) for one in found)
    for one in found:
        output.line(f"{output.styled(one.verdict, 7)}  {one.topic:<{width}}  {one.found}")
        if one.advice:
            output.line(f"{'':7}  {'':<{width}}  -> {one.advice}")
    output.line()
    output.line(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
