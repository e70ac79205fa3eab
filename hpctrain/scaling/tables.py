"""A report as rows of text: terminal, Markdown, CSV, JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from hpctrain.records import SCHEMA_VERSION, finite
from hpctrain.scaling.analysis import CONVENTION, Report, Row
from hpctrain.scaling.collect import PARTS
from hpctrain.scaling.origins import Origin, origins
from hpctrain.scaling.published import Published, published
from hpctrain.scaling.stats import Estimate
from hpctrain.units import format_bytes

HEADERS = (
    "point", "devices", "runs", "step", "tokens/s", "speed-up", "efficiency", "model FLOP/s",
    "hardware FLOP/s", "MFU", "planned", "memory",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """A point as the cells of HEADERS."""
    usable = len(row.point.usable)
    title = row.point.title + (" (baseline)" if row.is_baseline else "")
    if row.step is None:
        return (title, str(row.ranks or "-"), "0", *("-",) * 7, seconds(row.predicted_step), "-")
    assert row.tokens is not None
    planned = seconds(row.predicted_step)
    if row.predicted_efficiency is not None:
        planned += f", {percent(row.predicted_efficiency)}"
    return (
        title,
        str(row.ranks),
        str(usable),
        interval(row.step, seconds),
        f"{row.tokens.value:,.0f}",
        "-" if row.speedup is None else f"{row.speedup.value:.2f}",
        "-" if row.efficiency is None else interval(row.efficiency, percent),
        tera(row.model_flops),
        tera(row.hardware_flops),
        "-" if row.mfu is None else percent(row.mfu),
        planned,
        format_bytes(row.memory_bytes) if row.memory_bytes else "-",
    )


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def tera(rate: float | None) -> str:
    """``123 TFLOP/s``."""
    if rate is None:
        return "-"
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= limit:
            return f"{rate / limit:.3g} {unit}FLOP/s"
    return f"{rate:.3g} FLOP/s"


def seconds(value: float | None) -> str:
    """``12.5 s``, ``85 ms``."""
    if value is None:
        return "-"
    return f"{value:.4g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def interval(found: Estimate, show: Any) -> str:
    """A value with its 95 % interval, where there is one."""
    text = str(show(found.value))
    if found.low is None or found.high is None:
        return text
    return f"{text} [{show(found.low)}, {show(found.high)}]"


def formulas(report: Report) -> list[str]:
    """What the numbers mean: one sentence a line."""
    base = {series.baseline.point.title for series in report.series if series.baseline}
    named = "; ".join(sorted(base)) or "none was measured"
    kind = report.collection.kind
    lines = [f"Baseline: {named}."]
    if kind == "strong":
        lines.append(
            "Strong scaling, the same work on more devices: speed-up S = T_b / T_n, efficiency "
            "E = S · n_b / n; ideal is S = n / n_b."
        )
    elif kind == "weak":
        grown = {"batch": "the global batch", "layers": "the layers", "hidden": "the width"}
        lines.append(
            f"Weak scaling, {grown[report.collection.grow]} grows with the devices: efficiency E = "
            "(W_n / (n·T_n)) / (W_b / (n_b·T_b)) with W = "
            + ("tokens" if report.collection.grow == "batch" else "model FLOPs")
            + " a step; scaled speed-up E · n / n_b."
        )
    else:
        lines.append("Work per device and second against the baseline's.")
    lines += [
        f"A run's step is the median of its steps without the first {report.warm_up} of each "
        "start (at most half of a start's steps); a point is the median of its runs. [a, b] is a "
        "95 % interval over the runs (Student's t on logarithms); a single run has none.",
        CONVENTION,
        "FLOP/s are those of one device"
        + (
            "; its peak is assumed, not stated by anyone, and so is MFU."
            if any(row.peak_assumed for row in report.rows)
            else "."
        ),
        "Time is that of rank 0, communication in full where it runs beside computation.",
    ]
    return lines


def split_rows(report: Report) -> tuple[list[str], list[tuple[str, ...]]]:
    """Headers and cells of the time split, with the kinds that occur."""
    kinds = [part for part in PARTS if any(_share(row, part) >= _SHOWN for row in report.rows)]
    found = []
    for row in report.rows:
        if row.split:
            total = sum(row.split.values())
            shares = (percent(row.split.get(kind, 0.0) / total) for kind in kinds)
            found.append((row.point.title, *shares))
    return ["point", *kinds], found


_SHOWN = 5e-4
"""Least share of a kind of time that is worth a column."""


def _share(row: Row, part: str) -> float:
    return row.split.get(part, 0.0) / (sum(row.split.values()) or 1.0)


def energy(row: Row) -> str:
    return "-" if row.joules_per_token is None else f"{row.joules_per_token:.3g} J/token"


def markdown(report: Report) -> str:
    """The report as a Markdown document."""
    return "\n".join(_markdown(report)) + "\n"


def _markdown(report: Report) -> Iterator[str]:
    yield f"# {report.title}"
    yield ""
    yield "Hardware: " + "; ".join(report.hardware) + "."
    yield ""
    for series in report.series:
        if series.title:
            yield f"## {series.title}{report.mark}"
            yield ""
        if series.note:
            yield f"**{series.note}**"
            yield ""
        yield from _table(HEADERS, [cells(row) for row in series.rows])
        yield ""
        for row in series.rows:
            for flag in row.flags:
                yield f"- {row.point.title}: {flag}"
        yield ""
    headers, rows = split_rows(report)
    if rows:
        yield f"## Time of a step{report.mark}"
        yield ""
        yield from _table(headers, rows)
        yield ""
    if any(row.joules_per_token is not None for row in report.rows):
        yield "## Energy"
        yield ""
        yield from _table(
            ("point", "energy"), [(row.point.title, energy(row)) for row in report.rows]
        )
        yield ""
    beside = published(report)
    if beside:
        yield "## Published rows of the same model"
        yield ""
        yield from _table(Published.HEADERS, [one.cells() for one in beside])
        yield ""
    yield "## How to read this"
    yield ""
    for line in formulas(report):
        yield f"- {line}"
    yield ""
    yield "## Where it comes from"
    yield ""
    for origin in origins(report):
        yield f"- {origin.line()}"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headers) + " |"
    yield "|" + "|".join([":--"] + ["--:"] * (len(headers) - 1)) + "|"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


COLUMNS = (
    "series", "point", "nodes", "devices", "runs", "baseline", "step_seconds", "step_low",
    "step_high", "tokens_per_second", "speedup", "efficiency", "efficiency_low",
    "efficiency_high", "model_flops_per_device", "hardware_flops_per_device", "mfu",
    "peak_flops", "predicted_step_seconds", "predicted_efficiency", "memory_bytes",
    "joules_per_token", "emulated",
)  # fmt: skip


def record(report: Report, series: str, row: Row) -> dict[str, Any]:
    """A point's numbers by the names of COLUMNS."""
    step, efficiency = row.step, row.efficiency
    return {
        "series": series,
        "point": row.point.title,
        "nodes": row.point.nodes,
        "devices": row.ranks,
        "runs": len(row.point.usable),
        "baseline": row.is_baseline,
        "step_seconds": None if step is None else step.value,
        "step_low": None if step is None else step.low,
        "step_high": None if step is None else step.high,
        "tokens_per_second": None if row.tokens is None else row.tokens.value,
        "speedup": None if row.speedup is None else row.speedup.value,
        "efficiency": None if efficiency is None else efficiency.value,
        "efficiency_low": None if efficiency is None else efficiency.low,
        "efficiency_high": None if efficiency is None else efficiency.high,
        "model_flops_per_device": row.model_flops,
        "hardware_flops_per_device": row.hardware_flops,
        "mfu": row.mfu,
        "peak_flops": row.peak,
        "predicted_step_seconds": row.predicted_step,
        "predicted_efficiency": row.predicted_efficiency,
        "memory_bytes": row.memory_bytes or None,
        "joules_per_token": row.joules_per_token,
        "emulated": report.emulated,
    }


def comma_separated(report: Report) -> str:
    """One line a point, COLUMNS and the seconds of each kind of time."""
    stream = io.StringIO()
    times = [f"seconds_{part.replace(' ', '_')}" for part in PARTS]
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*COLUMNS, *times, "flags"])
    for series in report.series:
        for row in series.rows:
            found = record(report, series.title, row)
            writer.writerow(
                [
                    *("" if found[name] is None else found[name] for name in COLUMNS),
                    *(row.split.get(part, "") for part in PARTS),
                    "; ".join(row.flags),
                ]
            )
    return stream.getvalue()


def document(report: Report) -> dict[str, Any]:
    """The report as JSON data."""
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "title": report.title,
        "kind": report.collection.kind,
        "emulated": report.emulated,
        "ways": report.ways,
        "hardware": report.hardware,
        "warm_up_steps": report.warm_up,
        "formulas": formulas(report),
        "series": [
            {
                "title": series.title,
                "baseline": series.baseline.point.title if series.baseline else None,
                "note": series.note,
                "points": [
                    record(report, series.title, row)
                    | {
                        "settings": row.point.settings,
                        "seconds": row.split,
                        "flags": row.flags,
                        "run_ids": [run.run.id for run in row.point.runs],
                    }
                    for row in series.rows
                ],
            }
            for series in report.series
        ],
        "published": [one.to_dict() for one in published(report)],
        "origins": [_origin(origin) for origin in origins(report)],
    }
    cleaned: dict[str, Any] = finite(found)
    return cleaned


def _origin(origin: Origin) -> dict[str, Any]:
    return origin.to_dict()
