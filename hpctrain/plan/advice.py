"""What a plan should make people stop at, and what they can do about each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.layout import divisors
from hpctrain.plan.inputs import Strategy, Workload
from hpctrain.plan.memory import StageMemory
from hpctrain.plan.steptime import StepTime

BUBBLE = 0.20
IMBALANCE = 0.10
TIGHT = 0.92
EXPOSED = 0.20
LAUNCHES = 0.15
TILE = 64


@dataclass(frozen=True, slots=True)
class Warning:
    """Attributes: what is wrong, with its number, and what would help."""

    text: str
    remedy: str


def warnings(
    work: Workload,
    plan: Strategy,
    step: StepTime,
    memory: tuple[StageMemory, ...],
    limit: float,
) -> list[Warning]:
    """Everything worth a warning, the costliest kinds first."""
    return [
        *_memory(memory, limit),
        *_pipeline(work, plan, step),
        *_communication(work, plan, step),
        *_shapes(work, plan),
        *_sources(work),
    ]


def _memory(memory: tuple[StageMemory, ...], limit: float) -> Iterator[Warning]:
    fullest = max(stage.total for stage in memory)
    if limit * TIGHT < fullest <= limit:
        yield Warning(
            f"memory is {fullest / limit:.0%} of what can be filled: fragments may end the run",
            "a smaller micro-batch, recomputation, or more sharding leaves room",
        )


def _pipeline(work: Workload, plan: Strategy, step: StepTime) -> Iterator[Warning]:
    layout = plan.layout
    share = step.bubble / step.seconds
    if share > BUBBLE:
        ways = [f"more than {step.micro_batches} micro-batches (a smaller micro-batch"]
        ways[0] += " or a larger global batch)"
        if plan.virtual == 1 and work.model.layers // layout.pp > 1:
            ways.append("an interleaved schedule")
        ways.append(f"fewer than {layout.pp} stages")
        yield Warning(f"the pipeline idles {share:.0%} of the step", ", ".join(ways))
    if layout.pp > 1:
        middle = sorted(step.stages)[len(step.stages) // 2]
        slowest = max(step.stages)
        if slowest > middle * (1 + IMBALANCE):
            at = step.stages.index(slowest)
            why = (
                "it holds the output layer"
                if at == len(step.stages) - 1
                else (f"it holds {step.layers[at]} blocks")
            )
            yield Warning(
                f"stage {at} takes {slowest / middle - 1:.0%} longer than the others: {why}",
                "deal it fewer blocks, or spread the output layer over the pipeline",
            )


def _communication(work: Workload, plan: Strategy, step: StepTime) -> Iterator[Warning]:
    layout, platform = plan.layout, work.platform
    domain = platform.domain_devices
    if layout.tp > domain:
        inside = max(d for d in divisors(layout.tp) if d <= domain)
        yield Warning(
            f"tensor parallel {layout.tp} crosses nodes of {domain} devices",
            f"tensor {inside}, and the rest as pipeline or data parallel",
        )
    if layout.cp > 1 and layout.tp * layout.cp > domain:
        yield Warning(
            f"the context-parallel ring of {layout.cp} crosses nodes",
            f"context {max(1, domain // layout.tp)}, or tensor parallel in its place",
        )
    names = {
        "tensor parallel": "less tensor parallelism, or sequence parallelism",
        "gradient reduction": "a larger global batch (more micro-batches a step)",
        "sharded state": "a larger micro-batch, shard: node, or sharding: zero2",
        "expert parallel": "fewer expert-parallel ranks outside a node",
        "context parallel": "longer samples a rank, or fewer context-parallel ranks",
    }
    for name, remedy in names.items():
        share = step.split[name] / step.seconds
        if share > EXPOSED:
            yield Warning(f"{name} communication takes {share:.0%} of the step", remedy)
    share = step.split["launches"] / step.seconds
    if share > LAUNCHES:
        yield Warning(
            f"devices wait for launches {share:.0%} of the step: the pieces are small",
            "a larger micro-batch, or less tensor parallelism",
        )


def _shapes(work: Workload, plan: Strategy) -> Iterator[Warning]:
    model, tp = work.model, plan.layout.tp
    if model.vocab % (tp * TILE):
        step = tp * TILE
        yield Warning(
            f"vocabulary {model.vocab} is no multiple of {step} (tensor {tp} × {TILE})",
            f"pad it to {-(-model.vocab // step) * step}",
        )
    if model.head_dim % 8:
        good = [h for h in divisors(model.hidden) if (model.hidden // h) % 8 == 0]
        near = min(good, key=lambda h: abs(h - model.heads), default=model.heads)
        yield Warning(
            f"heads of {model.head_dim} are no multiple of 8: unfused attention leaves the matrix "
            "units",
            f"{near} heads of {model.hidden // near}",
        )
    if model.heads % tp or model.ffn_hidden % tp:
        yield Warning(
            f"{model.heads} heads and an inner width of {model.ffn_hidden} do not divide evenly "
            f"over tensor {tp}: the fullest rank sets the pace",
            f"tensor {max(d for d in divisors(model.heads) if d <= tp)}",
        )


def _sources(work: Workload) -> Iterator[Warning]:
    if not work.platform.known:
        yield Warning(
            f"nothing is published of {work.platform.name}: rates are guesses",
            "measure them with `hpctrain calibrate` on one node",
        )
