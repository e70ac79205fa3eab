"""Runs on a cluster of their own that are broken in every way and have to reach their last step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.rundir import RunDir
from hpctrain.testing.slurm import SlurmCluster

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
STEPS = 60
JOB = f"""\
name: life
nodes: 2
ranks_per_node: 1
model: {{layers: 1, hidden: 16, heads: 2, vocab_size: 256}}
data: {{path: tokens.h5, sequence_length: 16}}
train: {{steps: {STEPS}, global_batch: 8, micro_batch: 4, lr: 1e-2, loss: "faulty:loss"}}
checkpoint: {{every: 5}}
slurm: {{time: 30m, margin: 30s, cpus_per_task: 1, sbatch_options: ["--exclude=node[3-20]"]}}
"""


class Life:
    """A run in a directory of its own."""

    def __init__(self, cluster: SlurmCluster, folder: Path, tokens: Path, job: str = JOB) -> None:
        folder.mkdir(parents=True)
        self.cluster, self.folder = cluster, folder
        (folder / "tokens.h5").symlink_to(tokens)
        (folder / "job.yaml").write_text(job)
        shutil.copy(Path(__file__).with_name("faulty.py"), folder)

    def call(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = self.cluster.run(HPCTRAIN, *arguments, cwd=self.folder, check=False, timeout=100)
        assert code is None or done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done

    def submit(self, *sets: str) -> Life:
        options = [word for one in sets for word in ("--set", one)]
        self.call("submit", "job.yaml", *options)
        return self

    @property
    def run(self) -> RunDir:
        (run,) = RunDir.all(self.folder / "runs")
        return run

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.call("status", "--json").stdout)
        return found

    def reaches(self, step: int, seconds: float = 120) -> None:
        def there() -> bool:
            last = self.run.last_step()
            return last is not None and last.step >= step

        wait_for(there, seconds, self.tell)

    def held(self, step: int) -> None:
        """Wait until the ranks wait at a step of ``HOLD``; ``go`` lets them go on."""
        wait_for((self.run.root / f"held-{step}").exists, 200, self.tell)

    def go(self, step: int) -> None:
        (self.run.root / f"go-{step}").touch()

    def ends(self, *states: str, seconds: float = 240) -> dict[str, Any]:
        """Wait until the run is over; it has to end so."""

        def over() -> Any:
            state, restarts = self.run.read_state(), self.run.read_restarts()
            final = state is not None and state.status in ("finished", "stopped", "failed")
            # Ranks that failed have no word in the state.
            if not final and not (restarts and restarts[-1].action == "stop"):
                return None
            found = self.status()
            return found if found["exit_code"] is not None else None

        found = wait_for(over, seconds, self.tell)
        assert found["status"] in states, self.tell()
        return dict(found)

    def whys(self) -> list[str]:
        return [one.why for one in self.run.read_restarts()]

    def curve(self) -> list[tuple[int, float | None, float | None]]:
        by_step = {one.step: (one.step, one.loss, one.grad_norm) for one in self.run.read_steps()}
        return [by_step[step] for step in sorted(by_step)]

    def tell(self) -> str:
        run = self.run
        parts = [run.restarts, run.events, run.job_log, *sorted(run.logs.glob("rank*"))]
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in parts
            if path.exists()
        )


def wait_for(what: Callable[[], Any], seconds: float, tell: Callable[[], str]) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds} s in vain\n{tell()}")
        time.sleep(0.3)
    return found
