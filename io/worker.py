"""A background thread that does one thing after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Worker:
    """A thread that does one thing after the other; started by the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def wait(self) -> None:
        """Return when everything handed in so far is done."""
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done.set)
            done.wait()

    def stop(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
