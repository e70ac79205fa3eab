"""What rank 0 writes while the run goes on: metrics, state, events, TensorBoard."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

from hpctrain.errors import UsageError
from hpctrain.records import EventRecord, RunStatus, StateRecord, StepRecord, append_line
from hpctrain.rundir import RunDir

_STATE_SECONDS = 2.0


class Recorder:
    """The run's records; every method does nothing on ranks other than 0.

    Args:
        run: run directory.
        writes: this rank is the one that writes.
        attempt: number of this incarnation.
        total_steps: of the whole run.
        world_size: ranks.
        tensorboard: also write event files.

    Raises:
        UsageError: TensorBoard is asked for and not installed.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        writes: bool,
        attempt: int,
        total_steps: int,
        world_size: int,
        tensorboard: bool = False,
    ) -> None:
        self.run = run
        self.writes = writes
        self.attempt = attempt
        self.total_steps = total_steps
        self.world_size = world_size
        self.durable_step = -1
        self.resumed_from = -1
        self._written = 0.0
        self._board = _board(run) if tensorboard and writes else None

    def step(self, record: StepRecord) -> None:
        if not self.writes:
            return
        append_line(self.run.metrics, record)
        if time.monotonic() - self._written > _STATE_SECONDS:
            self.state("running", record.step)
        if self._board is not None:
            for key in ("loss", "lr", "grad_norm", "tokens_per_second", "step_seconds"):
                value = getattr(record, key)
                if value is not None:
                    self._board.add_scalar(key, value, record.step)

    def state(self, status: RunStatus, step: int, reason: str = "") -> None:
        if not self.writes:
            return
        self._written = time.monotonic()
        self.run.write_state(
            StateRecord(
                status=status,
                step=step,
                total_steps=self.total_steps,
                time=time.time(),
                world_size=self.world_size,
                reason=reason,
                durable_step=self.durable_step,
                resumed_from=self.resumed_from,
            )
        )

    def event(self, kind: str, message: str, **data: Any) -> None:
        if not self.writes:
            return
        self.run.add_event(EventRecord(kind, time.time(), message, self.attempt, data))
        print(f"{kind}: {message}", flush=True)  # noqa: T201  rank 0's log

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def peak_memory(device: torch.device) -> int:
    """Bytes: peak of the device, or peak resident size of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _board(run: RunDir) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError(
            "train.tensorboard: TensorBoard is not installed",
            hint="pip install 'hpctrain[tensorboard]', or set train.tensorboard: false",
        ) from None
    return SummaryWriter(str(run.tensorboard))
