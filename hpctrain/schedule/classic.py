"""Methods with one full backward: GPipe, 1F1B, interleaved 1F1B, breadth-first, layered."""

from __future__ import annotations

from hpctrain.schedule.building import (
    assemble,
    one_chunk,
    one_then_one,
    require,
    rounds,
)
from hpctrain.schedule.stages import loop
from hpctrain.schedule.table import Claim, Schedule

GPIPE = "GPipe, Huang et al. 2019, section 2.3"
ONE_F_ONE_B = "PipeDream-Flush, Narayanan et al. 2021; PTD-P, Narayanan et al. 2021, section 2.2.1"
INTERLEAVED = (
    "PTD-P, Narayanan et al. 2021, section 2.2.2; memory: Korthikanti et al. 2022, section 4.2.3"
)
BREADTH_FIRST = "Breadth-First Pipeline Parallelism, Lamy-Poirier 2022"
LAYERED = "Layered gradient accumulation and modular pipeline parallelism, Lamy-Poirier 2021"


def fused_bubble(ranks: int, chunks: int, micro_batches: int) -> float:
    """Bubble fraction where bubble over ideal time is (p-1)/(v m)."""
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)


def gpipe(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""
    one_chunk("gpipe", chunks)
    order = []
    for rank in range(ranks):
        forwards, backwards = rounds(rank, ranks, 1, micro_batches, micro_batches)
        order.append(forwards + backwards)
    claim = Claim(GPIPE, micro_batches, fused_bubble(ranks, 1, micro_batches))
    return assemble("gpipe", loop(ranks, 1), micro_batches, order, claim)


def one_f_one_b(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """One forward, one backward: rank i holds at most p - i micro-batches."""
    one_chunk("1f1b", chunks)
    order = []
    for rank in range(ranks):
        forwards, backwards = rounds(rank, ranks, 1, micro_batches, micro_batches)
        order.append(one_then_one(forwards, backwards, ranks - rank - 1))
    claim = Claim(ONE_F_ONE_B, min(ranks, micro_batches), fused_bubble(ranks, 1, micro_batches))
    return assemble("1f1b", loop(ranks, 1), micro_batches, order, claim)


def interleaved(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B over v stages a rank, micro-batches in rounds of p."""
    require(
        chunks >= 2, "interleaved", f"at least 2 chunks a rank, found {chunks}", "for one: 1f1b"
    )
    require(
        micro_batches % ranks == 0,
        "interleaved",
        f"micro-batches go in rounds of {ranks} (the ranks), found {micro_batches}",
        f"{ranks * -(-micro_batches // ranks)} micro-batches, or bfs or hanayo, take any number",
    )
    order = []
    for rank in range(ranks):
        forwards, backwards = rounds(rank, ranks, chunks, micro_batches, ranks)
        ahead = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        order.append(one_then_one(forwards, backwards, ahead))
    peak = min(micro_batches, ranks + (ranks - 1) / chunks)
    claim = Claim(INTERLEAVED, peak, fused_bubble(ranks, chunks, micro_batches))
    return assemble("interleaved", loop(ranks, chunks), micro_batches, order, claim)


def breadth_first(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """All micro-batches through a chunk before the next: each chunk's parameters are gathered
    once forward and once backward, its gradients reduced once, beside the next chunk's work."""
    return _breadth_first("bfs", ranks, chunks, micro_batches, BREADTH_FIRST)


def layered(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Layered gradient accumulation on a modular pipeline: a chunk is a layer, dealt round
    robin. On one rank: gradient accumulation layer by layer, without a pipeline."""
    return _breadth_first("layered", ranks, chunks, micro_batches, LAYERED)


def _breadth_first(name: str, ranks: int, chunks: int, micro_batches: int, source: str) -> Schedule:
    order = []
    for rank in range(ranks):
        forwards, backwards = rounds(rank, ranks, chunks, micro_batches, micro_batches)
        order.append(forwards + backwards)
    # with fewer micro-batches than ranks a loop waits for its own head: no closed form
    known = micro_batches >= ranks or chunks == 1
    bubble = fused_bubble(ranks, chunks, micro_batches) if known else None
    claim = Claim(source, micro_batches, bubble)
    return assemble(name, loop(ranks, chunks), micro_batches, order, claim)
