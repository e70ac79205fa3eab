"""One simulator for all schedules: when does each action run, and what is held meanwhile.

Event driven, exact for its model: a rank computes its list in order, one action at a time;
results reach other ranks ``transfer`` later, transfers of one directed link one after the
other; collectives and host copies run on streams of their own beside the computation. The work
is linear in the number of actions (about a microsecond each).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from hpctrain.schedule.actions import Action
from hpctrain.schedule.costs import UNIT, Costs
from hpctrain.schedule.graph import (
    EVERYONE,
    GATHER,
    LOCAL,
    OFFLOAD,
    OPT,
    REDUCE,
    RELOAD,
    SCATTER,
    B,
    F,
    I,
    InvalidScheduleError,
    Program,
    W,
)
from hpctrain.schedule.table import Schedule


class Span(NamedTuple):
    """One action on the time line."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What :func:`simulate` found.

    Attributes:
        schedule: what was simulated.
        costs: with which costs.
        starts, ends: for each rank the times of its computing actions, in the order of its
            list (transfers have no entry; collectives and copies: the time on their stream).
        indices: their places in ``schedule.actions[rank]``.
        order: places of all of them in one sequence that respects every dependency, as
            (rank, position in ``starts[rank]``).
        makespan: from 0 to the end of the last action.
        busy: computing time of each rank.
    """

    schedule: Schedule
    costs: Costs
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    indices: tuple[list[int], ...]
    order: list[tuple[int, int]]
    makespan: float
    busy: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """1 - mean busy time / makespan."""
        if self.makespan == 0:
            return 0.0
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan)

    @cached_property
    def rank_spans(self) -> tuple[float, ...]:
        """For each rank the time from its first to its last computing action."""
        return tuple(
            max(ends) - min(starts) if starts else 0.0
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def overlapped_bubble_fraction(self) -> float:
        """The bubble where steps follow one another without a barrier between ranks.

        1 - mean busy time / longest span of a rank: the definition of the zero-bubble papers
        (Qi et al. 2023, section 5.3), whose optimizer step does not synchronise the ranks.
        """
        longest = max(self.rank_spans)
        return 1.0 - sum(self.busy) / (len(self.busy) * longest) if longest else 0.0

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The most each rank holds (unit: a micro-batch over one p-th of the model)."""
        if self.schedule.program.gated:  # copies end in their own time
            curves = (self.memory(rank) for rank in range(self.schedule.ranks))
            return tuple(max((held for _, held in curve), default=0.0) for curve in curves)
        rows = (_memory_changes(self, rank) for rank in range(self.schedule.ranks))
        return tuple(max(accumulate(change for _, change in row), default=0.0) for row in rows)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage the most micro-batches it has between F and its last backward pass.

        What ``Memory.in_flight`` asks for; of a stage that is held twice, the larger count.
        """
        stages = self.schedule.stages.stages
        most = [0] * stages
        for row in self.schedule.program.steps:
            live = [0] * stages
            for code, stage, *_ in row:
                if code == F:
                    live[stage] += 1
                    most[stage] = max(most[stage], live[stage])
                elif code in (B, W):
                    live[stage] -= 1
        return tuple(most)

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Activations held by a rank over time: (from when on, how many), times ascending.

        Counted from the start of F to the end of B, or of W; after I, the share
        ``costs.weight_grad_share`` is left. Offloading frees at the end of the copy.
        """
        changes = _memory_changes(self, rank)
        changes.sort(key=lambda change: (change[0], change[1]))  # at one time, free first
        curve: list[tuple[float, float]] = []
        held = 0.0
        for time, change in changes:
            held += change
            if abs(held) < 1e-9:
                held = 0.0
            if curve and curve[-1][0] == time and change > 0 and curve[-1][1] <= held:
                curve[-1] = (time, held)
            else:
                curve.append((time, held))
        return curve

    def spans(self) -> Iterator[Span]:
        """Every action that takes part in the time line, rank by rank."""
        for rank, row in enumerate(self.schedule.actions):
            for index, start, end in zip(
                self.indices[rank], self.starts[rank], self.ends[rank], strict=True
            ):
                yield Span(rank, row[index], start, end)

    def summary(self) -> dict[str, Any]:
        """The numbers, as JSON data."""
        return {
            "makespan": self.makespan,
            "bubble_fraction": self.bubble_fraction,
            "overlapped_bubble_fraction": self.overlapped_bubble_fraction,
            "peak_activations": list(self.peak_activations),
            "busy": list(self.busy),
        }


def simulate(schedule: Schedule, costs: Costs = UNIT) -> Timeline:
    """Run a schedule on paper.

    Args:
        schedule: with or without transfers in its table; the result is the same.
        costs: times and sizes; the default makes every pass of a whole stage take 1 (B: 2).

    Raises:
        InvalidScheduleError: the table is not complete, or its ranks wait for each other.
        ValueError: costs that do not fit the number of stages.
    """
    program = schedule.program
    run = _Run(program, costs, schedule)
    run.advance()
    ends = tuple(run.ends)
    return Timeline(
        schedule=schedule,
        costs=costs,
        starts=tuple(run.starts),
        ends=ends,
        indices=tuple([step[5] for step in row] for row in program.steps),
        order=run.order,
        makespan=max((max(row) for row in ends if row), default=0.0),
        busy=tuple(run.busy),
    )


class _Run:
    """State of one simulation: each rank advances until a token it needs is missing."""

    def __init__(self, program: Program, costs: Costs, schedule: Schedule) -> None:
        wiring = program.wiring
        ranks = range(len(program.steps))
        self.program = program
        self.schedule = schedule
        self.costs = costs
        self.durations = costs.durations(schedule.stages)
        self.link_times = [0.0, *costs.links(wiring.links)]
        self.ready = [-1.0] * wiring.tokens
        self.starts: list[list[float]] = [[] for _ in ranks]
        self.ends: list[list[float]] = [[] for _ in ranks]
        self.busy = [0.0 for _ in ranks]
        self.order: list[tuple[int, int]] = []
        self._parts: dict[int, list[float]] = {}  # what has come of a token made by all ranks
        self._streams = [Streams() for _ in ranks]

    def advance(self) -> None:
        steps = self.program.steps
        queue = deque(range(len(steps)))
        position, clock = [0] * len(steps), [0.0] * len(steps)
        waiting: dict[int, list[int]] = {}  # token: ranks that stopped for it
        ready, order, durations = self.ready, self.order, self.durations
        link_times, link_free = self.link_times, [0.0] * len(self.link_times)
        gated = self.program.gated
        while queue:
            rank = queue.popleft()
            row, at, now, busy = steps[rank], position[rank], clock[rank], self.busy[rank]
            starts, ends, streams = self.starts[rank], self.ends[rank], self._streams[rank]
            while at < len(row):
                code, stage, need, product, hop, index = row[at]
                if code >= GATHER:
                    self._beside(rank, code, stage, index, now)
                    order.append((rank, at))
                    at += 1
                    continue
                if need >= 0:
                    arrival = ready[need]
                    if arrival < 0:
                        waiting.setdefault(need, []).append(rank)
                        break
                    if arrival > now:
                        now = arrival
                if gated:
                    now = max(now, streams.gate(code, stage, self._micro_batch(rank, index)))
                taken = durations[code][stage]
                starts.append(now)
                now += taken
                ends.append(now)
                busy += taken
                order.append((rank, at))
                at += 1
                if product < 0:
                    continue
                if hop == LOCAL:
                    ready[product] = now
                elif hop == EVERYONE:
                    self._collect(product, now)
                    if ready[product] < 0:
                        continue
                else:
                    arrival = link_free[hop]
                    arrival = (now if now > arrival else arrival) + link_times[hop]
                    link_free[hop] = ready[product] = arrival
                if product in waiting:
                    queue.extend(waiting.pop(product))
            position[rank], clock[rank], self.busy[rank] = at, now, busy
        if waiting:
            stopped = sorted(rank for ranks in waiting.values() for rank in ranks)
            actions = self.schedule.actions
            raise InvalidScheduleError(
                [
                    f"rank {rank} waits forever at: {actions[rank][steps[rank][position[rank]][5]]}"
                    for rank in stopped
                ]
            )
        if self.program.extras:
            self._finish()

    def _micro_batch(self, rank: int, index: int) -> int:
        return self.schedule.actions[rank][index].micro_batch or 0

    def _collect(self, product: int, now: float) -> None:
        """A token made by all ranks, or sent to all: ready when the last part is there."""
        parts = self._parts.setdefault(product, [])
        parts.append(now)
        if len(parts) == self.program.wiring.producers(product):
            self.ready[product] = max(parts) + self.costs.collective

    def _beside(self, rank: int, code: int, stage: int, index: int, now: float) -> None:
        """An action that is no pass: it starts here and runs on a stream of its own."""
        costs, streams = self.costs, self._streams[rank]
        share = self.schedule.ranks / self.schedule.stages.stages
        start = end = now
        if code == GATHER:
            start, end = streams.run("collectives", now, costs.gather * share)
            streams.gathered[stage] = end
        elif code == SCATTER:
            start, end = streams.run("collectives", now, costs.scatter * share)
        elif code == OFFLOAD:
            start, end = streams.run("out", now, costs.offload * share)
            streams.offloaded[stage, self._micro_batch(rank, index)] = end
        elif code == RELOAD:
            cell = stage, self._micro_batch(rank, index)
            start = max(now, streams.offloaded.get(cell, 0.0))
            start, end = streams.run("in", start, costs.reload * share)
            streams.reloaded[cell] = end
        self.starts[rank].append(start)
        self.ends[rank].append(end)

    def _finish(self) -> None:
        """What needs all ranks' ends: sums over two copies of a stage, then the optimizer."""
        actions, steps = self.schedule.actions, self.program.steps
        share = self.schedule.ranks / self.schedule.stages.stages
        meetings: dict[tuple[int, int, int], float] = {}
        sums: list[tuple[int, int, tuple[int, int, int]]] = []
        for rank, row in enumerate(steps):
            for at, (code, stage, _, _, _, index) in enumerate(row):
                if code == REDUCE:
                    peer = actions[rank][index].peer
                    pair = sorted((rank, rank if peer is None else peer))
                    key = (stage, pair[0], pair[1])
                    meetings[key] = max(meetings.get(key, 0.0), self.starts[rank][at])
                    sums.append((rank, at, key))
        for rank, at, key in sums:
            self.starts[rank][at] = meetings[key]
            self.ends[rank][at] = meetings[key] + self.costs.reduce * share
        for rank, row in enumerate(steps):
            for at, step in enumerate(row):
                if step[0] == OPT:
                    start = max((e for e in self.ends[rank][:at]), default=0.0)
                    self.starts[rank][at] = start
                    self.ends[rank][at] = start + self.costs.optimizer
                    self.busy[rank] += self.costs.optimizer


@dataclass(slots=True)
class Streams:
    """What one rank does beside its computation."""

    free: dict[str, float] = field(default_factory=dict)
    gathered: dict[int, float] = field(default_factory=dict)
    offloaded: dict[tuple[int, int], float] = field(default_factory=dict)
    reloaded: dict[tuple[int, int], float] = field(default_factory=dict)

    def run(self, stream: str, now: float, taken: float) -> tuple[float, float]:
        """Start and end of a piece of work on a stream that is in order."""
        start = max(now, self.free.get(stream, 0.0))
        self.free[stream] = start + taken
        return start, start + taken

    def gate(self, code: int, stage: int, micro_batch: int) -> float:
        """When what a pass needs from the streams is there."""
        if code not in (F, B, I):
            return 0.0
        then = self.gathered.get(stage, 0.0)
        if code != F:
            then = max(then, self.reloaded.get((stage, micro_batch), 0.0))
        return then


def _memory_changes(timeline: Timeline, rank: int) -> list[tuple[float, float]]:
    """(time, change) of the activations of one rank, in the order of its list."""
    costs, schedule = timeline.costs, timeline.schedule
    size = costs.activations(schedule.stages)
    kept = costs.weight_grad_share
    changes: list[tuple[float, float]] = []
    for (code, stage, *_), start, end in zip(
        schedule.program.steps[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    ):
        if code in (F, RELOAD):
            changes.append((start, size[stage]))
        elif code in (B, OFFLOAD):
            changes.append((end, -size[stage]))
        elif code == I:
            changes.append((end, -size[stage] * (1 - kept)))
        elif code == W:
            changes.append((end, -size[stage] * kept))
    return changes
