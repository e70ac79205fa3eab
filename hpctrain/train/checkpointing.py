"""Between the loop and :mod:`hpctrain.io`: what goes into a checkpoint, when, which comes back."""

from __future__ import annotations

import statistics
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpctrain
from hpctrain.errors import CheckpointError
from hpctrain.io.buffers import SaveOptions
from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.flush import WriteOptions
from hpctrain.io.interval import steps_between
from hpctrain.io.recover import Recovery
from hpctrain.io.restore import DamagedError
from hpctrain.io.saver import Outcome, Saver
from hpctrain.io.storage import files_for
from hpctrain.io.store import STORE
from hpctrain.train import rng
from hpctrain.train.levels import Levels

if TYPE_CHECKING:
    from hpctrain.io.checkpoint import CheckpointReader
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec
    from hpctrain.train.metrics import Recorder
    from hpctrain.train.state import TrainState

_FIRST = 5
"""Steps before the first checkpoint where the interval is to be worked out from its cost."""


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
        settings = spec.checkpoint
        kind = settings.files
        if kind == "auto":
            kind = files_for(root, context.world_size, context.nodes)
        write = WriteOptions(direct=settings.direct, bandwidth=settings.bandwidth)
        options = SaveOptions(kind, settings.buffers, settings.when_busy, write)
        self.store = CheckpointStore(
            root, context.comm.Dup(), keep=settings.keep, node=context.node
        )
        self._saver: Saver | None = None
        self._options = options
        self._levels = Levels(root, spec.checkpoint, context, write)
        self._interval = _Interval(spec)
        self._blocked = 0.0
        self._generators = rng.Generators()
        self._static = self._static_scalars()

    @property
    def saver(self) -> Saver:
        """Made by the first save or restore, because it looks at what is there."""
        if self._saver is None:
            self._saver = Saver(
                self.store.root,
                self.store.comm,
                keep=self.store.keep,
                options=self._options,
                node=self.context.node,
                tiers=self._levels.tiers(self.context.comm.Dup()),
            )
        return self._saver

    def guard(self, state: TrainState) -> None:
        """Make the optimizer's step wait for what a snapshot has not copied yet."""

        def wait(*_: Any) -> None:
            began = time.perf_counter()
            if self._saver is not None:
                self._saver.wait_copied()
            self._blocked += time.perf_counter() - began

        state.optimizer.register_step_pre_hook(wait)

    def due(self, step: int) -> frozenset[str]:
        """Levels that are to hold a checkpoint of ``step``; the same on every rank."""
        stored = {STORE} if step % self._interval.every == 0 else set()
        return frozenset(stored | self._levels.due(step))

    def save(self, state: TrainState, *, wait: bool = False) -> list[Outcome]:
        """Begin a checkpoint for the levels that are due; with ``wait`` one on the parallel
        file system, and bring everything to an end.

        Returns:
            What ended meanwhile, as :meth:`poll`.

        Raises:
            CheckpointError: on every rank, where the ranks' parts do not fit together.
        """
        began = time.perf_counter()
        sources = state.sources()
        taken = self.saver.save(
            state.step,
            sources,
            scalars=state.scalars() | self._static,
            per_rank=self._generators.capture(),
            tiers={STORE} if wait else self.due(state.step),
        )
        outcomes = []
        if wait or not self.spec.checkpoint.background:
            outcomes = self.saver.drain()
        if not taken:
            outcomes.append(
                Outcome(state.step, None, 0, 0.0, warnings=("skipped: all buffers are in use",))
            )
        self._blocked += time.perf_counter() - began
        return outcomes

    def poll(self, step_seconds: float) -> list[Outcome]:
        """Checkpoints that ended; collective, at each step boundary.

        Args:
            step_seconds: of the step that ended, agreed by all ranks.
        """
        if self._saver is None:
            return []
        began = time.perf_counter()
        busy = self._saver.busy
        outcomes = self._saver.poll()
        self._blocked += time.perf_counter() - began
        self._interval.step(step_seconds, busy)
        return outcomes

    def adapt(self, outcomes: list[Outcome]) -> str | None:
        """Work the interval out anew; what to say where it changed. Collective."""
        if not self._interval.automatic or not any(o.path for o in outcomes):
            return None
        mine = (max(o.seconds for o in outcomes), self._interval.cost())
        duration, cost = self.context.comm.bcast(mine)
        return self._interval.adapt(cost, duration)

    def close(self, step: int, durable_step: int) -> None:
        """Stop the background threads and free the memory; after the last save has ended.

        Args:
            step: where training ended.
            durable_step: newest checkpoint on the parallel file system; where it is another,
                the near levels are left as they are.
        """
        if self._saver is not None:
            self._saver.close(forget=self.context.comm.bcast(durable_step) == step)

    def take_blocked_seconds(self) -> float:
        """Seconds that saving held up the loop since the last call."""
        seconds, self._blocked = self._blocked, 0.0
        self._interval.blocked(seconds)
        return seconds

    def _static_scalars(self) -> dict[str, Any]:
        layout = self.context.grid.layout
        return {
            "job": self.spec.name,
            "code": hpctrain.__version__,
            "layout": {
                axis: layout.size(axis) for axis in ("pp", "tp", "cp", "dp_replicate", "dp_shard")
            },
            "schedule": {
                "lr": self.spec.train.lr,
                "min_lr": self.spec.train.min_lr,
                **self.spec.train.schedule.model_dump(mode="json"),
            },
            "data": {"seed": self.spec.train.seed, "global_batch": self.spec.train.global_batch},
            "model": self.spec.model.model_dump(mode="json"),
        }

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
        recovery = Recovery(
            self.store, self._levels.near(), self.context.node, self._static["layout"]
        )
        while True:
            choice = recovery.find(wanted)
            if choice is None:
                break
            with recovery.open(choice) as reader:
                generators, fault = self._take(state, reader)
            if fault is None:
                break
            recovery.reject(choice, fault)
        for bad, reason in recovery.skipped:
            recorder.event("checkpoint_skipped", f"step {bad}: {reason}", step=bad)
        if choice is None:
            self._none_found(wanted, recovery.skipped)
            return False
        step = choice.step
        recorder.resumed_from = step
        recorder.durable_step = step if choice.stored else self._newest_stored()
        recorder.event(
            "resumed",
            f"from step {step}, checkpoint of {reader.world_size} ranks in {choice.source}",
            step=step,
            world_size=reader.world_size,
            source=choice.source,
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

    def _take(self, state: TrainState, reader: CheckpointReader) -> tuple[bool, str | None]:
        """Read a checkpoint on all ranks: whether generators were restored, and what is damaged."""
        generators, fault = False, None
        try:
            generators = state.restore(reader)
        except DamagedError as error:
            fault = error.message
        faults = [text for text in self.context.comm.allgather(fault) if text is not None]
        return generators, faults[0] if faults else None

    def _none_found(self, wanted: int, skipped: list[tuple[int, str]]) -> None:
        """Raise where there are checkpoints and none will do, or the one asked for will not."""
        root = self.store.root
        if wanted >= 0:
            steps = ", ".join(map(str, self.store.steps())) or "none"
            reason = f": {skipped[-1][1]}" if skipped else ", there is none"
            raise CheckpointError(
                f"{root}: no good checkpoint of step {wanted}{reason}",
                hint=f"steps that there are: {steps}",
            )
        if skipped:
            raise CheckpointError(
                f"none of {len(skipped)} checkpoints in {root} is good",
                hint="each is named in events.jsonl; start anew with hpctrain submit",
            )

    def _newest_stored(self) -> int:
        found: int = self.context.comm.bcast(next(iter(reversed(self.store.steps())), -1))
        return found

    def _warn_of_changes(self, scalars: dict[str, Any], recorder: Recorder) -> None:
        then = scalars.get("data", {})
        now = {"seed": self.spec.train.seed, "global_batch": self.spec.train.global_batch}
        changed = [
            f"{key} was {then[key]}, is {now[key]}"
            for key in now
            if then.get(key, now[key]) != now[key]
        ]
        if changed:
            recorder.event("warning", f"the order of samples changes: {'; '.join(changed)}")


class _Interval:
    """Steps between checkpoints: the job's, or worked out from what they cost."""

    def __init__(self, spec: JobSpec) -> None:
        every = spec.checkpoint.every
        assert every is not None, "a resolved job has an interval"
        self.automatic = every == "auto"
        self.every = min(_FIRST, spec.train.steps) if every == "auto" else every
        self._mtbf = float(spec.checkpoint.mtbf)
        self._idle = _Mean()
        self._busy = _Mean()
        self._blocked = 0.0
        self._costs: deque[float] = deque(maxlen=5)

    def step(self, seconds: float, busy: bool) -> None:
        (self._busy if busy else self._idle).add(seconds)

    def blocked(self, seconds: float) -> None:
        self._blocked += seconds

    def cost(self) -> float:
        """Seconds that a checkpoint costs: what the loop waited, and what its steps took longer
        while something was in flight. The median of the last ones, for other things make steps
        slow too."""
        slower = (self._busy.value - self._idle.value) * self._busy.count if self._idle.count else 0
        self._costs.append(max(1e-4, self._blocked + max(0.0, slower)))
        self._blocked = 0.0
        self._busy = _Mean()
        return statistics.median(self._costs)

    def adapt(self, cost: float, duration: float) -> str | None:
        step = self._idle.value or self._busy.value
        if not step:
            return None
        before = self.every
        self.every = steps_between(cost, self._mtbf, step, duration)
        if abs(self.every - before) <= 0.2 * before:
            return None
        return (
            f"every {self.every} steps from now on, every {before} before: one costs {cost:.3g} s "
            f"and is durable after {duration:.3g} s, a step takes {step:.3g} s, "
            f"checkpoint.mtbf is {self._mtbf:.0f} s"
        )


class _Mean:
    """Mean of a stream of numbers."""

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, number: float) -> None:
        self.count += 1
        self.value += (number - self.value) / self.count
