"""Seconds that one micro-batch spends in one block, by kind of work, and in the output layer."""

from __future__ import annotations

import math

from hpctrain.plan.collectives import Wires
from hpctrain.plan.experts import add_experts
from hpctrain.plan.inputs import Strategy, Workload
from hpctrain.plan.kernels import Device
from hpctrain.plan.seconds import LayerTime, Seconds

# Element-wise memory traffic, bytes a token and unit of width in half precision. Two norms and
# two residual additions run on the residual stream; a fused norm reads and writes once forward
# (and reads twice, writes once backward), an unfused RMSNorm in fp32 makes 36 bytes of passes.
_NORM = (8.0, 20.0)
_NORM_UNFUSED = (48.0, 73.0)
_RESIDUAL = (12.0, 12.0)
_DROPOUT = (2.0, 0.0)
_GELU = (4.0, 6.0)
_SWIGLU = (6.0, 10.0)
_ROTARY = (8.0, 8.0)
_LOSS = 26.0
"""Bytes a logit: casts, log-sum-exp and its gradient in fp32."""
_EMBEDDING = 20.0
_SUMMED = 12.0
"""Bytes a weight of the output layer and piece of a streamed sequence: its gradient's fp32 sum is
read and written, and the piece's gradient read."""


def layer_time(
    work: Workload, device: Device, wires: Wires, plan: Strategy, *, dense: bool = False
) -> LayerTime:
    """Time of one block under a strategy.

    Args:
        work: model, sequence and software.
        device, wires: rates of the platform.
        plan: the cut; only tp, cp, ep, etp, micro-batch, recompute, sequence parallelism and pieces
            count.
        dense: the block has a dense network in a model with experts.
    """
    model, values, layout = work.model, work.values, plan.layout
    tp, cp = layout.tp, layout.cp
    strides = plan.strides()
    tokens = plan.micro_batch * work.sequence / cp
    split = tp if plan.sequence_parallel else 1
    kernel = work.kernel

    forward, backward = Seconds(), Seconds()
    weights = 0.0
    width = model.heads * model.head_dim
    for inputs, outputs in ((model.hidden, model.qkv_width / tp), (width / tp, model.hidden)):
        f, i, w = device.linear(tokens, inputs, outputs)
        forward.products += f
        backward.products += i + w
        weights += w
    forward.attention, backward.attention = device.attention_core(
        kernel,
        plan.micro_batch,
        work.sequence / cp,
        work.sequence,
        model.heads / tp,
        model.head_dim,
    )

    # Element-wise work on the residual stream and inside the block.
    norm = (
        _NORM
        if work.norms_fused
        else (_NORM_UNFUSED[0] * device.unfused_norm, _NORM_UNFUSED[1] * device.unfused_norm)
    )
    rotary = _ROTARY if model.positions == 0 and model.gated else (0.0, 0.0)
    inner = _SWIGLU if model.gated else _GELU
    sparse = bool(model.experts) and not dense
    ffn = model.ffn_hidden * max(model.topk, 1) + model.shared_ffn
    if not sparse and model.experts:
        ffn = model.dense_ffn or model.ffn_hidden
    for side, seconds in enumerate((forward, backward)):
        stream = norm[side] + _RESIDUAL[side] + (_DROPOUT[side] if model.dropout else 0.0)
        moved = tokens * model.hidden * stream / split
        moved += tokens * (inner[side] * ffn + rotary[side] * model.hidden) / tp
        seconds.elementwise = device.stream(moved)

    forward.launch = values.layer_seconds / 3.0
    backward.launch = values.layer_seconds * 2.0 / 3.0

    # Feed-forward network, in pieces of the sequence where it is streamed.
    gate = 2 if model.gated else 1
    count, piece = pieces(work, plan)
    before = forward.products
    if sparse:
        weights += add_experts(work, device, wires, plan, forward, backward)
        dense_ffn = model.shared_ffn
    else:
        dense_ffn = int(ffn)
    if dense_ffn:
        for inputs, outputs in (
            (model.hidden, gate * dense_ffn / tp),
            (dense_ffn / tp, model.hidden),
        ):
            f, i, w = (count * t for t in device.linear(piece, inputs, outputs))
            forward.products += f
            backward.products += i + w
            weights += w
    network = forward.products - before

    # Tensor parallelism: two all-reduces, or their halves on both sides of the split regions.
    if tp > 1:
        one = wires.gather(2.0 * tokens * model.hidden, wires.group((tp, strides["tp"])))
        exchanged = sparse and plan.sequence_parallel and work.dispatch.kind != "slice"
        sums = 2.0 if exchanged else 4.0
        forward.tp = sums * one * (1.0 - values.tp_overlap)
        hidden = max(values.tp_overlap, values.tp_backward_overlap)
        backward.tp = sums * one * (1.0 - hidden)
        if plan.sequence_parallel:
            # inputs are gathered once more for weight gradients, beside a product
            backward.tp += 2.0 * one * 0.5 * (1.0 - hidden)

    # Context parallelism: keys and values travel the ring behind the attention of the last block;
    # heads are exchanged before and after attention.
    if cp > 1:
        near, ring = plan.exchange, cp // plan.exchange
        kv = 4.0 * tokens * model.kv_heads * model.head_dim / tp
        ring_time = 0.0
        if ring > 1:
            ring_time = wires.gather(kv * ring, wires.group((ring, strides["cp"] * near)))
        forward.cp = max(0.0, ring_time - 0.8 * forward.attention)
        backward.cp = max(0.0, 2.0 * ring_time - 0.8 * backward.attention)
        swap = head_exchange_time(work, wires, plan)
        forward.cp += swap
        backward.cp += swap

    recompute = Seconds()
    if plan.recompute in ("full", "stage"):
        recompute = forward
    elif plan.recompute == "selective" and kernel in ("torch", "fused"):
        recompute.attention = forward.attention
    elif plan.recompute == "selective":
        share = work.stack.selective_share
        recompute.products = share * forward.products
        recompute.elementwise = share * forward.elementwise
    if plan.stream is not None:
        # backward computes the network again, piece by piece
        inner_bytes = tokens * inner[0] * ffn / tp
        recompute = Seconds().plus(recompute)
        recompute.products += network
        recompute.elementwise += device.stream(inner_bytes)
        recompute.launch += (count - 1) * values.layer_seconds / 3.0
    total = forward.total + backward.total + recompute.total
    return LayerTime(forward, backward, recompute, weights, total)


def exchanged_heads(heads: float, kv_heads: float, ranks: int) -> float:
    """Heads of a token that a rank hands over before attention (queries, keys, values) and after
    it; a key-value head goes to every rank that needs it."""
    return 2.0 * heads + 2.0 * max(kv_heads, float(ranks))


def pieces(work: Workload, plan: Strategy) -> tuple[int, float]:
    """Pieces that a rank's tokens of a micro-batch are worked on in, and the tokens of one."""
    tokens = plan.micro_batch * work.sequence / plan.layout.cp
    if plan.stream is None:
        return 1, tokens
    split = plan.layout.tp if plan.sequence_parallel else 1
    at_once = min(tokens, float(plan.micro_batch * plan.stream * split))
    count = math.ceil(tokens / at_once)
    return count, tokens / count


def head_exchange_time(work: Workload, wires: Wires, plan: Strategy) -> float:
    """Seconds in which context-parallel neighbours exchange heads in a block's forward pass."""
    model, near, tp = work.model, plan.exchange, plan.layout.tp
    if near == 1:
        return 0.0
    tokens = plan.micro_batch * work.sequence / plan.layout.cp
    handed = 2.0 * tokens * exchanged_heads(model.heads / tp, model.kv_heads / tp, near)
    return wires.all_to_all(handed * model.head_dim, wires.group((near, plan.strides()["cp"])))


def head_time(work: Workload, device: Device, wires: Wires, plan: Strategy) -> float:
    """Seconds a micro-batch of the output layer and its loss, forward and backward."""
    model, layout = work.model, plan.layout
    tokens = plan.micro_batch * work.sequence / layout.cp
    vocab = model.vocab / layout.tp
    count, piece = pieces(work, plan)
    products = count * sum(device.linear(piece, model.hidden, vocab))
    if count > 1:  # gradients are made in forward, and summed over the pieces
        products += count * device.stream(_SUMMED * vocab * model.hidden)
    if work.loss_is_parallel or layout.tp == 1:
        return products + device.stream(tokens * vocab * _LOSS)
    whole = wires.gather(2.0 * tokens * model.vocab, wires.group((layout.tp, plan.strides()["tp"])))
    return products + whole + device.stream(tokens * model.vocab * _LOSS)


def embedding_time(work: Workload, device: Device, plan: Strategy) -> float:
    """Seconds a micro-batch of the embedding's look-up and its gradient."""
    tokens = plan.micro_batch * work.sequence / plan.layout.cp
    return device.stream(tokens * work.model.hidden * _EMBEDDING)
