"""``hpctrain sweep``: a job over values of its keys, where that stands, and what is missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli import output
from hpctrain.cli.options import json_option, runs_option
from hpctrain.errors import Exit, ImpossibleError, UsageError
from hpctrain.units import format_seconds

if TYPE_CHECKING:
    from hpctrain.cli.sweep_start import Standing
    from hpctrain.scaling.points import Point
    from hpctrain.scaling.sweepdir import SweepDir
    from hpctrain.scaling.sweepfile import SweepFile

_LAUNCHER = click.Choice(["auto", "local", "slurm"])


class _Sweep(click.Group):
    """``hpctrain sweep FILE`` is ``hpctrain sweep start FILE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["start", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Sweep, short_help="Run a job over values of its keys.")
def command() -> None:
    """Run a job over values of its keys, one run a point, and see where they stand.

    \b
      hpctrain sweep sweep.yaml --dry-run
      hpctrain sweep sweep.yaml
      hpctrain sweep status
      hpctrain sweep resume SWEEP
      hpctrain report runs/SWEEP -o report.html
    """


@command.command("start", short_help="Start the sweep of a file (the word may be left out).")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--launcher",
    type=_LAUNCHER,
    default="auto",
    show_default=True,
    help="Where to run; auto is Slurm where sbatch answers, else this machine.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="List the points, what they ask for and why some cannot run; start nothing.",
)
@click.option("--yes", is_flag=True, help="Do not ask before jobs are submitted.")
@click.option(
    "--wait/--no-wait",
    default=None,
    help="Stay until all runs are over, and submit "
    "more as the queue empties. [default: --wait on this machine, --no-wait on Slurm]",
)
@runs_option
@json_option
def start(
    file: Path,
    launcher: str,
    dry_run: bool,
    yes: bool,
    wait: bool | None,
    runs: Path,
    as_json: bool,
) -> int:
    """Check every point of FILE, show what they cost, and start those that can run.

    On Slurm, points that ask for the same become one job array; on this machine they run one
    after another, each rank on cores of its own. Leaves with 3 where no point can run.
    """
    from hpctrain.cli.sweep_start import Shop, Starter, choose
    from hpctrain.scaling.points import baseline_of, expand
    from hpctrain.scaling.sweepdir import SweepDir, SweepIndex
    from hpctrain.scaling.sweepfile import read_sweep

    sweep = read_sweep(file)
    shop = Shop(sweep.job, Path.cwd())
    where = choose(launcher, shop, sweep)
    if where == "slurm":
        shop.ask_slurm()
    elif where == "local":
        shop.ignore_limits()
    points = expand(sweep, shop)
    _show(sweep, points, where, as_json)
    possible = [point for point in points if not point.reason]
    if not possible:
        raise ImpossibleError(f"{file}: none of {len(points)} points can run")
    if dry_run:
        return Exit.OK
    if where == "slurm" and not yes:
        _confirm(len(possible) * sweep.repeats)
    index = SweepIndex.of(sweep, points, Path.cwd(), where, baseline_of(sweep, points))
    found = SweepDir.create(sweep, index, runs)
    output.line(f"sweep {found.id}")
    starter = Starter(found, index, shop, sys.argv, {p.id: p.prepared for p in possible})
    return starter.run(wait=where == "local" if wait is None else wait)


@command.command("status", short_help="Show where the points of a sweep stand.")
@click.argument("name", metavar="[SWEEP]", required=False)
@runs_option
@json_option
def status(name: str | None, runs: Path, as_json: bool) -> None:
    """Show each point: its settings, state, speed, and why it waits, failed or cannot run.

    SWEEP is a path, a name or its unique start; without it the newest sweep.
    """
    from hpctrain.cli.sweep_start import standing
    from hpctrain.scaling.sweepdir import SweepDir

    found = SweepDir.find(name, runs)
    index = found.read()
    rows = standing(found, index)
    if as_json:
        output.emit_json(
            {
                "sweep": found.id,
                "path": str(found.root),
                "kind": index.kind,
                "launcher": index.launcher,
                "runs": [row.to_dict() for row in rows],
            }
        )
        return
    _table(found, rows)


@command.command("resume", short_help="Run what is missing or failed of a sweep.")
@click.argument("name", metavar="SWEEP")
@click.option("--yes", is_flag=True, help="Do not ask before jobs are submitted.")
@click.option("--wait/--no-wait", default=None, help="As in start.")
@runs_option
def resume(name: str, yes: bool, wait: bool | None, runs: Path) -> int:
    """Start what is missing of SWEEP: points that never ran, failed or were cancelled anew, and
    stopped ones from their checkpoints. What runs, waits or is finished is left alone.
    """
    from hpctrain.cli.sweep_start import Shop, Starter, standing
    from hpctrain.scaling.sweepdir import SweepDir

    found = SweepDir.find(name, runs)
    index = found.read()
    wanted = [row for row in standing(found, index) if row.missing]
    if not wanted:
        output.line(f"sweep {found.id}: nothing is missing")
        return Exit.OK
    output.line(f"sweep {found.id}: {len(wanted)} run{'s' * (len(wanted) > 1)} to start")
    if index.launcher == "slurm" and not yes:
        _confirm(len(wanted))
    shop = Shop(found.root / "base.yaml", Path(index.directory), index.job_file)
    starter = Starter(found, index, shop, sys.argv, {})
    return starter.run(wait=index.launcher == "local" if wait is None else wait)


def _confirm(count: int) -> None:
    question = f"submit {count} job{'s' * (count > 1)}?"
    if not sys.stdin.isatty():
        raise UsageError(
            "nobody is here to answer whether to submit", hint="say so beforehand: --yes"
        )
    click.confirm(question, abort=True, err=True)


def _show(sweep: SweepFile, points: Sequence[Point], where: str, as_json: bool) -> None:
    possible = [point for point in points if not point.reason]
    hours = [point.node_hours for point in possible]
    total = sum(hour * sweep.repeats for hour in hours if hour is not None)
    unknown = sum(hour is None for hour in hours)
    if as_json:
        output.emit_json(
            {
                "sweep": sweep.name,
                "kind": sweep.kind,
                "launcher": where,
                "repeats": sweep.repeats,
                "node_hours": total,
                "points": [
                    {
                        "id": point.id,
                        "settings": {one.key: one.text for one in point.settings},
                        "grown": {one.key: one.text for one in point.grown},
                        "nodes": point.nodes,
                        "ranks": point.ranks,
                        "step_seconds": point.step_seconds,
                        "node_hours": point.node_hours,
                        "reason": point.reason,
                    }
                    for point in points
                ],
            }
        )
        return
    refused = [point for point in points if point.reason]
    reasons: dict[str, list[Point]] = {}
    for point in refused:
        reasons.setdefault(point.reason, []).append(point)
    for reason, members in reasons.items():
        output.warn(f"{_named(members)} cannot run: {reason}")
    rows = [
        (
            point.id,
            point.title,
            str(point.nodes),
            str(point.ranks),
            "-" if point.step_seconds is None else format_seconds(point.step_seconds),
            "-" if point.node_hours is None else f"{point.node_hours:.3g}",
        )
        for point in possible
    ]
    headers = ("point", "settings", "nodes", "ranks", "planned step", "node-hours")
    output.table(headers, rows, right=(2, 3, 4, 5))
    runs = len(possible) * sweep.repeats
    each = f", {sweep.repeats} runs a point" if sweep.repeats > 1 else ""
    more = f", {unknown} point{'s' * (unknown > 1)} of unknown length" if unknown else ""
    refusals = f"; {len(refused)} of {len(points)} cannot run" if refused else ""
    output.line(
        f"{runs} run{'s' * (runs != 1)}{each} on {where}: at most {total:.3g} node-hours"
        f"{more}{refusals}"
    )


def _named(points: Sequence[Point]) -> str:
    """``p002 nodes=3``; of several points the first and how many more."""
    first = f"{points[0].id} {points[0].title}"
    more = len(points) - 1
    return first if not more else f"{first} and {more} more ({points[-1].id} the last)"


def _table(found: SweepDir, rows: Sequence[Standing]) -> None:
    listed = []
    for row in rows:
        speed = "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        number = f"{row.point.id}" + (f"-{row.repeat + 1}" if row.several else "")
        done = "-" if row.total_steps == 0 else f"{row.step}/{row.total_steps}"
        listed.append((number, row.point.title, row.status, done, speed, row.reason))
    output.table(("run", "settings", "status", "steps", "tokens/s", "why"), listed, right=(3, 4))
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    output.line(f"{found.id}: " + ", ".join(f"{n} {word}" for word, n in counts.items()))
    if any(row.missing for row in rows):
        output.line(f"  hpctrain sweep resume {found.id}")
