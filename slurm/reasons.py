"""Slurm's reasons and states in the words of a person who waits for a job.

Names as in squeue(1), JOB REASON CODES and JOB STATE CODES.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.units import format_walltime

if TYPE_CHECKING:
    from hpctrain.slurm.answers import JobInfo

_PENDING = {
    "Resources": "it is next in line and waits for nodes to become free",
    "Priority": "jobs of higher priority are before it",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "it waits for another job that failed, and will never start: "
    "cancel it",
    "BeginTime": "its earliest start lies ahead; a requeued job waits here for about two minutes",
    "JobHeldUser": "it is held: scontrol release it",
    "JobHeldAdmin": "an administrator holds it",
    "JobArrayTaskLimit": "its array runs as many tasks as it may",
    "Licenses": "it waits for a licence",
    "Reservation": "its reservation has not begun",
    "ReqNodeNotAvail": "nodes that it asks for are down or reserved; it may also run into a "
    "maintenance: a shorter slurm.time may start now",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions":
    "the nodes it needs are down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs",
    "PartitionNodeLimit": "it asks for more or fewer nodes than its partition allows, and will "
    "never start: cancel it",
    "PartitionTimeLimit": "its walltime is longer than its partition allows, and it will never "
    "start: cancel it",
    "PartitionConfig": "its request does not fit its partition",
    "BadConstraints": "no node has the features it asks for (slurm.constraint)",
    "InvalidAccount": "its account is not valid (slurm.account)",
    "InvalidQOS": "its quality of service is not valid (slurm.qos)",
    "Prolog": "the nodes are being prepared",
    "Cleaning": "it is being cleaned up after a requeue",
    "NonZeroExitCode": "it ended with an error",
    "launch failed requeued held": "a node could not start it and Slurm holds it: scontrol "
    "release it",
    "SchedDefer": "the scheduler has not looked at it yet",
    "NodeFail": "a node failed and it starts again elsewhere",
    "Preempted": "a job of higher priority took its nodes",
}  # fmt: skip
_LIMITS = (
    ("QOS", "a limit of its quality of service is reached"),
    ("Assoc", "a limit of your account is reached"),
    ("Max", "a limit of the site is reached"),
)


def why_pending(reason: str) -> str:
    """Why a job waits.

    Args:
        reason: as squeue prints it, perhaps with details after a comma or in brackets.

    Returns:
        Words with Slurm's own after them; the reason itself where it is not known.
    """
    word = reason.strip().strip("()")
    if not word or word == "None":
        return "the scheduler has not looked at it yet"
    known = _PENDING.get(word) or _PENDING.get(word.partition(",")[0])
    if known is None:
        known = next((text for name, text in _LIMITS if word.startswith(name)), None)
    return word if known is None else f"{known} ({word})"


def why_failed(info: JobInfo) -> str:
    """Why a job ended as it did.

    Args:
        info: from SlurmClient.state.

    Returns:
        Words; empty for a job that completed or is not over; the state itself where it is not
        known.
    """
    if info.active or info.state == "COMPLETED":
        return ""
    how = _ENDS.get(info.state)
    if info.state == "FAILED":
        return _failed(info)
    if info.state == "CANCELLED":
        by = f" by user {info.cancelled_by}" if info.cancelled_by else ""
        never = "" if info.nodes else " before it started"
        return f"cancelled{by}{never}"
    if info.state == "TIMEOUT" and info.time_limit is not None:
        return f"{how}: {format_walltime(info.time_limit)}"
    if how is None:
        return f"{info.state}{f' ({info.reason})' if info.reason else ''}"
    return how


_ENDS = {
    "TIMEOUT": "the walltime ended before the ranks had stopped",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it used more memory than it had asked for (slurm.memory), or than a node has",
    "PREEMPTED": "a job of higher priority took its nodes",
    "DEADLINE": "its deadline passed",
    "BOOT_FAIL": "a node did not boot",
    "REVOKED": "another cluster started it",
}


def _failed(info: JobInfo) -> str:
    code, signal = info.exit_code, info.signal
    if code == 0 and signal == 53:
        # slurmd's word for an output file that it cannot open (tried on 22.05).
        return "Slurm could not open the job's log (0:53): its directory is missing or read-only"
    if info.reason in ("BadConstraints", "InvalidAccount", "InvalidQOS"):
        return _PENDING[info.reason]
    if signal:
        return f"the batch script was ended by signal {signal}"
    if info.reason == "JobLaunchFailure":
        return "a node could not start it (JobLaunchFailure): its administrators can tell why"
    if code is None:
        return "it failed; Slurm does not say how"
    if code == 75:
        return "stopped early and resumable (exit code 75)"
    if code > 128:
        name = _signal_name(code - 128)
        return f"a rank was ended by {name} (exit code {code})"
    return f"exit code {code}"


def _signal_name(number: int) -> str:
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
