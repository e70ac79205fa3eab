"""Each number of a plan with its formula, what went into it, and where that comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.plan.inputs import Placement
from hpctrain.plan.memory import activations, state_bytes
from hpctrain.plan.plan import NODE_MTBF, STORAGE, STORAGE_LIMIT, Plan
from hpctrain.plan.text import flops
from hpctrain.units import format_bytes, format_count, format_seconds

_SPEC, _FILE, _SHEET = "job file", "machine file", "vendor's data sheet"


@dataclass(frozen=True, slots=True)
class Explained:
    """One number.

    Attributes:
        name: what it is.
        value: with its unit.
        formula: in words and symbols.
        inputs: symbol, value and source of each.
    """

    name: str
    value: str
    formula: str
    inputs: tuple[tuple[str, str, str], ...]


def explain(plan: Plan) -> list[Explained]:
    """Every number that ``render`` shows."""
    return [*_model(plan), *_memory(plan), *_time(plan), *_run(plan)]


def _calibration(plan: Plan) -> str:
    fitted = plan.fitted
    if fitted.source == "published":
        return f"fitted to {fitted.rows} published measurements"
    return fitted.source


def _model(plan: Plan) -> Iterator[Explained]:
    model, work = plan.work.model, plan.work
    sizes = (
        ("layers l", str(model.layers), _SPEC),
        ("width h", str(model.hidden), _SPEC),
        (
            "heads a, kv heads, head size d",
            f"{model.heads}, {model.kv_heads}, {model.head_dim}",
            _SPEC,
        ),
        ("inner width f", str(model.ffn_hidden), _SPEC),
        ("vocabulary V", str(model.vocab), _SPEC),
        ("sequence s", str(work.sequence), _SPEC),
    )
    yield Explained(
        "parameters",
        format_count(model.parameters),
        f"l·(h·(a + 2·kv)·d + a·d·h + {model.ffn_matrices}·h·f + norms) + embedding + "
        f"{'nothing (tied)' if model.tied else 'V·h'} for the output layer",
        sizes,
    )
    yield Explained(
        "model FLOPs a token",
        f"{model.model_flops_per_token(work.sequence):.4g}",
        "6 a weight of every product + 12·l·a·d·s, attention in full (Narayanan et al. 2021, "
        "section 3.2, without recomputation)",
        sizes,
    )


def _memory(plan: Plan) -> Iterator[Explained]:
    work, strategy, stage = plan.work, plan.strategy, plan.memory[plan.fullest]
    layout = strategy.layout
    shard = layout.dp_shard * layout.cp
    where = f"stage {plan.fullest} of {layout.pp}"
    states = strategy.states
    for name, value, placement, size in (
        ("parameters", stage.parameters, states.parameters, work.weight_bytes),
        ("gradients", stage.gradients, states.gradients, work.state_gradient_bytes),
        ("optimizer states", stage.optimizer, states.optimizer, work.optimizer_bytes),
    ):
        share = "" if placement is Placement.REPLICATED else f" / {shard} ranks that share them"
        yield Explained(
            f"memory of {name}",
            format_bytes(value),
            f"parameters of {where} · {size:g} bytes{share}",
            (("placement", placement.value, _SPEC), ("bytes", f"{size:g}", plan.work.stack.title)),
        )
    yield Explained(
        "memory of activations",
        format_bytes(stage.activations),
        "micro-batches held · blocks of the stage · bytes a block "
        "(Korthikanti et al. 2022, equations 1 to 4, for gated networks and grouped heads)",
        (
            ("micro-batch b", str(strategy.micro_batch), _SPEC),
            ("recompute", strategy.recompute, _SPEC),
            ("sequence parallel", str(strategy.sequence_parallel).lower(), _SPEC),
            ("attention kernel", work.kernel, plan.work.stack.title),
        ),
    )
    kept = activations(work, strategy)
    state = state_bytes(work, strategy)
    rest = {
        "logits": (
            "b·s·V/t · bytes a logit at its fullest moment, on the last stage",
            (("bytes a logit", f"{work.kept_logit_bytes:g}", work.stack.title),),
        ),
        "gathered": (
            "block at work · bytes of gathered copies and their gradients, all blocks · bytes of "
            "copies that stay, embedding and output layer",
            (
                ("of the block at work", f"{state.unit:g} bytes a parameter", states.parameters),
                ("of every block", f"{state.block:g} bytes a parameter", states.parameters),
                ("of the ends", f"{state.ends:g} bytes a parameter", states.parameters),
            ),
        ),
        "buffers": (
            "a received and a sent residual stream of b·s·h",
            (("bytes", format_bytes(kept.buffers), _SPEC),),
        ),
        "context": (
            "driver, communicators and workspaces of a process",
            (("assumed", format_bytes(work.context_bytes), work.stack.title),),
        ),
    }
    for name, (formula, used) in rest.items():
        value = getattr(stage, name)
        if value:
            yield Explained(f"memory of {name}", format_bytes(value), formula, used)
    yield Explained(
        "memory that can be filled",
        format_bytes(plan.limit),
        "95 % of a device's memory: the rest goes to fragments of the allocator",
        (("memory", format_bytes(work.platform.memory_bytes), _FILE),),
    )


def _time(plan: Plan) -> Iterator[Explained]:
    work, step, values = plan.work, plan.step, plan.work.values
    platform, layout = work.platform, plan.strategy.layout
    fitted = _calibration(plan)
    peak = platform.peak_flops(work.dtype)
    inputs = {
        "matrix products": (
            "Σ over products: FLOPs / (peak · reached) · lost last wave + bytes moved / bandwidth",
            (
                (f"peak {work.dtype}", flops(peak), _SHEET),
                ("reached", f"{values.gemm:.1%}", fitted),
                ("traffic that adds", f"{values.gemm_traffic:.2f}", fitted),
                ("memory bandwidth", f"{platform.memory_bandwidth / 1e12:.2f} TB/s", _FILE),
            ),
        ),
        "attention": (
            "4·b·s²·a·d / t FLOPs, half of them for causal kernels, backward 2.5 times forward",
            (
                ("kernel", work.kernel, work.stack.title),
                ("reached", f"{getattr(values, work.kernel, values.gemm):.1%} of peak", fitted),
            ),
        ),
        "element-wise": (
            "bytes of norms, residuals, activation functions / (bandwidth · reached)",
            (("reached", f"{values.memory:.1%}", fitted),),
        ),
        "launches": (
            "blocks · micro-batches · time lost a block",
            (("time lost", format_seconds(values.layer_seconds), fitted),),
        ),
        "tensor parallel": (
            "all-gathers and reduce-scatters of b·s·h, (t-1)/t of each over the links, if exposed",
            (
                ("links", f"{platform.domain_bandwidth(layout.tp) / 1e9:.0f} GB/s one way", _FILE),
                ("reached", f"{values.link:.1%}", fitted),
                ("hidden in backward", f"{values.tp_backward_overlap:.0%}", fitted),
            ),
        ),
        "sharded state": (
            "gathers of a block's parameters and scatters of its gradients, not hidden",
            (("can hide", f"{values.fsdp_overlap:.0%}", fitted),),
        ),
        "gradient reduction": (
            "gradients over the data-parallel ranks, less what hides behind one micro-batch"
            + (", and updated parameters after it" if work.stack.serial_ends else ""),
            (
                ("network", f"{platform.nic_bandwidth / 1e9:.1f} GB/s a device", _FILE),
                ("reached", f"{values.network:.1%}", fitted),
                ("bytes an element", str(work.gradient_bytes), work.stack.title),
            ),
        ),
        "pipeline bubble": (
            "sum of the other stages' time, over the chunks a rank where they are interleaved",
            (
                ("stages", str(layout.pp), _SPEC),
                ("micro-batches", str(step.micro_batches), _SPEC),
                ("schedule", plan.strategy.schedule, _SPEC),
            ),
        ),
        "pipeline sends": (
            "2·b·s·h bytes a micro-batch and direction over the link between stages",
            (("hidden", f"{values.pp_overlap:.0%}", fitted),),
        ),
        "optimizer": (
            "30 bytes a parameter that a rank updates / (bandwidth · reached)",
            (("reached", f"{values.memory:.1%}", fitted),),
        ),
        "recompute": (
            "forward passes that backward does again",
            (("policy", plan.strategy.recompute, _SPEC),),
        ),
        "context parallel": (
            "keys and values round a ring of c ranks, (c-1)/c of them over the links, less four "
            "fifths of the attention that they hide behind; twice that backward",
            (
                ("ranks c", str(layout.cp), _SPEC),
                ("reached", f"{values.link:.1%} of links, {values.network:.1%} of cards", fitted),
            ),
        ),
        "expert parallel": (
            "four all-to-alls of the routed tokens a block and micro-batch, if exposed",
            (
                ("experts a token", str(work.model.topk), _SPEC),
                ("ranks", str(layout.ep), _SPEC),
                ("hidden", f"{values.expert_overlap:.0%}", fitted),
            ),
        ),
        "other": (
            "what of a step belongs to no block",
            (("fixed", format_seconds(values.step_seconds), fitted),),
        ),
        "output layer": (
            "three products of b·s by h by V/t and the loss's passes over the logits",
            (("vocabulary", str(work.model.vocab), _SPEC),),
        ),
    }
    for name, value in sorted(step.split.items(), key=lambda item: -item[1]):
        if value > 0 and name in inputs:
            formula, used = inputs[name]
            yield Explained(f"time: {name}", f"{format_seconds(value)} a step", formula, used)
    low, high = plan.interval
    yield Explained(
        "step",
        f"{format_seconds(step.seconds)} ({format_seconds(low)} to {format_seconds(high)})",
        "slowest stage · micro-batches + bubble + what is not hidden; nine in ten within "
        "exp(±1.645·spread)",
        (("spread", f"{values.spread:.1%}", fitted),),
    )
    tokens = f"{work.global_batch} · {work.sequence}"
    yield Explained(
        "speed",
        f"{format_count(plan.tokens_per_second)} tokens/s",
        "tokens of a step / its seconds",
        (("tokens of a step", tokens, _SPEC),),
    )
    yield Explained(
        "MFU",
        f"{plan.utilisation:.1%}",
        "tokens/s · model FLOPs a token / (devices · peak) (Chowdhery et al. 2022)",
        (
            ("devices", str(plan.devices), _SPEC),
            (f"peak {work.dtype}", flops(peak), _SHEET),
        ),
    )


def _run(plan: Plan) -> Iterator[Explained]:
    run, spec = plan.run, plan.spec
    yield Explained(
        "run",
        f"{run.hours:.1f} hours, {format_count(run.node_hours)} node-hours",
        "steps · seconds of a step, times the nodes",
        (("steps", str(spec.train.steps), _SPEC), ("nodes", str(spec.nodes), _SPEC)),
    )
    measured = plan.machine.measured
    node = measured.write_bandwidth if measured is not None else None
    yield Explained(
        "checkpoint",
        f"{format_bytes(run.checkpoint_bytes)} in {format_seconds(run.checkpoint_seconds)}",
        "12 bytes a parameter / min(nodes · rate of a node, rate of the file system)",
        (
            (
                "rate of a node",
                f"{(node or STORAGE) / 1e9:.3g} GB/s",
                "measured" if node else "assumed",
            ),
            ("rate of the file system", f"{STORAGE_LIMIT / 1e9:g} GB/s", "assumed"),
        ),
    )
    yield Explained(
        "host memory of a node for checkpoints",
        format_bytes(run.staging_bytes),
        "checkpoints in flight · size of one / nodes",
        (("checkpoints in flight", str(spec.checkpoint.buffers), _SPEC),),
    )
    if run.mtbf == NODE_MTBF / spec.nodes:
        rate: tuple[tuple[str, str, str], ...] = (
            (
                "time between failures of a node",
                f"{NODE_MTBF / 86400:g} days",
                "Grattafiori et al. 2024, section 3.3.4",
            ),
            ("nodes", str(spec.nodes), _SPEC),
        )
    else:
        rate = (("time between failures of the job", format_seconds(run.mtbf), _SPEC),)
    yield Explained(
        "time between checkpoints",
        f"{format_seconds(run.interval_seconds)}, {run.interval_steps} steps",
        "sqrt(2 · write time · time between failures of the job) (Young 1974; Daly 2006)",
        rate,
    )


def render(found: list[Explained]) -> str:
    """Text of ``explain``."""
    lines = []
    for one in found:
        lines.append(f"{one.name}: {one.value}")
        lines.append(f"  {one.formula}")
        lines += [f"    {name} = {value}  [{source}]" for name, value, source in one.inputs]
    return "\n".join(lines)
