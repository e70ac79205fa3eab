"""Many runs at once: found below a directory, looked at, put into rows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cli import text
from hpctrain.cli.view import RunView, look
from hpctrain.errors import UsageError
from hpctrain.rundir import RunDir
from hpctrain.units import format_duration


def runs_below(root: Path) -> list[RunDir]:
    """All runs in a directory tree, oldest first; what lies inside a run is not searched.

    Raises:
        UsageError: no such directory.
    """
    if not root.is_dir():
        raise UsageError(f"{root}: no such directory")
    found = list(_walk(root.absolute()))
    return sorted(found, key=lambda run: (_created(run), str(run.root)))


def _walk(folder: Path) -> Iterator[RunDir]:
    for here, folders, files in os.walk(folder):
        if "job.yaml" in files and "provenance.json" in files:
            yield RunDir(Path(here))
            folders.clear()
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))


def _created(run: RunDir) -> float:
    try:
        return run.provenance.stat().st_mtime
    except OSError:
        return 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A run in an overview."""

    view: RunView
    name: str

    @classmethod
    def of(cls, run: RunDir, root: Path) -> Row:
        name = os.path.relpath(run.root, root.absolute())
        return cls(look(run), run.id if name == "." else name)

    def cells(self) -> list[str]:
        """Run, status, step, loss, speed, time to go, restarts, last checkpoint, why."""
        view = self.view
        left = view.pace.seconds_left if view.has_eta else None
        loss = "-" if view.pace.last is None else text.loss(view.pace.last.loss)
        return [
            self.name,
            view.status,
            f"{view.step}/{view.total_steps}",
            loss,
            text.speed(view.pace.tokens_per_second) if not view.is_final else "-",
            "-" if left is None else format_duration(left),
            str(view.restarted),
            f"step {view.durable_step}" if view.durable_step >= 0 else "none",
            view.reason.splitlines()[0] if view.reason else "",
        ]

    def history(self) -> list[str]:
        """Run, status, when, how long, ranks, steps, loss, restarts, seconds lost, why."""
        view = self.view
        launches = view.run.read_launches()
        begun = launches[0].submitted if launches else 0.0
        over = view.state.time if view.state is not None and view.is_final else time.time()
        lost = sum(one.seconds_lost for one in view.restarts)
        return [
            self.name,
            view.status,
            text.moment(begun) if begun else "-",
            format_duration(max(0.0, over - begun)) if begun else "-",
            str(launches[-1].world_size) if launches else "-",
            f"{view.step}/{view.total_steps}",
            "-" if view.pace.last is None else text.loss(view.pace.last.loss),
            str(view.restarted),
            format_duration(lost) if lost else "-",
            view.reason.splitlines()[0] if view.reason else "",
        ]

    def to_dict(self) -> dict[str, Any]:
        return self.view.to_dict()


HEADERS = ["run", "status", "step", "loss", "speed", "ETA", "restarts", "checkpoint", "why"]
HISTORY = ["run", "status", "started", "took", "ranks", "steps", "loss", "restarts", "lost", "why"]
RIGHT = (2, 3, 4, 5, 6)
HISTORY_RIGHT = (4, 5, 6, 7, 8)
