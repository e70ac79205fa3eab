"""Building blocks with controllable memory (Qi et al. 2024): V-Min, V-Half and V-ZB.

Two chunks a rank, placed in a V. The passes of one micro-batch form a block in time; the block
repeats every six units (two chunks of F, I and W), so the time an activation lives, divided by
six, is how many are held. Shorter distances between neighbouring ranks mean less memory, longer
ones leave room against bubbles. The block gives the order of F and I on each rank; fill and
drain are then squeezed, and W goes into the gaps, under the block's own peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.schedule.building import assemble, require
from hpctrain.schedule.graph import F, I
from hpctrain.schedule.stages import StageMap, wave
from hpctrain.schedule.table import Claim, Schedule
from hpctrain.schedule.weave import FixedOrder, Loom, Order, Settings, one_a_pass

SOURCE = "Pipeline Parallelism with Controllable Memory, Qi et al. 2024, section 3"
PERIOD = 6


@dataclass(frozen=True, slots=True)
class Distances:
    """Time between one pass on neighbouring ranks: F down, F up, I down, I up (the V twice)."""

    forward_down: int
    forward_up: int
    input_down: int
    input_up: int


V_MIN = Distances(1, 1, 1, 1)
V_HALF = Distances(1, 2, 1, 2)
V_ZB = Distances(2, 4, 2, 4)


def v_half(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Half of 1F1B's activations, half of its bubble."""
    require(chunks == 2, "v-half", f"two chunks a rank, found {chunks}")
    m = micro_batches
    peak = (ranks + 2) // 2
    order = weave_blocks(wave(ranks, 2), m, V_HALF, limit=2 * peak)
    bubble = None
    if m >= ranks > 1:
        idle = 3 * ranks - (4 if ranks > 2 else 3)
        bubble = idle / (6 * m + idle)
    return assemble("v-half", wave(ranks, 2), m, order, Claim(SOURCE, min(peak, m), bubble))


def v_min(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """A third of 1F1B's activations, two thirds of its bubble."""
    require(chunks == 2, "v-min", f"two chunks a rank, found {chunks}")
    m = micro_batches
    peak = (ranks + 4) // 3
    order = weave_blocks(wave(ranks, 2), m, V_MIN, limit=2 * peak)
    bubble = None
    if m >= 2 and ranks > 1:
        idle = 4 * ranks - (3 if ranks % 3 == 0 else 5)
        bubble = idle / (6 * m + idle)
    return assemble("v-min", wave(ranks, 2), m, order, Claim(SOURCE, min(peak, m), bubble))


def weave_blocks(stages: StageMap, micro_batches: int, distances: Distances, limit: int) -> Order:
    """Repeat a block once a micro-batch and squeeze; at most ``limit`` chunks are held."""
    ranks = stages.ranks
    times = _block(ranks, distances)
    order: Order = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        passes = ((F, down), (F, up), (I, up), (I, down))
        dated = [
            (times[kind][rank] + PERIOD * j, code, stage, j)
            for kind, (code, stage) in enumerate(passes)
            for j in range(micro_batches)
        ]
        order.append([(code, stage, j) for _, code, stage, j in sorted(dated)])
    loom = Loom(stages, micro_batches, Settings(one_a_pass(stages), limit=limit))
    return loom.run(FixedOrder(order))


def _block(ranks: int, distances: Distances) -> tuple[list[int], ...]:
    """Start of F down, F up, I up and I down on every rank: the shortest block in which no rank
    has two of the four at the same time modulo the period."""
    last = ranks - 1
    down = [distances.forward_down * rank for rank in range(ranks)]
    for gap in range(PERIOD):
        first = down[last] + 1 + gap
        up = [first + distances.forward_up * (last - rank) for rank in range(ranks)]
        if _clash(up, down):
            continue
        for gap_up in range(PERIOD):
            first = up[0] + 1 + gap_up
            input_up = [first + distances.input_down * rank for rank in range(ranks)]
            if _clash(input_up, down, up):
                continue
            for gap_down in range(PERIOD):
                first = input_up[last] + 1 + gap_down
                input_down = [first + distances.input_up * (last - r) for r in range(ranks)]
                if not _clash(input_down, down, up, input_up):
                    return down, up, input_up, input_down
    raise AssertionError(f"no block for {ranks} ranks and {distances}")


def _clash(new: list[int], *others: list[int]) -> bool:
    return any(
        (mine - theirs) % PERIOD == 0
        for other in others
        for mine, theirs in zip(new, other, strict=True)
    )
