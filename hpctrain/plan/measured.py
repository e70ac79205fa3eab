"""From short measurements to a calibration: the planner's formulas, solved for their numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.plan.kernels import Device
from hpctrain.plan.platform import Platform
from hpctrain.plan.software import Calibration, apply

SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 4096), (1024, 4096, 1024))
"""(m, n, k) of the products that are measured on a processor; devices get them larger."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured; a part that was not is empty or None.

    Attributes:
        products: (m, n, k, seconds).
        attention: sequence, heads, head size, forward seconds.
        stream: bytes moved and seconds of element-wise work.
        block_seconds: forward and backward of a block too small to compute anything.
        gathers: bytes of the result and seconds, by number of ranks of a node.
        write: bytes/s into the checkpoint area.
        dtype: type of the products.
        element_bytes: bytes of an element of it.
    """

    products: tuple[tuple[int, int, int, float], ...] = ()
    attention: tuple[int, int, int, float] | None = None
    stream: tuple[float, float] | None = None
    block_seconds: float | None = None
    gathers: Mapping[int, Sequence[tuple[int, float]]] = field(default_factory=dict)
    write: float | None = None
    dtype: str = "bf16"
    element_bytes: float = 2.0


@dataclass(frozen=True, slots=True)
class Solved:
    """Numbers of a calibration that measurements gave.

    Attributes:
        values: by name, shares of the platform's rates and seconds.
        spread: standard deviation of log(measured / predicted) over products and gathers.
    """

    values: dict[str, float]
    spread: float


def solve(found: Measurements, platform: Platform, base: Calibration, kernel: str) -> Solved:
    """The numbers that make the planner's formulas agree best with measurements.

    Args:
        found: measurements on one device, and between the ranks of one node.
        platform: rates that the shares are of.
        base: numbers for what was not measured.
        kernel: attention kernel, as in Stack.attention.
    """
    values: dict[str, float] = {}
    logs: list[float] = []
    if found.stream is not None:
        moved, seconds = found.stream
        values["memory"] = moved / seconds / platform.memory_bandwidth
    if found.products:
        gemm, traffic = _products(found, platform, base)
        values |= {"gemm": gemm, "gemm_traffic": traffic}
    current = apply(base, values)
    device = Device.of(platform, current, found.dtype, kernel)
    for m, n, k, seconds in found.products:
        logs.append(math.log(device.product(m, n, k, found.element_bytes) / seconds))
    if found.attention is not None:
        sequence, heads, head_dim, seconds = found.attention
        flops = 4.0 * heads * sequence**2 * head_dim / 2.0
        slow = min(1.0, head_dim / 128) ** base.head_exponent
        half = platform.peak_flops("fp32" if found.dtype == "fp32" else "bf16")
        values[kernel] = flops / seconds / half / slow
    if found.block_seconds is not None:
        values["layer_seconds"] = found.block_seconds
    links = [_links(ranks, timed, platform) for ranks, timed in found.gathers.items()]
    if links:
        values["link"] = statistics.median(share for share, _, _ in links)
        values["hop_seconds"] = statistics.median(hop for _, hop, _ in links)
        logs += [error for _, _, errors in links for error in errors]
    spread = math.sqrt(statistics.fmean(x * x for x in logs)) if logs else base.spread
    return Solved(values, max(spread, 0.03))


def _products(found: Measurements, platform: Platform, base: Calibration) -> tuple[float, float]:
    """Share of peak and traffic share: least squares of relative errors, both at least 0."""
    peak = platform.peak_flops(found.dtype)
    unit = Device.of(platform, apply(base, {"gemm": 1.0, "gemm_traffic": 0.0}), found.dtype, "")
    a11 = a12 = a22 = b1 = b2 = 0.0
    for m, n, k, seconds in found.products:
        compute = unit.product(m, n, k, found.element_bytes) / seconds
        moved = found.element_bytes * (m * n + m * k + n * k)
        traffic = moved / platform.memory_bandwidth / seconds
        a11 += compute * compute
        a12 += compute * traffic
        a22 += traffic * traffic
        b1 += compute
        b2 += traffic
    det = a11 * a22 - a12 * a12
    inverse, share = b1 / a11, 0.0
    if det > 1e-12 * a11 * a22:
        both = ((b1 * a22 - b2 * a12) / det, (b2 * a11 - b1 * a12) / det)
        if both[0] > 0 and both[1] > 0:
            inverse, share = both
    assert peak > 0
    return 1.0 / inverse, share


def _links(
    ranks: int, timed: Sequence[tuple[int, float]], platform: Platform
) -> tuple[float, float, list[float]]:
    """Share of the links' bandwidth, seconds a hop, and errors, from gathers of several sizes."""
    moved = [size * (ranks - 1) / ranks for size, _ in timed]
    seconds = [t for _, t in timed]
    weights = [1.0 / (t * t) for t in seconds]
    total = sum(weights)
    x = sum(w * m for w, m in zip(weights, moved, strict=True)) / total
    y = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    slope_top = sum(w * (m - x) * (t - y) for w, m, t in zip(weights, moved, seconds, strict=True))
    slope_bottom = sum(w * (m - x) ** 2 for w, m in zip(weights, moved, strict=True))
    slope = slope_top / slope_bottom if slope_bottom else seconds[-1] / moved[-1]
    slope = max(slope, 1e-15)
    fixed = max(y - slope * x, 1e-9)
    share = 1.0 / slope / platform.domain_bandwidth(ranks)
    errors = [math.log((fixed + slope * m) / t) for m, t in zip(moved, seconds, strict=True)]
    return share, fixed / (ranks - 1), errors
