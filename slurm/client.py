"""The only place that runs Slurm commands.

Output is parsed from formats that the caller chooses (``-o``, ``-P``, ``Key=value``), which have
not changed in ten years; the JSON of squeue and sacct changes between versions.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hpctrain.errors import SchedulerError
from hpctrain.launchers.environment import without_leaks
from hpctrain.slurm.answers import (
    JobInfo,
    JobNow,
    NodeGroup,
    Partition,
    Submitted,
    parse_cancelled,
    parse_exit_code,
    parse_fields,
    parse_gpus,
    parse_number,
    parse_time,
    parse_time_limit,
    word,
)

_COMMAND_VARIABLES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
"""A user's defaults for these commands change what they print or ask back."""


class SlurmClient:
    """Runs sbatch, squeue, sacct, scontrol, scancel and sinfo.

    Args:
        environ: the caller's environment; SLURM_*, PMI* and the like are dropped from it, and
            the job inherits the rest.
        timeout: seconds a command may take.
    """

    def __init__(self, environ: Mapping[str, str], *, timeout: float = 30.0) -> None:
        self._environ = {
            name: value
            for name, value in without_leaks(environ).items()
            if not name.startswith(_COMMAND_VARIABLES)
        }
        self.timeout = timeout

    # ---- is there a Slurm -----------------------------------------------------------------

    def why_unavailable(self) -> str | None:
        """Why jobs cannot be submitted from here, or None where they can."""
        for name in ("sbatch", "sinfo"):
            if shutil.which(name, path=self._environ.get("PATH", "")) is None:
                return f"no {name} on PATH"
        try:
            self._run(["sinfo", "--noheader", "--format=%P"], timeout=min(self.timeout, 10.0))
        except SchedulerError as error:
            return error.message
        return None

    def available(self) -> bool:
        """Whether Slurm answers."""
        return self.why_unavailable() is None

    def cluster(self) -> str:
        """Name of the cluster; empty where Slurm does not tell."""
        text = self._run(["scontrol", "show", "config"]).stdout
        found = re.search(r"^ClusterName\s*=\s*(\S+)", text, re.MULTILINE)
        return found[1] if found else ""

    # ---- submitting -----------------------------------------------------------------------

    def overriding(self) -> list[str]:
        """Warnings about SBATCH_* of the caller: sbatch puts them above the script's lines."""
        return [
            f"{name}={value} in your environment overrides the batch script: unset {name} to "
            "have the job file apply"
            for name, value in sorted(self._environ.items())
            if name.startswith("SBATCH_")
        ]

    def submit(
        self, script: Path, *, directory: Path | None = None, options: Sequence[str] = ()
    ) -> Submitted:
        """Submit a batch script.

        Args:
            script: its path.
            directory: where the job starts; the present one where not given.
            options: of sbatch, above the script's own.

        Raises:
            SchedulerError: sbatch refused it.
        """
        done = self._run(["sbatch", "--parsable", *options, str(script)], directory=directory)
        job_id, _, cluster = done.stdout.strip().splitlines()[-1].partition(";")
        if not re.fullmatch(r"\d+", job_id):
            raise SchedulerError(
                f"sbatch answered {done.stdout.strip()!r}, a job number was expected",
                hint="look with squeue --me whether the job is in the queue",
            )
        said = [f"sbatch: {line}" for line in done.stderr.strip().splitlines()]
        return Submitted(job_id, cluster, (*self.overriding(), *said))

    # ---- asking ---------------------------------------------------------------------------

    def state(self, job_id: str) -> JobInfo | None:
        """What Slurm knows of a job: squeue, then sacct, scontrol and the completion log.

        Returns:
            None where no command knows the job: it is over for longer than Slurm remembers,
            or never was.

        Raises:
            SchedulerError: the controller did not answer, and nothing else knows the job.
        """
        unreached: SchedulerError | None = None
        try:
            info = self._squeue(job_id)
        except SchedulerError as error:
            unreached, info = error, None
        asks = [self._sacct, self._completion_log]
        if unreached is None:
            asks.insert(1, self._scontrol)
        for ask in asks:
            if info is not None:
                return info
            with contextlib.suppress(SchedulerError):  # no accounting, no completion log
                info = ask(job_id)
        if info is None and unreached is not None:
            raise unreached
        return info

    def queued(self, job_id: str) -> JobInfo | None:
        """What squeue says of a job; None where it is not in the queue.

        Raises:
            SchedulerError: the controller does not answer.
        """
        return self._squeue(job_id)

    def now(self, job_id: str) -> JobNow | None:
        """What the controller does with a job at this moment; None where it knows none.

        Raises:
            SchedulerError: it does not answer.
        """
        done = self._run(["scontrol", "--oneliner", "show", "job", job_id], unknown=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("JobId=")]
        if not lines:
            return None
        fields = parse_fields(lines[0])
        return JobNow(
            state=fields.get("JobState", "UNKNOWN"),
            restarts=parse_number(fields.get("Restarts", "")) or 0,
            preempted=parse_time(fields.get("PreemptTime", "")) is not None,
            run_seconds=parse_time_limit(fields.get("RunTime", "")) or 0,
            time_limit=parse_time_limit(fields.get("TimeLimit", "")),
            nodes=word(fields.get("NodeList", "")),
        )

    def _squeue(self, job_id: str) -> JobInfo | None:
        columns = "%T|%N|%S|%e|%l|%r"
        argv = ["squeue", "--noheader", f"--jobs={job_id}", f"--format={columns}"]
        done = self._run(argv, unknown=True)
        lines = done.stdout.strip().splitlines()
        if not lines:
            return None
        state, nodes, start, end, limit, reason = (lines[0].split("|") + [""] * 6)[:6]
        return JobInfo(
            job_id,
            state,
            reason=word(reason),
            nodes=word(nodes),
            start=parse_time(start),
            end=parse_time(end),
            time_limit=parse_time_limit(limit),
            source="squeue",
        )

    def _sacct(self, job_id: str) -> JobInfo | None:
        columns = "State,ExitCode,NodeList,Start,End,Timelimit,Reason"
        argv = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}"]
        done = self._run([*argv, f"--format={columns}"])
        lines = done.stdout.strip().splitlines()
        if not lines:
            return None
        # The newest incarnation of a requeued job comes last.
        fields = (lines[-1].split("|") + [""] * 7)[:7]
        state, by = parse_cancelled(fields[0])
        code, signal = parse_exit_code(fields[1])
        return JobInfo(
            job_id,
            state,
            reason=word(fields[6]),
            exit_code=code,
            signal=signal,
            nodes=word(fields[2]),
            start=parse_time(fields[3]),
            end=parse_time(fields[4]),
            time_limit=parse_time_limit(fields[5]),
            cancelled_by=by,
            source="sacct",
        )

    def _scontrol(self, job_id: str) -> JobInfo | None:
        done = self._run(["scontrol", "--oneliner", "show", "job", job_id], unknown=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("JobId=")]
        if not lines:
            return None
        fields = parse_fields(lines[0])
        code, signal = parse_exit_code(fields.get("ExitCode", ""))
        return JobInfo(
            job_id,
            fields.get("JobState", "UNKNOWN"),
            reason=word(fields.get("Reason", "")),
            exit_code=code,
            signal=signal,
            nodes=word(fields.get("NodeList", "")),
            start=parse_time(fields.get("StartTime", "")),
            end=parse_time(fields.get("EndTime", "")),
            time_limit=parse_time_limit(fields.get("TimeLimit", "")),
            source="scontrol",
        )

    def _completion_log(self, job_id: str) -> JobInfo | None:
        """jobcomp/filetxt, which clusters without an accounting database may keep."""
        columns = "State,NodeList,Start,End"
        argv = ["sacct", "--completion", "--noheader", "--parsable2", f"--jobs={job_id}"]
        done = self._run([*argv, f"--format={columns}"])
        lines = done.stdout.strip().splitlines()
        if not lines:
            return None
        fields = (lines[-1].split("|") + [""] * 4)[:4]
        state, by = parse_cancelled(fields[0])
        return JobInfo(
            job_id,
            state,
            nodes=word(fields[1]),
            start=parse_time(fields[2]),
            end=parse_time(fields[3]),
            cancelled_by=by,
            source="sacct --completion",
        )

    def partition_text(self) -> str:
        """What ``scontrol show partition`` prints, a line a partition.

        Raises:
            SchedulerError: Slurm does not answer.
        """
        return self._run(["scontrol", "--oneliner", "show", "partition"]).stdout

    def partitions(self) -> list[Partition]:
        """All partitions that this user sees.

        Raises:
            SchedulerError: Slurm does not answer.
        """
        found = []
        for line in self.partition_text().splitlines():
            fields = parse_fields(line)
            if "PartitionName" in fields:
                found.append(
                    Partition(
                        name=fields["PartitionName"],
                        default=fields.get("Default") == "YES",
                        state=fields.get("State", "UP"),
                        max_time=parse_time_limit(fields.get("MaxTime", "")),
                        default_time=parse_time_limit(fields.get("DefaultTime", "")),
                        max_nodes=parse_number(fields.get("MaxNodes", "")),
                        min_nodes=parse_number(fields.get("MinNodes", "")) or 1,
                        total_nodes=parse_number(fields.get("TotalNodes", "")) or 0,
                    )
                )
        return found

    def nodes(self) -> list[NodeGroup]:
        """Nodes of all partitions, those that are alike as one entry.

        Raises:
            SchedulerError: Slurm does not answer.
        """
        done = self._run(["sinfo", "--noheader", "--exact", "--format=%R|%D|%c|%m|%G"])
        found = []
        for line in done.stdout.splitlines():
            name, count, cpus, memory, gres = (line.strip().split("|") + [""] * 5)[:5]
            with contextlib.suppress(ValueError):
                found.append(NodeGroup(name, int(count), int(cpus), int(memory), parse_gpus(gres)))
        return found

    # ---- acting ---------------------------------------------------------------------------

    def cancel(self, job_id: str) -> Literal["cancelled", "over", "unknown"]:
        """Cancel a job; scancel itself is content with any number, so Slurm is asked first.

        Returns:
            ``cancelled``; ``over`` where it had ended before; ``unknown`` where Slurm knows no
            such job.

        Raises:
            SchedulerError: scancel failed, or Slurm does not answer.
        """
        info = self.state(job_id)
        if info is None:
            return "unknown"
        if info.final:
            return "over"
        self._run(["scancel", job_id], unknown=True)
        return "cancelled"

    def requeue(self, job_id: str) -> None:
        """Put a running job back into the queue; its batch script is killed at once.

        Args:
            job_id: of one task for arrays (``17_2``): a bare number is all of its tasks.

        Raises:
            SchedulerError: the job or the site does not allow it.
        """
        self._run(["scontrol", "requeue", job_id])

    def signal(self, job_id: str, name: str) -> None:
        """Send a signal to the ranks of a running job.

        Raises:
            SchedulerError: the job is not running, or Slurm does not answer.
        """
        info = self.state(job_id)
        if info is None:
            raise SchedulerError(f"no job {job_id}: no signal was sent")
        if info.state != "RUNNING":
            raise SchedulerError(f"job {job_id} is {info.state}: no signal was sent")
        # It may end before scancel comes to it, or by what scancel sends.
        self._run(["scancel", f"--signal={name}", job_id], unknown=True)

    # ---- running commands -----------------------------------------------------------------

    def _run(
        self,
        argv: Sequence[str],
        *,
        unknown: bool = False,
        directory: Path | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; ``unknown`` lets it fail where it knows no such job.

        Raises:
            SchedulerError: with the command, what it printed and what to do.
        """
        command = " ".join(argv)
        seconds = self.timeout if timeout is None else timeout
        try:
            done = subprocess.run(
                list(argv),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=seconds,
                check=False,
                cwd=directory,
                env={**self._environ, "SLURM_TIME_FORMAT": "standard"}
                if argv[0] != "sbatch"
                else self._environ,
            )
        except FileNotFoundError:
            raise SchedulerError(
                f"{argv[0]} is not on PATH",
                hint="load the site's Slurm module, or run here: --launcher local",
            ) from None
        except subprocess.TimeoutExpired:
            raise SchedulerError(
                f"{command}: no answer within {seconds:g} s",
                hint="Slurm's controller is busy or down; try again later",
            ) from None
        if done.returncode != 0 and not (unknown and _no_such_job(done.stderr)):
            said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            raise SchedulerError(f"{command}: {said}", hint=_advice(said))
        return done


def _no_such_job(said: str) -> bool:
    return "Invalid job id" in said or "already completing or completed" in said


_ADVICE = (
    ("Invalid account", "slurm.account: sacctmgr show associations user=$USER lists yours"),
    ("Invalid partition", "slurm.partition: sinfo -s lists them"),
    ("invalid partition", "slurm.partition: sinfo -s lists them"),
    ("Invalid qos", "slurm.qos: sacctmgr show associations user=$USER format=qos lists yours"),
    ("Requested time limit", "slurm.time: the partition's MaxTime is shorter"),
    ("Requested node configuration", "fewer ranks_per_node, slurm.cpus_per_task, slurm.memory or "
     "GPUs: no node of the partition has as much"),
    ("Node count specification", "nodes: fewer, or another slurm.partition"),
    ("More processors requested", "fewer ranks_per_node, or slurm.cpus_per_task"),
    ("parameter too long", "slurm.comment and paths may have 1024 characters"),
    ("QOSMax", "a limit of the quality of service: sacctmgr show qos"),
    ("Job violates accounting/QOS policy", "limits of your account: sacctmgr show associations"),
    ("Unable to contact slurm controller", "Slurm's controller is down; try again later"),
    ("Socket timed out", "Slurm's controller is busy; look with squeue --me before you try again"),
    ("Could not establish a configuration source", "no Slurm is set up on this host"),
    ("DOS line breaks", "a carriage return is in the script"),
)  # fmt: skip


def _advice(said: str) -> str | None:
    return next((advice for text, advice in _ADVICE if text in said), None)
