"""One run's table: what ``hpctrain report RUN`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpctrain.cli import output
from hpctrain.units import format_bytes, format_count, format_duration, format_seconds

if TYPE_CHECKING:
    from hpctrain.cli.summary import Summary
    from hpctrain.cli.view import RunView
    from hpctrain.rundir import RunDir


def show(run: RunDir, as_json: bool) -> None:
    """Print the table of a run.

    Speed is the median over all steps but the first five after each start.
    """
    from hpctrain.cli.summary import summarise
    from hpctrain.cli.view import look

    view, summary = look(run), summarise(run)
    if as_json:
        output.emit_json(
            {"run": run.id, "path": str(run.root), "status": view.status, "reason": view.reason}
            | summary.to_dict()
        )
        return
    output.pairs(_rows(view, summary))
    if len(summary.attempts) > 1:
        output.line()
        _attempts(view, summary)


def _rows(view: RunView, summary: Summary) -> list[tuple[str, str]]:
    from hpctrain.cli import text

    rows = [("run", view.run.id), ("status", output.styled(view.status))]
    if view.reason:
        rows.append(("why", view.reason))
    if summary.parameters is not None:
        rows.append(("model", f"{format_count(summary.parameters)} parameters"))
    else:
        rows.append(("model", str(summary.spec.model.module)))
    if summary.attempts:
        spec = summary.spec
        rows.append(
            ("ranks", f"{summary.attempts[-1].world_size} on {spec.nodes} node"
             f"{'s' if spec.nodes > 1 else ''} of {spec.machine}")
        )  # fmt: skip
    if not summary.steps:
        return [*rows, ("steps", f"none of {summary.spec.train.steps} yet")]
    first, last = summary.steps[0], summary.steps[-1]
    rows.append(("steps", f"{last.step} of {summary.spec.train.steps}"))
    rows.append(("tokens", format_count(last.tokens)))
    lowest = f", lowest {text.loss(min(summary.losses))}" if summary.losses else ""
    if summary.losses or not summary.spec.emulated:  # what is simulated has none
        told = f"{text.loss(first.loss)} at step {first.step}, {text.loss(last.loss)} at step "
        rows.append(("loss", f"{told}{last.step}{lowest}"))
    rows.append(("speed", f"{text.speed(summary.tokens_per_second)}, median of "
                 f"{len(summary.steady)} steps"))  # fmt: skip
    median, slow = summary.step_seconds(0.5), summary.step_seconds(0.95)
    if median is not None and slow is not None:
        rows.append(("step", f"{format_seconds(median)} median, {format_seconds(slow)} at 95 %"))
    if (flops := summary.model_flops_per_second) is not None:
        rows.append(("model FLOP/s", f"{flops / 1e12:.3g} TFLOP/s over all ranks"))
    if last.experts:
        rows.append(("experts", experts_words(last.experts) + f" at step {last.step}"))
    rows.append(("time", _split(summary.time_split)))
    rows.append(("memory", f"{format_bytes(max(r.memory_bytes for r in summary.steps))} peak, "
                 "rank 0"))  # fmt: skip
    rows.append(("checkpoints", _checkpoints(view, summary)))
    rows.append(("files", str(view.run.root)))
    return rows


def experts_words(experts: Mapping[str, float]) -> str:
    """How evenly experts were wanted, and what was dropped."""
    words = f"the busiest wanted {experts['busiest']:.2f} times the mean"
    if experts["idle"]:
        words += f", {100 * experts['idle']:.0f} % of a layer's wanted by nobody"
    if experts["dropped"]:
        words += f", {100 * experts['dropped']:.1f} % of choices dropped"
    return words


def _split(split: dict[str, float]) -> str:
    total = sum(split.values()) or 1.0
    ordered = sorted(split.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name} {format_duration(seconds)} ({100 * seconds / total:.0f} %)"
        for name, seconds in ordered
        if seconds > 0
    )


def _checkpoints(view: RunView, summary: Summary) -> str:
    if not summary.checkpoints:
        return "none"
    _, size, seconds = summary.checkpoints[-1]
    written = f"{len(summary.checkpoints)} written, last durable step {view.durable_step}"
    return f"{written}, {format_bytes(size)} in {format_duration(seconds)}"


def _attempts(view: RunView, summary: Summary) -> None:
    from hpctrain.cli import text

    rows = []
    for attempt in summary.attempts:
        newest = attempt is summary.attempts[-1]
        done = "-" if attempt.first_step is None else f"{attempt.first_step}-{attempt.last_step}"
        rows.append(
            (
                str(attempt.number),
                attempt.launcher + (f" {attempt.job_id}" if attempt.job_id else ""),
                text.moment(attempt.submitted),
                str(attempt.world_size),
                done,
                view.status if newest else attempt.ended or "failed",
            )
        )
    output.table(("attempt", "launcher", "started", "ranks", "steps", "ended"), rows, right=(0, 3))
