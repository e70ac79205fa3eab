"""The learning rate by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpctrain.optim.schedule import learning_rate
from hpctrain.spec.training import TrainSpec


def train(kind: str, *, steps: int = 110, lr: float = 1.0, **more: Any) -> TrainSpec:
    keys = {key: more.pop(key) for key in ("warmup_steps", "decay_steps") if key in more}
    schedule = {"kind": kind, "warmup_steps": 10} | keys
    return TrainSpec.model_validate(
        {"steps": steps, "global_batch": 1, "lr": lr, "schedule": schedule, **more}
    )


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_warm_up_is_a_line_from_zero(kind: str) -> None:
    spec = train(kind, lr=3e-4, decay_steps=20)
    found = [learning_rate(step, spec) for step in (1, 2, 5, 10)]
    assert found == pytest.approx([3e-5, 6e-5, 1.5e-4, 3e-4], rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "more", "points"),
    [
        ("constant", {}, {11: 1, 60: 1, 110: 1}),
        # t = (step − 10) / 100; cos π/3 = 1/2, cos π/2 = 0, cos 2π/3 = −1/2, cos π = −1
        ("cosine", {}, {35: (1 + math.sqrt(0.5)) / 2, 60: 0.5, 110: 0}),
        ("cosine", {"min_lr": 0.1}, {60: 0.55, 110: 0.1, 500: 0.1}),
        ("cosine", {"warmup_steps": 0, "steps": 3}, {1: 0.75, 2: 0.25, 3: 0}),
        ("linear", {}, {11: 0.99, 60: 0.5, 110: 0}),
        ("linear", {"min_lr": 0.2}, {60: 0.6, 110: 0.2, 111: 0.2}),
        ("wsd", {"decay_steps": 20}, {11: 1, 90: 1, 91: 0.95, 100: 0.5, 110: 0}),
        ("wsd", {"decay_steps": 20, "min_lr": 0.5}, {90: 1, 100: 0.75, 110: 0.5}),
        ("wsd", {"decay_steps": 100}, {10: 1, 60: 0.5, 110: 0}),
    ],
)
def test_by_hand(kind: str, more: dict[str, Any], points: dict[int, float]) -> None:
    spec = train(kind, **more)
    found = {step: learning_rate(step, spec) for step in points}
    assert found == pytest.approx(points, abs=1e-12)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear"])
def test_warm_up_of_all_steps_ends_at_the_peak(kind: str) -> None:
    assert learning_rate(10, train(kind, steps=10)) == 1.0


def test_a_decay_that_the_warm_up_leaves_no_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="10 warmup_steps and 5 decay_steps are more than all 10"):
        train("wsd", steps=10, decay_steps=5)


def test_cosine_against_torch() -> None:
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=0.1)
    spec = train("cosine", steps=100, warmup_steps=0, min_lr=0.1)
    for step in range(1, 101):
        optimizer.step()
        scheduler.step()
        assert learning_rate(step, spec) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
