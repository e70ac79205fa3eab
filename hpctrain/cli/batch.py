"""``hpctrain batch``: what a batch script calls before its ranks start and after they have left.

``begin`` writes down that a job has begun and says on how many nodes its ranks run; ``end``
decides whether the run goes on by itself, writes that down, and requeues the job or submits a
successor. A job that Slurm requeues while nobody could say ``end`` is accounted for by ``begin``.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli import output
from hpctrain.errors import Exit, HpctrainError, SchedulerError
from hpctrain.records import (
    EventRecord,
    FailureRecord,
    LaunchRecord,
    RestartRecord,
    RunStatus,
    StateRecord,
)
from hpctrain.rundir import RunDir

if TYPE_CHECKING:
    from hpctrain.slurm.answers import JobNow
    from hpctrain.slurm.lifecycle import Ended
    from hpctrain.spec import JobSpec

_SUBMITTER_SECONDS = 10.0
_LOG_BYTES = 1 << 18


@click.group(short_help="Begin and end a Slurm job (its batch script does this).")
def command() -> None:
    """Account for the jobs of a run and have it go on by itself.

    Called by the batch script that `hpctrain submit` renders.
    """


_root = click.argument("rundir", metavar="RUNDIR", type=click.Path(path_type=Path))


@command.command("begin", short_help="Before the ranks start.")
@_root
def begin(rundir: Path) -> int:
    """Print the number of nodes that the ranks run on; 0 where nothing is left to do."""
    _keep_calm()
    life = Life.read(RunDir(rundir.absolute()))
    nodes = life.begin()
    click.echo(nodes)
    return life.code


@command.command("end", short_help="After the ranks have left.")
@_root
@click.option("--code", type=int, required=True, help="Exit status of srun.")
@click.option("--late", is_flag=True, help="The script ended the ranks before the walltime did.")
def end(rundir: Path, code: int, late: bool) -> int:
    """Say how the job ended, have the run go on, and leave with the job's exit code."""
    _keep_calm()
    return Life.read(RunDir(rundir.absolute())).end(code, late)


def _keep_calm() -> None:
    """Slurm's signals to the processes of the script are meant for the ranks."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@dataclass
class Life:
    """A run as the batch script of one of its jobs sees it.

    Attributes:
        run: its directory.
        spec: of the job; None in a directory without one.
        job_id: of this job, ``17_2`` for a task of an array.
        restart: how often Slurm had requeued it.
        nodes: node list of the allocation.
        count: nodes of the allocation.
        code: exit code for the batch script.
    """

    run: RunDir
    spec: JobSpec | None
    job_id: str
    restart: int
    nodes: str
    count: int
    code: int = 0

    @classmethod
    def read(cls, run: RunDir) -> Life:
        """From the environment of a batch script."""
        from hpctrain.spec import read_job

        spec = read_job(run.job).spec if run.job.is_file() else None
        environ = os.environ
        job_id = environ.get("SLURM_JOB_ID", "")
        # The last task of an array has the number of the whole array.
        if "SLURM_ARRAY_JOB_ID" in environ:
            job_id = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
        return cls(
            run,
            spec,
            job_id,
            int(environ.get("SLURM_RESTART_COUNT") or 0),
            environ.get("SLURM_JOB_NODELIST", ""),
            int(environ.get("SLURM_JOB_NUM_NODES") or 1),
        )

    # ---- before the ranks ------------------------------------------------------------------

    def begin(self) -> int:
        """Account for this incarnation; the number of nodes that its ranks run on, 0 for none."""
        launch = self._launch()
        state = self.run.read_state()
        if launch is None or launch.restart != self.restart or launch.job_id != self.job_id:
            if state is not None and state.status == "finished":
                output.note("the run has done its last step already")
                return 0
            refused = self._account(launch)
            if refused is not None:
                self._conclude(refused)
                self.code = int(Exit.STOPPED)
                return 0
            count = self._fit()
            launch = self._follow(launch, count)
        else:
            count = self._fit()
        self._event(
            "job",
            f"job {self.job_id} on {self.nodes}, restart {self.restart}",
            launch.attempt,
            job_id=self.job_id,
            nodes=self.nodes,
            restart=self.restart,
        )
        return count

    def _launch(self) -> LaunchRecord | None:
        """The newest launch; of a job that Slurm never requeued its submitter writes it."""
        deadline = time.monotonic() + _SUBMITTER_SECONDS
        while True:
            launches = self.run.read_launches()
            if launches and (launches[-1].job_id == self.job_id or self.restart):
                return launches[-1]
            if time.monotonic() > deadline:
                return launches[-1] if launches else None
            time.sleep(0.1)

    def _account(self, launch: LaunchRecord | None) -> str | None:
        """Write down how the incarnation before this one ended, unless its script has; why the
        run must not go on, if so."""
        from hpctrain.slurm.lifecycle import chain, due_to, lost, refusal

        restarts = self.run.read_restarts()
        if self.run.stop_file.exists():
            return "somebody asked for it"
        if (
            self.spec is None
            or launch is None
            or any(one.attempt == launch.attempt for one in restarts)
        ):
            return None
        state = self._own_state(launch)
        end = lost(state, due_to(self._log(before=1)))
        history = chain(self.run.read_launches(), restarts)
        refused = refusal(end, history, self._from_step(), self._most())
        self._write(launch, end, "stop" if refused else "slurm", self.job_id, refused)
        return refused

    def _follow(self, before: LaunchRecord | None, count: int) -> LaunchRecord:
        import socket

        ranks = 0 if before is None else before.world_size
        if self.spec is not None and self.spec.slurm.nodes is not None:
            ranks = count * int(self.spec.ranks_per_node)

        launch = LaunchRecord(
            attempt=len(self.run.read_launches()),
            launcher="slurm",
            submitted=time.time(),
            world_size=ranks,
            job_id=self.job_id,
            host=socket.gethostname(),
            cluster="" if before is None else before.cluster,
            restart=self.restart,
            started=time.time(),
            nodes=self.nodes,
            automatic=True,
        )
        self.run.add_launch(launch)
        return launch

    def _fit(self) -> int:
        """Nodes that the ranks run on; where the job takes a range it is made to fit them."""
        if self.spec is None or self.spec.slurm.nodes is None:
            return self.count
        from hpctrain.cli.elastic import fit

        return fit(self.run, self.count)

    # ---- after the ranks -------------------------------------------------------------------

    def end(self, code: int, late: bool = False) -> int:
        """Decide what follows, write it down, do it; the exit code of the job.

        Args:
            code: exit status of srun.
            late: the script ended the ranks since the walltime was nearly over.
        """
        from hpctrain.slurm.lifecycle import chain, due_to, ended, refusal

        launches = self.run.read_launches()
        launch = launches[-1] if launches else LaunchRecord(0, "slurm", 0.0, 0, self.job_id)
        state = self._own_state(launch)
        failures = self.run.read_failures(launch.attempt)
        now = self._now()
        end = ended(code, state, failures, now, self.restart, due_to(self._log()), late)
        if end is None:
            return 0
        code = _exit_code(code, state, failures)
        if self.spec is None:
            return code
        history = chain(launches, self.run.read_restarts())
        refused = refusal(end, history, self._from_step(), self._most())
        if refused is not None:
            self._write(launch, end, "stop", "", refused)
            ours = end.goes_on and self._most() > 0  # where not, the ranks' own words say it best
            final = state is not None and state.status in ("stopped", "failed")
            if end.by_slurm:  # it would start all the same
                self._conclude(refused)
            elif ours or not (final or failures):
                status: RunStatus = "stopped" if code == Exit.STOPPED else "failed"
                words = f"; it does not go on by itself: {refused}" if ours else ""
                self._state(status, end.reason + words)
            return code
        if end.by_slurm:
            self._write(launch, end, "slurm", self.job_id, None)
            self._state("submitted", end.reason)
            return code
        return self._go_on(launch, end, code)

    def _go_on(self, launch: LaunchRecord, end: Ended, code: int) -> int:
        """Requeue this job, or submit a successor."""
        from hpctrain.slurm.client import SlurmClient

        assert self.spec is not None
        client = SlurmClient(os.environ)
        bad = self._bad_nodes()
        if self.spec.slurm.requeue != "false" and not bad:
            # Slurm kills this script as soon as it has requeued the job.
            self._write(launch, end, "requeue", self.job_id, None)
            self._state("submitted", end.reason)
            try:
                client.requeue(self.job_id)
            except SchedulerError as error:
                output.warn(f"{error.message}; submitting a successor")
            else:
                return code
        from hpctrain.slurm.submit import submit

        options = [f"--dependency=afterany:{self.job_id}"]
        if bad:
            options.append(f"--exclude={','.join(bad)}")
        try:
            script = self.run.script.read_bytes().decode("utf-8", "surrogateescape")
            done = submit(self.spec, self.run, script, client, options=options, automatic=True)
        except HpctrainError as error:
            self._write(launch, end, "stop", "", error.message)
            self._state("failed", f"{end.reason}; it could not be started again: {error.message}")
            return int(error.exit_code)
        self._write(launch, end, "successor", done.launch.job_id, None, bad)
        self._state("submitted", end.reason)
        return code

    # ---- what is known, what is written ----------------------------------------------------

    def _own_state(self, launch: LaunchRecord) -> StateRecord | None:
        """What the ranks of an incarnation wrote; None where they wrote nothing."""
        state = self.run.read_state()
        if state is None or state.time < max(launch.submitted, launch.started):
            return None
        return None if state.status in ("submitted", "created") else state

    def _now(self) -> JobNow | None:
        from hpctrain.slurm.client import SlurmClient

        try:
            return SlurmClient(os.environ, timeout=10.0).now(self.job_id)
        except SchedulerError as error:
            output.warn(error.message)
            return None

    def _log(self, before: int = 0) -> str:
        """What this job, or the one ``before`` it, has written into the log."""
        try:
            with self.run.job_log.open("rb") as stream:
                size = stream.seek(0, 2)
                stream.seek(max(0, size - _LOG_BYTES))
                text = stream.read().decode("utf-8", "replace")
        except OSError:
            return ""
        parts = re.split(r"^hpctrain: job \S+ on .*, restart \d+", text, flags=re.MULTILINE)
        return parts[-1 - before] if len(parts) > before else ""

    def _most(self) -> int:
        return 0 if self.spec is None else self.spec.slurm.max_restarts

    def _from_step(self) -> int:
        """Step of the newest stored checkpoint; 0 for none."""
        from hpctrain.io.directory import committed

        if self.spec is None:
            return 0
        path = self.spec.checkpoint.path
        return max(committed(Path(path) if path else self.run.checkpoints), default=0)

    def _bad_nodes(self) -> tuple[str, ...]:
        """Nodes that the run is to do without, by its preflights."""
        from hpctrain.health.report import bad_nodes

        if self.spec is None or not self.spec.health.exclude_bad_nodes:
            return ()
        return bad_nodes(self.run)

    def _write(
        self,
        launch: LaunchRecord,
        end: Ended,
        action: str,
        next_job: str,
        refused: str | None,
        excluded: tuple[str, ...] = (),
    ) -> None:
        from hpctrain.cli.metrics import recent
        from hpctrain.slurm.lifecycle import seconds_lost

        steps, from_step, now = recent(self.run), self._from_step(), time.time()
        began = self._began(launch)
        last = [one.step for one in steps if one.time >= began]
        over = max([one.time for one in steps if one.time >= began] or [began])
        nodes = launch.nodes or self._nodes_of(launch) or self.nodes
        state = self._own_state(launch)
        # Where nobody was there to see the end, the last sign of life is it.
        over = now if action != "slurm" or end.by_slurm else max(over, state.time if state else 0)
        record = RestartRecord(
            attempt=launch.attempt,
            time=now,
            why=end.why,
            reason=end.reason if refused is None else f"{end.reason}; {refused}",
            action=action,  # type: ignore[arg-type]
            from_step=from_step,
            step=max(last, default=from_step),
            nodes=nodes,
            seconds_lost=round(seconds_lost(steps, from_step, began, over), 3),
            job_id=launch.job_id,
            next_job_id=next_job,
            excluded=excluded,
        )
        self.run.add_restart(record)
        follows = f"job {next_job} goes on from step {from_step}" if next_job else "nothing follows"
        self._event("ended", f"{record.reason}; {follows}", launch.attempt, why=end.why)
        output.note(f"{record.reason}; {follows}")

    def _began(self, launch: LaunchRecord) -> float:
        jobs = [
            e for e in self.run.read_events() if e.kind == "job" and e.attempt == launch.attempt
        ]
        return launch.started or (jobs[-1].time if jobs else launch.submitted)

    def _nodes_of(self, launch: LaunchRecord) -> str:
        for event in reversed(self.run.read_events()):
            if event.kind == "job" and event.attempt == launch.attempt:
                return str(event.data.get("nodes", ""))
        return ""

    def _conclude(self, refused: str) -> None:
        """The run ends here although Slurm would start it again."""
        self._state("failed", f"it does not go on by itself: {refused}")
        output.note(f"the run does not go on by itself: {refused}")

    def _state(self, status: RunStatus, reason: str) -> None:
        before = self.run.read_state()
        from_step = self._from_step()
        self.run.write_state(
            StateRecord(
                status=status,
                step=0 if before is None else before.step,
                total_steps=self.spec.train.steps if self.spec else 0,
                time=time.time(),
                world_size=0 if before is None else before.world_size,
                reason=reason,
                durable_step=from_step or -1,
                resumed_from=-1 if before is None else before.resumed_from,
            )
        )

    def _event(self, kind: str, message: str, attempt: int, **data: object) -> None:
        self.run.add_event(EventRecord(kind, time.time(), message, attempt, dict(data)))


def _exit_code(code: int, state: StateRecord | None, failures: list[FailureRecord]) -> int:
    """Of the run: srun's own says little once it has killed ranks."""
    from hpctrain.cli.view import failure_code

    if state is not None and state.status == "stopped":
        return int(Exit.STOPPED)
    if failures:
        return int(failure_code(tuple(failures)))
    return code
