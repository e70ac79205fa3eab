"""Ragged shards: whole blocks of tensors laid on ranks, evenly by bytes. Integers only.

An even cut of every tensor (FSDP's) runs through the matrices that a matrix optimizer has to
see whole and through the blocks that share a scale or a preconditioner. Here the unit is a
block: the whole tensor, or a run of its rows of given length; ranks get whole blocks, so their
shares are ragged, and a planner makes them as even as blocks allow (the idea of veScale-FSDP's
RaggedShard).

::

    tensors      A (whole)      B (whole)   C (blocks of 2 rows)
                 ┌────────┐     ┌─────┐     ┌──┬──┬──┬──┬──┐
    rank 0       │ A      │     │     │     │C0│  │  │  │  │
    rank 1       │        │     │ B   │     │  │C1│C2│C3│C4│
                 └────────┘     └─────┘     └──┴──┴──┴──┴──┘
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

WHOLE = 0
"""Block length of a tensor that is not cut."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a tensor that one rank owns.

    Attributes:
        tensor: its number in the plan.
        owner: rank, 0 the first.
        start, stop: rows, a multiple of the block but for the tensor's end.
    """

    tensor: int
    owner: int
    start: int
    stop: int


@dataclass(frozen=True)
class RaggedPlan:
    """Who owns what: of each tensor at most one piece a rank, all of them together once.

    Attributes:
        ranks: number of ranks.
        pieces: ordered by owner, then tensor.
        loads: bytes of each rank.
    """

    ranks: int
    pieces: tuple[Piece, ...]
    loads: tuple[int, ...]

    @cached_property
    def by_rank(self) -> tuple[tuple[Piece, ...], ...]:
        """Pieces of each rank, in the order of tensors."""
        found: list[list[Piece]] = [[] for _ in range(self.ranks)]
        for piece in self.pieces:
            found[piece.owner].append(piece)
        return tuple(tuple(pieces) for pieces in found)

    def piece(self, rank: int, tensor: int) -> Piece | None:
        """What ``rank`` owns of a tensor."""
        return next((p for p in self.by_rank[rank] if p.tensor == tensor), None)


def plan_ragged(
    shapes: Sequence[Sequence[int]],
    ranks: int,
    block: int | Sequence[int] = WHOLE,
    itemsize: int | Sequence[int] = 4,
) -> RaggedPlan:
    """Lay blocks on ranks, evenly by bytes.

    Whole tensors go first, the largest first, each to the rank with the least (LPT; Graham
    1969: at most 4/3 of the best makespan). Those that may be cut are then poured, in order,
    into what the ranks have room for below a common level, cut at the nearest block. So the
    largest load is at most the larger of that of the whole tensors alone and the mean over the
    ranks that take part in pouring plus one block.

    The same arguments give the same plan everywhere.

    Args:
        shapes: of the tensors; a scalar counts as one row.
        ranks: at least 1.
        block: rows of a block, of all tensors or of each; WHOLE: the tensor is one block.
        itemsize: bytes an element, of all tensors or of each.

    Raises:
        ValueError: a number that makes no sense.
    """
    count = len(shapes)
    blocks = [block] * count if isinstance(block, int) else list(block)
    sizes = [itemsize] * count if isinstance(itemsize, int) else list(itemsize)
    if ranks < 1 or len(blocks) != count or len(sizes) != count:
        raise ValueError(
            f"{ranks} ranks, {count} shapes, {len(blocks)} blocks, {len(sizes)} item sizes"
        )
    if any(b < 0 for b in blocks) or any(s < 1 for s in sizes):
        raise ValueError("a block has 0 (whole) or more rows, an element at least 1 byte")
    rows = [shape[0] if shape else 1 for shape in shapes]
    row_bytes = [math.prod(shape[1:]) * size for shape, size in zip(shapes, sizes, strict=True)]
    loads = [0] * ranks
    pieces = []
    cut = []
    for tensor in sorted(range(count), key=lambda t: (-rows[t] * row_bytes[t], t)):
        if rows[tensor] == 0:
            continue
        if blocks[tensor] != WHOLE and blocks[tensor] < rows[tensor]:
            cut.append(tensor)
            continue
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owner] += rows[tensor] * row_bytes[tensor]
        pieces.append(Piece(tensor, owner, 0, rows[tensor]))
    cut.sort()
    ends = _room(loads, sum(rows[t] * row_bytes[t] for t in cut))
    poured = 0.0
    owner = 0
    for tensor in cut:
        start = 0
        while start < rows[tensor]:
            while owner < ranks - 1 and ends[owner] <= poured:
                owner += 1
            left = ends[owner] - poured
            wanted = round(left / max(1, row_bytes[tensor]) / blocks[tensor]) * blocks[tensor]
            stop = min(rows[tensor], start + wanted)
            if owner == ranks - 1 or all(end <= poured for end in ends[owner + 1 :]):
                stop = rows[tensor]
            if stop > start:
                pieces.append(Piece(tensor, owner, start, stop))
                taken = (stop - start) * row_bytes[tensor]
                loads[owner] += taken
                poured += taken
            if stop < rows[tensor]:
                owner += 1
            start = stop
    pieces.sort(key=lambda piece: (piece.owner, piece.tensor))
    return RaggedPlan(ranks, tuple(pieces), tuple(loads))


def _room(loads: Sequence[int], total: int) -> list[float]:
    """Where each rank's share of ``total`` bytes ends, counted from the first rank's beginning,
    if all ranks are filled to one level; ranks above it get nothing."""
    level, filled = 0.0, 0
    ordered = sorted(loads)
    for index, load in enumerate(ordered, start=1):
        filled += load
        level = (filled + total) / index
        if index == len(ordered) or level <= ordered[index]:
            break
    ends, end = [], 0.0
    for load in loads:
        end += max(0.0, level - load)
        ends.append(end)
    return ends
