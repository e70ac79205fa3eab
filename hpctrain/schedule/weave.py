"""The scheduler inside the generators: decides, rank by rank and moment by moment, what to run.

Two ways of choosing the passes on the critical path, and one way of weaving the others in:

* :class:`FixedOrder` - the method prescribes the order of forwards and backwards on each rank;
* :class:`Greedy` - whatever is ready runs, under a limit of live micro-batches a stage,
  forwards and backwards by turns (the idea of 1F1B for any placement of stages);
* passes that nothing urgent waits for fill the gaps: weight gradients (W), and with Vocabulary
  Parallelism those of the output layer and the embedding.

It runs on a clock of its own. Generators let one pass take one unit, so that nothing depends on
rounding; the automatic scheduler gives the times it was asked to plan for. What comes out is an
order for each rank; times are the simulator's job.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpctrain.schedule.costs import Costs
from hpctrain.schedule.graph import EVERYONE, LOCAL, B, D, E, F, I, S, T, W, Wiring
from hpctrain.schedule.stages import StageMap

Pass = tuple[int, int, int]
"""(code, stage, micro-batch)"""
Order = list[list[Pass]]
"""For each rank its passes in order."""

NEVER = -1.0


def one_a_pass(stages: StageMap) -> Costs:
    """Costs on the generators' clock: each F, I and W of a chunk takes 1, B takes 2."""
    each = (1.0,) * stages.stages
    return Costs(forward=each, input_grad=each, weight_grad=each, activation=each)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a loom runs.

    Attributes:
        costs: times of the passes; transfers count.
        limit: activations a rank may hold, in the unit of ``costs.activation``. A forward
            that would exceed it waits while there is a weight gradient to run instead.
        vocabulary: barriers of Vocabulary Parallelism (0: none, see ``Schedule.vocabulary``).
        patience: a weight gradient does not start if the next pass of the critical path is
            known to be ready within this share of its time.
    """

    costs: Costs
    limit: float = float("inf")
    vocabulary: int = 0
    patience: float = 0.0


class Chooser(Protocol):
    """Decides which pass of the critical path a rank runs next."""

    def next(self, loom: Loom, rank: int, now: float) -> tuple[Pass | None, float]:
        """The pass to run now; or None, and when the next is known to be ready, or NEVER."""

    def took(self, rank: int, chosen: Pass) -> None:
        """The pass that :meth:`next` offered was started."""


class Loom:
    """The state of a schedule that is being woven.

    Attributes:
        order: the passes of each rank so far.
        peak: the most activations a rank has held.
    """

    def __init__(
        self,
        stages: StageMap,
        micro_batches: int,
        settings: Settings,
        route_of: Sequence[int] | None = None,
    ) -> None:
        self.stages, self.micro_batches, self.settings = stages, micro_batches, settings
        self.route_of = route_of if route_of is not None else [0] * micro_batches
        self.wiring = Wiring(stages, micro_batches, settings.vocabulary)
        self.durations = settings.costs.durations(stages)
        self.sizes = settings.costs.activations(stages)
        self.ready = [NEVER] * self.wiring.tokens
        self.order: Order = [[] for _ in range(stages.ranks)]
        self._forward_end = [NEVER] * (stages.stages * micro_batches)
        self.peak = 0.0
        self._kept = settings.costs.weight_grad_share
        self._held = [0.0] * stages.ranks
        self._weights: list[deque[Pass]] = [deque() for _ in range(stages.ranks)]
        self._link_times = [0.0, *settings.costs.links(self.wiring.links)]
        self._link_free = [0.0] * len(self._link_times)
        self._parts: dict[int, tuple[int, float]] = {}
        self._free = [0.0] * stages.ranks
        self._events = [(0.0, rank) for rank in range(stages.ranks)]
        self._vocabulary = _VocabularyPasses(self) if settings.vocabulary else None

    def run(self, chooser: Chooser) -> Order:
        """Weave until nothing moves any more; the order of every rank."""
        events, free = self._events, self._free
        while events:
            now, rank = heapq.heappop(events)
            if free[rank] > now:
                continue
            chosen = self._choose(chooser, rank, now)
            if chosen is not None:
                self._start(rank, now, chosen)
        return self.order

    @property
    def makespan(self) -> float:
        """When the last pass that was started ends."""
        return max(self._free)

    def arrival(self, code: int, stage: int, micro_batch: int) -> float:
        """When a pass has all it needs; NEVER where that is not known yet."""
        need = self.wiring.edges[code][self.route_of[micro_batch]][stage].need
        when = self.ready[need + micro_batch] if need >= 0 else 0.0
        if code != F and when >= 0:
            own = self._forward_end[stage * self.micro_batches + micro_batch]
            return own if own > when or own < 0 else when
        return when

    def wake(self, time: float) -> None:
        """Let every rank look again at ``time``."""
        for rank in range(self.stages.ranks):
            heapq.heappush(self._events, (time, rank))

    def _choose(self, chooser: Chooser, rank: int, now: float) -> Pass | None:
        vocabulary = self._vocabulary
        if vocabulary is not None and (urgent := vocabulary.urgent(rank, now)) is not None:
            return urgent
        main, soon = chooser.next(self, rank, now)
        weights = self._weights[rank]
        if main is not None:
            full = self._held[rank] + self.sizes[main[1]] > self.settings.limit + 1e-9
            if not (weights and full and main[0] == F):
                chooser.took(rank, main)
                return main
            return weights.popleft()
        if weights:
            code, stage, _ = weights[0]
            patience = self.settings.patience * self.durations[code][stage]
            if soon < now or soon - now >= patience:
                return weights.popleft()
            return None
        return vocabulary.later(rank, now) if vocabulary is not None else None

    def _start(self, rank: int, now: float, chosen: Pass) -> None:
        code, stage, micro_batch = chosen
        end = now + self.durations[code][stage]
        self.order[rank].append(chosen)
        self._free[rank] = end
        heapq.heappush(self._events, (end, rank))
        if code == F:
            self._held[rank] += self.sizes[stage]
            self.peak = max(self.peak, self._held[rank])
            self._forward_end[stage * self.micro_batches + micro_batch] = end
        elif code == I:
            self._weights[rank].append((W, stage, micro_batch))
            self._held[rank] -= self.sizes[stage] * (1 - self._kept)
        elif code == W:
            self._held[rank] -= self.sizes[stage] * self._kept
        elif code == B:
            self._held[rank] -= self.sizes[stage]
        edge = self.wiring.edges[code][self.route_of[micro_batch]][stage]
        if edge.product >= 0:
            self._deliver(edge.product + micro_batch, edge.hop, end)
        if self._vocabulary is not None:
            self._vocabulary.started(chosen, now)

    def _deliver(self, token: int, hop: int, end: float) -> None:
        if hop == LOCAL:
            self.ready[token] = end  # this rank looks again at that time anyway
        elif hop == EVERYONE:
            count, latest = self._parts.get(token, (0, 0.0))
            self._parts[token] = count, latest = count + 1, max(latest, end)
            if count == self.wiring.producers(token):
                self.ready[token] = latest + self.settings.costs.collective
                self.wake(self.ready[token])
        else:
            arrival = max(end, self._link_free[hop]) + self._link_times[hop]
            self._link_free[hop] = self.ready[token] = arrival
            heapq.heappush(self._events, (arrival, self.wiring.links[hop - 1][1]))


class FixedOrder:
    """Forwards and backwards in a prescribed order on each rank."""

    def __init__(self, order: Sequence[Sequence[Pass]]) -> None:
        self._order = order
        self._at = [0] * len(order)

    def next(self, loom: Loom, rank: int, now: float) -> tuple[Pass | None, float]:
        row, at = self._order[rank], self._at[rank]
        if at == len(row):
            return None, NEVER
        when = loom.arrival(*row[at])
        return (row[at] if 0 <= when <= now else None), when

    def took(self, rank: int, chosen: Pass) -> None:
        self._at[rank] += 1


class Greedy:
    """Run what is ready, the oldest micro-batch first, under a limit of live ones a stage.

    Args:
        stages: the placement.
        route_of: the route of each micro-batch.
        split: whether backwards are I (W follows) or B.
        live: the most micro-batches of a stage between its F and its backward.
        alternate: prefer the other kind than the last one run; else backwards come first.
    """

    def __init__(
        self,
        stages: StageMap,
        route_of: Sequence[int],
        *,
        split: bool,
        live: Callable[[int], int],
        alternate: bool,
    ) -> None:
        self._held = stages.held
        self._backward = I if split else B
        self._alternate = alternate
        count, routes = stages.stages, range(len(stages.routes))
        self._live = [max(1, live(stage)) for stage in range(count)]
        self._members = [[j for j, r in enumerate(route_of) if r == route] for route in routes]
        self._forwards = [[0] * count for _ in routes]
        self._backwards = [[0] * count for _ in routes]
        self._last = [self._backward] * stages.ranks
        self._route_of = route_of

    def next(self, loom: Loom, rank: int, now: float) -> tuple[Pass | None, float]:
        best: tuple[tuple[bool, int, int, int], Pass] | None = None
        soon = NEVER
        last_was_forward = self._last[rank] == F
        for route, stage in self._held[rank]:
            members = self._members[route]
            done, live = self._backwards[route][stage], self._forwards[route][stage]
            if done < live:
                when = loom.arrival(self._backward, stage, members[done])
                if 0 <= when <= now:
                    late = self._alternate and not last_was_forward
                    key = (late, done, stage, route)
                    if best is None or key < best[0]:
                        best = key, (self._backward, stage, members[done])
                elif when > now and (soon < 0 or when < soon):
                    soon = when
            if live < len(members) and live - done < self._live[stage]:
                when = loom.arrival(F, stage, members[live])
                if 0 <= when <= now:
                    late = last_was_forward or not self._alternate
                    key = (late, live, -stage, route)
                    if best is None or key < best[0]:
                        best = key, (F, stage, members[live])
                elif when > now and (soon < 0 or when < soon):
                    soon = when
        return (None, soon) if best is None else (best[1], now)

    def took(self, rank: int, chosen: Pass) -> None:
        code, stage, micro_batch = chosen
        counters = self._forwards if code == F else self._backwards
        counters[self._route_of[micro_batch]][stage] += 1
        self._last[rank] = code


class _VocabularyPasses:
    """When the passes S, T, E and D of Vocabulary Parallelism run (Yeung et al. 2024).

    S is on the way from the last stage's forward to its backward and runs as soon as it can;
    so does T where the input gradient is computed there (two barriers). Otherwise T fills gaps,
    but not more than one may be pending: it keeps the logits. An embedding is looked up about
    one micro-batch before the first stage needs it.
    """

    def __init__(self, loom: Loom) -> None:
        self._loom = loom
        self._last = loom.stages.stages - 1
        self._two = loom.settings.vocabulary == 2
        ranks = range(loom.stages.ranks)
        self._s: list[deque[int]] = [deque() for _ in ranks]
        self._t: list[deque[int]] = [deque() for _ in ranks]
        self._d: list[deque[int]] = [deque() for _ in ranks]
        self._e = [0 for _ in ranks]
        self._injected = 0

    def _ready(self, code: int, stage: int, queue: deque[int], now: float) -> bool:
        if not queue:
            return False
        token = self._loom.wiring.edges[code][0][stage].need + queue[0]
        return 0 <= self._loom.ready[token] <= now

    def urgent(self, rank: int, now: float) -> Pass | None:
        """A pass that the critical path waits for, or that has waited too long."""
        if self._e[rank] <= self._injected and self._e[rank] < self._loom.micro_batches:
            self._e[rank] += 1
            return E, 0, self._e[rank] - 1
        if self._ready(S, self._last, self._s[rank], now):
            return S, self._last, self._s[rank].popleft()
        if (self._two or len(self._t[rank]) > 1) and self._ready(T, self._last, self._t[rank], now):
            return T, self._last, self._t[rank].popleft()
        if len(self._d[rank]) > 1 and self._ready(D, 0, self._d[rank], now):
            return D, 0, self._d[rank].popleft()
        return None

    def later(self, rank: int, now: float) -> Pass | None:
        """A pass for a gap."""
        if self._ready(T, self._last, self._t[rank], now):
            return T, self._last, self._t[rank].popleft()
        if self._ready(D, 0, self._d[rank], now):
            return D, 0, self._d[rank].popleft()
        return None

    def started(self, chosen: Pass, now: float) -> None:
        """Note what a pass that was just started makes possible."""
        code, stage, micro_batch = chosen
        queues: list[deque[int]] = []
        if code == F:
            if stage == 0:
                self._injected += 1
                self._loom.wake(now)
            if stage == self._last:
                queues += self._s
        if code in (B, I) and stage == 0:
            queues += self._d
        if code == S:
            token = self._loom.wiring.edges[S][0][self._last].product + micro_batch
            if self._loom.ready[token] >= 0:
                queues += self._t
        for queue in queues:
            queue.append(micro_batch)
