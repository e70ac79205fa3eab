"""Zero Bubble pipelines (Qi et al. 2023): the backward cut into I (input) and W (weights).

Only I is on the way between ranks, so W can go where a rank would wait. Peak counts take an
activation as held until its W has run.
"""

from __future__ import annotations

from hpctrain.schedule.building import assemble, one_chunk, require
from hpctrain.schedule.graph import F, I, W
from hpctrain.schedule.stages import loop, wave
from hpctrain.schedule.table import Claim, Schedule
from hpctrain.schedule.v_shape import V_ZB, weave_blocks
from hpctrain.schedule.weave import Pass

HAND_MADE = "Zero Bubble Pipeline Parallelism, Qi et al. 2023, section 2.2 and table 1"
V_SOURCE = "Zero Bubble Pipeline Parallelism, Qi et al. 2023, section 6 (ZB-V)"


def zb_h1(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B's memory, a third of its bubble: rank r puts W off by r micro-batches."""
    one_chunk("zb-h1", chunks)
    order = [
        _hand_made(rank, micro_batches, ahead=ranks - rank, late=rank) for rank in range(ranks)
    ]
    m = micro_batches
    bubble = (ranks - 1) / (3 * m + ranks - 1) if m >= ranks else None
    claim = Claim(HAND_MADE, min(ranks, m), bubble)
    return assemble("zb-h1", loop(ranks, 1), m, order, claim)


def zb_h2(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """No bubble on any rank between its first and last pass, for twice 1F1B's memory."""
    one_chunk("zb-h2", chunks)
    order = [
        _hand_made(rank, micro_batches, ahead=2 * (ranks - rank) - 1, late=2 * rank)
        for rank in range(ranks)
    ]
    m = micro_batches
    bubble = (ranks - 1) / (3 * m + ranks - 1) if m >= 2 * ranks - 1 else None
    claim = Claim(HAND_MADE, min(2 * ranks - 1, m), bubble)
    return assemble("zb-h2", loop(ranks, 1), m, order, claim)


def _hand_made(rank: int, micro_batches: int, *, ahead: int, late: int) -> list[Pass]:
    """``ahead`` forwards; then I, the W of ``late`` micro-batches before, F, over and over."""
    ahead = min(ahead, micro_batches)
    row: list[Pass] = [(F, rank, j) for j in range(ahead)]
    for j in range(micro_batches):
        row.append((I, rank, j))
        if j >= late:
            row.append((W, rank, j - late))
        if j + ahead < micro_batches:
            row.append((F, rank, j + ahead))
    return row + [(W, rank, j) for j in range(max(0, micro_batches - late), micro_batches)]


def zb_v(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """No bubble on any rank between its first and last pass, with 1F1B's memory: two chunks a
    rank in a V, so that the last stage lies beside the first."""
    require(chunks == 2, "zb-v", f"two chunks a rank, found {chunks}")
    stages, m = wave(ranks, 2), micro_batches
    if m >= 2 * ranks - 1:
        order = [_v_hand_made(rank, ranks, m) for rank in range(ranks)]
    else:
        order = weave_blocks(stages, m, V_ZB, limit=2 * ranks)
    bubble = (ranks - 1) / (6 * m + ranks - 1) if m >= ranks else None
    claim = Claim(V_SOURCE, min(ranks, m), bubble)
    return assemble("zb-v", stages, m, order, claim)


def _v_hand_made(rank: int, ranks: int, micro_batches: int) -> list[Pass]:
    """One rank of ZB-V for m >= 2p - 1: the fill, the repeated block of six, the drain."""
    down, up, m = rank, 2 * ranks - 1 - rank, micro_batches
    counters: dict[tuple[int, int], int] = {}
    row: list[Pass] = []

    def run(*passes: tuple[int, int]) -> None:
        for code, stage in passes:
            j = counters.get((code, stage), 0)
            counters[code, stage] = j + 1
            row.append((code, stage, j))

    for _ in range(2 * (ranks - rank) - 1):
        run((F, down))
    for _ in range(rank):
        run((F, up), (F, down))
    for _ in range(ranks - rank):
        run((F, up), (I, up), (W, up))
    for turn in range(m - ranks):
        if turn < m - 2 * ranks + 1 + rank:
            run((F, down))
        run((I, down), (W, down), (F, up), (I, up), (W, up))
    for _ in range(rank):
        run((I, down), (I, up))
    for _ in range(ranks - rank):
        run((I, down), (W, down))
    run(*[(W, up)] * rank, *[(W, down)] * rank)
    return row
