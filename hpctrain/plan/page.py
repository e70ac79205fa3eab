"""A plan as one HTML page: memory of every stage, the time split, the pipeline's time line."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from hpctrain.plan.explain import explain
from hpctrain.plan.pipeline import form_of
from hpctrain.plan.plan import Plan
from hpctrain.plan.text import changed, head
from hpctrain.units import format_bytes, format_seconds

_COLOURS = {
    "parameters": "#4269d0",
    "gradients": "#efb118",
    "optimizer": "#ff725c",
    "activations": "#6cc5b0",
    "logits": "#3ca951",
    "gathered": "#ff8ab7",
    "buffers": "#a463f2",
    "context": "#97bbf5",
}
_TIMELINE_RANKS = 16
_TIMELINE_MICRO_BATCHES = 24
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse}td,th{padding:.15em .8em .15em 0;text-align:left;vertical-align:top}
pre{background:#f6f6f6;padding:.8em;white-space:pre-wrap}
.wide{overflow-x:auto}
td:nth-child(-n+2){white-space:nowrap}
.legend span{display:inline-block;margin-right:1em}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}
"""


def render(plan: Plan) -> str:
    """The page; it needs no other file."""
    title = f"Plan of {plan.spec.name}"
    body = "\n".join(_sections(plan))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _sections(plan: Plan) -> Iterator[str]:
    yield f"<pre>{escape(chr(10).join(head(plan)))}</pre>"
    yield "<h2>Memory of the stages</h2>"
    yield memory_chart(plan)
    yield "<h2>Time of a step</h2>"
    yield time_chart(plan)
    if plan.strategy.layout.pp > 1:
        yield "<h2>Pipeline</h2>"
        yield timeline(plan)
    if plan.alternatives:
        yield "<h2>Better layouts</h2><table>"
        yield "<tr><th>step</th><th>memory</th><th>why</th><th>settings</th></tr>"
        for other in plan.alternatives:
            keys = " ".join(f"{k}={v}" for k, v in changed(plan, other).items())
            cells = (
                format_seconds(other.candidate.seconds),
                format_bytes(other.candidate.memory),
                other.why,
                keys,
            )
            yield "<tr>" + "".join(f"<td>{escape(str(c))}</td>" for c in cells) + "</tr>"
        yield "</table>"
    if plan.warnings:
        yield "<h2>Warnings</h2><ul>"
        for warning in plan.warnings:
            yield f"<li>{escape(warning.text)}<br>remedy: {escape(warning.remedy)}</li>"
        yield "</ul>"
    yield "<h2>Where each number comes from</h2><table>"
    for one in explain(plan):
        inputs = "<br>".join(escape(f"{n} = {v} [{s}]") for n, v, s in one.inputs)
        yield (
            f"<tr><td>{escape(one.name)}</td><td>{escape(one.value)}</td>"
            f"<td>{escape(one.formula)}<br><small>{inputs}</small></td></tr>"
        )
    yield "</table>"


def memory_chart(plan: Plan) -> str:
    """One bar a stage, stacked by part, with the limit as a line."""
    width, row, left = 860, 22, 70
    scale = (width - left) / max(plan.used, plan.limit)
    bars = []
    for number, stage in enumerate(plan.memory):
        x, y = float(left), number * row
        bars.append(f'<text x="0" y="{y + 15}" font-size="12">stage {number}</text>')
        for name, value in stage.parts().items():
            if value <= 0:
                continue
            bars.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{value * scale:.1f}" height="{row - 6}" '
                f'fill="{_COLOURS[name]}"><title>{name} {format_bytes(value)}</title></rect>'
            )
            x += value * scale
    height = row * len(plan.memory)
    line = left + plan.limit * scale
    bars.append(
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="0" y2="{height}" stroke="#c00" '
        f'stroke-dasharray="4 3"><title>limit {format_bytes(plan.limit)}</title></line>'
    )
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{name}</span>'
        for name, colour in _COLOURS.items()
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" '
        f'aria-label="memory of each stage">{"".join(bars)}</svg><p class="legend">{legend}'
        f"<span>dashed: {format_bytes(plan.limit)} that can be filled</span></p>"
    )


def time_chart(plan: Plan) -> str:
    """One bar a kind of work."""
    width, row, left = 860, 20, 150
    parts = [(n, v) for n, v in plan.step.split.items() if v > 0]
    parts.sort(key=lambda item: -item[1])
    scale = (width - left - 80) / parts[0][1]
    bars = []
    for number, (name, value) in enumerate(parts):
        y = number * row
        bars.append(
            f'<text x="0" y="{y + 14}" font-size="12">{escape(name)}</text>'
            f'<rect x="{left}" y="{y + 3}" width="{value * scale:.1f}" height="{row - 6}" '
            f'fill="#4269d0"/><text x="{left + value * scale + 5:.1f}" y="{y + 14}" '
            f'font-size="12">{format_seconds(value)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {width} {row * len(parts)}" width="100%" role="img" '
        f'aria-label="time of a step by kind">{"".join(bars)}</svg>'
    )


def timeline(plan: Plan) -> str:
    """The schedule's own table, run with this plan's times; long pipelines are cut short."""
    from hpctrain.schedule import Costs, draw_svg, make, simulate

    layout, block = plan.strategy.layout, plan.step.layer
    ranks = min(layout.pp, _TIMELINE_RANKS)
    micro = min(plan.step.micro_batches, _TIMELINE_MICRO_BATCHES)
    virtual = plan.strategy.virtual
    if virtual > 1 and micro % ranks:
        micro = max(ranks, micro // ranks * ranks)
    share = plan.work.model.layers / layout.pp
    costs = Costs(
        forward=block.forward.total * share,
        input_grad=(block.total - block.forward.total - block.weights) * share,
        weight_grad=block.weights * share,
    )
    name = form_of(plan.strategy.schedule, virtual).name
    table = make(name, ranks=ranks, micro_batches=micro, chunks=virtual)
    note = ""
    if (ranks, micro) != (layout.pp, plan.step.micro_batches):
        note = (
            f"<p>{ranks} of {layout.pp} stages and {micro} of {plan.step.micro_batches} "
            "micro-batches</p>"
        )
    return f'{note}<div class="wide">{draw_svg(simulate(table, costs))}</div>'
