"""Published measurements as planner inputs.

A row of ``data/published_measurements.csv`` states a model, a layout and what was measured; empty
cells are not stated. This module fills them by rules that look at no measured speed, and says
what it could not model. The rules are listed in docs/planner.md.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from published_origins import Origin, origin_of

from hpctrain.errors import HpctrainError
from hpctrain.layout import DENSE_AXES, ParallelLayout
from hpctrain.plan.inputs import Dispatch, Placement, StatePlacement, Strategy, Workload
from hpctrain.plan.memory import StageMemory
from hpctrain.plan.platform import CATALOGUE, Platform, find_accelerator
from hpctrain.plan.shapes import ModelShape
from hpctrain.plan.software import STACKS, calibration
from hpctrain.schedule import names

_RECOMPUTE = {
    "0": "none", "false": "none", "no": "none", "off": "none", "1": "full", "true": "full",
    "yes": "full", "block": "full", "uniform": "full", "sac": "selective", "attention": "selective",
    "core_attn": "selective", "core attention": "selective", "partial": "selective",
}  # fmt: skip
LONG = 32768
"""Sequences from here on count as long context."""


GATED = re.compile(
    r"llama|qwen|mi[sx]tral|deepseek|gemma|\byi\b|internlm|baichuan|grok|kimi|glm|olmo|phi-?3"
    r"|falcon3|skywork|apertus",
    re.IGNORECASE,
)
PLAIN = re.compile(r"gpt|mpt|bloom|opt|nemotron|bert|megatron|falcon|starcoder", re.IGNORECASE)
UNTIED = re.compile(
    r"llama|qwen|mi[sx]tral|deepseek|grok|internlm|baichuan|nemotron|kimi", re.IGNORECASE
)


@dataclass(frozen=True)
class Row:
    """One measurement, ready to be predicted.

    Attributes:
        ident, source, model, accelerator, devices: as the row states them.
        raw: the row.
        work, plan: what the planner is asked.
        seconds: measured step, or the one that the stated throughput means; None in rows that
            ran out of memory.
        memory: bytes a device, where stated.
        kind: ``dense``, ``moe`` or ``long``.
        known: the accelerator is in the catalogue.
        filled: cells that were not stated and had to be assumed.
    """

    ident: str
    source: str
    model: str
    accelerator: str
    devices: int
    raw: dict[str, str]
    work: Workload
    plan: Strategy
    seconds: float | None
    memory: float | None
    kind: str
    known: bool
    filled: tuple[str, ...] = field(default=())

    @property
    def doubtful(self) -> bool:
        """The accelerator was guessed by whoever recorded the row: predicted, never fitted."""
        return "GPU type not" in self.raw.get("notes", "")

    @property
    def series(self) -> str:
        """The source without its per-row part, for grouping."""
        return re.sub(r"\s*(trial|row|run)\s*\d+.*$", "", self.source)


class NotModelled(Exception):
    """A row states too little, or something the planner has no model of."""


def _number(raw: dict[str, str], key: str) -> float | None:
    text = (raw.get(key) or "").strip()
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is None or (math.isfinite(value) and value >= 0) else None


def _kernel(raw: dict[str, str], origin: Origin) -> tuple[str | None, bool | None]:
    """Attention kernel and fused norms, where the notes state them."""
    found = re.search(r"kernel=([^;]*)", raw.get("notes", ""))
    if not found:
        return origin.attention, None
    text = found[1].lower()
    if "flash_attention2" in text or "flash2" in text:
        kernel: str | None = "flash2"
    elif "flash" in text:
        kernel = "flash1"
    elif "torch" in text:
        kernel = "torch"
    elif "fused" in text:
        kernel = "fused"
    else:
        kernel = origin.attention
    return kernel, "rms" in text


def _states(text: str) -> StatePlacement:
    text = text.strip().lower().removesuffix(".0")
    if "fsdp" in text or "hsdp" in text:
        placed = StatePlacement.zero(3)
        if "grad_op" in text or "zero2" in text or "zero-2" in text:
            return replace(placed, parameters=Placement.MATERIALISED)
        return placed
    stage = re.search(r"zero[- _]?(?:stage[- _]?)?([0-3])|^([0-3])$", text)
    if stage:
        return StatePlacement.zero(int(stage[1] or stage[2]))
    if re.search(r"dist\w*[- _]?opt|distributed[- _]optimizer", text):
        return StatePlacement.zero(1)
    return StatePlacement.zero(0)


def _model(raw: dict[str, str], filled: list[str]) -> ModelShape:
    def need(key: str) -> int:
        value = _number(raw, key)
        if not value:
            raise NotModelled(f"{key} is not stated")
        return int(value)

    name = f"{raw.get('model', '')}"
    layers, hidden = need("layers"), need("hidden")
    billions = _number(raw, "params_b")
    heads = _number(raw, "heads")
    if heads is None:
        filled.append("heads")
        heads = max(1, hidden // 128)
    kv = _number(raw, "kv_heads")
    if kv is None:
        filled.append("kv_heads")
        kv = heads
    experts = int(_number(raw, "experts") or 0)
    topk = int(_number(raw, "topk") or 0)
    if experts > 1 and not topk:
        filled.append("topk")
        topk = 2
    if experts <= 1:
        experts = topk = 0
    ffn = _number(raw, "ffn_hidden")
    if GATED.search(name):
        gated = True
    elif PLAIN.search(name):
        gated = False
    else:
        gated = _nearer_gated(raw, layers, hidden, int(heads), int(kv), ffn, billions)
    if ffn is None:
        filled.append("ffn_hidden")
        ffn = 4 * hidden if not gated else -(-8 * hidden // (3 * 256)) * 256
    tied = not UNTIED.search(name)
    head_dim = max(1, hidden // int(heads))
    if re.search(r"qwen3", name, re.IGNORECASE) and hidden // int(heads) < 128:
        head_dim = 128  # published width of a head in this family, not hidden / heads
    vocab = _number(raw, "vocab")
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=int(heads),
        kv_heads=int(kv),
        head_dim=head_dim,
        ffn_hidden=int(ffn),
        vocab=int(vocab or 51200),
        gated=gated,
        tied=tied,
        bias=not gated,
        layernorm=not gated,
        positions=0 if gated else int(_number(raw, "seq") or 2048),
        experts=experts,
        topk=topk,
    )
    if vocab is None:
        filled.append("vocab")
        rate, speed = _number(raw, "achieved_tflops_per_gpu"), _number(raw, "tokens_per_s_per_gpu")
        if rate and speed and not experts:
            # model FLOPs a token are the quotient; what the blocks leave over is the output layer
            sequence = int(_number(raw, "seq") or 2048)
            body = replace(shape, vocab=0).model_flops_per_token(sequence)
            rows = (rate * 1e12 / speed - body) / (6.0 * hidden)
            if 16_000 < rows < 300_000:
                shape = replace(shape, vocab=int(rows))
    return shape


def _nearer_gated(
    raw: dict[str, str],
    layers: int,
    hidden: int,
    heads: int,
    kv: int,
    ffn: float | None,
    billions: float | None,
) -> bool:
    """Whether the stated size is nearer to three feed-forward matrices than to two."""
    if ffn is None or billions is None or _number(raw, "experts"):
        return ffn is not None and ffn < 3.9 * hidden
    attention = hidden * hidden * (2 + 2 * kv / heads)
    vocab = _number(raw, "vocab") or 50000
    sizes = {m: layers * (attention + m * hidden * ffn) + vocab * hidden for m in (2, 3)}
    return abs(sizes[3] / 1e9 - billions) < abs(sizes[2] / 1e9 - billions)


def _platform(raw: dict[str, str], origin: Origin) -> Platform:
    name = raw.get("gpu", "")
    found = find_accelerator(name)
    if found is None:
        platform = replace(CATALOGUE["H100"], name=name or "unknown", family="unknown", known=False)
    else:
        platform = CATALOGUE[found]
    node = int(_number(raw, "gpus_per_node") or platform.node_devices)
    nic = origin.nic
    stated = re.search(
        r"(\d+)\s*x\s*(?:HDR|NDR|EDR|IB)?\s*(\d+)\s*G(?:b|bps)", raw.get("notes", "")
    )
    if nic is None and stated:
        nic = int(stated[1]) * int(stated[2]) / 8 * 1e9
    if node != platform.node_devices or nic is not None:
        platform = platform.in_node(node, nic)
    return platform


def parse(raw: dict[str, str]) -> Row:
    """A row as the planner's input.

    Raises:
        NotModelled: too little is stated.
    """
    filled: list[str] = []
    origin = origin_of(raw)
    devices = _number(raw, "gpus")
    if devices is None and _number(raw, "dp"):
        degrees = (_number(raw, axis) or 1.0 for axis in ("dp", "tp", "pp", "cp"))
        devices = math.prod(degrees)
    sequence = _number(raw, "seq")
    batch = _number(raw, "global_batch")
    if not devices or not sequence:
        raise NotModelled("gpus or seq is not stated")
    devices = int(devices)
    shape = _model(raw, filled)
    stack = STACKS[origin.stack]
    if stack.dropout:
        shape = replace(shape, dropout=True)
    platform = _platform(raw, origin)

    def degree(key: str) -> int:
        value = _number(raw, key)
        if value is None:
            filled.append(key)
        return max(1, int(value or 1))

    tp, pp, cp, ep = degree("tp"), degree("pp"), degree("cp"), degree("ep")
    if devices % (tp * pp * cp):
        raise NotModelled(f"tp·pp·cp = {tp * pp * cp} does not divide {devices} devices")
    dp = devices // (tp * pp * cp)
    micro = _number(raw, "micro_batch")
    if batch is None and micro is None:
        raise NotModelled("neither global_batch nor micro_batch is stated")
    if micro is None:
        filled.append("micro_batch")
        micro = max(1, int(batch or 1) // dp) if pp == 1 else 1
    if batch is None:
        filled.append("global_batch")
        batch = micro * dp * (4 * pp if pp > 1 else 1)
    schedule = raw.get("schedule", "").strip().lower()
    if schedule and schedule.split("+")[0] not in (*names(), "interleaved-1f1b"):
        filled.append("schedule")
        schedule = "interleaved-1f1b" if re.search("inter|vpp|virtual", schedule) else "1f1b"
    virtual = _number(raw, "vpp_interleave")
    if virtual is None:
        virtual = 1
        if pp > 1:
            filled.append("vpp_interleave")
            told = schedule == "interleaved-1f1b"
            if (told or not schedule) and origin.stack == "megatron-core-2024":
                virtual = max(1, shape.layers // pp)
    states = _states(raw.get("zero_stage_or_fsdp", ""))
    if not raw.get("zero_stage_or_fsdp", "").strip():
        filled.append("zero_stage_or_fsdp")
        if origin.stack in ("megatron-core-2024", "pytorch-2024"):
            states = StatePlacement.zero(1)
    sharded = states.fully_sharded
    layout = ParallelLayout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp_replicate=1 if sharded or states.optimizer is not Placement.REPLICATED else dp,
        dp_shard=dp if sharded or states.optimizer is not Placement.REPLICATED else 1,
        ep=ep,
    )
    parallel = _number(raw, "seqpar")
    if parallel is None:
        filled.append("seqpar")
        parallel = float(stack.sequence_parallel)
    recompute = raw.get("recompute", "").strip().lower()
    recompute = _RECOMPUTE.get(recompute, recompute)
    if recompute not in ("none", "selective", "full"):
        filled.append("recompute")
        recompute = "full" if stack.name.startswith("megatron-2") else "none"
    dtype = raw.get("dtype", "").strip().lower() or "bf16"
    if dtype not in ("bf16", "fp16", "fp8", "fp32"):
        dtype = "fp8" if "8" in dtype else "bf16"
    kernel, fused = _kernel(raw, origin)
    fitted = calibration(platform.family, origin.stack)
    work = Workload(
        model=shape,
        sequence=int(sequence),
        global_batch=int(batch),
        dtype=dtype,
        platform=platform,
        stack=stack,
        values=fitted.values,
        attention=kernel,
        fused_norms=fused,
        logit_bytes=origin.logit_bytes,
        parallel_loss=origin.parallel_loss,
        dispatch=Dispatch(_dispatch(raw)),
        reduce_bytes=2 if "PURE" in raw.get("notes", "") else origin.gradients,
    )
    plan = Strategy(
        layout=layout,
        micro_batch=int(micro),
        virtual=max(1, int(virtual)),
        schedule=schedule or "1f1b",
        states=states,
        recompute=recompute,
        sequence_parallel=bool(parallel) and tp > 1,
        order=DENSE_AXES,  # what Megatron and its kin number ranks by
    )
    memory = _memory(raw)
    kind = "moe" if shape.experts else "long" if sequence >= LONG else "dense"
    return Row(
        ident=raw.get("id", ""),
        source=raw.get("source", ""),
        model=raw.get("model", ""),
        accelerator=raw.get("gpu", ""),
        devices=devices,
        raw=raw,
        work=work,
        plan=plan,
        seconds=measured_seconds(raw, work, plan, devices, origin.flops),
        memory=memory,
        kind=kind,
        known=platform.known,
        filled=tuple(filled),
    )


def _dispatch(raw: dict[str, str]) -> str:
    """DeepEP and HybridEP send a token once to each node (DeepEP's documentation)."""
    text = raw.get("notes", "")
    return "hierarchical" if re.search("deep-?ep|hybrid-?ep", text, re.IGNORECASE) else "flat"


def _memory(raw: dict[str, str]) -> float | None:
    """Stated memory in bytes; monitors and frameworks print GiB and call it GB."""
    stated = _number(raw, "mem_gb_per_gpu")
    return stated * 2**30 if stated else None


def shown_memory(row: Row, stage: StageMemory) -> float:
    """What the row's way of measuring shows of a stage: allocated, reserved, or all in use."""
    notes = row.raw.get("notes", "")
    reserved = row.work.stack.reserved
    if "peak allocated" in notes:
        return stage.total - stage.context
    if "nvidia-smi" in notes:
        return stage.total * reserved
    return (stage.total - stage.context) * reserved


def measured_seconds(
    raw: dict[str, str], work: Workload, plan: Strategy, devices: int, flops: str
) -> float | None:
    """The step time a row states, or the one its throughput means."""
    step = _number(raw, "step_time_s")
    if step:
        return step
    tokens = work.global_batch * work.sequence
    speed = _number(raw, "tokens_per_s_per_gpu")
    if speed:
        return tokens / (speed * devices)
    rate = _number(raw, "achieved_tflops_per_gpu")
    share = _number(raw, "mfu_pct")
    if rate is None and share is not None:
        rate = share / 100 * work.platform.peak_flops(work.dtype) / 1e12
    if not rate:
        return None
    model = work.model
    if flops == "hardware" and plan.recompute == "full":
        each = model.hardware_flops_per_token(work.sequence)
    elif flops == "causal":
        each = model.causal_flops_per_token(work.sequence)
    else:
        each = model.model_flops_per_token(work.sequence)
    return tokens * each / (rate * 1e12 * devices)


def group_of(row: Row) -> str:
    """The (source, model) group that a row is split by."""
    return f"{row.series}|{row.model}"


def half_of(row: Row) -> int:
    """Which half a (source, model) group belongs to, dealt by its bytes."""
    return sum(group_of(row).encode()) % 2


def load(path: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """Rows of a CSV file, and (id, reason) of those that cannot be modelled.

    A row without an id, or with one that came before, is named by its line.
    """
    rows: list[Row] = []
    left: list[tuple[str, str]] = []
    seen: set[str] = set()
    with path.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream)
        for raw in reader:
            stated = {k.strip(): v.strip() for k, v in raw.items() if k and isinstance(v, str)}
            if not any(stated.values()):
                continue
            name = stated.get("id", "")
            if not name or name in seen:
                name = f"{name} line {reader.line_num}".strip()
            seen.add(name)
            stated["id"] = name
            try:
                rows.append(parse(stated))
            except (NotModelled, HpctrainError) as error:
                left.append((name, str(error)))
            except (ValueError, ArithmeticError) as error:
                left.append((name, f"numbers that make no model: {error}"))
    return rows, left
