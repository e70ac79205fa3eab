"""How a sequence lies over context-parallel ranks: what data, model, planner and topo share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Run = tuple[int, int]
"""First and one past the last of consecutive places of a sequence."""


@dataclass(frozen=True, slots=True)
class SequenceSplit:
    """Which places of a sequence each rank of a context group holds.

    The group is ``size / inner`` members of a ring, each of them ``inner`` neighbouring ranks
    that exchange heads (Ulysses). A ring of c members cuts the sequence into 2c chunks and gives
    member i the chunks i and 2c-1-i, so that with a causal mask all have the same work::

        chunks   0  1  2  3  4  5  6  7        member 0: 0 7    member 2: 2 5
                 0  1  2  3  3  2  1  0        member 1: 1 6    member 3: 3 4

    Inside a member each rank holds consecutive tokens of what the member holds. Lengths that do
    not divide are shared as evenly as can be.

    Attributes:
        size: ranks of the group.
        inner: of them, those that exchange heads with each other; divides ``size``.
        zigzag: pair early with late chunks; without, members hold consecutive places.
    """

    size: int = 1
    inner: int = 1
    zigzag: bool = True

    @property
    def ring(self) -> int:
        """Members of the ring."""
        return self.size // self.inner

    def member_runs(self, length: int, member: int) -> list[Run]:
        """Places of a member of the ring, ascending; chunks that touch are one run."""
        if self.ring == 1 or not self.zigzag:
            return [_part(length, self.ring, member)]
        chunks = 2 * self.ring
        early, late = (_part(length, chunks, c) for c in (member, chunks - 1 - member))
        return [(early[0], late[1])] if early[1] == late[0] else [early, late]

    def runs(self, length: int, place: int) -> list[Run]:
        """Places of the rank at ``place`` of the group, ascending, as runs."""
        member, inside = divmod(place, self.inner)
        held = self.member_runs(length, member)
        first, stop = _part(sum(b - a for a, b in held), self.inner, inside)
        found = []
        for a, b in held:
            begin, end = a + max(first, 0), min(b, a + stop)
            if begin < end:
                found.append((begin, end))
            first, stop = first - (b - a), stop - (b - a)
        return found

    def count(self, length: int, place: int) -> int:
        """Tokens of the rank at ``place``."""
        return count(self.runs(length, place))

    def even(self, length: int) -> bool:
        """Whether all ranks hold the same number of tokens."""
        return length % self.size == 0 or len({self.count(length, p) for p in range(self.size)}) < 2

    def fits(self, length: int) -> bool:
        """Whether every rank holds a token at least."""
        return length >= self.size and all(self.count(length, p) for p in range(self.size))


def count(runs: Sequence[Run]) -> int:
    """Places in runs."""
    return sum(b - a for a, b in runs)


def _part(total: int, parts: int, index: int) -> Run:
    """Part ``index`` of ``total`` things; the first parts take the rest, the last may be empty."""
    each, rest = divmod(total, parts)
    first = index * each + min(index, rest)
    return first, first + each + (index < rest)
