"""Work beside a rank's own, in order: tasks that compute a little and wait for other ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from hpctrain.runtime.counting import Counter

T = TypeVar("T")


class Lane:
    """On processors a thread, which ends with the lane; on a GPU a stream (which was never run).

    Collectives that tasks call need groups that nobody else uses: those of one group have to be
    called in one order on all ranks.

    Args:
        device: that computes.
        counter: of the rank, whose emulated clock a task has its own part of.
    """

    def __init__(self, device: torch.device, counter: Counter) -> None:
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )
        self._thread = None if self._stream else ThreadPoolExecutor(1, thread_name_prefix="lane")
        self._counter = counter

    def run(self, task: Callable[[], T]) -> Handle[T]:
        """Do something after what this rank has computed so far, and after earlier tasks."""
        if self._thread is None:
            assert self._stream is not None
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream), torch.no_grad():
                return Handle(task(), self._stream)
        links = self._counter.links
        clock = None if links is None else links.clock
        asked = 0.0 if clock is None else clock.now

        def work() -> tuple[T, float]:
            with torch.no_grad(), nullcontext() if clock is None else clock.lane(asked):
                return task(), 0.0 if clock is None else clock.now

        return Handle(self._thread.submit(work), clock)


class Handle(Generic[T]):
    """A task under way."""

    def __init__(self, task: Any, after: Any) -> None:
        self._task, self._after = task, after

    def wait(self) -> T:
        """What the task returned; what follows comes after it."""
        if isinstance(self._after, torch.cuda.Stream):
            torch.cuda.current_stream().wait_stream(self._after)
            return self._task  # type: ignore[no-any-return]
        found, over = self._task.result()
        if self._after is not None:
            self._after.reach(over)
        return found  # type: ignore[no-any-return]
