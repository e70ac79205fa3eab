"""A plan in plain text: whether it fits, how fast it is, where memory and time go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpctrain.plan.plan import Alternative, Plan
from hpctrain.plan.unequal import Mixed
from hpctrain.units import format_bytes, format_count, format_duration, format_seconds

_BAR = 40
_SHOWN = 0.003
_GAIN = 1.02


def render(plan: Plan) -> str:
    """The whole report."""
    blocks = [
        "\n".join(head(plan)),
        "\n".join(_axes(plan)),
        "\n".join(_memory(plan)),
        "\n".join(_time(plan)),
        "\n".join(_better(plan)),
        "\n".join(_warnings(plan)),
    ]
    return "\n\n".join(block for block in blocks if block)


def head(plan: Plan) -> Iterator[str]:
    """The answer in a few lines."""
    spec, run = plan.spec, plan.run
    model = spec.model.preset or "model"
    low, high = plan.interval
    yield (
        f"{model} of {format_count(plan.work.model.parameters)} parameters on {spec.nodes} "
        f"node{'s' if spec.nodes > 1 else ''} of {plan.machine.name}, {plan.devices} ranks: "
        f"{plan.strategy.layout.describe()}"
    )
    rows = []
    spare = plan.limit - plan.used
    where = f" (stage {plan.fullest})" if plan.strategy.layout.pp > 1 else ""
    if spare >= 0:
        rows.append(
            (
                "fits",
                f"{format_bytes(plan.used)} of {format_bytes(plan.limit)} a rank{where}, "
                f"{format_bytes(spare)} to spare",
            )
        )
    else:
        rows.append(
            (
                "does not fit",
                f"{format_bytes(plan.used)} a rank{where}, {format_bytes(plan.limit)} can be "
                f"filled: {format_bytes(-spare)} too much",
            )
        )
    rows.append(
        (
            "step",
            f"{format_seconds(plan.step.seconds)}, nine in ten between {format_seconds(low)} and "
            f"{format_seconds(high)}"
            f" ({plan.step.micro_batches} micro-batch"
            f"{'es' if plan.step.micro_batches > 1 else ''})",
        )
    )
    rate = plan.tokens_per_second
    rows.append(
        (
            "speed",
            f"{format_count(rate)} tokens/s, {format_count(rate / plan.devices)} a rank; "
            f"{flops(plan.model_flops)} a rank, MFU {plan.utilisation:.1%}"
            + (
                f" ({flops(plan.hardware_flops)} with recomputation)"
                if plan.hardware_flops != plan.model_flops
                else ""
            ),
        )
    )
    rows.append(
        (
            "run",
            f"{spec.train.steps} steps in {format_duration(run.hours * 3600)}, "
            f"{format_count(run.node_hours)} node-hours",
        )
    )
    rows.append(
        (
            "checkpoint",
            f"{format_bytes(run.checkpoint_bytes)} in {format_duration(run.checkpoint_seconds)} "
            f"({_storage(plan)} file system), best every {format_duration(run.interval_seconds)} "
            f"({run.interval_steps} steps); {format_bytes(run.staging_bytes)} of a node's memory",
        )
    )
    rows.append(("numbers", sources(plan)))
    if plan.timeline is not None:
        idle = plan.timeline.bubble_fraction
        rows.append(
            (
                "schedule",
                f"its table of actions takes {format_seconds(plan.timeline.makespan)}, "
                f"idle {idle:.1%}",
            )
        )
    if plan.placement.gain > _GAIN:
        order = ", ".join(axis for axis in plan.placement.grid.order)
        rows.append(
            (
                "placement",
                f"axes ordered {order} cost {plan.placement.gain:.2f} times less traffic time",
            )
        )
    yield from _pairs(rows)


def _storage(plan: Plan) -> str:
    measured = plan.machine.measured
    return "measured" if measured is not None and measured.write_bandwidth else "assumed"


def sources(plan: Plan) -> str:
    """Where the numbers come from, in words."""
    fitted = plan.fitted
    if fitted.source == "measured":
        return f"measured on {plan.machine.name}"
    spread = f"{plan.work.values.spread:.0%} standard deviation"
    if fitted.source == "published":
        return f"fitted to {fitted.rows} published measurements, {spread}"
    return f"assumed from published measurements of relatives, {spread}; measure with calibrate"


def _axes(plan: Plan) -> Iterator[str]:
    rows = [("axis", "ranks", "groups", "link", "GB/s", "nodes", "exposed")]
    for link in plan.links:
        if link.axis == "edp" and not plan.work.model.experts:
            continue
        exposed = plan.exposed.get(link.axis)
        rows.append(
            (
                link.axis,
                str(link.size),
                str(link.groups),
                link.kind.value,
                "-" if link.bandwidth is None else f"{link.bandwidth / 1e9:.0f}",
                str(link.nodes),
                "-" if exposed is None else f"{format_seconds(exposed)} a step",
            )
        )
    if len(rows) > 1:
        yield from _columns(rows)


def _memory(plan: Plan) -> Iterator[str]:
    stage = plan.memory[plan.fullest]
    name = f"stage {plan.fullest}, the fullest" if len(plan.memory) > 1 else "a rank"
    yield f"memory of {name}"
    yield from bars(stage.parts(), stage.total, format_bytes, plan.limit)


def _time(plan: Plan) -> Iterator[str]:
    yield "time of a step"
    yield from bars(plan.step.split, plan.step.seconds, format_seconds)


def _better(plan: Plan) -> Iterator[str]:
    if plan.found is None:
        return
    if not plan.alternatives:
        yield f"no better layout among {plan.found.scored} that fit"
        return
    yield f"better, of {plan.found.scored} layouts that fit"
    for alternative in plan.alternatives:
        candidate = alternative.candidate
        keys = " ".join(f"{k}={_value(v)}" for k, v in changed(plan, alternative).items())
        yield (
            f"  {format_seconds(candidate.seconds)} a step, {alternative.gain:.2f} times as fast, "
            f"{format_bytes(candidate.memory)} a rank: {alternative.why}"
        )
        yield f"    {keys}"


def changed(plan: Plan, alternative: Alternative) -> dict[str, object]:
    """Settings of an alternative that differ from the job's."""
    from hpctrain.plan.plan import settings

    mine = settings(plan.strategy, plan.work)
    return {k: v for k, v in alternative.settings.items() if mine.get(k) != v}


def _warnings(plan: Plan) -> Iterator[str]:
    if plan.warnings:
        yield "warnings"
    for warning in plan.warnings:
        yield f"  {warning.text}"
        yield f"    remedy: {warning.remedy}"


def compare(first: Plan, second: Plan, names: tuple[str, str]) -> str:
    """Two plans side by side."""
    rows: list[tuple[str, ...]] = [("", *names)]

    def add(name: str, a: object, b: object) -> None:
        rows.append((name, str(a), str(b)))

    plans = (first, second)
    add("layout", *(p.strategy.layout.describe() for p in plans))
    add("ranks", *(p.devices for p in plans))
    add("fits", *("yes" if p.fits else "no" for p in plans))
    add("memory", *(format_bytes(p.used) for p in plans))
    add("step", *(format_seconds(p.step.seconds) for p in plans))
    add("tokens/s", *(format_count(p.tokens_per_second) for p in plans))
    add("MFU", *(f"{p.utilisation:.1%}" for p in plans))
    add("hours", *(f"{p.run.hours:.1f}" for p in plans))
    add("node-hours", *(format_count(p.run.node_hours) for p in plans))
    for name in first.step.split:
        a, b = first.step.split[name], second.step.split[name]
        if max(a / first.step.seconds, b / second.step.seconds) > _SHOWN:
            add(name, format_seconds(a), format_seconds(b))
    return "\n".join(_columns(rows))


def render_mixed(mixed: Mixed) -> str:
    """Shares of several kinds of devices."""
    rate = mixed.shares[0].part.work
    tokens = rate.global_batch * rate.sequence / mixed.seconds
    ways = {
        "data": "every device holds the whole model, faster ones take more micro-batches",
        "pipeline": "stages on one kind of device each, faster ones with more blocks",
    }
    rows: list[tuple[str, ...]] = [
        ("machine", "ranks", "micro-batches", "state", "stages", "blocks", "busy", "memory")
    ]
    for share in mixed.shares:
        blocks = "-" if not share.layers else "+".join(str(n) for n in share.layers)
        rows.append(
            (
                share.part.name,
                str(share.part.devices),
                str(share.micro_batches),
                f"{share.state:.2%}",
                str(share.stages) if share.stages else "-",
                blocks,
                format_seconds(share.seconds),
                format_bytes(share.memory),
            )
        )
    gain = "" if mixed.gain is None else f", {mixed.gain:.2f} times as fast as equal shares"
    return "\n".join(
        [
            f"{format_seconds(mixed.seconds)} a step, {format_count(tokens)} tokens/s{gain}",
            f"{ways[mixed.way]}; micro-batch {mixed.micro_batch}, tensor {mixed.tensor}",
            "",
            *_columns(rows),
        ]
    )


# ---- formats -------------------------------------------------------------------------------


def flops(rate: float) -> str:
    """``158 TFLOP/s``."""
    if rate >= 1e12:
        return f"{rate / 1e12:.0f} TFLOP/s"
    return f"{rate / 1e9:.3g} GFLOP/s"


def bars(
    parts: Mapping[str, float], whole: float, show: object, limit: float | None = None
) -> Iterator[str]:
    """One line a part that counts, longest first, with its share as a bar."""
    assert callable(show)
    scale = max(whole, limit or 0.0) or 1.0
    width = max((len(name) for name in parts), default=0)
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        if value < _SHOWN * whole:
            continue
        yield f"  {name:<{width}}  {show(value):>9}  {'#' * max(1, round(_BAR * value / scale))}"
    if limit is not None:
        yield f"  {'all of it':<{width}}  {show(whole):>9}  {whole / limit:.0%} of {show(limit)}"
    else:
        yield f"  {'all of it':<{width}}  {show(whole):>9}"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pairs(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        yield f"{name:<{width}}  {value}"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
