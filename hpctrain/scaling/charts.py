"""Plots as inline SVG that follow the page's colours: lines with error bars, stacked bars.

Colours are CSS classes (``c0`` … ``c7``), so that light and dark pages need no second plot. Every
mark has a ``<title>`` with its number, and every line its own dash and shape of points, so that
nothing hangs on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 16, 46
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 4", "1 4", "6 2 1 2")
_BAR = 26


@dataclass(frozen=True, slots=True)
class Mark:
    """One point of a line; ``low`` and ``high`` are its error bar."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot; ``ideal`` ones are grey, thin and without points."""

    name: str
    marks: Sequence[Mark]
    ideal: bool = False


def line_plot(
    title: str,
    lines: Sequence[Line],
    *,
    x_title: str,
    y_title: str,
    show: Callable[[float], str],
    log_y: bool = False,
    top: float | None = None,
) -> str:
    """A plot over the number of devices, on a logarithmic axis.

    Args:
        title: heading, also what a screen reader says.
        lines: with at least one point in all.
        x_title, y_title: of the axes.
        show: text of a value.
        log_y: logarithmic values too.
        top: the axis goes up to this at least.
    """
    marks = [mark for line in lines for mark in line.marks]
    if not marks:
        return ""
    xs = sorted({mark.x for mark in marks})
    ys = [value for m in marks for value in (m.y, m.high or m.y, m.low or m.y)]
    highest = max([*ys, top or 0.0]) or 1.0
    highest = min(highest, 4 * max(mark.y for mark in marks)) if not log_y else highest
    lowest = min(y for y in ys if y > 0) if log_y else 0.0
    ticks = _log_ticks(lowest, highest) if log_y else _ticks(highest)
    bottom_value, top_value = ticks[0], max(ticks[-1], highest)

    left, right = math.log2(xs[0]), math.log2(xs[-1])

    def across(x: float) -> float:
        share = 0.5 if right == left else (math.log2(x) - left) / (right - left)
        return _LEFT + 12 + share * (WIDTH - _LEFT - _RIGHT - 24)

    def up(y: float) -> float:
        if log_y:
            low, high = math.log(bottom_value), math.log(top_value)
            share = (math.log(max(y, bottom_value)) - low) / (high - low or 1.0)
        else:
            share = min(y, top_value) / top_value
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    bottom, middle = HEIGHT - _BOTTOM, (HEIGHT - _BOTTOM + _TOP) / 2
    parts = []
    for value in ticks:
        y = up(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y + 4, show(value), "end"))
    for x in _spread(xs, across):
        parts.append(f'<path class="tick" d="M{across(x):.1f} {bottom}v4"/>')
        parts.append(_text(across(x), bottom + 17, f"{x:g}"))
    parts.append(_text((WIDTH + _LEFT) / 2, HEIGHT - 8, x_title))
    parts.append(f'<g transform="rotate(-90)">{_text(-middle, 13, y_title)}</g>')
    number = 0
    for line in lines:
        path = " ".join(f"{across(m.x):.1f},{up(m.y):.1f}" for m in line.marks)
        if line.ideal:
            parts.append(f'<polyline class="ideal" points="{path}"/>')
            continue
        colour, dash = f"c{number % 8}", _DASHES[number % 8]
        parts.append(_polyline(colour, dash, path))
        for mark in line.marks:
            x, y = across(mark.x), up(mark.y)
            if mark.low is not None and mark.high is not None:
                a, b = up(mark.low), up(mark.high)
                cap = f"M{x - 4:.1f} {a:.1f}h8M{x - 4:.1f} {b:.1f}h8"
                parts.append(f'<path class="error s-{colour}" d="M{x:.1f} {a:.1f}V{b:.1f}{cap}"/>')
            words = f"{line.name}: {mark.title}" if line.name else mark.title
            parts.append(f"{_shape(number, x, y, colour)}<title>{escape(words)}</title></path>")
        number += 1
    return _figure(title, HEIGHT, parts, _line_legend(lines))


def bars(
    title: str, kinds: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]],
    show: Callable[[float], str],
) -> str:  # fmt: skip
    """Bars of parts that add up to one, a row each."""
    if not rows:
        return ""
    left = 12 + min(210, max(7 * len(name) for name, _ in rows))
    height = _TOP + _BAR * len(rows) + 8
    parts = []
    for number, (name, shares) in enumerate(rows):
        y, x = _TOP + number * _BAR, float(left)
        parts.append(_text(left - 8, y + 15, _short(name), "end"))
        for kind, share in enumerate(shares):
            width = share * (WIDTH - left - _RIGHT)
            if width <= 0:
                continue
            told = escape(f"{name}: {kinds[kind]} {show(share)}")
            box = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR - 6}"'
            parts.append(
                f'<rect class="f-c{kind % 8} p{kind // 8}" {box}><title>{told}</title></rect>'
            )
            if width > 44:
                parts.append(_text(x + width / 2, y + 15, show(share), "middle", "in"))
            x += width
    legend = "".join(
        f'<span><svg class="key" viewBox="0 0 12 12"><rect class="f-c{n % 8} p{n // 8}" width="12" '
        f'height="12"/></svg>{escape(kind)}</span>'
        for n, kind in enumerate(kinds)
    )
    return _figure(title, height, parts, legend)


def _figure(title: str, height: float, parts: Sequence[str], legend: str) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height:g}" '
        f'role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
        f'<p class="legend">{legend}</p></figure>'
    )


def _line_legend(lines: Sequence[Line]) -> str:
    found, number = [], 0
    for line in lines:
        if line.ideal:
            if not line.name:
                continue
            found.append(
                '<span><svg class="key wide" viewBox="0 0 24 12"><polyline class="ideal" '
                f'points="0,6 24,6"/></svg>{escape(line.name)}</span>'
            )
            continue
        colour, dash = f"c{number % 8}", _DASHES[number % 8]
        if line.name:
            sample = _polyline(colour, dash, "0,6 24,6") + _shape(number, 12, 6, colour) + "</path>"
            found.append(
                f'<span><svg class="key wide" viewBox="0 0 24 12">{sample}</svg>'
                f"{escape(line.name)}</span>"
            )
        number += 1
    return "".join(found)


def _text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text{mark} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _polyline(colour: str, dash: str, points: str) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline class="line s-{colour}"{dashes} points="{points}"/>'


def _shape(number: int, x: float, y: float, colour: str) -> str:
    """An open path element: circle, square, triangle, diamond in turn."""
    r = 4.5
    outlines = (
        f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z",
        f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8Z",
        f"M{x:.1f} {y - 5:.1f}l5 9h-10Z",
        f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6Z",
    )
    return f'<path class="f-{colour} point" d="{outlines[number % 4]}">'


def _spread(xs: Sequence[float], across: Callable[[float], float]) -> list[float]:
    """Values whose labels do not touch."""
    kept: list[float] = []
    for x in xs:
        if not kept or across(x) - across(kept[-1]) > 30:
            kept.append(x)
    return kept


def _ticks(highest: float) -> list[float]:
    raw = highest / 5
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= raw * 0.999)
    return [step * n for n in range(math.ceil(highest / step - 1e-9) + 1)]


def _log_ticks(lowest: float, highest: float) -> list[float]:
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    if last - first < 3:
        all_ticks = [k * 10.0**n for n in range(first, last + 1) for k in (1, 2, 5)]
        inside = [t for t in all_ticks if lowest < t < highest]
        below = max(t for t in all_ticks if t <= lowest * 1.0001)
        above = min(t for t in all_ticks if t >= highest * 0.9999)
        return [below, *(t for t in inside if below < t < above), above] if below < above else [
            below, 2 * below,
        ]  # fmt: skip
    return [10.0**n for n in range(first, last + 1)]


def _short(text: str, most: int = 30) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
