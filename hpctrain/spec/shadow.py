"""The small model that ranks of an emulated machine really compute, in the place of the large one.

It has the same layers, the same cut and the same messages in the same order, each of few bytes;
the time of computing and of links is that of the job's own model.
"""

from __future__ import annotations

from typing import Any

from hpctrain.spec.job import JobSpec


def shadow(spec: JobSpec) -> JobSpec:
    """A resolved job with a model just wide enough for its cut.

    Args:
        spec: resolved, of a transformer.
    """
    assert spec.model.module is None, "the emulated machine knows no model of a user's own"
    tensor = spec.parallel.tensor
    head = 2 if tensor >= 4 else 4  # an even size, for rotary positions
    heads = tensor
    hidden = heads * head
    length = max(tensor, 4) if tensor == 1 else tensor * max(1, 4 // tensor)
    values: dict[str, Any] = {
        "preset": None,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn_hidden": 2 * hidden,
        "vocab_size": 8 * tensor * spec.parallel.pipeline,
        "max_positions": length,
        "dropout": 0.0,
    }
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update=values),
            "data": spec.data.model_copy(update={"sequence_length": length}),
            "train": spec.train.model_copy(update={"precision": "fp32"}),
        }
    )
