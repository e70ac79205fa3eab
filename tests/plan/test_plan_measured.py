"""Measurements to a calibration: numbers that made them are found again."""

from __future__ import annotations

import pytest

from hpctrain.plan.collectives import Wires
from hpctrain.plan.kernels import Device
from hpctrain.plan.measured import Measurements, solve
from hpctrain.plan.platform import CATALOGUE
from hpctrain.plan.software import Calibration, apply

TRUE = {
    "gemm": 0.72,
    "gemm_traffic": 0.9,
    "memory": 0.81,
    "flash2": 0.44,
    "link": 0.66,
    "hop_seconds": 5e-6,
    "layer_seconds": 8e-4,
}


def test_numbers_are_found_again():
    platform = CATALOGUE["H100"]
    values = apply(Calibration(), TRUE)
    device = Device.of(platform, values, "bf16", "flash2")
    wires = Wires.of(platform, values)
    shapes = [(4096, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 1024), (512, 4096, 4096)]
    group = wires.group((8, 1))
    found = Measurements(
        products=tuple((m, n, k, device.product(m, n, k)) for m, n, k in shapes),
        attention=(8192, 16, 128, device.attention_core("flash2", 1, 8192, 8192, 16, 128)[0]),
        stream=(1e9, device.stream(1e9)),
        block_seconds=8e-4,
        gathers={8: [(size, wires.gather(size, group)) for size in (1e5, 1e7, 1e9)]},
        dtype="bf16",
    )
    solved = solve(found, platform, Calibration(), "flash2")
    for name, value in TRUE.items():
        assert solved.values[name] == pytest.approx(value, rel=0.02), name
    assert solved.spread == 0.03, "no worse than the formulas themselves"


def test_noise_shows_in_the_spread():
    platform = CATALOGUE["H100"]
    device = Device.of(platform, Calibration(), "bf16", "flash2")
    times = [device.product(n, n, n) for n in (2048, 4096, 8192, 16384)]
    shaken = [t * f for t, f in zip(times, (1.3, 0.8, 1.2, 0.75), strict=True)]
    found = Measurements(
        products=tuple((n, n, n, t) for n, t in zip((2048, 4096, 8192, 16384), shaken, strict=True))
    )
    assert solve(found, platform, Calibration(), "flash2").spread > 0.15


def test_what_was_not_measured_is_left_alone():
    solved = solve(Measurements(block_seconds=1e-3), CATALOGUE["H100"], Calibration(), "flash2")
    assert solved.values == {"layer_seconds": 1e-3}
    assert solved.spread == Calibration().spread
