"""One validator for all schedules: can these lists be run, and do they keep their promise?

* every stage sees every micro-batch exactly once forward and once backward (B, or I and W), on
  the rank that holds it, and each rank's order respects what it makes from its own results;
* every send has its receive, every collective all of its members, between the right passes;
* **no deadlock with blocking sends**: the lists are run with sends that return only when the
  peer stands at the matching receive, and with collectives that wait for all members. That is
  stricter than any transport: with buffered or asynchronous sends fewer things wait. Because the
  heads of two lists must match, messages between two ranks also arrive in the order sent;
* the activations held stay under the bound that the method claims.
"""

from __future__ import annotations

from collections import defaultdict

from hpctrain.schedule.actions import TRANSFERS, Action, ActionKind
from hpctrain.schedule.costs import UNIT
from hpctrain.schedule.graph import InvalidScheduleError
from hpctrain.schedule.simulate import simulate
from hpctrain.schedule.table import Schedule

MATCH = {ActionKind.SEND_F: ActionKind.RECV_F, ActionKind.SEND_B: ActionKind.RECV_B}
KINDS = {kind: number for number, kind in enumerate(ActionKind)}
PIPELINE_WIDE = (ActionKind.SHARE, ActionKind.COMBINE, ActionKind.STATS)


def validate(schedule: Schedule) -> None:
    """Check a schedule completely.

    Raises:
        InvalidScheduleError: with every problem found.
    """
    problems = find_problems(schedule)
    if problems:
        raise InvalidScheduleError(problems)


def find_problems(schedule: Schedule) -> tuple[str, ...]:
    """Every fault of a schedule, as one line each; empty if there is none."""
    try:
        timeline = simulate(schedule, UNIT)
    except InvalidScheduleError as error:
        return error.problems
    problems: list[str] = []
    bound = schedule.claim.peak_activations
    for rank, peak in enumerate(timeline.peak_activations):
        if peak > bound + 1e-6:
            problems.append(
                f"rank {rank}: holds {peak:g} activations, {schedule.name} claims {bound:g}"
            )
    for rank, row in enumerate(schedule.actions):
        ends = [i for i, action in enumerate(row) if action.kind is ActionKind.OPT]
        if ends and ends != [len(row) - 1]:
            problems.append(f"rank {rank}: the optimizer step is not its one last action")
    if schedule.has_transfers or schedule.vocabulary or len(schedule.stages.routes) > 1:
        problems += _transfer_problems(schedule)
        problems += _deadlock(schedule)
    return tuple(problems)


def _transfer_problems(schedule: Schedule) -> list[str]:
    """Exactly the messages that are needed, each after its pass and before the one that waits."""
    problems: list[str] = []
    for rank, row in enumerate(schedule.actions):
        place = _places(schedule, row)
        wanted: set[int] = set()
        for index, action in enumerate(row):
            for message, comes_first in _messages(schedule, action, rank):
                key = _cell(schedule, message)
                wanted.add(key)
                found = place.get(key)
                if found is None or row[found] != message:
                    problems.append(f"rank {rank}: {message} is missing")
                elif (found < index) != comes_first:
                    word = "after" if comes_first else "before"
                    problems.append(f"rank {rank}: {message} is {word} {action}")
        transfers = [action for action in row if action.kind in TRANSFERS]
        problems += [
            f"rank {rank}: {action} is not needed"
            for action in transfers
            if _cell(schedule, action) not in wanted
        ]
        if len(transfers) > len(wanted):
            problems.append(f"rank {rank}: {len(transfers)} messages, {len(wanted)} are needed")
        if schedule.vocabulary or schedule.program.gated:
            problems += _other_problems(schedule, rank, place)
    return problems


def _cell(schedule: Schedule, action: Action) -> int:
    """Number of (kind, stage, micro-batch): cheaper to look up than a tuple."""
    m = schedule.micro_batches
    stage, j = action.stage or 0, action.micro_batch or 0
    return (KINDS[action.kind] * schedule.stages.stages + stage) * m + j


def _places(schedule: Schedule, row: tuple[Action, ...]) -> dict[int, int]:
    m, stages = schedule.micro_batches, schedule.stages.stages
    return {
        (KINDS[kind] * stages + stage) * m + j: index
        for index, (kind, stage, j, _, _) in enumerate(row)
        if stage is not None and j is not None
    }


def _messages(schedule: Schedule, action: Action, rank: int) -> list[tuple[Action, bool]]:
    """The messages that a pass calls for, and whether each has to stand before it."""
    kind, stage, j, chunk, _ = action
    if kind not in (ActionKind.F, ActionKind.B, ActionKind.I) or stage is None or j is None:
        return []
    route = schedule.stages.routes[schedule.route_of[j]]
    behind = route[stage - 1] if stage else rank
    ahead = route[stage + 1] if stage + 1 < len(route) else rank
    receive, send, source, target = (
        (ActionKind.RECV_F, ActionKind.SEND_F, behind, ahead)
        if kind is ActionKind.F
        else (ActionKind.RECV_B, ActionKind.SEND_B, ahead, behind)
    )
    messages: list[tuple[Action, bool]] = []
    if source != rank:
        messages.append((Action(receive, stage, j, chunk, source), True))
    if target != rank:
        messages.append((Action(send, stage, j, chunk, target), False))
    return messages


def _other_problems(schedule: Schedule, rank: int, place: dict[int, int]) -> list[str]:
    """Collectives of vocabulary passes, and copies to host memory, stand where they must."""
    problems: list[str] = []
    for index, action in enumerate(schedule.actions[rank]):
        for kind, comes_first in _neighbours(schedule, action):
            other = place.get(_cell(schedule, action._replace(kind=kind)))
            if other is not None and (other < index) != comes_first:
                word = "before" if other < index else "after"
                problems.append(f"rank {rank}: {kind} is {word} {action}")
    return problems


def _neighbours(schedule: Schedule, action: Action) -> list[tuple[ActionKind, bool]]:
    """Passes of the same stage and micro-batch, and whether they come before this action."""
    kinds = ActionKind
    last = schedule.stages.stages - 1
    match action.kind:
        case kinds.OFFLOAD:
            return [(kinds.F, True), (kinds.RELOAD, False)]
        case kinds.RELOAD:
            return [(kinds.OFFLOAD, True), (kinds.B, False), (kinds.I, False)]
        case kinds.SHARE if action.stage == last:
            return [(kinds.F, True), (kinds.S, False)]
        case kinds.SHARE:
            return [(kinds.B, True), (kinds.I, True), (kinds.D, False)]
        case kinds.STATS:
            return [(kinds.S, True), (kinds.T, False)]
        case kinds.COMBINE if action.stage == 0:
            return [(kinds.E, True), (kinds.F, False)]
        case kinds.COMBINE:
            return [(kinds.S, True), (kinds.B, False), (kinds.I, False)]
    return []


def _deadlock(schedule: Schedule) -> list[str]:
    """Run the communication with blocking sends; what is left over is stuck."""
    ranks = schedule.ranks
    lists = [
        [a for a in row if a.kind in TRANSFERS or a.kind in PIPELINE_WIDE or _pairwise(a)]
        for row in schedule.actions
    ]
    at = [0] * ranks
    arrived: defaultdict[Action, set[int]] = defaultdict(set)
    todo = list(range(ranks))
    while todo:
        rank = todo.pop()
        if at[rank] == len(lists[rank]):
            continue
        head = lists[rank][at[rank]]
        if head.kind in PIPELINE_WIDE:
            arrived[head].add(rank)
            if len(arrived[head]) == ranks:
                at = [position + 1 for position in at]
                todo = list(range(ranks))
            continue
        peer = head.peer
        assert peer is not None
        if at[peer] < len(lists[peer]) and _matches(schedule, head, rank, lists[peer][at[peer]]):
            at[rank] += 1
            at[peer] += 1
            todo += [rank, peer]
    return [
        f"rank {rank} is stuck at {lists[rank][at[rank]]}"
        for rank in range(ranks)
        if at[rank] < len(lists[rank])
    ]


def _pairwise(action: Action) -> bool:
    return action.kind is ActionKind.REDUCE


def _matches(schedule: Schedule, head: Action, rank: int, other: Action) -> bool:
    """Whether two heads are the two ends of one message, or of one sum."""
    if other.peer != rank or other.micro_batch != head.micro_batch:
        return False
    if head.kind is ActionKind.REDUCE:
        return other.kind is ActionKind.REDUCE and other.stage == head.stage
    send, receive = (head, other) if head.kind in MATCH else (other, head)
    if MATCH.get(send.kind) is not receive.kind:
        return False
    assert send.stage is not None
    return receive.stage == send.stage + (1 if send.kind is ActionKind.SEND_F else -1)
