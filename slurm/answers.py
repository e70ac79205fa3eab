"""What Slurm's commands answer: jobs, partitions, nodes, and the words they are printed in."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass

ACTIVE = frozenset(
    {
        "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED",
        "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT",
        "RESV_DEL_HOLD", "PREEMPTED_PENDING",
    }
)  # fmt: skip
FAILED = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REVOKED", "TIMEOUT",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What Slurm says about a job; what it does not say is None or empty.

    Attributes:
        job_id: as asked for.
        state: Slurm's long name (``RUNNING``); a name unknown to us is kept as it is.
        reason: why it waits or ended, Slurm's word.
        exit_code: exit status of the batch script.
        signal: signal that ended the batch script, 0 for none.
        nodes: node list in Slurm's bracket form.
        start, end: seconds since the epoch; ``end`` of a running job is its walltime's.
        time_limit: seconds; None for no limit.
        cancelled_by: user id that cancelled it.
        source: command that said so.
    """

    job_id: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    nodes: str = ""
    start: float | None = None
    end: float | None = None
    time_limit: int | None = None
    cancelled_by: str = ""
    source: str = ""

    @property
    def active(self) -> bool:
        """In the queue or running; a state of unknown name is taken for neither."""
        return self.state in ACTIVE

    @property
    def final(self) -> bool:
        """Over, well or not."""
        return self.state == "COMPLETED" or self.state in FAILED


@dataclass(frozen=True, slots=True)
class JobNow:
    """A job that is in Slurm's hands, as scontrol tells it.

    Attributes:
        state: Slurm's long name.
        restarts: how often it was requeued; grows as soon as Slurm decides to.
        preempted: a job of higher priority takes its nodes.
        run_seconds: since it began.
        time_limit: seconds; None for no limit.
        nodes: node list in Slurm's bracket form.
    """

    state: str
    restarts: int
    preempted: bool
    run_seconds: int
    time_limit: int | None
    nodes: str = ""


@dataclass(frozen=True, slots=True)
class Partition:
    """Limits of a partition; None is no limit.

    Attributes:
        max_time, default_time: seconds.
        max_nodes, min_nodes: of one job.
        total_nodes: of the partition.
        state: ``UP``, ``DOWN``, ``DRAIN`` or ``INACTIVE``.
    """

    name: str
    default: bool
    state: str
    max_time: int | None
    default_time: int | None
    max_nodes: int | None
    min_nodes: int
    total_nodes: int


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of a partition that are alike.

    Attributes:
        count: how many.
        cpus: as Slurm counts them.
        memory_mb: MiB that jobs may ask for.
        gpus: all types together.
    """

    partition: str
    count: int
    cpus: int
    memory_mb: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that Slurm has taken.

    Attributes:
        job_id: its number.
        cluster: name where sbatch gave one.
        warnings: what of the caller's environment overrides the script, and what sbatch said.
    """

    job_id: str
    cluster: str
    warnings: tuple[str, ...]


def parse_fields(line: str) -> dict[str, str]:
    """``Key=value Key=value`` of ``scontrol --oneliner``; values may hold blanks and ``=``."""
    pairs = re.findall(r"(?:^| )([A-Za-z][\w/:]*)=(.*?)(?= [A-Za-z][\w/:]*=|$)", line.strip())
    return dict(pairs)


def parse_time(text: str) -> float | None:
    """Seconds since the epoch of a local time that Slurm prints; None for Unknown, N/A."""
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    return None


def parse_time_limit(text: str) -> int | None:
    """Seconds of ``[D-]HH:MM:SS`` or ``MM:SS`` as Slurm prints them; None for UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


def parse_gpus(gres: str) -> int:
    """GPUs in a gres list such as ``gpu:a100:4(S:0-1),nvme:1``."""
    counts = re.findall(r"(?:^|,)gpu(?::[^,:()]+)??(?::(\d+))?(?=[(,]|$)", gres)
    return sum(int(count or 1) for count in counts)


def parse_number(text: str) -> int | None:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None


def word(text: str) -> str:
    """A value without Slurm's several words for nothing."""
    stripped = text.strip()
    return "" if stripped in ("None", "(null)", "N/A", "None assigned", "n/a") else stripped


def parse_exit_code(text: str) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    return (int(found[1]), int(found[2])) if found else (None, None)


def parse_cancelled(text: str) -> tuple[str, str]:
    """``CANCELLED by 1000`` as state and user id."""
    state, _, by = text.strip().partition(" by ")
    return state.rstrip("+"), by.strip()
