"""Dropout whose mask depends on the sample and never on where it is computed.

The mask of an element is a pure function of (seed, step, number of the sample, site,
position in the sequence, channel). How samples are spread over ranks and
micro-batches, which pipeline stage holds a layer, and whether an activation is recomputed
makes no difference, so a run with dropout can be compared bit for bit between layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.model.rng import bits, stream_key

_LEVELS = 1 << 16


def dropout_keys(seed: int, step: int, samples: Tensor) -> Tensor:
    """One key a sample of a micro-batch.

    Args:
        seed: of the run.
        step: number of the optimizer step.
        samples: (B,) int64, a number for each sample that tells it apart in its step and does
            not depend on the layout, such as its place in the global batch.

    Returns:
        (B,) int64 on the device of ``samples``.
    """
    return bits(stream_key("dropout", seed, step), samples)


class Dropout(nn.Module):
    """Sets elements to zero with probability ``p`` and scales the others to keep the mean.

    16 random bits an element: ``p`` is rounded to a multiple of 2^-16, and the scale is that
    of the rounded value.

    Args:
        p: probability, 0 <= p < 1.
        site: name of this place in the model, of its own; two sites share no mask.
    """

    def __init__(self, p: float, site: str) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability {p}: at least 0 and below 1 belongs here")
        self.p = p
        self.site = site
        self._dropped = min(round(p * _LEVELS), _LEVELS - 1)
        self._key = stream_key("site", site)

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site!r}"

    def forward(self, x: Tensor, keys: Tensor | None, positions: Tensor | None = None) -> Tensor:
        """Drop out in training, the identity in evaluation and for p = 0.

        Args:
            x: (B, …), floating.
            keys: (B,) int64 of :func:`dropout_keys`.
            positions: (S,) or (B, S) int64 where ``x`` is (B, S, …): the place of each element
                of dimension 1 in its whole sequence. Without, dimension 1 is whole.

        Raises:
            ValueError: ``keys`` is missing in training.
        """
        if not self.training or self._dropped == 0:
            return x
        if keys is None:
            raise ValueError(
                f"dropout at {self.site!r} needs the keys of its samples: model(tokens, keys)"
            )
        keep = self.keep_mask(x.shape, keys, positions)
        return torch.where(keep, x * (_LEVELS / (_LEVELS - self._dropped)), 0.0)

    def keep_mask(self, shape: torch.Size, keys: Tensor, positions: Tensor | None = None) -> Tensor:
        """True where an element stays; of ``shape`` (B, …)."""
        row = bits(self._key, keys)
        outer = 1
        if positions is not None:
            row = bits(row.unsqueeze(1), positions)  # (B, S)
            outer = 2
        width = shape[outer:].numel()
        # Each 64-bit number serves four neighbouring elements.
        blocks = torch.arange(-(-width // 4), device=keys.device)
        lanes = bits(row.unsqueeze(-1), blocks).view(torch.int16)
        keep = lanes >= self._dropped - _LEVELS // 2
        return keep[..., :width].reshape(shape)
