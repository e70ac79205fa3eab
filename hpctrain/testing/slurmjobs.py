"""Commands to a local Slurm cluster and what they answer."""

from __future__ import annotations

import re
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.errors import SchedulerError
from hpctrain.testing.commands import run_command

_FINAL = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "TIMEOUT",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """What the controller says about a job.

    Attributes:
        id: job number.
        state: JobState, for example ``RUNNING``.
        reason: why it pends or failed; ``None`` as Slurm prints it.
        exit_code: exit status of the batch script.
        signal: signal that ended the batch script, 0 for none.
        nodes: node list in Slurm's bracket form; empty where it has none.
        restarts: how often it was requeued.
        fields: all of ``scontrol show job``.
    """

    id: int
    state: str
    reason: str
    exit_code: int
    signal: int
    nodes: str
    restarts: int
    fields: Mapping[str, str] = field(repr=False)

    @staticmethod
    def parse(line: str) -> Job:
        """Read one line of ``scontrol -o show job``."""
        # Values may hold blanks and '='; a new field starts at " Word=".
        pairs = re.findall(r"(?:^| )([A-Za-z][\w/:]*)=(.*?)(?= [A-Za-z][\w/:]*=|$)", line.strip())
        fields = dict(pairs)
        status, _, signal = fields["ExitCode"].partition(":")
        nodes = fields.get("NodeList", "")
        return Job(
            id=int(fields["JobId"]),
            state=fields["JobState"],
            reason=fields["Reason"],
            exit_code=int(status),
            signal=int(signal),
            nodes="" if nodes == "(null)" else nodes,
            restarts=int(fields["Restarts"]),
            fields=fields,
        )


class SlurmCommands(ABC):
    """What a test asks of a running cluster; the cluster itself says where that is."""

    @property
    @abstractmethod
    def root(self) -> Path:
        """Directory of the cluster: slurm.conf, log/, spool/."""

    @property
    @abstractmethod
    def env(self) -> dict[str, str]:
        """A whole environment for commands that talk to the cluster."""

    def run(
        self,
        *argv: str | Path,
        input: str | None = None,
        timeout: float = 60.0,
        check: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this cluster's environment and capture its output.

        Args:
            argv: program and arguments.
            input: text for its stdin, which is empty otherwise.
            timeout: seconds after which it is killed.
            check: raise where the exit status is not 0.
            cwd: working directory; the cluster's own where not given.
            env: variables on top of :attr:`env`.

        Raises:
            SchedulerError: it failed or ran out of time; says what it printed.
        """
        return run_command(
            [str(token) for token in argv],
            env={**self.env, **(env or {})},
            cwd=cwd or self.root,
            error=SchedulerError,
            input=input,
            timeout=timeout,
            check=check,
        )

    def submit(self, script: str, *options: str, cwd: Path | None = None) -> int:
        """Submit a batch script with ``sbatch``.

        Args:
            script: its text, from ``#!`` on.
            options: options of sbatch.
            cwd: directory that the job starts and logs in; the cluster's own where not given.

        Returns:
            The job's number.

        Raises:
            SchedulerError: sbatch refused it.
        """
        done = self.run("sbatch", "--parsable", *options, input=script, cwd=cwd)
        return int(done.stdout.partition(";")[0])

    def cancel_all(self, timeout: float = 30.0) -> None:
        """Cancel every job and wait until none is left in the queue.

        Raises:
            SchedulerError: some are left after ``timeout`` seconds.
        """
        self.run("scancel", "--me")
        deadline = time.monotonic() + timeout
        while left := self.run("squeue", "-h", "-o", "%i %T").stdout:
            if time.monotonic() > deadline:
                raise SchedulerError(f"jobs left after scancel and {timeout:g} s", hint=left)
            time.sleep(0.1)

    def job(self, job_id: int) -> Job:
        """What the controller says about a job, up to 300 s after its end.

        Raises:
            SchedulerError: it knows no such job.
        """
        return Job.parse(self.run("scontrol", "-o", "show", "job", str(job_id)).stdout)

    def wait_job(self, job_id: int, *states: str, timeout: float = 60.0) -> Job:
        """Wait until a job is in one of ``states``, and return it.

        Raises:
            SchedulerError: it ended otherwise, or ``timeout`` seconds have passed; says what
                the controller knows.
        """
        deadline = time.monotonic() + timeout
        ended = 0
        while True:
            job = self.job(job_id)
            if job.state in states:
                return job
            # A job that is about to be requeued shows a final state for a moment.
            ended = ended + 1 if job.state in _FINAL else 0
            if ended > 20 or time.monotonic() > deadline:
                raise SchedulerError(
                    f"job {job_id} is {job.state}, wanted {' or '.join(states)}",
                    hint="\n".join(f"{key}={value}" for key, value in job.fields.items()),
                )
            time.sleep(0.1)

    def nodes_up(self) -> set[int]:
        """Numbers of the nodes that the controller can use now."""
        done = self.run("sinfo", "-h", "-N", "-t", "idle,mix,alloc,comp", "-o", "%N", check=False)
        return {int(name.removeprefix("node")) for name in done.stdout.split()}
