"""Between the loop and :mod:`hpctrain.io`: what goes into a checkpoint, which one comes back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpctrain
from hpctrain.errors import CheckpointError
from hpctrain.io.checkpoint import CheckpointStore, SaveReport
from hpctrain.train import rng

if TYPE_CHECKING:
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec
    from hpctrain.train.metrics import Recorder
    from hpctrain.train.state import TrainState


class Checkpointer:
    """Saves and restores a TrainState; collective over all ranks.

    Args:
        root: directory of the checkpoints.
        spec: resolved job.
        context: of this rank.
    """

    def __init__(self, root: Path, spec: JobSpec, context: RankContext) -> None:
        self.spec = spec
        self.context = context
        self.store = CheckpointStore(root, context.comm.Dup(), keep=spec.checkpoint.keep)
        self._blocked = 0.0

    def save(self, state: TrainState) -> SaveReport:
        """Write one checkpoint; it is durable when this returns.

        Raises:
            CheckpointError: on every rank, where any could not write its part.
        """
        began = time.perf_counter()
        layout = self.context.grid.layout
        scalars = state.scalars() | {
            "job": self.spec.name,
            "code": hpctrain.__version__,
            "layout": {axis: layout.size(axis) for axis in ("pp", "dp_replicate", "dp_shard")},
            "data": {"seed": self.spec.train.seed, "global_batch": self.spec.train.global_batch},
        }
        report = self.store.save(
            state.step,
            state.shards(),
            scalars=scalars,
            per_rank=rng.collect(),
        )
        self._blocked += time.perf_counter() - began
        return report

    def take_blocked_seconds(self) -> float:
        """Seconds that saving held up the loop since the last call."""
        seconds, self._blocked = self._blocked, 0.0
        return seconds

    def restore(self, state: TrainState, wanted: int, recorder: Recorder) -> bool:
        """Fill ``state`` from a checkpoint; False where there is none and none was asked for.

        Args:
            state: fresh.
            wanted: step to take, -1 for the newest good one.
            recorder: told what was taken and what was passed over.

        Raises:
            CheckpointError: the one asked for is missing or bad, or all there are bad.
        """
        removed = self.store.clean()
        if removed:
            recorder.event("warning", f"removed what dead writers left: {', '.join(removed)}")
        step = wanted
        if wanted < 0:
            found, skipped = self.store.latest_good()
            for bad, reason in skipped:
                recorder.event("checkpoint_skipped", f"step {bad}: {reason}", step=bad)
            if found is None:
                if skipped:
                    raise CheckpointError(
                        f"none of {len(skipped)} checkpoints in {self.store.root} is good",
                        hint="each is named in events.jsonl; start anew with hpctrain submit",
                    )
                return False
            step = found
        reader = self.store.open(step)
        generators = state.restore(reader)
        recorder.durable_step = recorder.resumed_from = step
        recorder.event(
            "resumed",
            f"from step {step}, checkpoint {reader.path} of {reader.world_size} ranks",
            step=step,
            world_size=reader.world_size,
        )
        if not generators:
            recorder.event(
                "warning",
                f"{reader.world_size} ranks then, {self.context.world_size} now: weights, "
                "optimizer and order of samples go on exactly; random numbers that your own "
                "code draws start anew",
            )
        self._warn_of_changes(reader.scalars, recorder)
        return True

    def _warn_of_changes(self, scalars: dict[str, Any], recorder: Recorder) -> None:
        then = scalars["data"]
        now = {"seed": self.spec.train.seed, "global_batch": self.spec.train.global_batch}
        changed = [f"{key} was {then[key]}, is {now[key]}" for key in now if then[key] != now[key]]
        if changed:
            recorder.event("warning", f"the order of samples changes: {'; '.join(changed)}")
