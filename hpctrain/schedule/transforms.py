"""Changes that apply to any method's table of passes, before transfers are added.

``2bp`` cuts every backward in two; ``vocab`` spreads output layer and embedding over all ranks;
``offload`` parks activations in host memory; ``fsdp`` gathers and reduces sharded parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from itertools import groupby, zip_longest

from hpctrain.schedule.actions import Action, ActionKind
from hpctrain.schedule.building import assemble, require
from hpctrain.schedule.costs import UNIT
from hpctrain.schedule.graph import CODES, B, I
from hpctrain.schedule.simulate import simulate
from hpctrain.schedule.table import Claim, Schedule
from hpctrain.schedule.weave import FixedOrder, Loom, Order, Pass, Settings, one_a_pass

TWO_STAGE = "2BP: 2-Stage Backpropagation, Rae et al. 2024"
VOCABULARY = "Vocabulary Parallelism, Yeung et al. 2024, sections 4 and 5"
OFFLOAD = "PipeOffload, Wan et al. 2025"

_BACKWARD = (ActionKind.B, ActionKind.I)


def two_stage(schedule: Schedule) -> Schedule:
    """Cut B into I and W; W runs where its rank would wait, the rest at the end.

    Raises:
        ImpossibleError: the method cuts its backwards itself.
    """
    name = f"{schedule.name}+2bp"
    require(not schedule.split_backward, name, "its backward is in two stages already")
    stages, m, p = schedule.stages, schedule.micro_batches, schedule.ranks
    order = [[(I if c == B else c, s, j) for c, s, j in row] for row in critical_path(schedule)]
    loom = Loom(stages, m, Settings(one_a_pass(stages)), schedule.route_of)
    idle = {"gpipe": 2 * (p - 1), "1f1b": p - 1}.get(schedule.name)
    known = idle is not None and (m >= p or schedule.name == "gpipe")
    bubble = idle / (3 * m + idle) if idle is not None and known else None
    return assemble(
        name,
        stages,
        m,
        loom.run(FixedOrder(order)),
        Claim(TWO_STAGE, m, bubble),
        route_of=schedule.route_of,
        options=dict(schedule.options),
    )


def with_vocabulary(schedule: Schedule, *, barriers: int = 1) -> Schedule:
    """Spread the output layer and the embedding over all ranks, as passes S, T, E and D.

    The last stage's backward then waits for S of all ranks (one barrier, the paper's algorithm
    2) or for S and T (two, algorithm 1). Every rank runs that many micro-batches further ahead
    forward, so that nobody waits; that is what it costs in memory.

    Raises:
        ImpossibleError: a bidirectional pipeline, which has two last stages.
        ValueError: ``barriers`` is not 1 or 2.
    """
    if barriers not in (1, 2):
        raise ValueError(f"barriers: 1 or 2, found {barriers!r}")
    name = f"{schedule.name}+vocab"
    require(len(schedule.stages.routes) == 1, name, "it has two last stages")
    require(schedule.ranks > 1, name, "on one rank there is nothing to spread")
    stages, m = schedule.stages, schedule.micro_batches
    peak = min(schedule.claim.peak_activations + barriers, m)
    order = _backwards_later(schedule, barriers)
    costs = replace(one_a_pass(stages), vocabulary_forward=0.5, vocabulary_weight_grad=0.5)
    limit = peak * stages.chunks if schedule.split_backward else float("inf")
    loom = Loom(stages, m, Settings(costs, limit=limit, vocabulary=barriers))
    return assemble(
        name,
        stages,
        m,
        loom.run(FixedOrder(order)),
        Claim(f"{VOCABULARY}; {schedule.claim.source}", peak),
        vocabulary=barriers,
        options={**dict(schedule.options), "barriers": barriers},
    )


def critical_path(schedule: Schedule) -> Order:
    """The forwards and backwards of each rank in order, without W and anything else."""
    rows: Order = []
    for row in schedule.actions:
        passes: list[Pass] = []
        for kind, stage, micro_batch, _, _ in row:
            if kind is ActionKind.F or kind in _BACKWARD:
                assert stage is not None
                assert micro_batch is not None
                passes.append((CODES[kind], stage, micro_batch))
        rows.append(passes)
    return rows


def _backwards_later(schedule: Schedule, micro_batches: int) -> Order:
    """All backwards later by the time a rank works on that many micro-batches.

    Moving all of them by one time keeps every dependency: forwards wait for forwards only,
    backwards for forwards and for backwards that moved as far.
    """
    clock = one_a_pass(schedule.stages)
    timeline = simulate(schedule, clock)
    later = 3.0 * schedule.stages.chunks * micro_batches
    rows: list[list[tuple[float, Pass]]] = [[] for _ in range(schedule.ranks)]
    for rank, action, start, _ in timeline.spans():
        if action.kind is ActionKind.F or action.kind in _BACKWARD:
            moved = start if action.kind is ActionKind.F else start + later
            rows[rank].append(
                (moved, (CODES[action.kind], action.stage or 0, action.micro_batch or 0))
            )
    return [[item for _, item in sorted(row, key=lambda dated: dated[0])] for row in rows]


def with_offload(schedule: Schedule, *, fraction: float = 0.5, lead: int = 1) -> Schedule:
    """Copy a share of the activations to host memory between forward and backward.

    On each rank the stages whose activations live longest go first, as they free most for one
    copy; of the stage that is taken in part, every so many micro-batches. Copies run beside the
    computation. The claimed peak assumes that a copy takes no longer than the pass beside it.

    Args:
        schedule: passes only.
        fraction: share of a rank's activations, 0 to 1.
        lead: passes that a reload comes before the backward it is for.

    Raises:
        ValueError: ``fraction`` or ``lead`` out of range.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction: 0 to 1, found {fraction!r}")
    if lead < 1:
        raise ValueError(f"lead: at least 1, found {lead!r}")
    rows = tuple(_offloaded_row(row, fraction, lead) for row in schedule.actions)
    trial = schedule.with_actions(rows, name=f"{schedule.name}+offload")
    peak = max(simulate(trial, UNIT).peak_activations)
    claim = Claim(
        f"{OFFLOAD}; {schedule.claim.source}",
        min(peak, schedule.claim.peak_activations),
        schedule.claim.bubble_fraction,
    )
    options = (*schedule.options, ("fraction", fraction), ("lead", lead))
    return replace(trial, claim=claim, options=options)


def _offloaded_row(row: tuple[Action, ...], fraction: float, lead: int) -> tuple[Action, ...]:
    forward = {(a.stage, a.micro_batch): i for i, a in enumerate(row) if a.kind is ActionKind.F}
    backward = {(a.stage, a.micro_batch): i for i, a in enumerate(row) if a.kind in _BACKWARD}
    lives: dict[int | None, list[int]] = {}
    for cell, start in forward.items():
        lives.setdefault(cell[0], []).append(backward[cell] - start)
    longest_first = sorted(lives, key=lambda stage: -sum(lives[stage]))
    quota = fraction * len(longest_first)
    after: dict[int, Action] = {}
    before: dict[int, list[Action]] = {}
    for place, stage in enumerate(longest_first):
        share = min(max(quota - place, 0.0), 1.0)
        for cell, start in forward.items():
            j = cell[1] or 0
            if cell[0] != stage or int((j + 1) * share) == int(j * share):
                continue
            end = backward[cell]
            if end - start < lead + 2:
                continue  # it would be back before it is gone
            chunk = row[start].chunk
            after[start] = Action(ActionKind.OFFLOAD, stage, j, chunk)
            reload = Action(ActionKind.RELOAD, stage, j, chunk)
            before.setdefault(end - lead, []).append(reload)
    result: list[Action] = []
    for index, action in enumerate(row):
        result += before.get(index, [])
        result.append(action)
        if index in after:
            result.append(after[index])
    return tuple(result)


def with_sharding(schedule: Schedule, *, resident: int = 1) -> Schedule:
    """Gather each chunk's sharded parameters before they are used, scatter its gradients after.

    The next chunk is gathered while the current one computes. A weight gradient needs no
    parameters. Gradients are reduced once a step, after the chunk's last weight gradient.

    Args:
        schedule: passes only.
        resident: chunks that stay gathered on a rank; with as many as it has, each is gathered
            once a step.

    Raises:
        ValueError: ``resident`` below 1.
    """
    if resident < 1:
        raise ValueError(f"resident: at least 1 chunk, found {resident!r}")
    rows = tuple(_sharded_row(row, resident) for row in schedule.actions)
    options = (*schedule.options, ("resident", resident))
    return schedule.with_actions(rows, name=f"{schedule.name}+fsdp", options=options)


def _sharded_row(row: tuple[Action, ...], resident: int) -> tuple[Action, ...]:
    uses = [i for i, a in enumerate(row) if a.kind in (ActionKind.F, *_BACKWARD)]
    # passes on one chunk without another between them: first and last index
    runs = [list(run) for _, run in groupby(uses, key=lambda index: row[index].chunk)]
    last_use = {row[i].chunk: i for i in uses}
    last_grad = {a.chunk: i for i, a in enumerate(row) if a.kind in (ActionKind.B, ActionKind.W)}
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    live: OrderedDict[int | None, Action] = OrderedDict()

    def gather(at: int, use: Action) -> None:
        if use.chunk not in live:
            before.setdefault(at, []).append(Action(ActionKind.GATHER, use.stage, None, use.chunk))
        live[use.chunk] = use
        live.move_to_end(use.chunk)

    def drop(at: int, use: Action) -> None:
        del live[use.chunk]
        after.setdefault(at, []).append(Action(ActionKind.RESHARD, use.stage, None, use.chunk))

    for run, upcoming in zip_longest(runs, runs[1:]):
        gather(run[0], row[run[0]])
        if upcoming is not None:
            gather(run[0], row[upcoming[0]])
        finished = [use for chunk, use in live.items() if last_use[chunk] <= run[-1]]
        for use in finished:
            drop(run[-1], use)
        while len(live) > resident:
            drop(run[-1], next(iter(live.values())))
    for chunk, at in last_grad.items():
        after.setdefault(at, []).append(Action(ActionKind.SCATTER, row[at].stage, None, chunk))
    result: list[Action] = []
    for index, action in enumerate(row):
        result += [*before.get(index, []), action, *after.get(index, [])]
    return tuple(result)
