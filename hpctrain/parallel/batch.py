"""MicroBatch: what one forward pass on a rank works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward pass on this rank.

    Attributes:
        batch: ``(tokens, targets)``, each (samples, sequence) int64, or what the user's data
            set collates to; on the rank's device.
        keys: numbers of the samples in the order of the whole run, (samples,) int64.
        positions: (S,) int64, places of the tokens in their sequences where this rank holds a
            part of them; None where it holds them whole.
        starts: (samples, whole sequence) int64, place of the first token of each token's
            document; None where a sequence is one document.
        weight: of its mean loss in that of all ranks: tokens held over an even share.
        degree: ranks that share these sequences, where that differs from one to the next.
    """

    batch: Any
    keys: Tensor
    positions: Tensor | None = None
    starts: Tensor | None = None
    weight: float = 1.0
    degree: int | None = None
