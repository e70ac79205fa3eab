"""``hpctrain report``: one run's table, or the scaling of many runs, from their own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli import output
from hpctrain.cli.options import find_run, json_option, runs_option
from hpctrain.errors import Exit, UsageError

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.plan.plan import Plan
    from hpctrain.scaling.analysis import Report
    from hpctrain.scaling.collect import Collection
    from hpctrain.spec import JobSpec

_FORMATS = (".html", ".csv", ".json", ".md")


def _pairs(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, str] | None:
    if value is None:
        return None
    found = {}
    for part in value.split():
        key, equals, text = part.partition("=")
        if not equals or not key or not text:
            raise click.BadParameter(f"found {part!r}; write KEY=VALUE, for example nodes=1")
        found[key] = text
    return found


@click.command(short_help="Summarise a run, or report the scaling of many.")
@click.argument("names", metavar="[RUN | DIR...]", nargs=-1)
@click.option("-o", "outputs", metavar="FILE", multiple=True,
              type=click.Path(dir_okay=False, path_type=Path),
              help="Write the report: .html, .csv, .json or .md; may be repeated.")  # fmt: skip
@click.option("--kind", type=click.Choice(["strong", "weak", "grid"]),
              help="What is compared. [the sweep's]")  # fmt: skip
@click.option(
    "--baseline",
    metavar="'KEY=VALUE...'",
    callback=_pairs,
    help="Point to compare with, by its settings. [the sweep's, else the smallest]",
)
@click.option("--warm-up", metavar="STEPS", type=click.IntRange(0), help="Steps after each start "
              "that are left out, at most half of them. [default: 5]")  # fmt: skip
@click.option("--mixed", is_flag=True, help="Take runs on different hardware together.")
@click.option("--no-plan", is_flag=True, help="Leave the planner's prediction out.")
@click.option("--compare", "compared", is_flag=True,
              help="Two DIRs point by point: how much faster is the second?")  # fmt: skip
@click.option(
    "--fail-below",
    metavar="SHARE",
    type=click.FloatRange(0, min_open=True),
    help="Leave with 3 where an efficiency, or with --compare a ratio, is below.",
)
@runs_option
@json_option
def command(
    names: tuple[str, ...],
    outputs: tuple[Path, ...],
    kind: str | None,
    baseline: dict[str, str] | None,
    warm_up: int | None,
    mixed: bool,
    no_plan: bool,
    compared: bool,
    fail_below: float | None,
    runs: Path,
    as_json: bool,
) -> int:
    """Summarise one run, or report the scaling of a sweep or of many runs.

    One RUN: loss, speed, where the time went, memory, checkpoints, attempts. A sweep, several
    runs or a directory of runs: speed-up, efficiency, FLOP/s and time split of every point.

    \b
      hpctrain report
      hpctrain report runs/SWEEP -o report.html -o report.csv
      hpctrain report --compare runs/BEFORE runs/AFTER --fail-below 0.95
    """
    from hpctrain.scaling.steps import WARM_UP
    from hpctrain.scaling.sweepdir import SweepDir

    for path in outputs:
        if path.suffix not in _FORMATS:
            raise UsageError(f"-o {path}: found {path.suffix or 'no suffix'}; "
                             f"one of {', '.join(_FORMATS)} belongs here")  # fmt: skip
    cold = WARM_UP if warm_up is None else warm_up
    if compared:
        return _compare(names, runs, cold, fail_below, as_json)
    paths = [_find(name, runs) for name in names]
    single = len(paths) < 2 and (
        not paths or (not SweepDir.holds(paths[0]) and (paths[0] / "job.yaml").is_file())
    )
    if single and not outputs and fail_below is None:
        from hpctrain.cli.report_run import show

        show(find_run(names[0] if names else None, runs), as_json)
        return Exit.OK
    if not paths:
        paths = [find_run(None, runs).root]
    from hpctrain.scaling.analysis import analyse
    from hpctrain.scaling.collect import collect

    collection = collect(paths, kind=kind, warm_up=cold)
    planner = None if no_plan else Planner()
    report = analyse(collection, planner, warm_up=cold, mixed=mixed, baseline=baseline)
    for path in outputs:
        _write(path, report)
        output.note(f"wrote {path}")
    _print(report, as_json)
    return _gate(report, fail_below)


class Planner:
    """The planner's word on jobs, each machine read once."""

    def __init__(self) -> None:
        self._machines: dict[str, Machine | None] = {}

    def plan(self, spec: JobSpec) -> Plan | None:
        """None for a model of the user's own, or a machine that is not known here."""
        from hpctrain.cli.prepare import find_machine
        from hpctrain.errors import HpctrainError
        from hpctrain.plan.plan import make_plan
        from hpctrain.spec import Job

        if spec.machine not in self._machines:
            try:
                self._machines[spec.machine] = find_machine(Job(spec), Path.cwd())
            except HpctrainError:
                self._machines[spec.machine] = None
        machine = self._machines[spec.machine]
        if machine is None or spec.model.module is not None:
            return None
        try:
            return make_plan(spec, machine, alternatives=0)
        except HpctrainError:
            return None


def _find(name: str, runs: Path) -> Path:
    """A path as it is, or a run or sweep by its name below ``runs``."""
    from hpctrain.scaling.sweepdir import SweepDir

    path = Path(name)
    if path.is_dir():
        return path
    try:
        return SweepDir.find(name, runs).root
    except UsageError:
        return find_run(name, runs).root


def _write(path: Path, report: Report) -> None:
    import json

    from hpctrain.scaling import tables

    if path.suffix == ".html":
        from hpctrain.scaling.page import render

        text = render(report)
    elif path.suffix == ".csv":
        text = tables.comma_separated(report)
    elif path.suffix == ".json":
        text = json.dumps(tables.document(report), indent=2, ensure_ascii=False) + "\n"
    else:
        text = tables.markdown(report)
    path.write_text(text, encoding="utf-8")


def _print(report: Report, as_json: bool) -> None:
    from hpctrain.scaling import tables

    if as_json:
        output.emit_json(tables.document(report))
        return
    output.line(report.title)
    for series in report.series:
        output.line()
        if series.title:
            output.line(series.title + report.mark)
        if series.note:
            output.warn(series.note)
        rows = [tables.cells(row) for row in series.rows]
        output.table(tables.HEADERS, rows, right=range(1, len(tables.HEADERS)))
        for row in series.rows:
            for flag in row.flags:
                output.warn(f"{row.point.title}: {flag}")
    headers, split = tables.split_rows(report)
    if split:
        output.line()
        output.line(f"time of a step{report.mark}")
        output.table(headers, split, right=range(1, len(headers)))


def _gate(report: Report, limit: float | None) -> int:
    if limit is None:
        return Exit.OK
    bad = [row for row in report.rows if row.efficiency is None or row.efficiency.value < limit]
    for row in bad:
        found = (
            "was not measured"
            if row.efficiency is None
            else (f"has {100 * row.efficiency.value:.1f} %")
        )
        output.warn(f"{row.point.title} {found}; --fail-below asks for {100 * limit:g} %")
    return Exit.IMPOSSIBLE if bad else Exit.OK


def _compare(
    names: Sequence[str], runs: Path, warm_up: int, limit: float | None, as_json: bool
) -> int:
    from hpctrain.scaling.collect import collect
    from hpctrain.scaling.compare import compare
    from hpctrain.scaling.tables import interval, seconds

    if len(names) != 2:
        raise UsageError(f"--compare takes two directories, found {len(names)}")
    sides: list[Collection] = [collect([_find(name, runs)], warm_up=warm_up) for name in names]
    pairs = compare(*sides)
    below = [pair for pair in pairs if limit is not None and pair.ratio.value < limit]
    if as_json:
        output.emit_json(
            {"compared": list(names), "fail_below": limit,
             "points": [pair.to_dict() for pair in pairs]}
        )  # fmt: skip
    else:
        rows = [
            (
                pair.title,
                "/".join(str(n) for n in dict.fromkeys(pair.ranks)),
                interval(pair.a, seconds),
                interval(pair.b, seconds),
                interval(pair.ratio, lambda value: f"{value:.3f}"),
                "-" if pair.p is None else f"{pair.p:.3g}",
                pair.verdict,
            )
            for pair in pairs
        ]
        headers = ("point", "devices", "step, first", "step, second", "speed", "p", "second is")
        output.table(headers, rows, right=range(1, 6))
        for test in dict.fromkeys(pair.test for pair in pairs if pair.test):
            output.line(f"p: {test}; below 0.05 is a difference")
    for pair in below:
        output.warn(
            f"{pair.title}: {pair.ratio.value:.3f} of the first's speed; --fail-below asks for "
            f"{limit:g}"
        )
    return Exit.IMPOSSIBLE if below else Exit.OK
