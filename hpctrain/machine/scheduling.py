"""Partitions, QOS and limits of a site, and whether a request keeps to them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from hpctrain.machine.blocks import Block, Confidence, Part, Walltime
from hpctrain.units import format_walltime

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Violation:
    """A limit that a request breaks.

    Attributes:
        text: what was asked and what is allowed.
        source: where the limit was read.
        confidence: of that source; a ``low`` one is for a warning, not for a refusal.
    """

    text: str
    source: str
    confidence: Confidence

    @property
    def certain(self) -> bool:
        """Whether the limit is known well enough to refuse the request."""
        return self.confidence != "low"

    def __str__(self) -> str:
        return f"{self.text} [{self.source}; {self.confidence} confidence]"


class WalltimeBin(Part):
    """The longest walltime for a range of node counts."""

    min_nodes: Annotated[int, Field(ge=1)]
    max_nodes: Annotated[int, Field(ge=1)]
    max_walltime: Walltime


class Limits(Part):
    """Limits of one partition or QOS; None is no limit that is known.

    Attributes:
        min_nodes, max_nodes: of a job.
        max_walltime: seconds.
        bins: walltime by node count.
        max_node_minutes: nodes × minutes of a job.
        max_running_jobs, max_queued_jobs: of a user; queued counts jobs in any state.
        exclusive: whether nodes belong to one job.
        by_request: not open to everyone.
        extra: further sbatch options that it needs.
        note: what the numbers cannot say.
        source, confidence: where this entry differs from its block.
    """

    min_nodes: Count | None = None
    max_nodes: Count | None = None
    max_walltime: Walltime | None = None
    bins: tuple[WalltimeBin, ...] = ()
    max_node_minutes: Count | None = None
    max_running_jobs: Count | None = None
    max_queued_jobs: Count | None = None
    exclusive: bool | None = None
    by_request: bool = False
    extra: tuple[str, ...] = ()
    note: str | None = None
    source: str | None = None
    confidence: Confidence | None = None

    @field_validator("bins")
    @classmethod
    def _disjoint(cls, bins: tuple[WalltimeBin, ...]) -> tuple[WalltimeBin, ...]:
        ordered = sorted(bins, key=lambda one: one.min_nodes)
        for low, high in pairwise(ordered):
            if high.min_nodes <= low.max_nodes:
                raise ValueError(
                    f"walltime bins overlap: {low.min_nodes}-{low.max_nodes} and "
                    f"{high.min_nodes}-{high.max_nodes} nodes"
                )
        return tuple(ordered)

    def longest_walltime(self, nodes: int) -> int | None:
        """Seconds that a job of ``nodes`` nodes may run; None where no limit is known."""
        limits = [] if self.max_walltime is None else [self.max_walltime]
        limits += [one.max_walltime for one in self.bins if one.min_nodes <= nodes <= one.max_nodes]
        if self.max_node_minutes is not None:
            limits.append(self.max_node_minutes * 60 // nodes)
        return min(limits, default=None)

    def node_range(self) -> tuple[int, int | None]:
        """Fewest and most nodes of a job."""
        low, high = self.min_nodes or 1, self.max_nodes
        if self.bins:
            low = max(low, min(one.min_nodes for one in self.bins))
            top = max(one.max_nodes for one in self.bins)
            high = top if high is None else min(high, top)
        return low, high


class Scheduling(Block):
    """Partitions, QOS and what a user may have in the queue.

    Attributes:
        default_partition, default_qos: what a job gets that names none; None: the scheduler's.
        account_required: jobs without ``--account`` are refused.
        partitions, qos: limits by name; an empty mapping is not known.
        max_queued_jobs, max_eligible_jobs: of a user over all partitions.
        charge: what a job costs.
        requeue: what happens to a job when a node fails.
        slurm_version: as the site states it.
    """

    default_partition: str | None = None
    default_qos: str | None = None
    account_required: bool = False
    partitions: dict[str, Limits] = Field(default_factory=dict)
    qos: dict[str, Limits] = Field(default_factory=dict)
    max_queued_jobs: Count | None = None
    max_eligible_jobs: Count | None = None
    charge: str | None = None
    requeue: str | None = None
    slurm_version: str | None = None

    @model_validator(mode="after")
    def _defaults_exist(self) -> Scheduling:
        for name, table, what in (
            (self.default_partition, self.partitions, "partition"),
            (self.default_qos, self.qos, "qos"),
        ):
            if name is not None and table and name not in table:
                raise ValueError(f"default_{what} {name!r} is not among {', '.join(table)}")
        return self

    def limits(self, partition: str | None = None, qos: str | None = None) -> dict[str, Limits]:
        """The limits that hold for a job, by ``partition NAME`` and ``qos NAME``.

        A name that the file does not list has no entry: sites open partitions that no
        description knows of.
        """
        found = {}
        partition = partition or self.default_partition
        qos = qos or self.default_qos
        if partition is not None and partition in self.partitions:
            found[f"partition {partition}"] = self.partitions[partition]
        if qos is not None and qos in self.qos:
            found[f"qos {qos}"] = self.qos[qos]
        return found

    def longest_walltime(
        self, nodes: int, partition: str | None = None, qos: str | None = None
    ) -> int | None:
        """Seconds that a job of ``nodes`` nodes may run; None where no limit is known."""
        limits = [one.longest_walltime(nodes) for one in self.limits(partition, qos).values()]
        return min((limit for limit in limits if limit is not None), default=None)

    def check(
        self,
        nodes: int,
        walltime_seconds: int | None = None,
        partition: str | None = None,
        qos: str | None = None,
        *,
        account: str | None = None,
        queued_jobs: int | None = None,
    ) -> list[Violation]:
        """What of a request this site would refuse.

        Args:
            nodes: nodes of the job.
            walltime_seconds: asked walltime; None skips the walltime limits.
            partition, qos: as in the job; None is the site's default.
            account: as in the job; checked only when given (an empty one is a violation where
                the site wants one).
            queued_jobs: jobs that the user would have in the queue with this one.
        """
        found = self._unknown_names(partition, qos)
        for where, limits in self.limits(partition, qos).items():
            found += self._against(where, limits, nodes, walltime_seconds, queued_jobs)
        base = self.provenance()
        if account == "" and self.account_required:
            found.append(
                Violation(
                    "the site wants an account (slurm.account)", str(base.source), base.confidence
                )
            )
        if (
            queued_jobs is not None
            and self.max_queued_jobs is not None
            and queued_jobs > self.max_queued_jobs
        ):
            found.append(
                Violation(
                    f"{queued_jobs} jobs in the queue: a user may have {self.max_queued_jobs}",
                    base.source,
                    self.provenance("max_queued_jobs").confidence,
                )
            )
        return found

    def _unknown_names(self, partition: str | None, qos: str | None) -> list[Violation]:
        """Names the file does not list; never certain, since sites open partitions at will."""
        return [
            Violation(
                f"{what} {name} is not among those known here ({', '.join(table)}): "
                "its limits are not checked",
                self.source,
                "low",
            )
            for what, name, table in (
                ("partition", partition, self.partitions),
                ("qos", qos, self.qos),
            )
            if name is not None and table and name not in table
        ]

    def _against(
        self, where: str, limits: Limits, nodes: int, walltime: int | None, queued: int | None
    ) -> list[Violation]:
        kind, _, name = where.partition(" ")
        path = f"{'partitions' if kind == 'partition' else 'qos'}.{name}"

        def broken(field: str, text: str) -> Violation:
            base = self.provenance(f"{path}.{field}")
            return Violation(
                f"{where}: {text}",
                limits.source or base.source,
                limits.confidence or base.confidence,
            )

        found = []
        low, high = limits.node_range()
        if nodes < low:
            found.append(broken("min_nodes", f"{nodes} nodes asked, {low} are the fewest"))
        if high is not None and nodes > high:
            found.append(broken("max_nodes", f"{nodes} nodes asked, {high} are the most"))
        longest = limits.longest_walltime(nodes)
        if walltime is not None and longest is not None and walltime > longest:
            found.append(
                broken(
                    "max_walltime",
                    f"walltime {format_walltime(walltime)} asked, "
                    f"{format_walltime(longest)} is the longest on {nodes} "
                    f"node{'s' if nodes > 1 else ''}{self._longer(limits, walltime)}",
                )
            )
        most = limits.max_queued_jobs
        if queued is not None and most is not None and queued > most:
            found.append(
                broken(
                    "max_queued_jobs",
                    f"{queued} jobs in the queue, {most} are allowed",
                )
            )
        return found

    @staticmethod
    def _longer(limits: Limits, walltime: int) -> str:
        """Which node counts of the same limits allow the walltime, in words."""
        fits = [one.min_nodes for one in limits.bins if one.max_walltime >= walltime]
        return f" (jobs of {min(fits)} nodes and more may)" if fits else ""
