"""Which rank holds which stage of the model.

A model of ``stages`` pieces is laid over ``ranks``; each rank holds ``chunks`` of them. A
*route* is one such placement. Almost every method has one; a bidirectional pipeline has two,
with the model held twice, and says of each micro-batch which one it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StageMap:
    """Placement of stages on ranks.

    Attributes:
        ranks: number of pipeline ranks, p.
        routes: for each route the rank of every stage, in the order of the model.
    """

    ranks: int
    routes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a pipeline needs at least 1 rank, found {self.ranks}")
        if not self.routes or len({len(route) for route in self.routes}) != 1:
            raise ValueError("every route places the same stages; at least one route is needed")
        for route in self.routes:
            if set(route) != set(range(self.ranks)):
                raise ValueError(
                    f"a route uses the ranks 0 .. {self.ranks - 1}, each at least once: {route}"
                )

    @cached_property
    def stages(self) -> int:
        """Pieces the model is cut into."""
        return len(self.routes[0])

    @cached_property
    def chunks(self) -> int:
        """Stages a rank holds on one route, v (the most of any rank where they differ)."""
        route = self.routes[0]
        return max(route.count(rank) for rank in range(self.ranks))

    @cached_property
    def held(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each rank its (route, stage) pairs; the position is ``Action.chunk``."""
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        for number, route in enumerate(self.routes):
            for stage, rank in enumerate(route):
                held[rank].append((number, stage))
        return tuple(tuple(pairs) for pairs in held)

    @cached_property
    def chunk_of(self) -> tuple[tuple[int, ...], ...]:
        """``chunk_of[route][stage]``: the local index of a stage on its rank."""
        table = [[0] * self.stages for _ in self.routes]
        for pairs in self.held:
            for index, (route, stage) in enumerate(pairs):
                table[route][stage] = index
        return tuple(tuple(row) for row in table)


def loop(ranks: int, chunks: int) -> StageMap:
    """Round robin: stage s on rank s mod p (interleaved, breadth-first, looped pipelines)."""
    return StageMap(ranks, (tuple(stage % ranks for stage in range(ranks * chunks)),))


def wave(ranks: int, chunks: int) -> StageMap:
    """Down and up again: 0 .. p-1, p-1 .. 0, 0 ..; with 2 chunks a V, with 2w a w-fold wave.

    At each turn two neighbouring stages lie on one rank and nothing is sent.
    """
    return StageMap(ranks, (_wave_route(ranks, chunks),))


def bidirectional(ranks: int, chunks: int) -> StageMap:
    """Two waves in opposite directions; every stage is held by two ranks."""
    down = _wave_route(ranks, chunks)
    return StageMap(ranks, (down, tuple(ranks - 1 - rank for rank in down)))


def _wave_route(ranks: int, chunks: int) -> tuple[int, ...]:
    there = tuple(range(ranks))
    return tuple(rank for lap in range(chunks) for rank in (there, there[::-1])[lap % 2])
