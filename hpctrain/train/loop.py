"""The training loop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.errors import CheckpointError, RankFailedError
from hpctrain.optim.schedule import learning_rate
from hpctrain.records import StepRecord
from hpctrain.runtime.stopping import REASONS, StopWatch
from hpctrain.train.agreement import agree
from hpctrain.train.metrics import Recorder, peak_memory

if TYPE_CHECKING:
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec
    from hpctrain.train.checkpointing import Checkpointer
    from hpctrain.train.data import Batches
    from hpctrain.train.state import TrainState
    from hpctrain.train.step import Stepper


@dataclass
class Trainer:
    """All that the loop works with; put together in :mod:`hpctrain.train.main`."""

    spec: JobSpec
    context: RankContext
    state: TrainState
    stepper: Stepper
    batches: Batches
    checkpointer: Checkpointer
    recorder: Recorder
    stopwatch: StopWatch

    def run(self) -> str:
        """Train to the last step; returns the reason where all agreed to stop before it.

        Raises:
            RankFailedError: the loss or the gradient is no longer finite.
            CheckpointError: a checkpoint failed and the job says stop.
        """
        state, train = self.state, self.spec.train
        self.recorder.state("running", state.step)
        while state.step < train.steps:
            stop = self.step()
            last = state.step == train.steps
            if last or stop or state.step % self._every == 0:
                self._checkpoint(stop)
            if stop and not last:
                return REASONS[stop]
        return ""

    @property
    def _every(self) -> int:
        every = self.spec.checkpoint.every
        assert every is not None, "a resolved job has an interval"
        return every

    def step(self) -> int:
        """Take one optimizer step; returns the reason to stop that all agreed on, 0 for none."""
        state, batches = self.state, self.batches
        began = time.perf_counter()
        micro_batches = list(batches.next_step())
        data_seconds = time.perf_counter() - began
        loss = self.stepper.forward_backward(state.step + 1, micro_batches)
        norm = self.stepper.update(state.step + 1)
        mean_loss, grad_norm = float(loss), float(norm)  # waits for the device
        seconds = time.perf_counter() - began
        agreed = agree(self.context.comm, mean_loss, seconds, self.stopwatch.reason())
        state.step += 1
        state.tokens += batches.units_per_step
        state.samples += batches.global_batch
        if not (math.isfinite(agreed.loss) and math.isfinite(grad_norm)):
            raise RankFailedError(
                f"step {state.step}: loss {agreed.loss}, gradient norm {grad_norm}: not finite, "
                "training cannot go on",
                hint=f"the last checkpoint is step {self.recorder.durable_step}; resume from it "
                "with a lower train.lr or more schedule.warmup_steps, or look at the data",
            )
        if state.step % self.spec.train.log_every == 0 or state.step == self.spec.train.steps:
            self.recorder.step(
                StepRecord(
                    step=state.step,
                    time=time.time(),
                    loss=agreed.loss,
                    lr=learning_rate(state.step, self.spec.train),
                    grad_norm=grad_norm,
                    tokens=state.tokens,
                    step_seconds=agreed.seconds,
                    tokens_per_second=batches.units_per_step / agreed.seconds,
                    data_seconds=data_seconds,
                    checkpoint_seconds=self.checkpointer.take_blocked_seconds(),
                    memory_bytes=peak_memory(self.context.device),
                )
            )
        return agreed.stop

    def _checkpoint(self, stop: int) -> None:
        state, recorder = self.state, self.recorder
        if stop:
            recorder.state("stopping", state.step, REASONS[stop])
            recorder.event("signal", REASONS[stop], step=state.step)
        try:
            report = self.checkpointer.save(state)
        except CheckpointError as error:
            recorder.event("checkpoint_failed", str(error), step=state.step)
            if self.spec.checkpoint.on_error == "stop":
                raise
            return
        recorder.durable_step = state.step
        recorder.state("stopping" if stop else "running", state.step, REASONS[stop])
        recorder.event(
            "checkpoint",
            f"step {state.step} is durable in {report.path} ({report.seconds:.2f} s)",
            step=state.step,
            bytes=report.bytes,
            seconds=report.seconds,
        )
