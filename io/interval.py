"""How often to checkpoint: from what one costs and how often the job fails."""

from __future__ import annotations

import math


def young(cost: float, mtbf: float) -> float:
    """Seconds between checkpoints, to first order: √(2·C·M) (Young 1974).

    Args:
        cost: seconds of computing that a checkpoint costs, C.
        mtbf: mean seconds between failures of the job, M.
    """
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Seconds of computing between checkpoints, to higher order (Daly 2006, equation 37).

    √(2·C·M)·(1 + ⅓·√(C/2M) + ⅑·C/2M) − C for C < 2M, and M otherwise.

    Args:
        cost, mtbf: see :func:`young`.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return young(cost, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def steps_between(cost: float, mtbf: float, step: float, duration: float) -> int:
    """Steps between checkpoints.

    Args:
        cost, mtbf: see :func:`young`.
        step: seconds a step.
        duration: seconds from a checkpoint's begin until it is durable: a shorter interval
            would only queue them up.
    """
    seconds = max(daly(cost, mtbf), 1.1 * duration)
    return max(1, round(seconds / step))
