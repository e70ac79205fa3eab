"""How far data-parallel ranks are apart before their gradients are averaged.

A rank whose memory, processor or data goes wrong silently trains on: its gradient is averaged in
and the loss of the job shows nothing. Three numbers of each rank's own gradient do: how far the
ranks' losses lie apart, how far their gradient norms do, and how far each gradient points away
from the mean one. Healthy ranks differ as their samples do, and alike; one that does not is named.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.records import Record

if TYPE_CHECKING:
    from hpctrain.parallel.batch import MicroBatch
    from hpctrain.runtime.context import RankContext

_FALSE = 0.02
"""Chance that a rank of a healthy job stands out in a look, by one of the metrics."""
_FLOOR = 0.05
"""Deviations below this part of the mean are never worth a word."""
_PARTS = 200


@dataclass(frozen=True, slots=True)
class Dispersion(Record):
    """One look at a step.

    Attributes:
        step: whose samples were used.
        losses: each data-parallel rank's own mean loss.
        norms: L2 norms of their own gradients.
        cosines: of the angle between each gradient and the mean of all.
        loss_spread: standard deviation of the losses over their mean.
        norm_spread: the same of the norms.
        direction: mean of the cosines; 1 is agreement.
        outliers: data-parallel ranks that stand out, with why.
    """

    step: int
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    cosines: tuple[float, ...]
    loss_spread: float
    norm_spread: float
    direction: float
    outliers: dict[int, str]


def measure(
    step: int, losses: Sequence[float], norms: Sequence[float], cosines: Sequence[float]
) -> Dispersion:
    """The metrics of one value a rank; pure."""
    outliers: dict[int, str] = {}
    for what, values in (
        ("loss", losses), ("gradient norm", norms), ("gradient direction (cosine)", cosines),
    ):  # fmt: skip
        for rank, value, usual in _outliers(values):
            outliers.setdefault(rank, f"{what} {value:.4g}, {usual:.4g} is usual")
    return Dispersion(
        step,
        tuple(losses),
        tuple(norms),
        tuple(cosines),
        _spread(losses),
        _spread(norms),
        statistics.fmean(cosines),
        outliers,
    )


def _spread(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    variance = statistics.fmean((value - mean) ** 2 for value in values)
    return math.sqrt(variance) / abs(mean) if mean else 0.0


def _outliers(values: Sequence[float]) -> list[tuple[int, float, float]]:
    """(rank, value, mean of the others) of those that stand out; of fewer than four nobody does.

    Each value is held against the mean and deviation of the others (externally studentised
    residual; Cook and Weisberg 1982, section 2.2), which follows Student's t where all are alike.
    """
    if len(values) < 4:
        return []
    found = []
    for rank, value in enumerate(values):
        others = [v for index, v in enumerate(values) if index != rank and math.isfinite(v)]
        if len(others) < 3:
            continue
        usual, count = statistics.fmean(others), len(others)
        if not math.isfinite(value):
            found.append((rank, value, usual))
            continue
        away = abs(value - usual)
        if away <= _FLOOR * abs(usual):
            continue
        scatter = statistics.stdev(others) * math.sqrt(1 + 1 / count)
        if not scatter or chance(away / scatter, count - 1) < _FALSE / len(values):
            found.append((rank, value, usual))
    return found


def chance(t: float, freedom: int) -> float:
    """Probability that Student's t is further from 0 than ``t``, by the midpoint rule.

    With t = sqrt(n) tan(a) the density is that of cos(a)^(n - 1).
    """
    start = math.atan(t / math.sqrt(freedom))
    width = (math.pi / 2 - start) / _PARTS
    total = sum(math.cos(start + (i + 0.5) * width) ** (freedom - 1) for i in range(_PARTS))
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    return 2 * math.exp(scale) * total * width


def look(
    stepper: Any, context: RankContext, step: int, micro: MicroBatch, group: dist.ProcessGroup
) -> Dispersion:
    """Take one micro-batch forward and backward without averaging, and compare; collective.

    Nothing of it is left: gradients are dropped, generators put back, so that the steps of a run
    are the same with and without it.

    Args:
        stepper: of the run; its model is replicated (DDP).
        context: of this rank.
        step: number of the step, 1 for the first.
        micro: a micro-batch of this rank.
        group: the data-parallel ranks.
    """
    model = stepper.model.whole
    devices = [context.device] if context.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), model.no_sync():
        loss = stepper.micro_loss(step, micro)
        loss.backward()
    grads = [p.grad.detach().float() for p in model.parameters() if p.grad is not None]
    own = torch.cat([grad.flatten() for grad in grads])
    mean = own.clone()
    dist.all_reduce(mean, group=group)
    size = dist.get_world_size(group)
    mean /= size
    norm, length = own.norm(), mean.norm()
    cosine = torch.dot(own, mean) / (norm * length).clamp_min(1e-30)
    mine = torch.stack([loss.detach().float(), norm, cosine])
    rows = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(rows, mine, group=group)
    stepper.optimizer.zero_grad(set_to_none=True)
    table = torch.stack(rows).cpu().double()
    return measure(step, *(table[:, column].tolist() for column in range(3)))
