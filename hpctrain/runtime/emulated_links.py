"""Links of an emulated machine: what is sent arrives when that machine would deliver it.

Every collective and message goes through PyTorch's own operators as ever (hpctrain.runtime.counting
notes them there); here each is held until the time of the emulated link has passed:

- a collective that the caller waits for: its members meet, then all sleep as long as it takes;
- one that runs beside computation: a thread an axis does the same, one operation after another,
  and the work that the caller holds is done when that thread says so;
- a message to another stage leaves late: a thread a destination sleeps, then sends;
- shards of parameters are gathered as on a device whose host runs ahead (FSDP's implicit
  prefetching): a block's gathering begins when the block before it begins to compute, a block's
  gradients are scattered while others compute, and the next sum waits for all of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]  # not in its stubs
    _create_work_from_future,
)

_INSIDE_BLOCKS = frozenset({"tp", "cp"})
"""Axes whose collectives wait for no gradients."""
_KEPT = 64
"""Real sends that may be under way behind the emulated ones."""


class EmulatedLinks:
    """Times of one rank's links.

    Args:
        table: from hpctrain.plan.emulation.
        rank: of this process.

    Attributes:
        blocked: seconds that callers have waited here so far.
        buckets: that the gradients of replicas are summed in.
    """

    def __init__(self, table: Mapping[str, Any], rank: int) -> None:
        self._axes: Mapping[str, Mapping[str, Sequence[float]]] = table["links"]
        self._near, self._far = table["near"], table["far"]
        self._per_node = int(table["ranks_per_node"])
        self._rank = rank
        self.blocked = 0.0
        self.buckets = int(table["buckets"])
        self._threads: dict[Any, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._sent: dict[Any, deque[tuple[Any, Any]]] = {}
        self._free: dict[Any, float] = {}
        self._streams: frozenset[str] = frozenset(table["streams"])
        self._asked: dict[str, float] = {}
        self._cost: dict[Any, float] = {}

    def seconds(self, axis: str, operation: str, size: int) -> float:
        """Of a collective in which this rank hands in ``size`` bytes; 0 on unknown axes."""
        found = self._axes.get(axis, {}).get(operation)
        return 0.0 if found is None else found[0] + found[1] * size

    def message_seconds(self, size: int, peer: int) -> float:
        """Of a message of ``size`` bytes to a global rank."""
        same = self._rank // self._per_node == peer // self._per_node
        fixed, each = self._near if same else self._far
        return float(fixed + each * size)

    def wait(self, key: Any, began: float, work: Any, seconds: float) -> None:
        """A collective whose caller waits.

        Args:
            key: (axis, operation, bytes) of collectives that are alike. The shortest of them so
                far is taken for what the real one costs by itself, which is part of the
                emulated time.
            began: when the caller asked for it.
            work: the real one.
            seconds: of the emulated one.
        """
        axis, operation, _ = key
        work.wait()
        if axis in self._streams and operation in ("all_gather", "reduce_scatter"):
            self._stream(axis, operation, seconds)
            self.blocked += time.perf_counter() - began
            return
        if axis not in _INSIDE_BLOCKS:
            self._drain()
        now = time.perf_counter()
        cost = self._cost[key] = min(now - began, self._cost.get(key, now - began))
        sleep_until(now + seconds - cost)
        self.blocked += time.perf_counter() - began

    def _stream(self, axis: str, operation: str, seconds: float) -> None:
        """Gathering or scattering of shards that another block's computing may hide.

        Each is one after another, and neither waits for the other: a block is gathered before the
        gradients of the one before it are there to be scattered.
        """
        now, key = time.perf_counter(), (axis, operation)
        asked = self._asked.get(axis, now) if operation == "all_gather" else now
        self._free[key] = max(asked, self._free.get(key, 0.0)) + seconds
        if operation == "all_gather":
            sleep_until(self._free[key])
            self._asked[axis] = time.perf_counter()

    def _drain(self) -> None:
        """Wait for all that is scattered; what comes next is not gathered ahead."""
        for axis in self._streams:
            sleep_until(self._free.get((axis, "reduce_scatter"), 0.0))
        self._asked.clear()

    def later(self, axis: str, work: Any, seconds: float, done: Callable[[], None]) -> Any:
        """A collective that runs beside computation: the work to hold in its place.

        What the real one takes, which no rank can do before all have asked for it, is part of the
        emulated time.
        """
        future: torch.futures.Future[None] = torch.futures.Future()
        asked, key = time.perf_counter(), (axis, "later")

        def carry() -> None:
            work.wait()
            sleep_until(max(asked, self._free.get(key, 0.0)) + seconds)
            self._free[key] = time.perf_counter()
            done()
            future.set_result(None)

        self._thread(axis).submit(carry)
        return _create_work_from_future(future)

    def send(
        self, axis: str, group: dist.ProcessGroup, to: int, size: int, start: Callable[[], Any],
        tensors: Any,
    ) -> Any:  # fmt: skip
        """A message: the work to hold; ``start`` really sends."""
        seconds = self.message_seconds(size, dist.get_global_rank(group, to))
        key = (axis, to)
        asked = time.perf_counter()
        future: torch.futures.Future[None] = torch.futures.Future()

        def carry() -> None:
            # One after another: a message starts when it was asked for and the link is free.
            sleep_until(max(asked, self._free.get(key, 0.0)) + seconds)
            self._free[key] = time.perf_counter()
            sent = self._sent.setdefault(key, deque())
            sent.append((dist.Work.unbox(start()), tensors))
            future.set_result(None)
            while len(sent) > _KEPT:
                sent.popleft()[0].wait()

        self._thread(key).submit(carry)
        return _create_work_from_future(future)

    def close(self) -> None:
        """End all threads when what they were given is done."""
        for thread in self._threads.values():
            thread.shutdown()
        for sent in self._sent.values():
            while sent:
                sent.popleft()[0].wait()

    def _thread(self, key: Any) -> ThreadPoolExecutor:
        with self._lock:
            if key not in self._threads:
                self._threads[key] = ThreadPoolExecutor(1, thread_name_prefix=f"link-{key}")
            return self._threads[key]


def sleep_until(moment: float) -> None:
    """Sleep until a time of ``time.perf_counter``; at once where it has passed."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
