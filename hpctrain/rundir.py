"""Every path of a run: the only thing that a login node and the ranks share.

::

    runs/quickstart-20260131-142530-k3x9/
      job.yaml            the job as resolved: every key in force, no preset left to expand
      provenance.json     what was given, where each value came from, code, host, caller
      job.sbatch          the batch script (Slurm)
      launch.jsonl        one LaunchRecord an attempt
      state.json          StateRecord, replaced whole
      metrics.jsonl       one StepRecord a step
      events.jsonl        EventRecords
      restarts.jsonl      one RestartRecord an incarnation that ended too early
      health/             heartbeats, preflight.json, hang-0.txt (attempt 0) …
      failures/           0-rank3.json: FailureRecord of attempt 0, rank 3
      logs/               rank00000.log …, job.log of the batch script or launcher
      checkpoints/        step00000100/ …, latest
      tensorboard/        where asked for
      emulation.json      times of an emulated machine
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.records import (
    EventRecord,
    FailureRecord,
    LaunchRecord,
    RestartRecord,
    StateRecord,
    StepRecord,
    append_line,
    read_json,
    read_lines,
    write_json,
)

DEFAULT_ROOT = "runs"
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"


def safe_name(name: str) -> str:
    """A job name as it may stand in a path, a Slurm job name and a log file name."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64]
    return cleaned or "job"


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run directory, absolute; made by :meth:`create` or found by :meth:`find`."""

    root: Path

    @classmethod
    def create(cls, name: str, parent: Path) -> RunDir:
        """Make a new run directory below ``parent``; the id sorts by time and is unique."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        while True:
            tail = "".join(secrets.choice(_ALPHABET) for _ in range(4))
            root = parent.absolute() / f"{safe_name(name)}-{stamp}-{tail}"
            try:
                root.mkdir(parents=True)
            except FileExistsError:
                continue
            break
        run = cls(root)
        for folder in (run.logs, run.failures_dir, run.checkpoints):
            folder.mkdir()
        return run

    @classmethod
    def find(cls, run: str | None, parent: Path) -> RunDir:
        """The run that a person means: a path, an id or the start of one, or the newest.

        Raises:
            UsageError: there is none, or several begin so.
        """
        if run is not None and cls._is_run(Path(run)):
            return cls(Path(run).absolute())
        runs = cls.all(parent)
        if run is None:
            if not runs:
                raise UsageError(f"no runs in {parent}", hint="start one: hpctrain submit job.yaml")
            return runs[-1]
        matches = [r for r in runs if r.id == run] or [r for r in runs if r.id.startswith(run)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            ids = ", ".join(r.id for r in matches)
            raise UsageError(f"{run!r} is the start of {len(matches)} runs: {ids}")
        known = ", ".join(r.id for r in runs[-5:]) or "none"
        raise UsageError(
            f"no run {run!r}: neither a run directory nor an id in {parent}",
            hint=f"the newest there: {known}",
        )

    @classmethod
    def all(cls, parent: Path) -> list[RunDir]:
        """Runs directly below ``parent``, oldest first."""
        try:
            folders = [entry for entry in parent.iterdir() if cls._is_run(entry)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        folders.sort(key=lambda folder: (_stamp(folder.name), folder.name))
        return [cls(folder.absolute()) for folder in folders]

    @staticmethod
    def _is_run(path: Path) -> bool:
        return (path / "job.yaml").is_file() and (path / "provenance.json").is_file()

    @property
    def id(self) -> str:
        return self.root.name

    @property
    def job(self) -> Path:
        return self.root / "job.yaml"

    @property
    def provenance(self) -> Path:
        return self.root / "provenance.json"

    @property
    def script(self) -> Path:
        return self.root / "job.sbatch"

    @property
    def launches(self) -> Path:
        return self.root / "launch.jsonl"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def restarts(self) -> Path:
        return self.root / "restarts.jsonl"

    @property
    def health(self) -> Path:
        return self.root / "health"

    @property
    def failures_dir(self) -> Path:
        return self.root / "failures"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def job_log(self) -> Path:
        return self.logs / "job.log"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def emulation(self) -> Path:
        """Times of an emulated machine; see hpctrain.plan.emulation."""
        return self.root / "emulation.json"

    @property
    def stop_file(self) -> Path:
        """A person or ``hpctrain cancel`` asks all ranks to checkpoint and stop."""
        return self.root / "stop"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank{rank:05d}.log"

    def failure(self, attempt: int, rank: int) -> Path:
        return self.failures_dir / f"{attempt}-rank{rank}.json"

    # What lies in them.

    def read_state(self) -> StateRecord | None:
        data = read_json(self.state)
        return None if data is None else StateRecord.from_dict(data)

    def write_state(self, state: StateRecord) -> None:
        write_json(self.state, state.to_dict())

    def read_launches(self) -> list[LaunchRecord]:
        return [LaunchRecord.from_dict(data) for data in read_lines(self.launches)]

    def add_launch(self, launch: LaunchRecord) -> None:
        append_line(self.launches, launch)

    def read_steps(self) -> Iterator[StepRecord]:
        for data in read_lines(self.metrics):
            yield StepRecord.from_dict(data)

    def last_step(self) -> StepRecord | None:
        """The newest StepRecord, read from the end of the file."""
        try:
            with self.metrics.open("rb") as stream:
                stream.seek(0, 2)
                size = stream.tell()
                stream.seek(max(0, size - 65536))
                tail = stream.read()
        except FileNotFoundError:
            return None
        import json

        for line in reversed(tail.splitlines()):
            try:
                return StepRecord.from_dict(json.loads(line))
            except (ValueError, AttributeError):
                continue
        return None

    def add_event(self, event: EventRecord) -> None:
        append_line(self.events, event)

    def read_events(self) -> list[EventRecord]:
        return [EventRecord.from_dict(data) for data in read_lines(self.events)]

    def add_restart(self, restart: RestartRecord) -> None:
        append_line(self.restarts, restart)

    def read_restarts(self) -> list[RestartRecord]:
        return [RestartRecord.from_dict(data) for data in read_lines(self.restarts)]

    def read_failures(self, attempt: int | None = None) -> list[FailureRecord]:
        """Failures in the order of time; those of one attempt where it is given."""
        found = []
        for path in self.failures_dir.glob("*-rank*.json"):
            data = read_json(path)
            if data is not None:
                found.append(FailureRecord.from_dict(data))
        if attempt is not None:
            found = [failure for failure in found if failure.attempt == attempt]
        return sorted(found, key=lambda failure: (failure.time, failure.rank))


def _stamp(name: str) -> str:
    match = re.search(r"\d{8}-\d{6}", name)
    return match[0] if match else ""
