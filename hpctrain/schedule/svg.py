"""A schedule as a static SVG: one bar a rank, what it holds below it; light and dark."""

from __future__ import annotations

import math
from html import escape

from hpctrain.schedule.actions import COMPUTE, Action, ActionKind
from hpctrain.schedule.draw import headline
from hpctrain.schedule.simulate import Span, Timeline

MARGIN, LEFT, TOP = 16, 60, 58
BAR, STRIP, GAP = 26, 14, 12
CELL = 24
"""Pixels of the shortest pass, as long as the picture stays under ``WIDEST``."""
WIDEST = 1480

# hue for each kind: (first chunk, further chunks)
_LIGHT = {
    "F": ("#4c8dd6", "#a9cbf2"),
    "B": ("#3f9e5c", "#a6d9b4"),
    "I": ("#2f9e93", "#a0d8d0"),
    "W": ("#d9a23b", "#f0d9a4"),
    "S": ("#9a6fd0", "#9a6fd0"),
    "T": ("#c39be8", "#c39be8"),
    "E": ("#8a93a3", "#8a93a3"),
    "D": ("#b3bac6", "#b3bac6"),
    "GATHER": ("#c0504d", "#c0504d"),
    "SCATTER": ("#e09a5a", "#e09a5a"),
    "REDUCE": ("#e09a5a", "#e09a5a"),
    "OFFLOAD": ("#5b6675", "#5b6675"),
    "RELOAD": ("#98a3b3", "#98a3b3"),
}
_DARK = {
    "F": ("#3b78bd", "#7fa9d8"),
    "B": ("#347f4b", "#7fbd91"),
    "I": ("#288279", "#78b8b0"),
    "W": ("#b5852c", "#d3b673"),
    "S": ("#7f57b3", "#7f57b3"),
    "T": ("#a37fc9", "#a37fc9"),
    "E": ("#6d7686", "#6d7686"),
    "D": ("#8d95a3", "#8d95a3"),
    "GATHER": ("#d8706d", "#d8706d"),
    "SCATTER": ("#d18b4b", "#d18b4b"),
    "REDUCE": ("#d18b4b", "#d18b4b"),
    "OFFLOAD": ("#8d97a6", "#8d97a6"),
    "RELOAD": ("#c3cbd6", "#c3cbd6"),
}
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    "S": "output layer",
    "T": "output layer, weights",
    "GATHER": "gathering parameters",
    "SCATTER": "reducing gradients",
    "REDUCE": "reducing gradients",
    "OFFLOAD": "to host memory",
    "RELOAD": "from host memory",
}
_BESIDE = {"GATHER", "SCATTER", "REDUCE", "OFFLOAD", "RELOAD"}


def draw_svg(timeline: Timeline) -> str:
    """The time line as an SVG document."""
    spans = list(timeline.spans())
    passes = [span for span in spans if span.action.kind in COMPUTE]
    beside = [s for s in spans if s.action.kind in _BESIDE and s.end > s.start]
    shortest = min((s.end - s.start for s in passes if s.end > s.start), default=1.0)
    makespan = timeline.makespan or 1.0
    inner = min(max(makespan / shortest * CELL, 320), WIDEST - LEFT - MARGIN)
    scale = inner / makespan
    ranks = timeline.schedule.ranks
    step = BAR + STRIP + GAP
    width = math.ceil(LEFT + inner + MARGIN)
    bottom = TOP + ranks * step
    height = bottom + 52
    title = headline(timeline)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_style()}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>',
        *_head(timeline),
    ]
    bound = max(max(timeline.peak_activations), 1e-9)
    rows: list[str] = []
    for rank in range(ranks):
        top = TOP + rank * step
        parts.append(f'<text class="t" x="{MARGIN}" y="{top + 17}">rank {rank}</text>')
        parts.append(
            f'<rect class="idle" x="{LEFT}" y="{top}" width="{inner:.1f}" height="{BAR}"/>'
        )
        rows += [_bar(timeline, s, top, scale) for s in passes if s.rank == rank]
        rows += [_thin_bar(s, top - 6, scale) for s in beside if s.rank == rank]
        rows.append(_strip(timeline, rank, top + BAR, scale, bound))
    parts += [*_axis(makespan, scale, bottom), *rows]
    shown = {span.action.kind for span in (*passes, *beside)}
    parts += _legend(shown, bottom + 40, bound)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _style() -> str:
    def fills(table: dict[str, tuple[str, str]]) -> str:
        return "".join(
            f".{kind}0{{fill:{first}}}.{kind}1{{fill:{other}}}"
            for kind, (first, other) in table.items()
        )

    return (
        "text{font:12px ui-sans-serif,system-ui,sans-serif}"
        ".page{fill:#fff}.idle{fill:#eef0f3}.t{fill:#1d2430}.s{fill:#5b6675}"
        ".l0,.l1{fill:#10151d;font-size:11px;text-anchor:middle}"
        ".m{fill:#8c5aa8;fill-opacity:.35;stroke:#8c5aa8;stroke-width:1}"
        ".a{stroke:#c3c9d2;stroke-width:1}" + fills(_LIGHT) + "@media(prefers-color-scheme:dark){"
        ".page{fill:#12161c}.idle{fill:#1f2630}.t{fill:#e8ecf2}.s{fill:#9aa5b4}.l0{fill:#f6f8fb}"
        ".m{fill:#b98ad3;stroke:#b98ad3}.a{stroke:#3a4350}" + fills(_DARK) + "}"
    )


def _head(timeline: Timeline) -> list[str]:
    name, _, rest = headline(timeline).partition(": ")
    return [
        f'<text class="t" x="{MARGIN}" y="24" style="font-size:15px;font-weight:600">'
        f"{escape(name)}</text>",
        f'<text class="s" x="{MARGIN}" y="43">{escape(rest)}</text>',
    ]


def _bar(timeline: Timeline, span: Span, top: float, scale: float) -> str:
    action = span.action
    left, size = LEFT + span.start * scale, (span.end - span.start) * scale
    if size <= 0:
        return ""
    shade = _shade(timeline, action)
    bar = (
        f'<rect class="{action.kind.value}{shade}" x="{left:.1f}" y="{top}" '
        f'width="{max(size - 1, 0.5):.1f}" height="{BAR}"/>'
    )
    label = str(action.micro_batch)
    if size < 7 * len(label) + 3:
        return bar
    return (
        f'{bar}<text class="l{shade}" x="{left + (size - 1) / 2:.1f}" y="{top + 17}">{label}</text>'
    )


def _thin_bar(span: Span, top: float, scale: float) -> str:
    """What runs beside the computation, above the bar of its rank."""
    left, size = LEFT + span.start * scale, (span.end - span.start) * scale
    return (
        f'<rect class="{span.action.kind.value}0" x="{left:.1f}" y="{top}" '
        f'width="{max(size - 1, 0.5):.1f}" height="4"/>'
    )


def _shade(timeline: Timeline, action: Action) -> int:
    """0 for a rank's first chunk on a route, 1 for the others."""
    if action.micro_batch is None or action.stage is None:
        return 0
    return int(action.stage >= timeline.schedule.ranks)


def _strip(timeline: Timeline, rank: int, top: float, scale: float, bound: float) -> str:
    """What the rank holds over time, the highest peak of all ranks being the full height."""
    base = top + STRIP
    points = [f"{LEFT},{base}"]
    level = base
    for time, held in timeline.memory(rank):
        x = LEFT + time * scale
        points.append(f"{x:.1f},{level:.1f}")
        level = base - (STRIP - 2) * held / bound
        points.append(f"{x:.1f},{level:.1f}")
    return f'<polygon class="m" points="{" ".join(points)}"/>'


def _axis(makespan: float, scale: float, bottom: float) -> list[str]:
    rough = makespan / 10
    power = 10 ** math.floor(math.log10(rough))
    tick = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    parts = []
    for number in range(int(makespan / tick + 1e-9) + 1):
        x = LEFT + number * tick * scale
        parts.append(f'<line class="a" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(
            f'<text class="s" x="{x:.1f}" y="{bottom + 12}" text-anchor="middle">'
            f"{number * tick:g}</text>"
        )
    return parts


def _legend(used: set[ActionKind], y: float, bound: float) -> list[str]:
    parts = []
    x = float(LEFT)
    for kind, name in _NAMES.items():
        if kind not in used:
            continue
        parts.append(f'<rect class="{kind}0" x="{x}" y="{y - 10}" width="12" height="12"/>')
        parts.append(f'<text class="s" x="{x + 17}" y="{y}">{name}</text>')
        x += 36 + 6.6 * len(name)
    text = f"activations held (full height: {bound:g})"
    parts.append(f'<rect class="m" x="{x}" y="{y - 10}" width="12" height="12"/>')
    parts.append(f'<text class="s" x="{x + 17}" y="{y}">{text}</text>')
    return parts
