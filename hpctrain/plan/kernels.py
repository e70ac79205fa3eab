"""Seconds of the work of one device: matrix products, attention, element-wise passes.

Matrix products follow a roofline that adds instead of taking the larger of its two sides, with
the last wave of tiles on the device's units left partly empty; attention and element-wise work
are counted in FLOPs or bytes and divided by what the calibration says is reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.plan.platform import Platform
from hpctrain.plan.software import Calibration

# Bytes of memory traffic a score of an unfused attention core, forward and backward, beyond the
# products themselves: with a fused scale-mask-softmax kernel (softmax 4, dropout 5; backward
# 5 and 6), and with one kernel an operation (mask, casts to fp32 and back, softmax, dropout).
_FUSED_SOFTMAX = (9.0, 11.0)
_TORCH_SOFTMAX = (22.0, 20.0)
_TILE = 128
_TILES_A_UNIT = 2


@dataclass(frozen=True, slots=True)
class Device:
    """Rates of one accelerator under one calibration.

    Attributes:
        gemm: FLOP/s of large matrix products in the job's type.
        half: the same in half precision (attention stays in it under fp8).
        attention: FLOP/s of the attention core.
        memory: bytes/s of memory.
        elementwise: bytes/s that element-wise work reaches.
        slots: tiles that run at once.
    """

    gemm: float
    half: float
    attention: float
    memory: float
    elementwise: float
    slots: int
    traffic: float
    wave: float
    softmax: float
    misaligned: float
    unfused_norm: float
    head_exponent: float

    @classmethod
    def of(cls, platform: Platform, values: Calibration, dtype: str, kernel: str) -> Device:
        half = platform.peak_flops("fp32" if dtype == "fp32" else "bf16")
        rate = {"flash1": values.flash1, "flash2": values.flash2, "cudnn": values.cudnn}
        if dtype == "fp8" and "fp8" in platform.peak:
            gemm = platform.peak["fp8"] * values.gemm_fp8
        else:
            gemm = half * values.gemm
        return cls(
            gemm=gemm,
            half=half * values.gemm,
            attention=half * rate.get(kernel, values.gemm),
            memory=platform.memory_bandwidth,
            elementwise=platform.memory_bandwidth * values.memory,
            slots=platform.units * _TILES_A_UNIT,
            traffic=values.gemm_traffic,
            wave=values.wave,
            softmax=values.softmax,
            misaligned=values.misaligned,
            unfused_norm=values.unfused_norm,
            head_exponent=values.head_exponent,
        )

    def product(self, m: float, n: float, k: float, bytes_each: float = 2.0) -> float:
        """Seconds of an (m, k) by (k, n) product."""
        tiles = math.ceil(m / _TILE) * math.ceil(n / _TILE) / self.slots
        lost = 1.0 + self.wave * (math.ceil(tiles) / tiles - 1.0)
        moved = bytes_each * (m * n + m * k + n * k)
        return 2.0 * m * n * k / self.gemm * lost + self.traffic * moved / self.memory

    def linear(self, tokens: float, inputs: float, outputs: float) -> tuple[float, float, float]:
        """Seconds of a linear layer: forward, gradient of its inputs, gradient of its weights."""
        return (
            self.product(tokens, outputs, inputs),
            self.product(tokens, inputs, outputs),
            self.product(inputs, outputs, tokens),
        )

    def attention_core(
        self, kernel: str, samples: float, queries: float, keys: float, heads: float, head_dim: int
    ) -> tuple[float, float]:
        """Forward and backward seconds of softmax(QKᵀ)V.

        Args:
            kernel: as in Stack.attention.
            samples: sequences.
            queries, keys: rows of the score matrix on this device, and columns.
            heads: heads on this device.
            head_dim: width of a head.
        """
        scores = samples * queries * keys * heads
        flops = 4.0 * scores * head_dim
        if kernel in ("flash1", "flash2", "cudnn"):
            slow = min(1.0, head_dim / 128) ** self.head_exponent
            forward = flops / 2.0 / (self.attention * slow)
            return forward, 2.5 * forward
        penalty = 1.0 if head_dim % 8 == 0 else self.misaligned
        moved = 2.0 * (queries * keys + (queries + keys) * head_dim) * samples * heads
        products = flops / (self.half * 0.75) * penalty + 2.0 * moved / self.elementwise
        passes = _FUSED_SOFTMAX if kernel == "fused" else _TORCH_SOFTMAX
        forward = products + self.softmax * passes[0] * scores / self.elementwise
        backward = 2.0 * products + self.softmax * passes[1] * scores / self.elementwise
        return forward, backward

    def stream(self, moved: float) -> float:
        """Seconds to move ``moved`` bytes through memory by element-wise kernels."""
        return moved / self.elementwise
