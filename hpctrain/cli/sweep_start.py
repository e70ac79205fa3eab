"""Starting the runs of a sweep: here one after another, or through Slurm in arrays."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cli import launch, output
from hpctrain.cli.prepare import Prepared, devices, find_machine, prepare
from hpctrain.cli.view import RunView, look
from hpctrain.errors import Exit, HpctrainError, UsageError
from hpctrain.records import read_json, write_json
from hpctrain.rundir import RunDir, safe_name
from hpctrain.scaling.points import Prepared as PreparedPoint
from hpctrain.scaling.sweepdir import PointRecord, SweepDir, SweepIndex
from hpctrain.scaling.sweepfile import SweepFile
from hpctrain.spec.load import parse_tree
from hpctrain.spec.yaml_tree import load_tree

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.slurm.client import SlurmClient
    from hpctrain.spec import Job, JobSpec

_LOOK_SECONDS = 5.0
_ASKED_ONE_BY_ONE = 50
"""Runs that Slurm is asked about one by one; of more, what their files say is shown."""
_MISSING = frozenset({"missing", "failed", "cancelled", "stopped", "created"})


class Shop:
    """Makes jobs of a base job and overrides; reads the file and each machine once.

    Args:
        job: the base job's file.
        directory: that relative paths start from.
        shown: name of the file in messages and provenance, where it is a copy.
    """

    def __init__(self, job: Path, directory: Path, shown: str | None = None) -> None:
        self.directory = directory
        self.file = shown or str(job)
        try:
            self.text = job.read_bytes().decode("utf-8")
        except FileNotFoundError:
            raise UsageError(f"{job}: no such job file (the sweep's job)") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"{job}: not UTF-8 text (byte {error.start})") from None
        except OSError as error:
            raise UsageError(f"{job}: cannot be read: {error.strerror}") from None
        self._tree = load_tree(self.text, self.file)
        self._machines: dict[str, Machine] = {}
        self._client: SlurmClient | None = None
        self._checked: dict[tuple[Any, ...], Exception | None] = {}
        self._limits = True

    def ask_slurm(self) -> None:
        """Check points against the Slurm that answers, too."""
        from hpctrain.slurm.client import SlurmClient

        self._client = SlurmClient(os.environ)

    def ignore_limits(self) -> None:
        """Points run on this machine: limits of a site's scheduler are none of theirs."""
        self._limits = False

    def parse(self, overrides: Sequence[str]) -> Job:
        return parse_tree(self._tree, self.text, self.file, overrides)

    def prepare(self, job: Job) -> Prepared:
        return prepare(job, self.directory, self.machine(job))

    def ranks_per_node(self, spec: JobSpec) -> int:
        if isinstance(spec.ranks_per_node, int):
            return spec.ranks_per_node
        from hpctrain.spec import Job

        return devices(self.machine(Job(spec))) or 1

    def check_limits(self, prepared: PreparedPoint) -> None:
        from hpctrain.errors import HpctrainError
        from hpctrain.slurm.limits import check

        if not self._limits:
            return
        spec, machine = prepared.job.spec, prepared.machine
        # Slurm is asked once for all points that ask it for the same.
        key = (spec.machine, spec.nodes, spec.ranks_per_node, spec.slurm.model_dump_json())
        if key not in self._checked:
            try:
                for warning in check(spec, machine, self._client, locate=prepared.job.locate):
                    output.warn(warning)
                self._checked[key] = None
            except HpctrainError as error:
                self._checked[key] = error
        if (refusal := self._checked[key]) is not None:
            raise refusal

    def machine(self, job: Job) -> Machine:
        name = job.spec.machine
        if name not in self._machines:
            self._machines[name] = find_machine(job, self.directory)
        return self._machines[name]


def choose(wanted: str, shop: Shop, sweep: SweepFile) -> launch.Launcher:
    """The launcher of a sweep: that of its base job."""
    base = shop.parse([setting.override for setting in sweep.fixed])
    return launch.choose_for(wanted, shop.machine(base), emulated=base.spec.emulated)


# ---- where it stands -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Standing:
    """One run of a sweep, or one that is to be.

    Attributes:
        point: whose.
        repeat: which of them, from 0.
        several: the sweep has repeats.
        run: the newest, None where there is none.
        status: as ``hpctrain status`` has it; ``missing`` or ``impossible``.
        reason: why it waits, failed or cannot run.
    """

    point: PointRecord
    repeat: int
    several: bool
    run: RunDir | None
    status: str
    reason: str
    step: int = 0
    total_steps: int = 0
    tokens_per_second: float | None = None

    @property
    def missing(self) -> bool:
        """Resuming the sweep would start it."""
        return self.status in _MISSING

    def to_dict(self) -> dict[str, Any]:
        return {
            "point": self.point.id,
            "settings": {**self.point.settings, **self.point.grown},
            "repeat": self.repeat,
            "run": None if self.run is None else self.run.id,
            "status": self.status,
            "reason": self.reason,
            "step": self.step,
            "total_steps": self.total_steps,
            "tokens_per_second": self.tokens_per_second,
        }


def standing(sweep: SweepDir, index: SweepIndex) -> list[Standing]:
    """Every run of a sweep, point by point."""
    rows = []
    several = index.repeats > 1
    newest = [
        (point, number, ids[-1] if ids else None)
        for point in index.points
        for number, ids in enumerate(point.runs)
    ]
    views = _views({run for _, _, run in newest if run is not None}, sweep)
    for point, number, run_id in newest:
        if point.reason:
            rows.append(Standing(point, number, several, None, "impossible", point.reason))
        elif run_id is None:
            rows.append(Standing(point, number, several, None, "missing", ""))
        elif run_id not in views:
            rows.append(Standing(point, number, several, None, "missing", "its directory is gone"))
        else:
            view = views[run_id]
            rows.append(
                Standing(
                    point, number, several, view.run, view.status, view.reason.split("\n")[0],
                    view.step, view.total_steps, view.pace.tokens_per_second,
                )
            )  # fmt: skip
    return rows


def _views(ids: set[str], sweep: SweepDir) -> dict[str, RunView]:
    there = [run_id for run_id in ids if (sweep.root / run_id / "job.yaml").is_file()]
    found = {run_id: look(sweep.run(run_id), ask_slurm=False) for run_id in there}
    open_ = [run_id for run_id, view in found.items() if not view.is_final]
    if len(open_) <= _ASKED_ONE_BY_ONE:
        found.update({run_id: look(sweep.run(run_id)) for run_id in open_})
    return found


# ---- starting ------------------------------------------------------------------------------


class Starter:
    """Starts what is missing of a sweep.

    Args:
        sweep: its directory.
        index: as it is on disk.
        shop: makes its jobs.
        argv: command line, for provenance.
        prepared: points that were prepared already.
    """

    def __init__(
        self,
        sweep: SweepDir,
        index: SweepIndex,
        shop: Shop,
        argv: Sequence[str],
        prepared: Mapping[str, PreparedPoint | None],
    ) -> None:
        self.sweep, self.index, self.shop = sweep, index, shop
        self.argv = argv
        self._prepared = dict(prepared)
        self._points = {point.id: point for point in index.points}
        self._refused = 0

    def run(self, *, wait: bool) -> int:
        """Start what is missing; the exit code."""
        wanted = [row for row in standing(self.sweep, self.index) if row.missing]
        if self.index.launcher == "local":
            return self._local(wanted)
        return self._slurm(wanted, wait=wait)

    def prepared(self, point: PointRecord, run: RunDir | None = None) -> Prepared:
        """The job of a point."""
        known = self._prepared.get(point.id)
        if known is None:
            known = self.shop.prepare(self.shop.parse(point.overrides))
            self._prepared[point.id] = known
        return Prepared(known.job, known.machine)

    def _make(self, row: Standing) -> tuple[RunDir, Prepared]:
        """A run directory for a point: a new one, or that of a run that stopped early."""
        prepared = self.prepared(row.point)
        if row.run is not None and row.status == "stopped":
            row.run.stop_file.unlink(missing_ok=True)
            return row.run, prepared
        name = f"{row.point.id}-{row.repeat + 1}"
        spec = prepared.job.spec.model_copy(update={"name": f"{self.index.name}-{name}"})
        job = dataclasses.replace(
            prepared.job, spec=spec, overrides=(*prepared.job.overrides, f"name={spec.name}")
        )
        prepared = Prepared(job, prepared.machine)
        run = launch.create(prepared, self.sweep.root, self.argv, name=name)
        origin = read_json(run.provenance) or {}
        about = {"name": self.index.name, "point": row.point.id, "repeat": row.repeat}
        write_json(run.provenance, origin | {"sweep": about})
        self.index = self.sweep.add_run(self.index, row.point.id, row.repeat, run)
        return run, prepared

    # ---- on this machine -------------------------------------------------------------------

    def _local(self, wanted: Sequence[Standing]) -> int:
        bad = 0
        for number, row in enumerate(wanted, start=1):
            title = row.point.title
            output.note(f"{number}/{len(wanted)}: {row.point.id} {title}")
            run, prepared = self._make(row)
            try:
                view = self._run_here(run, prepared)
            except HpctrainError as error:  # of this point alone
                view = launch.conclude(look(run), "failed", error.message)
            speed = view.pace.tokens_per_second
            said = view.reason.split("\n")[0] if view.reason else ""
            more = f"{speed:,.0f} tokens/s" if view.status == "finished" and speed else said
            output.line(f"{row.point.id}-{row.repeat + 1} {title}: {view.status}  {more}".rstrip())
            bad += view.status != "finished"
        if bad:
            output.note(f"{bad} of {len(wanted)} runs did not finish: "
                        f"hpctrain sweep resume {self.sweep.id}")  # fmt: skip
        else:
            output.note(f"report: hpctrain report {self.sweep.root} -o report.html")
        return Exit.RANK_FAILED if bad else Exit.OK

    def _run_here(self, run: RunDir, prepared: Prepared) -> RunView:
        from hpctrain.launchers import LocalLauncher, rank_program
        from hpctrain.launchers.local_run import start

        launch.check_start(prepared, "local")
        cores = self._cores()
        environ = dict(os.environ)
        if "OMP_NUM_THREADS" not in environ:
            environ["OMP_NUM_THREADS"] = str(len(cores[0]) if cores else 1)
        launch.submitted(run, prepared)
        if (simulated := launch.simulate(run, prepared)) is not None:
            return simulated
        launcher = LocalLauncher.find(environ, cores=cores)
        program = rank_program(run)
        started = start(prepared.job.spec, run, program, environ, launcher=launcher)
        try:
            code = started.wait()
        except KeyboardInterrupt:
            output.note("asked the ranks to checkpoint and stop; the rest of the sweep is left")
            started.terminate(grace=60.0)
            raise
        return launch.settle(look(run), code, False)

    def _cores(self) -> list[list[int]]:
        """Cores of each rank, as many at every point, so that more ranks mean more cores.

        Where the largest point has more ranks than there are cores nothing is pinned.
        """
        cores = sorted(os.sched_getaffinity(0))
        most = max((p.ranks for p in self.index.points if not p.reason), default=1)
        each = len(cores) // most
        return [cores[i * each : (i + 1) * each] for i in range(most)] if each else []

    # ---- on Slurm --------------------------------------------------------------------------

    def _slurm(self, wanted: Sequence[Standing], *, wait: bool) -> int:
        left = list(wanted)
        while left:
            room = self._room()
            now, left = left[:room], left[room:]
            if now:
                self._submit(now)
            if not left:
                break
            if not wait:
                output.line(
                    f"{len(left)} run{'s are' if len(left) > 1 else ' is'} left for when the queue "
                    f"has room: hpctrain sweep resume {self.sweep.id}"
                )
                return self._submitted()
            time.sleep(_LOOK_SECONDS)
        if not wait:
            output.line(f"  hpctrain sweep status {self.sweep.id}")
            return self._submitted()
        return self._attend()

    def _submitted(self) -> int:
        return Exit.SCHEDULER if self._refused else Exit.OK

    def _attend(self) -> int:
        said = ""
        while True:
            rows = [r for r in standing(self.sweep, self.index) if r.status != "impossible"]
            counts: dict[str, int] = {}
            for row in rows:
                counts[row.status] = counts.get(row.status, 0) + 1
            words = ", ".join(f"{count} {word}" for word, count in counts.items())
            if words != said:
                output.note(words)
                said = words
            if all(row.missing or row.status == "finished" for row in rows):
                return Exit.OK if counts.keys() <= {"finished"} else Exit.RANK_FAILED
            time.sleep(_LOOK_SECONDS)

    def _room(self) -> int:
        """Jobs that may be submitted now."""
        limits = [self.index.max_queued]
        for point in self.index.points:
            if not point.reason:
                prepared = self.prepared(point)
                scheduling, slurm = prepared.machine.scheduling, prepared.job.spec.slurm
                limits.append(scheduling.max_queued_jobs)
                of = scheduling.limits(slurm.partition, slurm.qos)
                limits += [one.max_queued_jobs for one in of.values()]
                break
        known = [limit for limit in limits if limit is not None]
        if not known:
            return len(self.index.points) * self.index.repeats
        rows = standing(self.sweep, self.index)
        queued = sum(not (r.missing or r.status in ("finished", "impossible")) for r in rows)
        return max(0, min(known) - queued)

    def _submit(self, rows: Sequence[Standing]) -> None:
        from hpctrain.scaling.array import LARGEST, shape_of
        from hpctrain.slurm.client import SlurmClient

        client = SlurmClient(os.environ)
        groups: dict[tuple[str, ...], list[tuple[RunDir, Prepared, str]]] = {}
        for row in rows:
            run, prepared = self._make(row)
            script = launch.script_of(run, prepared)
            groups.setdefault(shape_of(script), []).append((run, prepared, script))
        for shape, members in groups.items():
            for first in range(0, len(members), LARGEST):
                part = members[first : first + LARGEST]
                try:
                    if len(part) == 1:
                        self._submit_one(*part[0], client)
                    else:
                        self._submit_array(shape, part, client)
                except HpctrainError as error:  # of these runs alone
                    self._refused += len(part)
                    output.warn(f"not submitted: {error.message}")
                    for run, _, _ in part:
                        launch.conclude(look(run, ask_slurm=False), "failed", error.message)

    def _submit_one(
        self, run: RunDir, prepared: Prepared, script: str, client: SlurmClient
    ) -> None:
        from hpctrain.slurm.submit import submit

        launch.submitted(run, prepared)
        done = submit(prepared.job.spec, run, script, client)
        output.line(f"job {done.launch.job_id}: {run.id}")
        for warning in done.warnings:
            output.warn(warning)

    def _submit_array(
        self,
        shape: tuple[str, ...],
        members: Sequence[tuple[RunDir, Prepared, str]],
        client: SlurmClient,
    ) -> None:
        from hpctrain.scaling.array import array_script
        from hpctrain.slurm.submit import add_launch, write_script

        self.sweep.arrays.mkdir(exist_ok=True)
        number = len(list(self.sweep.arrays.glob("*.sbatch")))
        path = self.sweep.arrays / f"{number}.sbatch"
        for run, prepared, script in members:
            launch.submitted(run, prepared)
            write_script(run.script, script)
        runs = [run.root for run, _, _ in members]
        name = safe_name(self.index.name)
        text = array_script(name, shape, runs, path.with_suffix(""), self.index.max_queued)
        write_script(path, text)
        submitted = client.submit(path, directory=Path(self.index.directory))
        cluster = submitted.cluster or client.cluster()
        for task, (run, prepared, _) in enumerate(members):
            add_launch(run, prepared.job.spec, f"{submitted.job_id}_{task}", cluster)
        output.line(f"array {submitted.job_id}: {len(members)} runs")
        for warning in submitted.warnings:
            output.warn(warning)
