"""``hpctrain schedule``: pipeline schedules, as pictures, numbers and tables of actions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli import output
from hpctrain.cli.options import json_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.schedule import Schedule, Timeline

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(short_help="Show, compare and check pipeline schedules.")
def command() -> None:
    """Show, compare and check pipeline schedules.

    A pipeline has p ranks with v chunks of the model each; a step goes through m micro-batches.
    Times are for one micro-batch through one p-th of the model, in any unit.
    """


def _shape(function: Callable[..., None]) -> Callable[..., None]:
    """The options that give a pipeline its shape and its times."""
    for option in reversed(
        (
            click.option("-p", "--ranks", type=int, default=4, show_default=True),
            click.option("-m", "--micro-batches", type=int, default=8, show_default=True),
            click.option("-v", "--chunks", type=int, help="Stages a rank; default: the method's."),
            click.option("--forward", type=float, default=1.0, show_default=True),
            click.option("--input-grad", type=float, default=1.0, show_default=True),
            click.option("--weight-grad", type=float, default=1.0, show_default=True),
            click.option("--transfer", type=float, default=0.0, show_default=True),
        )
    ):
        function = option(function)
    return function


@command.command()
@click.option("--schedule", "name", default="1f1b", show_default=True, help="See: schedule list.")
@_shape
@click.option(
    "-o",
    "--option",
    "pairs",
    metavar="KEY=VALUE",
    multiple=True,
    help="An option of the method: waves=2, unit=4, limit=6, barriers=2 …; may be repeated.",
)
@click.option("--svg", metavar="FILE", type=_FILE, help="Write a picture.")
@click.option("--trace", metavar="FILE", type=_FILE, help="Write a Chrome trace (Perfetto).")
@click.option("--table", metavar="FILE", type=_FILE, help="Write the table of actions as JSON.")
@json_option
def show(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int | None,
    pairs: tuple[str, ...],
    svg: Path | None,
    trace: Path | None,
    table: Path | None,
    as_json: bool,
    **times: float,
) -> None:
    """Draw one schedule, with its bubble and what it holds.

    \b
      hpctrain schedule show --schedule zb-v -p 4 -m 8
      hpctrain schedule show --schedule 1f1b+2bp -p 8 -m 32 --weight-grad 0.8 --svg 2bp.svg
      hpctrain schedule show --schedule auto -p 8 -m 32 -o limit=6 --transfer 0.1
    """
    from hpctrain.schedule import draw_json, draw_svg, draw_text, draw_trace, simulate, validate

    costs = _costs(times)
    schedule = _make(name, ranks, micro_batches, chunks, costs, _options(pairs))
    validate(schedule)
    timeline = simulate(schedule, costs)
    if svg is not None:
        _write(svg, draw_svg(timeline))
    if trace is not None:
        _write(trace, json.dumps(draw_trace(timeline)))
    if table is not None:
        _write(table, json.dumps(schedule.to_json()))
    if as_json:
        output.emit_json(draw_json(timeline))
        return
    width = shutil.get_terminal_size().columns if output.is_terminal() else 0
    output.line(draw_text(timeline, width=width, colour=output.colours()))
    for kind, path in (("picture", svg), ("trace", trace), ("table", table)):
        if path is not None:
            output.note(f"wrote the {kind}: {path}")


@command.command("list")
@json_option
def list_methods(as_json: bool) -> None:
    """List all methods, with what their papers state and where.

    Bubbles are idle over ideal time with equal times for forward, inputs and weights; memory is
    the most any rank holds, in activations of one micro-batch over one p-th of the model.
    """
    from hpctrain.schedule import METHODS, TRANSFORMS

    if as_json:
        methods = [
            {
                "name": name,
                "title": method.title,
                "source": method.source,
                "chunks": method.chunks,
                "bubble": method.bubble,
                "memory": method.memory,
            }
            for name, method in METHODS.items()
        ]
        transforms = [{"name": name, "title": title} for name, (_, title) in TRANSFORMS.items()]
        output.emit_json({"methods": methods, "transforms": transforms})
        return
    output.table(
        ("method", "what it does", "bubble", "memory", "from"),
        [(n, m.title, m.bubble, m.memory, m.source) for n, m in METHODS.items()],
    )
    output.line()
    output.table(
        ("after a method's name", "what it changes"),
        [(f"+{name}", title) for name, (_, title) in TRANSFORMS.items()],
    )


@command.command()
@_shape
@json_option
def compare(
    ranks: int,
    micro_batches: int,
    chunks: int | None,
    as_json: bool,
    **times: float,
) -> None:
    """Compare all methods on one model: time, bubble and memory, the shortest first."""
    from hpctrain.errors import ImpossibleError
    from hpctrain.schedule import names, simulate

    costs = _costs(times)
    timelines: list[Timeline] = []
    refused: dict[str, str] = {}
    for name in names():
        try:
            schedule = _make(name, ranks, micro_batches, None, costs, {}, chunks)
        except ImpossibleError as error:
            refused[name] = error.message
            continue
        timelines.append(simulate(schedule, costs))
    timelines.sort(key=lambda t: (t.makespan, max(t.peak_activations)))
    if as_json:
        rows = [
            {"schedule": t.schedule.name, "chunks": t.schedule.chunks, **t.summary()}
            for t in timelines
        ]
        output.emit_json({"schedules": rows, "refused": refused})
        return
    output.table(
        ("method", "chunks", "makespan", "bubble", "between steps", "peak activations"),
        [
            (
                t.schedule.name,
                str(t.schedule.chunks),
                f"{t.makespan:.4g}",
                f"{100 * t.bubble_fraction:.1f} %",
                f"{100 * t.overlapped_bubble_fraction:.1f} %",
                f"{max(t.peak_activations):.4g}",
            )
            for t in timelines
        ],
        right=(1, 2, 3, 4, 5),
    )
    for reason in refused.values():
        output.note(reason)


@command.command()
@click.argument("file", type=_FILE)
def check(file: Path) -> None:
    """Check a table of actions (as written by show --table): can every rank run its list?"""
    from hpctrain.errors import UsageError
    from hpctrain.schedule import Schedule, find_problems

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    try:
        schedule = Schedule.from_json(text)
        problems = find_problems(schedule)
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from None
    if problems:
        raise UsageError(
            f"{file}: {len(problems)} fault{'s' if len(problems) > 1 else ''}",
            hint="\n".join(problems[:20]),
        )
    actions = sum(len(row) for row in schedule.actions)
    output.line(f"{schedule.name}: {actions} actions on {schedule.ranks} ranks, all is well")


def _write(path: Path, text: str) -> None:
    from hpctrain.errors import UsageError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _costs(times: dict[str, float]) -> Any:
    from hpctrain.errors import UsageError
    from hpctrain.schedule import Costs

    try:
        return Costs(**times)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _make(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int | None,
    costs: Any,
    options: dict[str, Any],
    wished_chunks: int | None = None,
) -> Schedule:
    """Build a schedule; the automatic one is planned for the times that were given."""
    from hpctrain.schedule import METHODS, make

    if name.split("+")[0] == "auto":
        options = {"costs": costs, **options}
    if wished_chunks is not None and METHODS[name].chunks > 1:
        chunks = wished_chunks
    return make(name, ranks=ranks, micro_batches=micro_batches, chunks=chunks, **options)


def _options(pairs: tuple[str, ...]) -> dict[str, int | float | str]:
    from hpctrain.errors import UsageError

    options: dict[str, int | float | str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise UsageError(f"--option {pair!r}: should be KEY=VALUE, for example waves=2")
        for convert in (int, float, str):
            try:
                options[key.replace("-", "_")] = convert(value)
                break
            except ValueError:
                continue
    return options
