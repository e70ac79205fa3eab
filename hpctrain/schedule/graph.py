"""Who waits for what: the dependencies of a pipeline, in one place.

Between ranks, results travel as *tokens*, numbered by (what arrives, stage, micro-batch). Each
computing action waits for at most one token and produces at most one; what a rank needs of its
own earlier work (F before B, I before W) is the order of its list, checked here. Generators,
validator, simulator and the pass that adds transfers all use this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.schedule.actions import COMPUTE, Action, ActionKind
from hpctrain.schedule.stages import StageMap

F, B, I, W, S, T, E, D = range(8)  # noqa: E741 - the letters the literature uses
GATHER, RESHARD, SCATTER, REDUCE, OFFLOAD, RELOAD, OPT = range(8, 15)

CODES = {kind: code for code, kind in enumerate(COMPUTE)} | {
    ActionKind.GATHER: GATHER,
    ActionKind.RESHARD: RESHARD,
    ActionKind.SCATTER: SCATTER,
    ActionKind.REDUCE: REDUCE,
    ActionKind.OFFLOAD: OFFLOAD,
    ActionKind.RELOAD: RELOAD,
    ActionKind.OPT: OPT,
}

LOCAL = 0
"""Hop of a token that stays on its rank."""
EVERYONE = -1
"""Hop of a token that comes from, or goes to, all ranks."""


class InvalidScheduleError(ValueError):
    """A table that no executor could run, with every fault found in it."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Edge:
    """What one pass waits for and what it produces, for micro-batch 0; -1 where nothing.

    ``hop`` is where the product goes: ``LOCAL``, ``EVERYONE`` or 1 + the number of a link.
    """

    need: int
    product: int
    hop: int


class Wiring:
    """Token numbers of a pipeline: ``token of micro-batch j = Edge.need + j``.

    Args:
        stages: the placement.
        micro_batches: m.
        vocabulary: 0 for an output layer on the last stage; 1 or 2 for Vocabulary
            Parallelism with that many barriers between the last forward and its backward
            (algorithms 2 and 1 of Yeung et al. 2024).
    """

    def __init__(self, stages: StageMap, micro_batches: int, vocabulary: int = 0) -> None:
        assert vocabulary in (0, 1, 2), vocabulary
        self.stages = stages
        self.micro_batches = micro_batches
        self.vocabulary = vocabulary
        count, m = stages.stages, micro_batches
        self.output = 2 * count * m  # the last stage's output, on all ranks
        self.stats = self.output + m  # softmax statistics, from all ranks
        self.embedding_grad = self.stats + m  # gradient of the first stage's input
        self.tokens = self.embedding_grad + m
        self.links: list[tuple[int, int]] = []
        self._numbers: dict[tuple[int, int], int] = {}
        # edges[code][route][stage]
        self.edges = [[self._row(code, route) for route in stages.routes] for code in range(8)]

    def activation(self, stage: int) -> int:
        """Token of the activation that arrives at ``stage`` (micro-batch 0)."""
        return stage * self.micro_batches

    def gradient(self, stage: int) -> int:
        """Token of the gradient that arrives at ``stage`` (micro-batch 0)."""
        return (self.stages.stages + stage) * self.micro_batches

    def producers(self, token: int) -> int:
        """How many ranks produce this token: 1, or all of them."""
        if not self.vocabulary:
            return 1
        kind, first = token // self.micro_batches, token < self.micro_batches
        collected = kind == 2 * self.stages.stages - 1 or self.stats <= token < self.embedding_grad
        return self.stages.ranks if first or collected else 1

    def _hop(self, route: tuple[int, ...], source: int, target: int) -> int:
        pair = (route[source], route[target])
        if pair[0] == pair[1]:
            return LOCAL
        if pair not in self._numbers:
            self.links.append(pair)
            self._numbers[pair] = len(self.links)
        return self._numbers[pair]

    def _row(self, code: int, route: tuple[int, ...]) -> list[Edge]:
        return [self._edge(code, route, stage) for stage in range(len(route))]

    def _edge(self, code: int, route: tuple[int, ...], stage: int) -> Edge:
        last, vocabulary = len(route) - 1, self.vocabulary
        match code:
            case 0:  # F
                need = self.activation(stage) if stage or vocabulary else -1
                if stage < last:
                    return Edge(
                        need, self.activation(stage + 1), self._hop(route, stage, stage + 1)
                    )
                return Edge(need, self.output if vocabulary else -1, EVERYONE)
            case 1 | 2:  # B, I
                need = self.gradient(stage) if stage < last or vocabulary else -1
                if stage:
                    return Edge(need, self.gradient(stage - 1), self._hop(route, stage, stage - 1))
                return Edge(need, self.embedding_grad if vocabulary else -1, EVERYONE)
            case 4:  # S
                product = self.gradient(last) if vocabulary == 1 else self.stats
                return Edge(self.output, product, EVERYONE)
            case 5:  # T
                if vocabulary == 2:
                    return Edge(self.stats, self.gradient(last), EVERYONE)
                return Edge(self.gradient(last), -1, LOCAL)
            case 6:  # E
                return Edge(-1, self.activation(0), EVERYONE)
            case 7:  # D
                return Edge(self.embedding_grad, -1, LOCAL)
        return Edge(-1, -1, LOCAL)  # W


Step = tuple[int, int, int, int, int, int]
"""(code, stage, need, product, hop, index in the rank's list)"""


@dataclass(frozen=True)
class Program:
    """A schedule compiled for the simulator: transfers gone, dependencies as token numbers."""

    wiring: Wiring
    steps: tuple[tuple[Step, ...], ...]
    extras: bool
    """Whether there are actions that are no passes of the pipeline (``GATHER`` .. ``OPT``)."""
    gated: bool
    """Whether a pass may have to wait for one of them (``GATHER``, ``RELOAD``)."""


def compile_table(
    stages: StageMap,
    micro_batches: int,
    route_of: Sequence[int],
    actions: Sequence[Sequence[Action]],
    vocabulary: int = 0,
) -> Program:
    """Compile a table of actions.

    Raises:
        InvalidScheduleError: a rank's own order breaks a dependency, or a pass is missing, done
            twice, or done by the wrong rank.
    """
    wiring = Wiring(stages, micro_batches, vocabulary)
    problems = _Ledger(stages, micro_batches, wiring.vocabulary).check(actions, route_of)
    if problems:
        raise InvalidScheduleError(problems)
    extras: set[int] = set()
    steps: list[tuple[Step, ...]] = []
    for row in actions:
        mine: list[Step] = []
        for index, (kind, stage, micro_batch, _, _) in enumerate(row):
            code = CODES.get(kind)
            if code is None:
                continue
            if code < GATHER:
                assert stage is not None
                assert micro_batch is not None
                edge = wiring.edges[code][route_of[micro_batch]][stage]
                need, product = edge.need, edge.product
                mine.append(
                    (
                        code,
                        stage,
                        need + micro_batch if need >= 0 else -1,
                        product + micro_batch if product >= 0 else -1,
                        edge.hop,
                        index,
                    )
                )
            else:
                extras.add(code)
                mine.append((code, -1 if stage is None else stage, -1, -1, LOCAL, index))
        steps.append(tuple(mine))
    return Program(wiring, tuple(steps), bool(extras), bool(extras & {GATHER, RELOAD}))


class _Ledger:
    """Each pass exactly once, on the rank that holds the stage, after what it is made from."""

    # bits of what has been done of a (stage, micro-batch); S T E D per rank and micro-batch
    BEFORE = {"F": 0, "B": 1, "I": 1, "W": 1 | 4, "S": 0, "T": 1, "E": 0, "D": 0}  # noqa: RUF012
    SETS = {"F": 1, "B": 2 | 4 | 8, "I": 4, "W": 8, "S": 1, "T": 2, "E": 4, "D": 8}  # noqa: RUF012

    def __init__(self, stages: StageMap, micro_batches: int, vocabulary: int) -> None:
        self.stages, self.micro_batches, self.vocabulary = stages, micro_batches, vocabulary

    def check(self, actions: Sequence[Sequence[Action]], route_of: Sequence[int]) -> list[str]:
        m, count, ranks = self.micro_batches, self.stages.stages, self.stages.ranks
        problems: list[str] = []
        if len(actions) != ranks:
            return [f"{ranks} ranks need as many lists of actions, found {len(actions)}"]
        if len(route_of) != m:
            return [f"{m} micro-batches need as many routes, found {len(route_of)}"]
        done = bytearray(count * m)
        done_vocabulary = bytearray(ranks * m)
        first_last = {"S": count - 1, "T": count - 1, "E": 0, "D": 0}
        routes, chunk_of = self.stages.routes, self.stages.chunk_of
        for rank, row in enumerate(actions):
            for action in row:
                kind, stage, micro_batch, chunk, _ = action
                before = self.BEFORE.get(kind)
                if before is None:
                    continue
                if (
                    stage is None
                    or micro_batch is None
                    or not (0 <= stage < count and 0 <= micro_batch < m)
                ):
                    problems.append(f"rank {rank}: {action}: no such stage or micro-batch")
                    continue
                route = route_of[micro_batch]
                if kind in first_last:
                    ledger, cell = done_vocabulary, rank * m + micro_batch
                    wrong = stage != first_last[kind]
                else:
                    ledger, cell = done, stage * m + micro_batch
                    wrong = routes[route][stage] != rank or chunk_of[route][stage] != chunk
                if wrong:
                    problems.append(f"rank {rank}: {action}: this stage is not here")
                    continue
                bits, sets = ledger[cell], self.SETS[kind]
                if bits & sets:
                    problems.append(f"rank {rank}: {action}: done already")
                elif bits & before != before:
                    problems.append(f"rank {rank}: {action}: before what it is made from")
                ledger[cell] = bits | sets
        problems += self._missing(done, done_vocabulary)
        return problems

    def _missing(self, done: bytearray, done_vocabulary: bytearray) -> list[str]:
        m, problems = self.micro_batches, []
        names = {1: "forward", 4: "backward (input)", 8: "backward (weights)"}
        for cell, bits in enumerate(done):
            for bit, name in names.items():
                if not bits & bit:
                    problems.append(f"stage {cell // m}, micro-batch {cell % m}: no {name}")
        if self.vocabulary:
            for cell, bits in enumerate(done_vocabulary):
                for bit, name in {1: "S", 2: "T", 4: "E", 8: "D"}.items():
                    if not bits & bit:
                        problems.append(f"rank {cell // m}, micro-batch {cell % m}: no {name}")
        return problems
