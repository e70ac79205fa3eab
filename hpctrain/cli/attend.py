"""Staying with a run: live progress, what Ctrl-C means, and the summary at the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from hpctrain.cli import output, text
from hpctrain.cli.view import RunView, look
from hpctrain.rundir import RunDir

_SLICE_SECONDS = 0.1
_PLAIN_SECONDS = 5.0


class Display(Protocol):
    """Shows a view whenever it is given one."""

    def show(self, view: RunView) -> None: ...


def attend(
    run: RunDir,
    *,
    over: Callable[[RunView], bool],
    interrupt: Callable[[int], bool],
    every: float,
) -> RunView:
    """Show a run until it is over or ``interrupt`` says to let it go.

    Args:
        run: to be shown.
        over: whether its launcher or job has ended; given the newest view.
        interrupt: called for the first, second … Ctrl-C or SIGTERM; False lets the run go.
        every: seconds between two looks.
    """
    handled, view, looked = 0, look(run), time.monotonic()
    with _presses() as presses, _display() as display:
        display.show(view)
        while not over(view):
            while handled < len(presses):
                handled += 1
                if not interrupt(handled):
                    return view
            time.sleep(_SLICE_SECONDS)
            if time.monotonic() - looked >= every:
                view, looked = look(run), time.monotonic()
                display.show(view)
        view = look(run)
        display.show(view)
    return view


@contextmanager
def _presses() -> Iterator[list[int]]:
    """Signals that have come, in order; none of them ends this process meanwhile."""
    presses: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        presses.append(number)

    before: dict[int, Any] = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield presses
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _display() -> Iterator[Display]:
    """A progress bar on a terminal, plain lines elsewhere; both on stderr."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _PlainLines()
        return
    with _bar() as bar:
        yield bar


class _PlainLines:
    """A line when the state changes, at the first step, every few seconds, and at the end."""

    def __init__(self) -> None:
        self.status = ""
        self.step = -1
        self.said = -1e9

    def show(self, view: RunView) -> None:
        why = view.reason.partition("\n")[0]
        words = f"{view.status}: {why}" if why else view.status
        if words != self.status:
            self.status = words
            if not view.is_final:
                output.note(words)
        due = time.monotonic() - self.said >= _PLAIN_SECONDS or view.is_final
        if view.step != self.step and view.begun and due:
            self.step, self.said = view.step, time.monotonic()
            output.note(text.progress(view))


@contextmanager
def _bar() -> Iterator[Display]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.fields[status]}"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None, status="starting", words="")

        class _Bar:
            def show(self, view: RunView) -> None:
                progress.update(
                    task,
                    total=view.total_steps if view.begun else None,
                    completed=view.step,
                    status=view.status,
                    words=text.progress(view) if view.begun else view.reason,
                )

        yield _Bar()


def summarise(view: RunView) -> None:
    """What ran, how it ended, where everything lies and what to do next, on stdout."""
    from hpctrain.cli.summary import summarise as read
    from hpctrain.units import format_count, format_duration

    summary = read(view.run)
    output.line()
    rows = [("run", view.run.id), ("status", output.styled(view.status))]
    if view.reason:
        rows.append(("why", view.reason))
    took = f" in {format_duration(time.time() - view.launch.submitted)}" if view.launch else ""
    rows.append(("steps", f"{view.step} of {view.total_steps}{took}"))
    if summary.steps:
        first, last = summary.steps[0], summary.steps[-1]
        if summary.losses or not summary.spec.emulated:  # what is simulated has none
            rows.append(("loss", f"{text.loss(first.loss)} -> {text.loss(last.loss)}"))
        rows.append(("speed", f"{text.speed(summary.tokens_per_second)} (median)"))
    what = summary.spec.model.module or f"{format_count(summary.parameters or 0)} parameters"
    ranks = view.launch.world_size if view.launch else 0
    rows.append(("model", f"{what} on {ranks} rank{'s' if ranks != 1 else ''}"))
    if view.durable_step >= 0:
        folder = summary.spec.checkpoint.path or view.run.checkpoints
        rows.append(("checkpoint", f"step {view.durable_step} in {folder}"))
    else:
        rows.append(("checkpoint", "none"))
    rows.append(("files", str(view.run.root)))
    output.pairs(rows)
    output.line("next:")
    for command in text.next_commands(view):
        output.line(f"  {command}")
