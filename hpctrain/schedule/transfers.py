"""Add communication to a table of passes: one pass for all methods.

Generators only order what is computed. Here every result that changes rank gets its send and
its receive, every pass of Vocabulary Parallelism its collectives, every stage that is held twice
its sum of gradients.

Why the result cannot deadlock, even if a send blocks until it is received: all events of all
ranks (each pass; each message as one event on both of its ranks) are put in **one sequence** in
which everything comes after what it depends on, and a rank's list is the part of that sequence
that concerns it. Whatever has been done, the first event of the sequence that has not can always
go on: both of its ranks have nothing before it. Two ranks therefore also agree on the order of
the messages between them, so no tags are needed.

The sequence is by time, one unit a pass: a message stands where its result is finished, which is
as early as it can be, so that a receive is posted long before the pass that waits for it.
"""

from __future__ import annotations

from collections import defaultdict

from hpctrain.schedule.actions import TRANSFERS, Action, ActionKind
from hpctrain.schedule.costs import Costs
from hpctrain.schedule.graph import LOCAL, OPT, B, E, F, I, S, T, W, Wiring
from hpctrain.schedule.simulate import Timeline, simulate
from hpctrain.schedule.table import Schedule

Key = tuple[float, int, int, int]
"""(time, 0 for messages and 1 for the rest, place in the simulation's order, kind of message)"""

_CLOCK = Costs(
    vocabulary_forward=1.0, vocabulary_weight_grad=1.0, embedding=1.0, embedding_grad=1.0
)


def with_transfers(schedule: Schedule) -> Schedule:
    """The same schedule with sends, receives and pipeline collectives in its lists.

    Raises:
        InvalidScheduleError: the table cannot be run.
        ValueError: it has transfers already.
    """
    if schedule.has_transfers:
        raise ValueError(f"schedule {schedule.name} has its transfers already")
    return _Sequence(schedule).rows()


def without_transfers(schedule: Schedule) -> Schedule:
    """The passes only: what :func:`with_transfers` added is taken away."""
    added = {*TRANSFERS, ActionKind.SHARE, ActionKind.COMBINE, ActionKind.STATS, ActionKind.REDUCE}
    rows = tuple(tuple(a for a in row if a.kind not in added) for row in schedule.actions)
    return schedule.with_actions(rows)


class _Sequence:
    """All events with their keys, collected rank by rank and then sorted."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.timeline: Timeline = simulate(schedule, _CLOCK)
        self.wiring: Wiring = schedule.program.wiring
        self.lists: list[list[tuple[Key, Action]]] = [[] for _ in range(schedule.ranks)]
        self.last_backward: dict[tuple[int, int | None], Key] = {}
        self.collected: defaultdict[tuple[int, int | None], list[Key]] = defaultdict(list)

    def rows(self) -> Schedule:
        schedule, timeline = self.schedule, self.timeline
        last = schedule.stages.stages - 1
        for place, (rank, at) in enumerate(timeline.order):
            code, stage, _, product, hop, index = schedule.program.steps[rank][at]
            action = schedule.actions[rank][index]
            if code == OPT:
                continue
            self.lists[rank].append(((timeline.starts[rank][at], 1, place, 0), action))
            done: Key = (timeline.ends[rank][at], 0, place, 0)
            if code in (F, I, B) and product >= 0 and hop > LOCAL:
                self._transfer(code, action, rank, self.wiring.links[hop - 1][1], done)
            if code in (B, W):
                self.last_backward[rank, action.chunk] = done
            if schedule.vocabulary:
                if code in (S, T, E):
                    self.collected[code, action.micro_batch].append(done)
                if (code == F and stage == last) or (code in (B, I) and stage == 0):
                    self._everyone(ActionKind.SHARE, stage, action.micro_batch, rank, done)
        self._combine()
        self._reduce()
        return schedule.with_actions(
            tuple(
                (*(action for _, action in sorted(keyed, key=_key)), *self._optimizer(rank))
                for rank, keyed in enumerate(self.lists)
            )
        )

    def _optimizer(self, rank: int) -> list[Action]:
        return [a for a in self.schedule.actions[rank] if a.kind is ActionKind.OPT]

    def _chunk(self, stage: int, micro_batch: int) -> int:
        schedule = self.schedule
        return schedule.stages.chunk_of[schedule.route_of[micro_batch]][stage]

    def _transfer(self, code: int, action: Action, rank: int, peer: int, key: Key) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        assert stage is not None
        assert micro_batch is not None
        if code == F:
            kinds, target = (ActionKind.SEND_F, ActionKind.RECV_F), stage + 1
        else:
            kinds, target = (ActionKind.SEND_B, ActionKind.RECV_B), stage - 1
        send = Action(kinds[0], stage, micro_batch, action.chunk, peer)
        receive = Action(kinds[1], target, micro_batch, self._chunk(target, micro_batch), rank)
        self.lists[rank].append((key, send))
        self.lists[peer].append((key, receive))

    def _everyone(
        self, kind: ActionKind, stage: int, micro_batch: int | None, root: int, key: Key
    ) -> None:
        for keyed in self.lists:
            keyed.append(((*key[:3], 1), Action(kind, stage, micro_batch, None, root)))

    def _combine(self) -> None:
        """Collectives that wait for a pass on every rank stand where the last of them ends."""
        schedule = self.schedule
        last = schedule.stages.stages - 1
        input_grad = S if schedule.vocabulary == 1 else T
        for (code, j), keys in self.collected.items():
            stage = 0 if code == E else last
            kind = ActionKind.COMBINE
            if code == S and input_grad == T:
                kind = ActionKind.STATS
            elif code == T and input_grad == S:
                continue
            self._everyone(kind, stage, j, schedule.rank_of(stage, j or 0), max(keys))

    def _reduce(self) -> None:
        """Stages held twice: the copies' gradients are summed when both are complete."""
        stages = self.schedule.stages
        if len(stages.routes) == 1:
            return
        for stage in range(stages.stages):
            holders = [
                (route[stage], chunks[stage])
                for route, chunks in zip(stages.routes, stages.chunk_of, strict=True)
            ]
            key = max(self.last_backward[holder] for holder in holders)
            for (rank, chunk), (peer, _) in zip(holders, holders[::-1], strict=True):
                action = Action(ActionKind.REDUCE, stage, None, chunk, peer)
                self.lists[rank].append(((*key[:3], 2), action))


def _key(item: tuple[Key, Action]) -> Key:
    return item[0]
