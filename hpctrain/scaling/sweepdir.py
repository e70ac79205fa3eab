"""The directory of a sweep: what was asked for, which runs belong to which point.

::

    runs/strong-20260131-142530-k3x9/
      sweep.yaml      the sweep file as given
      sweep.json      points, their settings and reasons, their runs
      p000-1-…/       run directories, see hpctrain.rundir
      arrays/         scripts and logs of job arrays
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.records import SCHEMA_VERSION, Record, read_json, write_json
from hpctrain.rundir import RunDir
from hpctrain.scaling.points import SIZE_KEYS, Point
from hpctrain.scaling.sweepfile import SweepFile, shown


@dataclass(frozen=True, slots=True)
class PointRecord(Record):
    """A point as ``sweep.json`` holds it.

    Attributes:
        id: of the point.
        settings: varied keys, as written.
        grown: keys that weak scaling worked out.
        overrides: all that the point adds to the base job.
        nodes, ranks: that it runs on.
        reason: why it cannot run; empty where it can.
        baseline: others are compared with it.
        step_seconds: planned.
        runs: for each repeat the ids of its runs, the newest last.
    """

    id: str
    settings: dict[str, str]
    grown: dict[str, str]
    overrides: list[str]
    nodes: int
    ranks: int
    reason: str = ""
    baseline: bool = False
    step_seconds: float | None = None
    runs: list[list[str]] = dataclasses.field(default_factory=list)

    @property
    def title(self) -> str:
        return " ".join(f"{k}={shown(v)}" for k, v in {**self.settings, **self.grown}.items())


@dataclass(frozen=True, slots=True)
class SweepIndex:
    """``sweep.json``: the sweep and where its points stand.

    Attributes:
        name, kind, grow, repeats: of the sweep file.
        size_keys: keys that say how large a point is: what is not told apart in a series.
        directory: that relative paths of the job start from.
        job_file: the base job.
        launcher: where the points run.
        points: all of them.
    """

    name: str
    kind: str
    grow: str
    repeats: int
    size_keys: tuple[str, ...]
    directory: str
    job_file: str
    launcher: str
    points: tuple[PointRecord, ...]
    max_queued: int | None = None

    @classmethod
    def of(
        cls, sweep: SweepFile, points: Iterable[Point], directory: Path, launcher: str,
        baseline: Iterable[Point] = (),
    ) -> SweepIndex:  # fmt: skip
        """The index of a sweep of which nothing has run."""
        chosen = {point.id for point in baseline}
        size_keys = set(SIZE_KEYS)
        for axis in sweep.axes:  # what goes together with the size is part of it
            if size_keys & set(axis.keys):
                size_keys |= set(axis.keys)
        return cls(
            name=sweep.name,
            kind=sweep.kind,
            grow=sweep.grow,
            repeats=sweep.repeats,
            size_keys=tuple(sorted(size_keys)),
            directory=str(directory.absolute()),
            job_file=str(sweep.job.absolute()),
            launcher=launcher,
            max_queued=sweep.max_queued,
            points=tuple(
                PointRecord(
                    id=point.id,
                    settings={one.key: one.text for one in point.settings},
                    grown={one.key: one.text for one in point.grown},
                    overrides=list(point.overrides),
                    nodes=point.nodes,
                    ranks=point.ranks,
                    reason=point.reason,
                    baseline=point.id in chosen,
                    step_seconds=point.step_seconds,
                    runs=[[] for _ in range(sweep.repeats)],
                )
                for point in points
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}


@dataclass(frozen=True, slots=True)
class SweepDir:
    """A sweep's directory, absolute."""

    root: Path

    @classmethod
    def create(cls, sweep: SweepFile, index: SweepIndex, parent: Path) -> SweepDir:
        """Make a new one below ``parent``."""
        made = RunDir.create(sweep.name, parent)  # the same rule for names
        for folder in (made.logs, made.failures_dir, made.checkpoints):
            folder.rmdir()
        found = cls(made.root)
        (found.root / "sweep.yaml").write_text(sweep.text, encoding="utf-8")
        shutil.copyfile(index.job_file, found.root / "base.yaml")
        found.write(index)
        return found

    @classmethod
    def find(cls, name: str | None, parent: Path) -> SweepDir:
        """The sweep that a person means: a path, a name or the start of one, or the newest.

        Raises:
            UsageError: there is none, or several begin so.
        """
        if name is not None and cls.holds(Path(name)):
            return cls(Path(name).absolute())
        found = sorted(
            (p for p in parent.glob("*") if cls.holds(p)), key=lambda p: p.stat().st_mtime
        )
        if name is None:
            if not found:
                raise UsageError(f"no sweeps in {parent}", hint="start one: hpctrain sweep FILE")
            return cls(found[-1].absolute())
        matches = [path for path in found if path.name.startswith(name)]
        if len(matches) == 1:
            return cls(matches[0].absolute())
        if matches:
            raise UsageError(
                f"{name!r} is the start of {len(matches)} sweeps: "
                + ", ".join(path.name for path in matches)
            )
        known = ", ".join(path.name for path in found[-5:]) or "none"
        raise UsageError(f"no sweep {name!r} in {parent}", hint=f"the newest there: {known}")

    @staticmethod
    def holds(path: Path) -> bool:
        """Whether a sweep lies in a directory."""
        return (path / "sweep.json").is_file()

    @property
    def id(self) -> str:
        return self.root.name

    @property
    def arrays(self) -> Path:
        return self.root / "arrays"

    def run(self, run_id: str) -> RunDir:
        return RunDir(self.root / run_id)

    def read(self) -> SweepIndex:
        """The index.

        Raises:
            UsageError: it is damaged.
        """
        data = read_json(self.root / "sweep.json")
        try:
            assert data is not None
            data["points"] = tuple(PointRecord.from_dict(one) for one in data["points"])
            data["size_keys"] = tuple(data["size_keys"])
            known = {field.name for field in dataclasses.fields(SweepIndex)}
            return SweepIndex(**{key: value for key, value in data.items() if key in known})
        except (AssertionError, KeyError, TypeError, ValueError):
            raise UsageError(f"{self.root / 'sweep.json'}: not the index of a sweep") from None

    def write(self, index: SweepIndex) -> None:
        write_json(self.root / "sweep.json", index.to_dict())

    def add_run(self, index: SweepIndex, point: str, repeat: int, run: RunDir) -> SweepIndex:
        """The index with one more run of a point, written."""
        points = []
        for one in index.points:
            if one.id == point:
                runs = [list(ids) for ids in one.runs]
                runs[repeat].append(run.id)
                one = dataclasses.replace(one, runs=runs)
            points.append(one)
        changed = dataclasses.replace(index, points=tuple(points))
        self.write(changed)
        return changed
