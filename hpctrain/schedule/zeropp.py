"""ZeroPP (Tang et al. 2024): breadth-first rounds of a few micro-batches, backward split.

Micro-batches go in scheduling units of U. Within a unit every rank does one chunk for all of
them before the next chunk, so sharded parameters are gathered once a chunk and unit; the weight
gradients of a unit fill the waits of the next one, which may hold a second unit's activations.
"""

from __future__ import annotations

from hpctrain.schedule.building import assemble, require, rounds
from hpctrain.schedule.graph import I
from hpctrain.schedule.stages import loop
from hpctrain.schedule.table import Claim, Schedule
from hpctrain.schedule.weave import FixedOrder, Loom, Settings, one_a_pass

SOURCE = "ZeroPP, Tang et al. 2024"


def zeropp(ranks: int, chunks: int, micro_batches: int, *, unit: int = 0) -> Schedule:
    """Rounds of ``unit`` micro-batches (default: p), W in the gaps."""
    m = micro_batches
    size = unit or min(ranks, m)
    require(1 <= size <= m, "zeropp", f"unit is 1 to {m} (the micro-batches), found {unit}")
    stages = loop(ranks, chunks)
    order = []
    for rank in range(ranks):
        row = []
        for start in range(0, m, size):
            forwards, backwards = rounds(rank, ranks, chunks, min(size, m - start), size)
            row += [(code, stage, j + start) for code, stage, j in forwards]
            row += [(I, stage, j + start) for _, stage, j in backwards]
        order.append(row)
    limit = 2 * size * chunks
    loom = Loom(stages, m, Settings(one_a_pass(stages), limit=limit))
    claim = Claim(SOURCE, min(2 * size, m))
    order = loom.run(FixedOrder(order))
    return assemble("zeropp", stages, m, order, claim, options={"unit": size})
