"""A report as one HTML file: no scripts, no fonts, nothing from a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hpctrain import __version__
from hpctrain.scaling.analysis import Report, Series
from hpctrain.scaling.charts import Line, Mark, bars, line_plot
from hpctrain.scaling.origins import Origin, origins
from hpctrain.scaling.published import Published, published
from hpctrain.scaling.stats import Estimate
from hpctrain.scaling.tables import HEADERS, cells, energy, formulas, percent, split_rows, tera
from hpctrain.units import format_bytes, format_count

_STYLE = """
:root{--ink:#1c1f23;--soft:#59616b;--paper:#fff;--edge:#d5d9de;--tint:#f3f5f7;--warn:#8a3b00;
--warnbg:#fff4e5;--c0:#2f5fc4;--c1:#c2410c;--c2:#0f766e;--c3:#7c3aed;--c4:#b4236b;--c5:#4d7c0f;
--c6:#0369a1;--c7:#92660a;--on:#fff;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#a3acb8;--paper:#15181c;--edge:#363c44;
--tint:#1e2227;--warn:#ffc078;--warnbg:#33230f;--c0:#85aaff;--c1:#ff9b6a;--c2:#4fd1c0;--c3:#c4a6ff;
--c4:#ff8fc0;--c5:#a8d957;--c6:#62c4f5;--c7:#e6bb57;--on:#15181c}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0 auto;
max-width:1320px;padding:1.2rem 1rem 4rem}
h1{font-size:1.5rem;line-height:1.25;margin:.3em 0}h2{font-size:1.15rem;margin:2rem 0 .6rem}
h3{font-size:1rem;margin:1.4rem 0 .4rem}
.soft,figcaption small{color:var(--soft)}
.scroll{overflow-x:auto;border:1px solid var(--edge);border-radius:6px}
table{border-collapse:collapse;width:100%;font-size:.85rem}
th,td{padding:.35em .5em;text-align:right;white-space:nowrap;border-bottom:1px solid var(--edge)}
th:first-child,td:first-child{text-align:left}th{background:var(--tint);font-weight:600;white-space:normal;vertical-align:bottom}
tr:last-child td{border-bottom:0}tr.none td{color:var(--soft)}tr.base td{font-weight:600}
.published td,.published th{text-align:left}
.published td:first-child{white-space:normal;min-width:15em}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:1rem;margin-top:1rem}
figure{margin:0;padding:.7rem;border:1px solid var(--edge);border-radius:6px;min-width:0}
figcaption{font-weight:600;margin-bottom:.3rem}
figure>svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg text.in{fill:var(--on);font-size:11px}
.grid{stroke:var(--edge)}.tick{stroke:var(--soft)}
.ideal{fill:none;stroke:var(--soft);stroke-width:1.2;stroke-dasharray:3 3}
.line{fill:none;stroke-width:2}.error{fill:none;stroke-width:1.4}
.point{stroke:var(--paper);stroke-width:1}.p1{opacity:.45}
.legend{margin:.3rem 0 0;font-size:.82rem}.legend span{display:inline-flex;align-items:center;
margin-right:1.1em;gap:.4em}.key{width:12px;height:12px}.key.wide{width:24px}
.flags{background:var(--warnbg);color:var(--warn);border-radius:6px;padding:.5rem 1rem .5rem 2rem;
overflow-wrap:anywhere}
.banner{background:var(--warnbg);color:var(--warn);border-radius:6px;padding:.6rem 1rem;
font-weight:600}
details{border:1px solid var(--edge);border-radius:6px;padding:.4rem .8rem;margin:.4rem 0}
summary{cursor:pointer;overflow-wrap:anywhere}
pre{background:var(--tint);padding:.7rem;overflow:auto;font-size:.8rem;border-radius:6px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;font-size:.88rem}
dd{margin:0;overflow-wrap:anywhere}
@media(max-width:560px){dl{grid-template-columns:1fr}dt{font-weight:600}}
""" + "".join(f".s-c{n}{{stroke:var(--c{n})}}.f-c{n}{{fill:var(--c{n})}}" for n in range(8))


def render(report: Report) -> str:
    """The page."""
    body = "\n".join(_body(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


_HOW = {
    "emulated": "Emulated: real ranks on another machine slept as long as the model of {} says.",
    "simulated": "Simulated: the schedule was run event by event with the times that the model of "
    "{} gives, without any ranks.",
    "emulated and simulated": "Partly emulated, by real ranks that slept as long as the model of {}"
    " says, and partly simulated without ranks.",
}


def _body(report: Report) -> Iterator[str]:
    yield f"<h1>{escape(report.title)}</h1>"
    if report.emulated:
        how = _HOW[report.ways].format(escape(report.emulated))
        yield f'<p class="banner">{how} Nothing here was measured on that machine.</p>'
    yield f'<p class="soft">{escape("; ".join(report.hardware))} · hpctrain {__version__}</p>'
    for series in report.series:
        yield from _series(report, series)
    yield '<div class="plots">'
    yield from plots(report)
    yield "</div>"
    headers, rows = split_rows(report)
    if rows:
        yield f"<h2>Time of a step{escape(report.mark)}</h2>"
        yield _table(headers, rows)
    if any(row.joules_per_token is not None for row in report.rows):
        yield "<h2>Energy</h2>"
        yield _table(("point", "energy"), [(r.point.title, energy(r)) for r in report.rows])
    beside = published(report)
    if beside:
        yield "<h2>Published rows of the same model</h2>"
        yield '<div class="published">'
        yield _table(Published.HEADERS, [one.cells() for one in beside])
        yield "</div>"
    yield "<h2>How to read this</h2><ul>"
    for line in formulas(report):
        yield f"<li>{escape(line)}</li>"
    yield "</ul><h2>Where it comes from</h2>"
    for origin in origins(report):
        yield from _origin(origin)


def _series(report: Report, series: Series) -> Iterator[str]:
    if series.title:
        yield f"<h2>{escape(series.title + report.mark)}</h2>"
    if series.note:
        yield f'<p class="banner">{escape(series.note)}</p>'
    marks = [
        "base" if row.is_baseline else "none" if row.step is None else "" for row in series.rows
    ]
    yield _table(HEADERS, [cells(row) for row in series.rows], marks)
    flags = [(row.point.title, flag) for row in series.rows for flag in row.flags]
    if flags:
        yield '<ul class="flags">'
        for title, flag in flags:
            yield f"<li>{escape(title)}: {escape(flag)}</li>"
        yield "</ul>"


def _table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()
) -> str:
    top = "".join(f"<th>{escape(header)}</th>" for header in headers)
    lines = []
    for number, row in enumerate(rows):
        name = f' class="{classes[number]}"' if classes and classes[number] else ""
        inside = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr{name}>{inside}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}'
        "</tbody></table></div>"
    )


# ---- plots ---------------------------------------------------------------------------------


def plots(report: Report) -> Iterator[str]:
    """All plots of a report, each with its mark where it is emulated."""
    kind, mark = report.collection.kind, report.mark
    devices = "devices"
    if kind != "grid":
        name = "Speed-up" if kind == "strong" else "Scaled speed-up"
        yield line_plot(
            name + mark, [*_ideal(report, True), *_lines(report, "speedup", "{:.2f}")],
            x_title=devices, y_title=name.lower(), show=lambda v: f"{v:g}", log_y=True,
        )  # fmt: skip
        yield line_plot(
            "Parallel efficiency" + mark,
            [*_ideal(report, False), *_lines(report, "efficiency", "percent"), *_planned(report)],
            x_title=devices, y_title="efficiency", show=lambda v: f"{100 * v:.0f} %", top=1.0,
        )  # fmt: skip
    yield line_plot(
        "Tokens a second" + mark, _lines(report, "tokens", "{:,.0f}"),
        x_title=devices, y_title="tokens/s, all devices", show=format_count, log_y=True,
    )  # fmt: skip
    if any(row.mfu is not None for row in report.rows):
        yield line_plot(
            "Model FLOPs utilisation" + mark, _rates(report, "mfu"),
            x_title=devices, y_title="MFU", show=lambda v: f"{100 * v:g} %",
        )  # fmt: skip
    elif any(row.model_flops is not None for row in report.rows):
        yield line_plot(
            "Model FLOP/s of a device" + mark, _rates(report, "model_flops"),
            x_title=devices, y_title="FLOP/s", show=lambda v: tera(v).removesuffix("FLOP/s"),
        )  # fmt: skip
    kinds, rows = split_rows(report)
    shares = []
    sizes = [row.ranks for row in report.rows if row.split]
    distinct = len(set(sizes)) == len(sizes)
    for row in report.rows:
        if row.split:
            total = sum(row.split.values())
            found = [row.split.get(kind, 0.0) / total for kind in kinds[1:]]
            shares.append((f"{row.ranks} devices" if distinct else row.point.title, found))
    yield bars("Time of a step" + mark, kinds[1:], shares, percent) if rows else ""
    if any(row.memory_bytes for row in report.rows) and not report.emulated:
        yield line_plot(
            "Peak memory of rank 0", _rates(report, "memory_bytes", 2**30),
            x_title=devices, y_title="GiB", show=lambda v: f"{v:.3g}",
        )  # fmt: skip


def _lines(report: Report, name: str, form: str) -> list[Line]:
    found = []
    for series in report.series:
        marks = []
        for row in series.rows:
            estimate: Estimate | None = getattr(row, name)
            if estimate is not None:
                value = estimate.value
                text = percent(value) if form == "percent" else form.format(value)
                title = f"{row.point.title}, {row.ranks} devices: {text}"
                marks.append(Mark(row.ranks, value, estimate.low, estimate.high, title))
        if marks:
            found.append(Line(series.title or report.ways or "measured", marks))
    return found


def _rates(report: Report, name: str, unit: float = 1.0) -> list[Line]:
    found = []
    for series in report.series:
        marks = [
            Mark(row.ranks, value / unit, title=f"{row.point.title}: {_told(name, value)}")
            for row in series.rows
            if (value := getattr(row, name)) and row.step is not None
        ]
        if marks:
            found.append(Line(series.title, marks))
    return found


def _told(name: str, value: float) -> str:
    if name == "mfu":
        return percent(value)
    return format_bytes(value) if name == "memory_bytes" else tera(value)


def _planned(report: Report) -> list[Line]:
    found = []
    for series in report.series:
        marks = [
            Mark(row.ranks, row.predicted_efficiency,
                 title=f"{row.ranks} devices, planned: {percent(row.predicted_efficiency)}")
            for row in series.rows
            if row.predicted_efficiency is not None and row.ranks
        ]  # fmt: skip
        if len(marks) > 1:
            found.append(Line(f"{series.title} planned".strip(), marks))
    return found


def _ideal(report: Report, speedup: bool) -> list[Line]:
    """The ideal line of each size of baseline."""
    reach: dict[int, int] = {}
    for series in report.series:
        sizes = [row.ranks for row in series.rows if row.step is not None]
        if series.baseline and sizes:
            base = series.baseline.ranks
            reach[base] = max([reach.get(base, base), *sizes])
    if not speedup and reach:
        reach = {min(reach): max(reach.values())}
    return [
        Line(
            "" if number else "ideal",
            [Mark(n, n / base if speedup else 1.0) for n in sorted({base, far})],
            ideal=True,
        )
        for number, (base, far) in enumerate(sorted(reach.items()))
    ]


# ---- provenance ----------------------------------------------------------------------------


def _origin(origin: Origin) -> Iterator[str]:
    yield f"<details><summary>{escape(origin.line())}</summary><dl>"
    rows = [
        ("directory", origin.path),
        ("code", origin.code),
        ("submitted on", origin.host),
        ("command", origin.command),
        ("topology", origin.topology),
        ("nodes", origin.nodes),
        ("modules", origin.modules),
    ]
    rows += [(str(one["path"]), f"{one['bytes']} bytes, sha256 {one['sha256']} of {one['of']}")
             for one in origin.inputs]  # fmt: skip
    for name, value in rows:
        if value:
            yield f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
    yield "</dl>"
    variables = "\n".join(f"{name}={value}" for name, value in origin.environment.items())
    for name, text in (
        ("job as resolved", origin.job),
        ("batch script", origin.script),
        ("environment", variables),
    ):
        if text:
            yield f"<h3>{name}</h3><pre>{escape(text)}</pre>"
    yield "</details>"
