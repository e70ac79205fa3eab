"""Seconds of one block, by kind of work."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Seconds:
    """Time by kind. ``launch`` is what a device idles between kernels."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.products
            + self.attention
            + self.elementwise
            + self.launch
            + self.tp
            + self.cp
            + self.ep
        )

    @property
    def communication(self) -> float:
        return self.tp + self.cp + self.ep

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        """Field by field, ``self + times · other``."""
        return Seconds(
            **{f.name: getattr(self, f.name) + times * getattr(other, f.name) for f in fields(self)}
        )


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One block and one micro-batch: forward, backward, and forward again where recomputed."""

    forward: Seconds
    backward: Seconds
    recompute: Seconds
    weights: float = 0.0
    """Part of the backward pass that only weight gradients need."""
    total: float = 0.0
    """All of it."""
