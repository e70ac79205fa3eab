"""One validator for all schedules: can these lists be run, and do they keep their promise?

* every stage sees every micro-batch exactly once forward and once backward (B, or I and W), on
  the rank that holds it, and each rank's order respects what it makes from its own results;
* every send has its receive, every collective all of its members, between the right passes;
* **no deadlock with blocking sends**: the lists are run with sends that return only when the
  peer stands at the matching receive, and with collectives that wait for all members. That is
  stricter than any transport: with buffered or asynchronous sends fewer things wait. Because the
  heads of two lists must match, messages between two ranks also arrive in the order sent;
* sharded parameters are there when a pass needs them and gradients are reduced once, after the
  last pass that adds to them; what is copied to host memory comes back in time;
* the activations held stay under the bound that the method claims.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from hpctrain.schedule.actions import COLLECTIVES, TRANSFERS, Action, ActionKind
from hpctrain.schedule.costs import UNIT
from hpctrain.schedule.graph import InvalidScheduleError
from hpctrain.schedule.simulate import simulate
from hpctrain.schedule.table import Schedule

MATCH = {ActionKind.SEND_F: ActionKind.RECV_F, ActionKind.SEND_B: ActionKind.RECV_B}
KINDS = {kind: number for number, kind in enumerate(ActionKind)}
PIPELINE_WIDE = (ActionKind.SHARE, ActionKind.COMBINE, ActionKind.STATS)
_REDUCES = (ActionKind.SCATTER, ActionKind.REDUCE)
_USES_PARAMETERS = (ActionKind.F, ActionKind.B, ActionKind.I)


def validate(schedule: Schedule, *, passes_only: bool = False) -> None:
    """Check a schedule completely.

    Raises:
        InvalidScheduleError: with every problem found.
    """
    problems = find_problems(schedule, passes_only=passes_only)
    if problems:
        raise InvalidScheduleError(problems)


def find_problems(schedule: Schedule, *, passes_only: bool = False) -> tuple[str, ...]:
    """Every fault of a schedule, as one line each; empty if there is none.

    Args:
        schedule: the table to check.
        passes_only: it has no transfers yet (``make(..., transfers=False)``): check the rest.
    """
    problems: list[str] = []
    for rank, row in enumerate(schedule.actions[: schedule.ranks]):
        problems += _misplaced(schedule, rank, row)
    if problems:
        return tuple(problems)
    try:
        timeline = simulate(schedule, UNIT)
    except InvalidScheduleError as error:
        return error.problems
    bound = schedule.claim.peak_activations
    for rank, peak in enumerate(timeline.peak_activations):
        if peak > bound + 1e-6:
            problems.append(
                f"rank {rank}: holds {peak:g} activations, {schedule.name} claims {bound:g}"
            )
    for rank, row in enumerate(schedule.actions):
        steps = [i for i, action in enumerate(row) if action.kind is ActionKind.OPT]
        if steps and steps != [len(row) - 1]:
            problems.append(f"rank {rank}: the optimizer step is not its one last action")
        problems += _sharding_problems(rank, row)
        problems += _offload_problems(rank, row)
    if not passes_only:
        problems += _transfer_problems(schedule)
        problems += _collective_problems(schedule)
        if not problems:  # every message has two ends: now their order
            problems += _deadlock(schedule)
    return tuple(problems)


def _misplaced(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> list[str]:
    """Every action that names a chunk names the one where this rank holds the stage."""
    held = dict(enumerate(schedule.stages.held[rank]))
    routes = range(len(schedule.stages.routes))
    problems: list[str] = []
    for action in row:
        _, stage, j, chunk, _ = action
        if chunk is None:
            continue
        possible = routes if j is None else schedule.route_of[j : j + 1]
        if held.get(chunk) not in [(route, stage) for route in possible]:
            problems.append(f"rank {rank}: {action}: stage {stage} is not chunk {chunk} here")
    return problems


def _sharding_problems(rank: int, row: tuple[Action, ...]) -> list[str]:
    """Parameters are gathered where they are used; gradients are reduced when complete."""
    problems: list[str] = []
    sharded = any(action.kind is ActionKind.GATHER for action in row)
    there: set[int | None] = set()
    reduced: set[tuple[ActionKind, int | None]] = set()
    for action in row:
        kind, _, _, chunk, _ = action
        if kind is ActionKind.GATHER:
            if chunk in there:
                problems.append(f"rank {rank}: {action}: gathered already")
            there.add(chunk)
        elif kind is ActionKind.RESHARD:
            if chunk not in there:
                problems.append(f"rank {rank}: {action}: nothing is gathered")
            there.discard(chunk)
        elif kind in _REDUCES:
            if (kind, chunk) in reduced:
                problems.append(f"rank {rank}: {action}: done already")
            reduced.add((kind, chunk))
        elif sharded and kind in _USES_PARAMETERS and chunk not in there:
            problems.append(f"rank {rank}: {action}: the parameters are not gathered")
        if reduced and kind in (ActionKind.B, ActionKind.W):
            late = any((reduces, chunk) in reduced for reduces in _REDUCES)
            problems += [f"rank {rank}: {action}: after the gradients were reduced"] * late
    if sharded:
        chunks = {action.chunk for action in row if action.kind is ActionKind.F}
        for chunk in sorted(chunks, key=str):
            if (ActionKind.SCATTER, chunk) not in reduced:
                problems.append(f"rank {rank}: chunk {chunk}: no SCATTER")
        problems += [f"rank {rank}: chunk {c}: no RESHARD" for c in sorted(there, key=str)]
    return problems


def _offload_problems(rank: int, row: tuple[Action, ...]) -> list[str]:
    """What goes to host memory comes back, once, between forward and backward."""
    problems: list[str] = []
    away: set[tuple[int | None, int | None]] = set()
    ran: set[tuple[int | None, int | None]] = set()
    for action in row:
        cell = action.stage, action.micro_batch
        if action.kind is ActionKind.F:
            ran.add(cell)
        elif action.kind is ActionKind.OFFLOAD:
            if cell not in ran or cell in away:
                problems.append(f"rank {rank}: {action}: nothing is there to copy")
            away.add(cell)
        elif action.kind is ActionKind.RELOAD:
            if cell not in away:
                problems.append(f"rank {rank}: {action}: it is not in host memory")
            away.discard(cell)
        elif action.kind in (ActionKind.B, ActionKind.I):
            if cell in away:
                problems.append(f"rank {rank}: {action}: its activations are in host memory")
            ran.discard(cell)
    return problems


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


def _collective_problems(schedule: Schedule) -> list[str]:
    """Every rank meets the collectives that its passes need, each where it must stand."""
    problems: list[str] = []
    for rank, row in enumerate(schedule.actions):
        found = Counter(action for action in row if action.kind in COLLECTIVES)
        wanted = Counter(_collectives(schedule, rank))
        problems += [f"rank {rank}: {action} is missing" for action in wanted - found]
        problems += [f"rank {rank}: {action} is not needed" for action in found - wanted]
        place = _places(schedule, row)
        for index, action in enumerate(row):
            for kind, comes_first in _neighbours(schedule, action):
                other = place.get(_cell(schedule, action._replace(kind=kind)))
                if other is not None and (other < index) != comes_first:
                    word = "before" if other < index else "after"
                    problems.append(f"rank {rank}: {kind} is {word} {action}")
    return problems


def _collectives(schedule: Schedule, rank: int) -> list[Action]:
    """Pipeline-wide collectives and sums of copies that a rank takes part in."""
    stages, last = schedule.stages, schedule.stages.stages - 1
    actions: list[Action] = []
    if schedule.vocabulary:
        for j in range(schedule.micro_batches):
            for kind, stage in ((ActionKind.SHARE, last), (ActionKind.COMBINE, last)):
                actions.append(Action(kind, stage, j, None, schedule.rank_of(stage, j)))
                actions.append(Action(kind, 0, j, None, schedule.rank_of(0, j)))
            if schedule.vocabulary == 2:
                actions.append(Action(ActionKind.STATS, last, j, None, schedule.rank_of(last, j)))
    if len(stages.routes) == 2:
        for chunk, (route, stage) in enumerate(stages.held[rank]):
            peer = stages.routes[1 - route][stage]
            actions.append(Action(ActionKind.REDUCE, stage, None, chunk, peer))
    return actions


def _neighbours(schedule: Schedule, action: Action) -> list[tuple[ActionKind, bool]]:
    """Passes of the same stage and micro-batch, and whether they come before this action."""
    kinds = ActionKind
    last = schedule.stages.stages - 1
    match action.kind:
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
        [action for action in row if action.kind in TRANSFERS or action.kind in COLLECTIVES]
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
