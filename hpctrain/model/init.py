"""Initial weights as a pure function of (seed, name of the parameter).

Every rank can draw any part of any parameter alone, and every layout starts from the same
numbers. Names are those of the whole model, whatever stage or shard holds the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpctrain.model.rng import normal, stream_key
from hpctrain.model.transformer import Transformer
from hpctrain.spec.transformer import TransformerDims

Window = Sequence[slice]
"""A rectangular part of a tensor: ``slice(start, stop)`` a dimension."""
LocalPart = Callable[[Tensor], tuple[Tensor, Window | None, Sequence[int]]]
"""Parameter -> (tensor this rank holds, which part of the whole it is, shape of the whole)."""


def draw(
    name: str,
    shape: Sequence[int],
    dims: TransformerDims,
    seed: int,
    window: Window | None = None,
) -> Tensor:
    """Initial values of a parameter of :class:`Transformer`, or of a part of it.

    Matrices are normal with mean 0 and standard deviation ``init_std``; the projections into
    the residual stream (``attention.output`` and every ``down``) have init_std / √(2·layers)
    (Radford et al. 2019, section 2.3). Norm gains are 1, biases 0.

    Args:
        name: in the whole model, for example ``layers.3.ffn.down.weight``.
        shape: of the whole parameter.
        dims: of the model.
        seed: of the run.
        window: the part wanted; all of it without.

    Returns:
        float32 on CPU; a part equals the same part of the whole, bit for bit.
    """
    sizes = [part.stop - part.start for part in window] if window is not None else list(shape)
    module, kind = name.rsplit(".", 1)
    if kind == "bias":
        return torch.zeros(sizes)
    if module.endswith("norm"):
        return torch.ones(sizes)
    std = dims.init_std
    if module.endswith(("attention.output", ".down")):
        std /= math.sqrt(2 * dims.layers)
    return normal(stream_key("init", seed, name), shape, std, window)


@torch.no_grad()
def init_parameters(model: Transformer, seed: int, local: LocalPart | None = None) -> None:
    """Fill every parameter of a whole model or of a stage, in place; buffers become 0.

    Args:
        model: its parameters have memory (``to_empty`` after building on the meta device).
        seed: of the run.
        local: for parameters that are sharded over ranks: what this rank holds.
    """
    for name, parameter in model.named_parameters():
        name = model.logical_names.get(name, name)
        target, window, shape = local(parameter) if local else (parameter, None, parameter.shape)
        target.copy_(draw(name, shape, model.dims, seed, window))
    for buffer in model.buffers():
        buffer.zero_()
