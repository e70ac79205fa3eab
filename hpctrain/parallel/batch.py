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
    """

    batch: Any
    keys: Tensor
