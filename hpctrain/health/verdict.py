"""From what each rank says of itself to who holds up the others, in words; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from hpctrain.health.heartbeat import Beat

_ORDER = ("start", "preflight", "data", "forward_backward", "update", "agree", "health", "poll",
          "checkpoint", "end")  # fmt: skip
_SHOWN = 16


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank stands.

    Attributes:
        step: that it works on.
        phase: of that step.
        place: in its code.
    """

    step: int
    phase: str
    place: str = ""

    @property
    def progress(self) -> tuple[int, int]:
        """Comparable: further ranks have more."""
        return self.step, _ORDER.index(self.phase) if self.phase in _ORDER else 0

    def __str__(self) -> str:
        at = f", at {self.place}" if self.place else ""
        return f"{self.phase} of step {self.step}{at}"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Collectives of one process group that a rank has entered.

    Attributes:
        axis: of the layout.
        members: ranks of the group.
        count: how many, since the start.
        operation: the newest.
    """

    axis: str
    members: tuple[int, ...]
    count: int
    operation: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says when nothing goes on.

    Attributes:
        rank, host: who.
        position: where its training thread stands.
        seconds: since when.
        arrivals: by name of the process group.
        stack: of the training thread.
        threads: stacks of all threads.
        neighbours: state of the processes of its node, by rank, as the kernel has it.
    """

    rank: int
    host: str
    position: Position
    seconds: float
    arrivals: dict[str, Arrivals] = field(default_factory=dict)
    stack: str = ""
    threads: str = ""
    neighbours: dict[int, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        groups = {
            name: Arrivals(**{**one, "members": tuple(one["members"])})
            for name, one in data["arrivals"].items()
        }
        return cls(
            **{
                **data,
                "position": Position(**data["position"]),
                "arrivals": groups,
                "neighbours": {int(rank): state for rank, state in data["neighbours"].items()},
            }
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who holds up the others.

    Attributes:
        rank, host, step: of the first of them.
        summary: one line.
        text: the whole report.
        stack: of that rank, empty where it could not say.
    """

    rank: int
    host: str
    step: int
    summary: str
    text: str
    stack: str


def judge(
    reports: Sequence[Report],
    world_size: int,
    beats: Sequence[Beat],
    attempt: int,
    hosts: Sequence[str] = (),
) -> Verdict:
    """Name the ranks that hold up the others.

    Args:
        reports: of the ranks that could speak, at least one.
        world_size: ranks of the job.
        beats: last heartbeats of all ranks.
        attempt: number of the incarnation.
        hosts: of each rank, also of those that cannot speak.
    """

    def where(rank: int) -> str:
        return _where(rank, by_rank, reports, beats, host_of(rank))

    def host_of(rank: int) -> str:
        return hosts[rank] if rank < len(hosts) else _host_of(rank, reports)

    by_rank = {report.rank: report for report in reports}
    silent = [rank for rank in range(world_size) if rank not in by_rank]
    missing, collective = _not_arrived(reports)
    if not silent and not missing:
        missing = _behind(reports)
    # A rank that cannot speak is the cause; those that wait for it only look late.
    guilty = silent or missing
    step = max(report.position.step for report in reports)
    waited = max(report.seconds for report in reports)
    lines = [f"no progress for {waited:.0f} s in step {step} (attempt {attempt})"]
    if collective:
        lines.append(collective)
    lines += [where(rank) for rank in guilty[:_SHOWN]]
    if len(guilty) > _SHOWN:
        lines.append(f"and {len(guilty) - _SHOWN} more")
    if not guilty:
        lines.append(
            "all ranks stand in the same place: what they wait for is the network, the file "
            "system or a library"
        )
    summary = f"hang in step {step}: " + (where(guilty[0]) if guilty else lines[-1])
    if len(guilty) > 1:
        summary += f" (and {len(guilty) - 1} more)"
    if collective and guilty:
        summary += f"; {collective}"
    first = guilty[0] if guilty else reports[0].rank
    own = by_rank.get(first)
    lines += ["", "where the ranks stand:", *_positions(reports), "", "stacks:"]
    told = [rank for rank in guilty if rank in by_rank][:_SHOWN]
    told += [r.rank for r in reports if r.rank not in told][: max(0, _SHOWN - len(told))]
    for rank in told:
        lines += [f"rank {rank} on {by_rank[rank].host}:", by_rank[rank].stack.rstrip()]
    return Verdict(
        rank=first,
        host=own.host if own else host_of(first),
        step=step,
        summary=summary,
        text="\n".join(lines) + "\n",
        stack=own.stack if own else "",
    )


def _not_arrived(reports: Sequence[Report]) -> tuple[list[int], str]:
    """Ranks that have entered fewer collectives of a group than its other members, and which
    collective that is; of several groups the one with the fewest missing."""
    groups: dict[str, dict[int, Arrivals]] = {}
    for report in reports:
        for name, one in report.arrivals.items():
            groups.setdefault(name, {})[report.rank] = one
    best: tuple[list[int], str] = ([], "")
    for members in groups.values():
        most = max(one.count for one in members.values())
        example = next(one for one in members.values() if one.count == most)
        speaking = {report.rank for report in reports}
        late = [
            rank
            for rank in example.members
            if rank in speaking and (rank not in members or members[rank].count < most)
        ]
        if not late or (best[0] and len(best[0]) <= len(late)):
            continue
        there = [rank for rank in example.members if rank in members and rank not in late]
        text = (
            f"{example.operation} number {most} of axis {example.axis} "
            f"(ranks {ranges(example.members)}): {_ranks(there)} in it, {_ranks(late)} not arrived"
        )
        best = (late, text)
    return best


def _behind(reports: Sequence[Report]) -> list[int]:
    """Ranks that are further back than others."""
    front = max(report.position.progress for report in reports)
    back = min(report.position.progress for report in reports)
    return [r.rank for r in reports if r.position.progress == back] if back < front else []


def _where(
    rank: int,
    by_rank: dict[int, Report],
    reports: Sequence[Report],
    beats: Sequence[Beat],
    host: str,
) -> str:
    report = by_rank.get(rank)
    if report is not None:
        return f"rank {rank} on {report.host} stands in {report.position}"
    state = next((r.neighbours[rank] for r in reports if rank in r.neighbours), None)
    what = f"its process is {state}" if state else "its process is stopped or gone, or its node is"
    last = next((beat for beat in beats if beat.rank == rank), None)
    seen = f", last seen in {Position(last.step, last.phase)}" if last else ""
    return f"rank {rank} on {host} does not answer: {what}{seen}"


def _host_of(rank: int, reports: Sequence[Report]) -> str:
    return next((r.host for r in reports if rank in r.neighbours), "an unknown node")


def _positions(reports: Sequence[Report]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for report in reports:
        groups.setdefault(str(report.position), []).append(report.rank)
    return [f"  {_ranks(ranks)}: {where}" for where, ranks in groups.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}" if ranks else "nobody"


def ranges(ranks: Sequence[int]) -> str:
    """``0-3,7`` of 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
