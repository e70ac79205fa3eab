"""The training loop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.errors import CheckpointError, RankFailedError
from hpctrain.io.saver import Outcome
from hpctrain.optim.schedule import learning_rate
from hpctrain.records import StepRecord
from hpctrain.runtime.stopping import REASONS, StopWatch
from hpctrain.train.agreement import agree, agree_on_loads
from hpctrain.train.metrics import Recorder, peak_memory

if TYPE_CHECKING:
    from hpctrain.health.monitor import Monitor
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec
    from hpctrain.train.checkpointing import Checkpointer
    from hpctrain.train.data import Batches
    from hpctrain.train.emulation import Emulation
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
    monitor: Monitor
    emulation: Emulation | None = None
    _step_seconds: float = 0.0

    def run(self) -> str:
        """Train to the last step; returns the reason where all agreed to stop before it.

        Raises:
            RankFailedError: the loss or the gradient is no longer finite.
            CheckpointError: a checkpoint failed and the job says stop.
        """
        state, train = self.state, self.spec.train
        self.recorder.state("running", state.step)
        self.context.communicators.counter.take()  # what building and restoring have sent
        self.context.communicators.counter.take_computed()
        while state.step < train.steps:
            stop = self.step()
            last = state.step == train.steps
            self.monitor.mark("poll")
            self._conclude(self.checkpointer.poll(self._step_seconds), stop)
            if last or stop or self.checkpointer.due(state.step):
                self._checkpoint(stop, wait=last or bool(stop))
            if stop and not last:
                return REASONS[stop]
        return ""

    def step(self) -> int:
        """Take one optimizer step; returns the reason to stop that all agreed on, 0 for none."""
        state, batches = self.state, self.batches
        monitor, number = self.monitor, state.step + 1
        monitor.mark("data", number)
        counter = self.context.communicators.counter
        really, began = time.perf_counter(), counter.now()
        micro_batches = list(batches.next_step())
        data_seconds = counter.now() - began
        if monitor.looks_at(number):
            monitor.compare_gradients(self.stepper, number, micro_batches[0])
        monitor.mark("forward_backward")
        loss = self.stepper.forward_backward(state.step + 1, micro_batches)
        monitor.mark("update")
        norm = self.stepper.update(state.step + 1)
        mean_loss, grad_norm = float(loss), float(norm)  # waits for the device
        seconds = counter.now() - began
        monitor.mark("agree")
        agreed = agree(self.context.comm, mean_loss, seconds, self.stopwatch.reason())
        if self.emulation is not None:
            self.emulation.step_over(self.context.comm)
        self._step_seconds = agreed.seconds
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
        logged = state.step % self.spec.train.log_every == 0 or state.step == self.spec.train.steps
        comm = counter.take() if logged else {}
        monitor.step(seconds, data_seconds, comm if logged else None, time.perf_counter() - really)
        seen = self.stepper.take_loads() if logged and self.emulation is None else None
        experts = {} if seen is None else agree_on_loads(self.context.comm, seen)
        if logged:
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
                    comm=comm,
                    compute_seconds=counter.take_computed(),
                    experts=experts,
                )
            )
        return agreed.stop

    def _checkpoint(self, stop: int, *, wait: bool) -> None:
        state, recorder = self.state, self.recorder
        self.monitor.mark("checkpoint")
        if stop:
            recorder.state("stopping", state.step, REASONS[stop])
            recorder.event("signal", REASONS[stop], step=state.step)
        try:
            outcomes = self.checkpointer.save(state, wait=wait)
        except CheckpointError as error:
            outcomes = [Outcome.failed(state.step, error)]
        self._conclude(outcomes, stop)

    def _conclude(self, outcomes: list[Outcome], stop: int) -> None:
        """Tell how checkpoints ended; one that failed ends the job where it says so."""
        state, recorder = self.state, self.recorder
        for outcome in outcomes:
            for warning in outcome.warnings:
                message = f"checkpoint of step {outcome.step}: {warning}"
                recorder.event("warning", message, step=outcome.step)
            if outcome.error is not None:
                recorder.event("checkpoint_failed", str(outcome.error), step=outcome.step)
                if self.spec.checkpoint.on_error == "stop":
                    raise outcome.error
            elif outcome.path is not None:
                recorder.durable_step = outcome.step
                recorder.state("stopping" if stop else "running", state.step, REASONS[stop])
                recorder.event(
                    "checkpoint",
                    f"step {outcome.step} is durable in {outcome.path} ({outcome.seconds:.2f} s)",
                    step=outcome.step,
                    bytes=outcome.bytes,
                    seconds=outcome.seconds,
                )
        changed = self.checkpointer.adapt(outcomes)
        if changed is not None:
            recorder.event("checkpoint_interval", changed, step=state.step)
