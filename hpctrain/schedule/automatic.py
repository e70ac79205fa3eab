"""The automatic scheduler: the shortest schedule it can find for given times and memory.

It follows section 3 of Zero Bubble (Qi et al. 2023) in spirit: forwards are run ahead as far as
memory allows, then forward and backward by turns, weight gradients where a rank would wait. It
does so for a grid of the choices that such a heuristic has to make, adds the hand-made methods
of the same placement (as they are, and with their weight gradients woven anew for these times),
simulates all of them and keeps the best. So it is never behind a hand-made one, on its terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from hpctrain.errors import ImpossibleError
from hpctrain.schedule import classic, v_shape, waves, zero_bubble
from hpctrain.schedule.building import assemble, require
from hpctrain.schedule.costs import UNIT, Costs
from hpctrain.schedule.graph import B, I
from hpctrain.schedule.simulate import Timeline, simulate
from hpctrain.schedule.stages import StageMap, loop, wave
from hpctrain.schedule.table import Claim, Schedule
from hpctrain.schedule.transforms import critical_path, two_stage
from hpctrain.schedule.weave import FixedOrder, Greedy, Loom, Order, Settings

SOURCE = "automatic; after Zero Bubble Pipeline Parallelism, Qi et al. 2023, section 3"
PATIENCE = (0.0, 0.5, 1.0)
FINALISTS = 6

Maker = Callable[[int], Schedule]
"""A schedule for a number of micro-batches."""


def automatic(
    ranks: int,
    chunks: int,
    micro_batches: int,
    *,
    costs: Costs = UNIT,
    limit: float | None = None,
) -> Schedule:
    """The shortest of many schedules.

    Args:
        ranks: p.
        chunks: 1 (a line), or an even number (a V or a wave).
        micro_batches: m.
        costs: times to plan for.
        limit: activations a rank may hold, in those of a micro-batch over one p-th of the
            model; default p, what 1F1B needs.

    Raises:
        ImpossibleError: nothing found fits the limit.
    """
    require(
        chunks == 1 or chunks % 2 == 0,
        "auto",
        f"chunks is 1 (a line) or even (a V, a wave), found {chunks}",
    )
    bound = float(ranks if limit is None else limit)
    stages = loop(ranks, 1) if chunks == 1 else wave(ranks, chunks)
    search = _Search(stages, costs, bound)
    best = search.best(micro_batches)
    claim = Claim(SOURCE, max(bound, max(simulate(best, UNIT).peak_activations)))
    return best.with_actions(best.actions, name="auto", claim=claim, options=(("limit", bound),))


@dataclass(frozen=True)
class _Search:
    stages: StageMap
    costs: Costs
    limit: float

    def best(self, micro_batches: int) -> Schedule:
        """Rank all candidates on a short run, then the front runners on the real one."""
        p = self.stages.ranks
        makers = list(self._candidates())
        trial = min(micro_batches, 4 * p)
        if trial < micro_batches:
            makers.sort(key=lambda make: self._score(make(trial)))
            makers = makers[:FINALISTS]
        made = [make(micro_batches) for make in (*makers, *self._by_hand())]
        best = min(made, key=self._score)
        if self._score(best)[0]:
            least = min(self._score(schedule)[3] for schedule in made)
            raise ImpossibleError(
                f"schedule auto: no schedule found holds at most {self.limit:g} activations",
                hint=f"the least found is {least:g}; v-min needs the least memory of all methods",
            )
        return best

    def _score(self, schedule: Schedule) -> tuple[bool, float, float, float]:
        """Smaller is better: fits, makespan, longest span of a rank, peak."""
        timeline: Timeline = simulate(schedule, self.costs)
        peak = max(timeline.peak_activations)
        too_much = peak > self.limit + 1e-6
        return too_much, timeline.makespan, max(timeline.rank_spans), peak

    def _by_hand(self) -> list[Maker]:
        """The methods of this placement; those that need more memory lose in :meth:`_score`."""
        p, v = self.stages.ranks, self.stages.chunks
        if v == 1:
            generators = [
                classic.one_f_one_b,
                classic.gpipe,
                zero_bubble.zb_h1,
                zero_bubble.zb_h2,
            ]
        elif v == 2:
            generators = [zero_bubble.zb_v, v_shape.v_half, v_shape.v_min, waves.hanayo]
        else:
            generators = [waves.hanayo]
        makers: list[Maker] = [partial(generator, p, v) for generator in generators]
        fused = (classic.one_f_one_b, classic.gpipe, waves.hanayo)
        return makers + [partial(_cut, g, p, v) for g in generators if g in fused]

    def _candidates(self) -> Iterator[Maker]:
        for patience in PATIENCE:
            for by_hand in self._by_hand():
                yield partial(self._rewoven, by_hand, patience)
            for share, extra in self._depths():
                for alternate in (True, False):
                    yield partial(self._greedy, share, extra, alternate, patience)

    def _depths(self) -> Iterator[tuple[float, float]]:
        """Live micro-batches of stage s, as share * (stages - s) + extra, that fit the limit."""
        count, v = self.stages.stages, self.stages.chunks
        for share in (0.5, 1.0, 1.5, 2.0):
            for extra in (-1.0, 0.0, 1.0, 2.0):
                worst = max(
                    sum(self._live(share, extra, stage) for _, stage in held)
                    for held in self.stages.held
                )
                if worst <= self.limit * v or share == 1.0:
                    yield share / v if v > 2 else share, extra
        yield 0.0, max(1.0, math.floor(self.limit / max(1, count // self.stages.ranks)))

    def _live(self, share: float, extra: float, stage: int) -> int:
        capped = min(share * (self.stages.stages - stage) + extra, self.limit * self.stages.chunks)
        return max(1, int(capped))

    def _settings(self, patience: float) -> Settings:
        return Settings(self.costs, limit=self.limit, patience=patience)

    def _rewoven(self, make: Maker, patience: float, micro_batches: int) -> Schedule:
        path = critical_path(make(micro_batches))
        order = [[(I if code == B else code, s, j) for code, s, j in row] for row in path]
        loom = Loom(self.stages, micro_batches, self._settings(patience))
        return self._assembled(micro_batches, loom.run(FixedOrder(order)))

    def _greedy(
        self, share: float, extra: float, alternate: bool, patience: float, micro_batches: int
    ) -> Schedule:
        loom = Loom(self.stages, micro_batches, self._settings(patience))
        chooser = Greedy(
            self.stages,
            [0] * micro_batches,
            split=True,
            live=partial(self._live, share, extra),
            alternate=alternate,
        )
        return self._assembled(micro_batches, loom.run(chooser))

    def _assembled(self, micro_batches: int, order: Order) -> Schedule:
        return assemble("auto", self.stages, micro_batches, order, Claim(SOURCE, self.limit))


def _cut(generator: Callable[..., Schedule], ranks: int, chunks: int, m: int) -> Schedule:
    return two_stage(generator(ranks, chunks, m))
