"""One drawer for all schedules: text for a terminal, Chrome trace, JSON; SVG is in svg.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpctrain.schedule.actions import COMPUTE, ActionKind
from hpctrain.schedule.graph import EVERYONE
from hpctrain.schedule.simulate import Span, Timeline

_ANSI = {
    "F": "\x1b[30;44m",
    "B": "\x1b[30;42m",
    "I": "\x1b[30;46m",
    "W": "\x1b[30;43m",
    "S": "\x1b[30;45m",
    "T": "\x1b[30;45m",
}
_RESET = "\x1b[0m"
IDLE = "."


def headline(timeline: Timeline) -> str:
    """Name, shape and the two numbers that matter, in one line."""
    schedule = timeline.schedule
    peaks = timeline.peak_activations
    low, high = min(peaks), max(peaks)
    held = f"{high:g}" if low == high else f"{low:g} to {high:g}"
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.chunks} "
        f"{'chunk' if schedule.chunks == 1 else 'chunks'} each, "
        f"{schedule.micro_batches} micro-batches; makespan {timeline.makespan:g}, "
        f"bubble {100 * timeline.bubble_fraction:.1f} %, peak activations {held}"
    )


def draw_text(timeline: Timeline, *, width: int = 0, colour: bool = False) -> str:
    """A Gantt chart in characters, one line a rank.

    A pass shows its kind and micro-batch (``F3``); of two chunks the second is in small
    letters, of more each has its number (``F3.2``). Where there is no room, only the letter.

    Args:
        timeline: what to draw.
        width: columns to fit into; 0: as wide as full labels need.
        colour: ANSI colours.
    """
    spans = [span for span in timeline.spans() if span.action.kind in COMPUTE]
    shortest = min((s.end - s.start for s in spans if s.end > s.start), default=1.0)
    longest_label = max((len(_label(timeline, span)) for span in spans), default=1)
    prefix = len(f"rank {timeline.schedule.ranks - 1} ")
    columns = round((longest_label + 1) * timeline.makespan / shortest)
    if width and columns > width - prefix:
        columns = max(width - prefix, 10)
    scale = columns / timeline.makespan if timeline.makespan else 1.0
    lines = [headline(timeline)]
    for rank in range(timeline.schedule.ranks):
        mine = [span for span in spans if span.rank == rank]
        row = _row(timeline, mine, scale, columns, colour)
        lines.append(f"{f'rank {rank}':<{prefix}}{row}")
    lines.append(f"{'':<{prefix}}{_legend(timeline)}")
    return "\n".join(line.rstrip() for line in lines)


def draw_json(timeline: Timeline) -> dict[str, Any]:
    """Shape, numbers and claim, as JSON data."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "chunks": schedule.chunks,
        "micro_batches": schedule.micro_batches,
        "options": dict(schedule.options),
        "routes": [list(route) for route in schedule.stages.routes],
        **timeline.summary(),
        "claim": {
            "source": schedule.claim.source,
            "peak_activations": schedule.claim.peak_activations,
            "bubble_fraction": schedule.claim.bubble_fraction,
        },
    }


def draw_trace(timeline: Timeline, *, microseconds: float = 1000.0) -> dict[str, Any]:
    """The time line in Chrome's trace format, for chrome://tracing or Perfetto.

    One thread a rank, one for what runs beside its computation, arrows for messages, a counter
    for the activations held.

    Args:
        timeline: what to draw.
        microseconds: length of one time unit of the costs; 1e6 where they are seconds.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": timeline.schedule.name}}
    ]
    ranks = timeline.schedule.ranks
    beside = {span.rank for span in timeline.spans() if span.action.kind not in _ON_RANK}
    for rank in range(ranks):
        for thread, name in ((rank, f"rank {rank}"), (ranks + rank, f"rank {rank} beside")):
            if thread < ranks or rank in beside:
                meta = {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name"}
                events.append({**meta, "args": {"name": name}})
    for span in timeline.spans():
        action = span.action
        passes = action.kind in _ON_RANK
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": span.rank if passes else ranks + span.rank,
                "ts": span.start * microseconds,
                "dur": (span.end - span.start) * microseconds,
                "name": _label(timeline, span),
                "cat": action.kind.value,
                "args": {"stage": action.stage, "micro_batch": action.micro_batch},
            }
        )
    for number, (source, sent, target, used) in enumerate(_messages(timeline)):
        arrow = {"pid": 0, "id": number, "name": "message", "cat": "message"}
        events.append({"ph": "s", "tid": source, "ts": sent * microseconds, **arrow})
        events.append({"ph": "f", "bp": "e", "tid": target, "ts": used * microseconds, **arrow})
    for rank in range(ranks):
        for time, held in timeline.memory(rank):
            counter = {"ph": "C", "pid": 0, "ts": time * microseconds}
            name = f"activations of rank {rank}"
            events.append({**counter, "name": name, "args": {"held": held}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_ON_RANK = {*COMPUTE, ActionKind.OPT}


def _label(timeline: Timeline, span: Span) -> str:
    kind, stage, micro_batch, chunk, _ = span.action
    letter = kind.value
    if micro_batch is None:
        return letter if stage is None else f"{letter} {stage}"
    held = len(timeline.schedule.stages.held[span.rank])
    if chunk is not None and held == 2 and chunk == 1:
        letter = letter.lower()
    many = f".{chunk}" if chunk is not None and held > 2 else ""
    return f"{letter}{micro_batch}{many}"


def _row(timeline: Timeline, spans: list[Span], scale: float, columns: int, colour: bool) -> str:
    """One rank's line: idle columns are dots, each pass ends with a blank if it has room."""
    text = ""
    at = 0
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        start = max(start, at)
        size = end - start
        if size <= 0:
            continue
        text += IDLE * (start - at)
        label = _label(timeline, span)
        if len(label) > size or (len(label) == size and size > 1 and not colour):
            label = label[0]
        cell = f"{label:-<{size - 1}} " if size > 1 else label
        ansi = _ANSI.get(span.action.kind.value) if colour else None
        text += f"{ansi}{cell}{_RESET}" if ansi else cell
        at = end
    return text + IDLE * (columns - at)


def _legend(timeline: Timeline) -> str:
    names = {
        "F": "forward",
        "B": "backward",
        "I": "backward for inputs",
        "W": "for weights",
        "S": "output layer",
        "T": "its weights",
    }
    used = {span.action.kind.value for span in timeline.spans()}
    parts = [f"{letter} {name}" for letter, name in names.items() if letter in used]
    if any(len(held) == 2 for held in timeline.schedule.stages.held):
        parts.append("small letters: second chunk")
    elif timeline.schedule.chunks > 2 or len(timeline.schedule.stages.routes) > 1:
        parts.append("after the point: chunk")
    return ", ".join(parts) + f", {IDLE} idle"


def _messages(timeline: Timeline) -> Iterator[tuple[int, float, int, float]]:
    """(rank, end of the pass, rank, start of the pass that waits) of everything sent."""
    program = timeline.schedule.program
    made: dict[int, tuple[int, float]] = {}
    for rank, at in timeline.order:
        _, _, need, product, hop, _ = program.steps[rank][at]
        if need in made and made[need][0] != rank:
            source, sent = made[need]
            yield source, sent, rank, timeline.starts[rank][at]
        if product >= 0 and hop != EVERYONE:
            made[product] = rank, timeline.ends[rank][at]
