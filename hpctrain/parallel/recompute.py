"""Activations that are computed again in backward instead of being kept (Chen et al. 2016).

Our dropout needs no care here: its mask is a function of the sample, not of a generator. A
user's own model gets its generators put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.parallel.data import blocks_of

Recompute = Literal["none", "block", "full"]


def recompute(module: nn.Module, kind: Recompute, *, own: bool = False) -> None:
    """Make a model or a stage keep less, in place; names and parameters stay as they are.

    Args:
        module: before it is sharded.
        kind: ``block`` keeps the input of each block, ``full`` that of the module.
        own: the user's: it may draw from torch's generators.
    """
    targets = {"none": [], "block": list(blocks_of(module)), "full": [module]}[kind]
    for target in targets:
        target.forward = _again(target.forward, own)


def _again(forward: Callable[..., Tensor], generators: bool) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=generators, **kwargs
        )

    return run
