"""Stages of unequal length: how many layers each one gets.

A pipeline runs at the pace of its slowest stage, and its first stages hold the most activations.
Embedding and output layer, slower devices, or ranks with less memory make equal cuts unequal
(Yuan 2.0, Zorse and Holmes cut by speed and by memory).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hpctrain.errors import ImpossibleError

_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Memory:
    """What layers and stages need and have, in any one unit (bytes).

    Attributes:
        state: of each layer: parameters, gradients, optimizer state.
        activation: of each layer: activations of one micro-batch.
        in_flight: of each stage: micro-batches held at once.
        limit: of each stage.
    """

    state: tuple[float, ...]
    activation: tuple[float, ...]
    in_flight: tuple[float, ...]
    limit: tuple[float, ...]


def split_layers(
    layer_times: Sequence[float],
    stages: int,
    *,
    speeds: Sequence[float] | None = None,
    memory: Memory | None = None,
) -> tuple[int, ...]:
    """Cut a model into contiguous stages such that the slowest is as fast as possible.

    Of all such cuts it takes the most even one (least sum of squared stage times).

    Args:
        layer_times: time of each layer, in order; put embedding and output layer in as
            layers of their own.
        stages: how many; each gets at least one layer.
        speeds: relative speed of the device of each stage; default: all alike.
        memory: what has to fit.

    Returns:
        Layers of each stage.

    Raises:
        ImpossibleError: fewer layers than stages, or no cut fits into memory.
        ValueError: a time or speed that is not positive, or a list of the wrong length.
    """
    cut = _Cut(tuple(layer_times), stages, tuple(speeds or (1.0,) * stages), memory)
    cut.check()
    return cut.most_even(cut.least_time())


def share_layers(layers: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Deal layers to stages in proportion to weights, at least one each (largest remainder).

    Raises:
        ImpossibleError: fewer layers than stages.
        ValueError: a weight that is not positive.
    """
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights: positive numbers, found {list(weights)}")
    spare = layers - len(weights)
    if spare < 0:
        raise ImpossibleError(f"{layers} layers are too few for {len(weights)} stages")
    exact = [layers * weight / sum(weights) for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) < layers:
        neediest = max(range(len(counts)), key=lambda s: (exact[s] - counts[s], -s))
        counts[neediest] += 1
    while sum(counts) > layers:  # because some were raised to one
        richest = max(
            (s for s in range(len(counts)) if counts[s] > 1), key=lambda s: counts[s] - exact[s]
        )
        counts[richest] -= 1
    return tuple(counts)


def stage_sums(counts: Sequence[int], layer_values: Sequence[float]) -> tuple[float, ...]:
    """Sum of a per-layer quantity over each stage: what ``Costs`` takes, one number a stage."""
    if sum(counts) != len(layer_values):
        raise ValueError(f"{sum(counts)} layers are dealt out, {len(layer_values)} have a value")
    ends = list(accumulate(counts))
    starts = [end - count for end, count in zip(ends, counts, strict=True)]
    return tuple(
        float(sum(layer_values[start:end])) for start, end in zip(starts, ends, strict=True)
    )


@dataclass(frozen=True)
class _Cut:
    times: tuple[float, ...]
    stages: int
    speeds: tuple[float, ...]
    memory: Memory | None

    def check(self) -> None:
        if len(self.speeds) != self.stages:
            raise ValueError(f"speeds: one for each of {self.stages} stages, got {self.speeds}")
        if min(self.speeds) <= 0 or min(self.times, default=1) < 0:
            raise ValueError("layer times are at least 0, speeds more than 0")
        if len(self.times) < self.stages or self.stages < 1:
            raise ImpossibleError(
                f"{len(self.times)} layers are too few for {self.stages} stages",
                hint="fewer pipeline ranks or fewer chunks a rank",
            )
        if self.memory is None:
            return
        for name, length in (
            ("state", len(self.times)),
            ("activation", len(self.times)),
            ("in_flight", self.stages),
            ("limit", self.stages),
        ):
            found = len(getattr(self.memory, name))
            if found != length:
                raise ValueError(f"memory.{name}: {length} numbers, found {found}")

    def most(self, stage: int, start: int, bound: float) -> int:
        """How many layers from ``start`` on fit into a stage in ``bound`` time and memory."""
        time = held = 0.0
        memory = self.memory
        for count, layer in enumerate(range(start, len(self.times))):
            time += self.times[layer] / self.speeds[stage]
            if memory is not None:
                held += memory.state[layer]
                held += memory.activation[layer] * memory.in_flight[stage]
                if held > memory.limit[stage] * (1 + _SLACK):
                    return count
            if time > bound * (1 + _SLACK):
                return count
        return len(self.times) - start

    def greedy(self, bound: float) -> bool:
        """Whether each stage in turn, taking all it can, gets through: then a cut exists."""
        start = 0
        for stage in range(self.stages):
            left_over = len(self.times) - start - (self.stages - stage - 1)
            count = min(self.most(stage, start, bound), left_over)
            if count < 1:
                return False
            start += count
        return start == len(self.times)

    def least_time(self) -> float:
        """Time of the slowest stage in the best cut.

        Greedy cuts give a first bound, which keeps the exact search over all cuts narrow.
        """
        low, high = 0.0, sum(self.times) / min(self.speeds)
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self.greedy(middle) else (middle, high)
        best = {0: 0.0}  # layers dealt out: time of the slowest stage so far
        for stage in range(self.stages):
            following: dict[int, float] = {}
            for start, slowest in best.items():
                time = 0.0
                for count in range(1, self.most(stage, start, high) + 1):
                    time += self.times[start + count - 1] / self.speeds[stage]
                    end = start + count
                    following[end] = min(following.get(end, math.inf), max(slowest, time))
            best = following
        if len(self.times) not in best:
            raise ImpossibleError(
                f"no cut into {self.stages} stages fits into memory",
                hint="more pipeline ranks, fewer micro-batches in flight (v-half, v-min), "
                "recomputed or offloaded activations",
            )
        return best[len(self.times)]

    def most_even(self, bound: float) -> tuple[int, ...]:
        """Of the cuts within ``bound`` the one with the least sum of squares."""
        total = len(self.times)
        # best[i]: (sum of squares, counts) of the first stages over the first i layers
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for stage in range(self.stages):
            following: dict[int, tuple[float, tuple[int, ...]]] = {}
            for start, (squares, counts) in best.items():
                time = 0.0
                for count in range(1, self.most(stage, start, bound) + 1):
                    time += self.times[start + count - 1] / self.speeds[stage]
                    found = (squares + time * time, (*counts, count))
                    known = following.get(start + count)
                    if known is None or found[0] < known[0] - _SLACK:
                        following[start + count] = found
            best = following
        return best[total][1]
