"""Wave-shaped pipelines: Hanayo (one model, w waves) and BitPipe (two V's, opposite ways).

Both papers draw their schedules for as many micro-batches as ranks. Here one rule covers any
number: at most a share of the remaining depth may be live in a stage, forwards and backwards by
turns, the oldest micro-batch first. The shares are tried and the shortest schedule is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.schedule.building import assemble, require
from hpctrain.schedule.stages import StageMap, bidirectional, wave
from hpctrain.schedule.table import Claim, Schedule
from hpctrain.schedule.weave import Greedy, Loom, Order, Settings, one_a_pass

HANAYO = "Hanayo, Liu et al. 2023"
BITPIPE = "BitPipe, Wu et al. 2024"
PEAK_SHARE = 1.5
"""Activations held at most, in those of 1F1B."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Live micro-batches of stage s: ``share * (stages - s) + extra``."""

    share: float
    extra: float
    alternate: bool = True

    def live(self, stages: int) -> Callable[[int], int]:
        return lambda stage: int((stages - stage) * self.share + self.extra)


ONE_WAVE = (Rule(1.5, 0.0),)
WAVES = (
    Rule(1.0, 0.0),
    Rule(0.9, 0.0),
    Rule(0.9, 1.5),
    Rule(0.75, 1.5),
    Rule(0.75, 2.0),
    Rule(0.5, 1.0),
    Rule(0.5, 1.5),
    Rule(1.2, 0.5),
)


def hanayo(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Waves of 2 chunks a rank, without a second copy of the model."""
    require(
        chunks % 2 == 0,
        "hanayo",
        f"a wave goes down and up: chunks is twice the waves, found {chunks}",
    )
    m = micro_batches
    stages = wave(ranks, chunks)
    peak = PEAK_SHARE * ranks
    order = _best(stages, m, ONE_WAVE if chunks == 2 else WAVES, (0,) * m, peak * chunks)
    bubble = None
    if chunks == 2 and m == ranks:  # half of a bidirectional pipeline over 2p ranks
        bubble = (2 * ranks - 2) / (3 * m + 2 * ranks - 2)
    elif chunks == 2 and m >= 2 * ranks - 1:  # what filling and draining p ranks must cost
        bubble = (ranks - 1) / (2 * m + ranks - 1)
    claim = Claim(HANAYO, min(peak, m), bubble)
    return assemble("hanayo", stages, m, order, claim, options={"waves": chunks // 2})


def bitpipe(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Two V-shaped interleaved pipelines in opposite directions; every rank holds two copies'
    stages, whose gradients are summed (``REDUCE``) as soon as both are complete."""
    require(ranks % 2 == 0, "bitpipe", f"an even number of ranks, found {ranks}")
    require(
        chunks % 2 == 0,
        "bitpipe",
        f"each direction goes down and up: an even number of chunks, found {chunks}",
    )
    require(
        micro_batches % 2 == 0,
        "bitpipe",
        f"half of the micro-batches go each way: an even number, found {micro_batches}",
    )
    m = micro_batches
    stages = bidirectional(ranks, chunks)
    route_of = tuple(j % 2 for j in range(m))
    peak = PEAK_SHARE * ranks
    order = _best(stages, m, WAVES, route_of, peak * chunks)
    claim = Claim(BITPIPE, min(peak, m))
    return assemble("bitpipe", stages, m, order, claim, route_of=route_of)


def _best(
    stages: StageMap,
    micro_batches: int,
    rules: Sequence[Rule],
    route_of: Sequence[int],
    limit: float,
) -> Order:
    """The order of the rule that is shortest among those that hold at most ``limit`` chunks.

    Rules are compared on the first 4p micro-batches: from there on schedules repeat.
    """
    trial = min(micro_batches, 4 * stages.ranks)

    def key(rule: Rule) -> tuple[bool, float, float]:
        loom = _woven(stages, trial, rule, route_of)
        return loom.peak > limit, loom.makespan, loom.peak

    ranked = sorted(rules, key=key) if len(rules) > 1 else list(rules)
    for rule in ranked:
        loom = _woven(stages, micro_batches, rule, route_of)
        if loom.peak <= limit:
            break
    return loom.order


def _woven(stages: StageMap, micro_batches: int, rule: Rule, route_of: Sequence[int]) -> Loom:
    route_of = route_of[:micro_batches]
    loom = Loom(stages, micro_batches, Settings(one_a_pass(stages)), route_of)
    live = rule.live(stages.stages)
    loom.run(Greedy(stages, route_of, split=False, live=live, alternate=rule.alternate))
    return loom
