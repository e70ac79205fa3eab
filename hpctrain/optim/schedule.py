"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from hpctrain.spec.training import TrainSpec


def learning_rate(step: int, train: TrainSpec) -> float:
    """Learning rate of a step.

    Linear from (0, 0) to (warmup_steps, lr); from there

    - constant: lr;
    - cosine: min_lr + (lr − min_lr)·(1 + cos πt)/2, t from 0 at warmup_steps to 1 at the last
      step (Loshchilov and Hutter 2017, equation 5, one period);
    - linear: lr − (lr − min_lr)·t;
    - wsd: lr until decay_steps before the last step, then linear to min_lr (warm-up, stable,
      decay; Hu et al. 2024, section 4). A decay longer than what the warm-up leaves starts
      where the warm-up ends.

    Args:
        step: number of the step, 1 for the first.
        train: section ``train`` of a resolved job.
    """
    schedule = train.schedule
    warmup, last = schedule.warmup_steps, train.steps
    if step < warmup:
        return train.lr * step / warmup
    if schedule.kind == "constant":
        return train.lr
    start = warmup
    if schedule.kind == "wsd":
        assert schedule.decay_steps is not None, "resolve() fills decay_steps"
        start = max(warmup, last - schedule.decay_steps)
    t = min(max(step - start, 0) / (last - start), 1.0) if last > start else 0.0
    if schedule.kind == "cosine":
        return train.min_lr + (train.lr - train.min_lr) * 0.5 * (1.0 + math.cos(math.pi * t))
    return train.lr * (1.0 - t) + train.min_lr * t
