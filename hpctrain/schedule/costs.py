"""What an action costs: seconds of a rank, and a share of an activation.

Scalars are for **one p-th of the model** and one micro-batch, that is for a stage of plain
1F1B; a method with v chunks a rank pays 1/v of it for each chunk. So one set of costs
compares all methods on the same model. A tuple with one entry a stage is taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from hpctrain.schedule.stages import StageMap

PerStage = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Times in any one unit (seconds, or 1 a pass) and activation sizes.

    Attributes:
        forward, input_grad, weight_grad: time of F, I and W.
        backward: time of B; None: the sum of I and W.
        transfer: time from the end of a pass to the arrival of its result on another rank.
            Transfers run beside computation; those of one directed link follow one another.
            A matrix ``transfer[source][target]`` gives every link its own.
        optimizer: time of OPT on a rank.
        gather, scatter, reduce: time of the collectives of one stage of 1F1B (1/v a chunk).
        offload, reload: time to copy the activations of one stage of 1F1B out, and back.
        vocabulary_forward, vocabulary_weight_grad: S and T of one rank's vocabulary slice.
        embedding, embedding_grad: E and D of one rank's vocabulary slice.
        collective: time of SHARE, COMBINE and STATS.
        activation: activations kept by a stage for a micro-batch, in units of those of one
            p-th of the model.
        weight_grad_share: part of them that W still needs after I has run. 1, the default, is
            what published peak counts assume and what is safe.
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    backward: PerStage | None = None
    transfer: float | tuple[tuple[float, ...], ...] = 0.0
    optimizer: float = 0.0
    gather: float = 0.0
    scatter: float = 0.0
    reduce: float = 0.0
    offload: float = 0.0
    reload: float = 0.0
    vocabulary_forward: float = 0.5
    vocabulary_weight_grad: float = 0.5
    embedding: float = 0.0
    embedding_grad: float = 0.0
    collective: float = 0.0
    activation: PerStage = 1.0
    weight_grad_share: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            for number in _flatten(getattr(self, field.name)):
                if not (math.isfinite(number) and number >= 0):
                    raise ValueError(f"{field.name}: a finite number >= 0, found {number!r}")
        if self.weight_grad_share > 1:
            raise ValueError(f"weight_grad_share: at most 1, found {self.weight_grad_share!r}")

    def durations(self, stages: StageMap) -> list[list[float]]:
        """Times by code (F B I W S T E D) and stage.

        Raises:
            ValueError: a tuple whose length is not the number of stages.
        """
        full = self.backward
        input_grad = _spread(self.input_grad, stages, "input_grad")
        weight_grad = _spread(self.weight_grad, stages, "weight_grad")
        both = [i + w for i, w in zip(input_grad, weight_grad, strict=True)]
        count = stages.stages
        return [
            _spread(self.forward, stages, "forward"),
            both if full is None else _spread(full, stages, "backward"),
            input_grad,
            weight_grad,
            [self.vocabulary_forward] * count,
            [self.vocabulary_weight_grad] * count,
            [self.embedding] * count,
            [self.embedding_grad] * count,
        ]

    def activations(self, stages: StageMap) -> list[float]:
        """Activation units of every stage."""
        return _spread(self.activation, stages, "activation")

    def links(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Transfer time of each (source, target) pair of ranks.

        Raises:
            ValueError: a matrix without an entry for one of the pairs.
        """
        table = self.transfer
        if isinstance(table, int | float):
            return [float(table)] * len(pairs)
        try:
            return [float(table[source][target]) for source, target in pairs]
        except IndexError:
            need = 1 + max(max(pair) for pair in pairs)
            raise ValueError(f"transfer: a matrix of at least {need} x {need} numbers") from None


def _spread(value: PerStage, stages: StageMap, name: str) -> list[float]:
    count = stages.stages
    if isinstance(value, int | float):
        return [value * stages.ranks / count] * count
    if len(value) != count:
        raise ValueError(f"{name}: one number for each of {count} stages, found {len(value)}")
    return list(value)


def _flatten(value: object) -> list[float]:
    if value is None:
        return []
    if isinstance(value, tuple):
        return [number for item in value for number in _flatten(item)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [float(value)]
    raise ValueError(f"costs are numbers, or tuples of them; found {value!r}")


UNIT = Costs()
"""F = I = W = 1, B = 2, nothing else costs: what closed forms are stated for."""
