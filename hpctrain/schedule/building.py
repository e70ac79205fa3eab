"""What all generators share: refusing what a method does not allow, and building the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.errors import ImpossibleError
from hpctrain.schedule.actions import COMPUTE, Action, ActionKind
from hpctrain.schedule.graph import B, F
from hpctrain.schedule.stages import StageMap
from hpctrain.schedule.table import Claim, Schedule
from hpctrain.schedule.weave import Order, Pass


def assemble(
    name: str,
    stages: StageMap,
    micro_batches: int,
    order: Order,
    claim: Claim,
    *,
    route_of: Sequence[int] = (),
    vocabulary: int = 0,
    options: Mapping[str, int | float | str] | None = None,
) -> Schedule:
    """A schedule of passes, with ``OPT`` at the end of each rank; transfers come later."""
    route_of = tuple(route_of) or (0,) * micro_batches
    chunk_of = stages.chunk_of
    rows: list[tuple[Action, ...]] = []
    for passes in order:
        row = [
            Action(COMPUTE[code], stage, j, chunk_of[route_of[j]][stage] if code < 4 else None)
            for code, stage, j in passes
        ]
        rows.append((*row, Action(ActionKind.OPT)))
    return Schedule(
        name=name,
        stages=stages,
        micro_batches=micro_batches,
        actions=tuple(rows),
        claim=claim,
        route_of=route_of,
        vocabulary=vocabulary,
        options=tuple((options or {}).items()),
    )


def require(holds: bool, name: str, what: str, hint: str | None = None) -> None:
    """Refuse p, v and m that a method does not allow.

    Raises:
        ImpossibleError: ``holds`` is false.
    """
    if not holds:
        raise ImpossibleError(f"schedule {name}: {what}", hint=hint)


def one_chunk(name: str, chunks: int) -> None:
    """Refuse v > 1 for methods that keep one stage on a rank."""
    require(
        chunks == 1,
        name,
        f"one stage a rank, so chunks is 1, found {chunks}",
        "with several chunks a rank: interleaved, bfs, zeropp, hanayo, bitpipe",
    )


def one_then_one(forwards: Sequence[Pass], backwards: Sequence[Pass], ahead: int) -> list[Pass]:
    """``ahead`` forwards, then forward and backward by turns, then the other backwards."""
    ahead = min(ahead, len(forwards))
    row = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += (forward, backward)
    return row + list(backwards[len(forwards) - ahead :])


def rounds(
    rank: int, ranks: int, chunks: int, micro_batches: int, size: int
) -> tuple[list[Pass], list[Pass]]:
    """A rank's forwards and backwards, looped placement, ``size`` micro-batches at a time.

    Each round goes through a rank's chunks in order, and backward through them in reverse,
    all micro-batches of the round in one chunk before the next chunk.
    """
    forwards: list[Pass] = []
    backwards: list[Pass] = []
    for start in range(0, micro_batches, size):
        members = range(start, min(start + size, micro_batches))
        for chunk in range(chunks):
            forwards += [(F, chunk * ranks + rank, j) for j in members]
        for chunk in reversed(range(chunks)):
            backwards += [(B, chunk * ranks + rank, j) for j in members]
    return forwards, backwards
