"""The small model that ranks of an emulated machine really compute, in the place of the large one.

It has the same layers, the same cut and the same messages in the same order, each of few bytes;
the time of computing and of links is that of the job's own model.
"""

from __future__ import annotations

import math
from typing import Any

from hpctrain.spec.job import JobSpec
from hpctrain.spec.resolve import layout_of
from hpctrain.spec.transformer import TransformerDims


def shadow(spec: JobSpec) -> JobSpec:
    """A resolved job with a model just wide enough for its cut.

    Its embedding has the share of all parameters, routed experts left out, that the job's own has.

    Args:
        spec: resolved, of a transformer.
    """
    assert spec.model.module is None, "the emulated machine knows no model of a user's own"
    layout = layout_of(spec)
    tensor, context = layout.tp, layout.cp
    # Every rank that shards parameters gets whole rows of them: padding would be sent as well.
    shards = layout.dp_shard * context if spec.parallel.fsdp else 1
    heads = tensor * spec.sequence_split().inner
    head = 2 if heads >= 4 else 4  # an even size, for rotary positions
    head *= shards // math.gcd(shards, head * heads // tensor)
    hidden = heads * head
    length = 2 * context * tensor if context > 1 else tensor
    length *= math.ceil(4 / length)
    values: dict[str, Any] = {
        "preset": None,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn_hidden": 2 * hidden,
        "max_positions": length,
        "dropout": 0.0,
    }
    dims, rows = spec.model.transformer(), tensor * layout.pp * shards
    values["vocab_size"] = rows
    if spec.model.moe.experts:
        values |= _experts(spec, values, tensor * shards, layout.etp * shards)
    small = spec.model.model_copy(update=values).transformer()
    share = dims.vocab_size * dims.hidden / _beside_experts(dims)
    values["vocab_size"] = rows * max(1, round(share * _beside_experts(small) / hidden / rows))
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update=values),
            "data": spec.data.model_copy(update={"sequence_length": length}),
            "train": spec.train.model_copy(update={"precision": "fp32"}),
        }
    )


def _experts(spec: JobSpec, values: dict[str, Any], dense: int, routed: int) -> dict[str, Any]:
    """Inner widths, multiples of ``dense`` and ``routed``, of networks that have the share of a
    block's parameters that they have in the job's own model."""
    model, hidden = spec.model, values["hidden"]
    large = model.transformer()
    least = model.moe.model_copy(update={"hidden": routed})
    small = model.model_copy(update={**values, "moe": least}).transformer()
    beside = _beside_experts(small)
    matrices = small.routed_parameters / (model.moe.experts * hidden * routed)
    wanted = large.routed_parameters / _beside_experts(large) * beside
    inner = routed * max(1, round(wanted / small.routed_parameters))
    found: dict[str, Any] = {"moe": model.moe.model_copy(update={"hidden": inner})}
    if large.dense_layers:
        more = large.dense_layer_parameters / _beside_experts(large) * beside
        more -= small.dense_layer_parameters
        wider = small.ffn_hidden + more / (matrices * hidden)
        found["ffn_hidden"] = dense * max(1, round(wider / dense))
    return found


def _beside_experts(dims: TransformerDims) -> int:
    """Parameters of a block without its routed experts."""
    return dims.layer_parameters - dims.routed_parameters
