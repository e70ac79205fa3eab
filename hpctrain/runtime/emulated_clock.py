"""Time on an emulated machine: a clock a rank, and what ranks tell each other of theirs.

A rank's clock goes on by what the machine model says that a pass or a message takes, never by
what this machine needed for it. Who waits for others goes on to the latest of them (logical
clocks, Lamport 1978), so the clocks agree with each other however few cores the ranks share. The
rank sleeps until its clock's time has really passed; where this machine was too slow for that it
does not sleep, and only the waiting gets longer, not what is measured.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_CHANNELS = 48
"""Groups, and ranks to send to, that a rank may have."""
_DEPTH = 256
"""Moments of a channel that are kept."""
_NAP_SECONDS = 2e-4
_ITEM = np.dtype([("number", np.int64), ("moment", np.float64)])


class EmulatedClock:
    """Seconds of the emulated machine on this rank, for the thread that made the clock and for
    others that work beside it."""

    def __init__(self) -> None:
        self._first = threading.get_ident()
        self._moments = {self._first: 0.0}
        self._origin = time.perf_counter()

    @property
    def now(self) -> float:
        """Seconds since the start; threads without a time of their own see the first one's."""
        return self._moments.get(threading.get_ident(), self._moments[self._first])

    @property
    def mine(self) -> bool:
        """Whether the calling thread's time is counted."""
        return threading.get_ident() in self._moments

    @contextmanager
    def lane(self, moment: float) -> Iterator[None]:
        """The calling thread works beside the others, from ``moment`` on."""
        self._moments[threading.get_ident()] = moment
        try:
            yield
        finally:
            del self._moments[threading.get_ident()]

    def reach(self, moment: float) -> None:
        """It is ``moment``, or later if it was later already."""
        if moment > self.now:
            self._moments[threading.get_ident()] = moment
            self.sleep_until(moment)

    def spend(self, seconds: float) -> None:
        """Something took ``seconds``."""
        self.reach(self.now + seconds)

    def sleep_until(self, moment: float) -> None:
        """Sleep until it really is as late as ``moment``; of any thread."""
        left = self._origin + moment - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def anchor(self) -> None:
        """From here on sleep as if this machine had kept up so far."""
        self._origin = max(self._origin, time.perf_counter() - self.now)

    # Compute of the layers; see hpctrain.parallel.emulate.Pace.

    def before(self, seconds: float) -> float:
        """A pass takes its time before it computes: what it makes is there when it is over."""
        self.spend(seconds)
        return 0.0

    def after(self, began: float, seconds: float) -> None:
        """Nothing is left to wait for."""


class Board:
    """Moments that the ranks of a job write for each other, in memory that they share.

    Collective over ``comm``, whose ranks all run on this machine. Every rank has channels, one a
    group or receiver, and in each the newest moments with their numbers. The messages that the
    moments are about order writing before reading.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        row = 8 * _CHANNELS + _CHANNELS * _DEPTH * _ITEM.itemsize
        self._window = MPI.Win.Allocate_shared(row, 8, comm=comm)
        self._comm, self._rank = comm, comm.rank
        self._names: list[Any] = []
        self._items: list[Any] = []
        for rank in range(comm.size):
            memory: Any = self._window.Shared_query(rank)[0]
            self._names.append(np.frombuffer(memory, np.int64, _CHANNELS))
            items = np.frombuffer(memory, _ITEM, _CHANNELS * _DEPTH, 8 * _CHANNELS)
            self._items.append(items.reshape(_CHANNELS, _DEPTH))
        self._names[self._rank][:] = 0
        self._items[self._rank]["number"] = 0
        self._places: dict[tuple[int, int], int] = {}
        self._told: dict[int, int] = {}
        comm.Barrier()

    def tell(self, name: str, moment: float) -> int:
        """Write the next moment of a channel of this rank; returns its number, 1 for the first.

        Raises:
            RuntimeError: too many channels.
        """
        key = _key(name)
        number = self._told[key] = self._told.get(key, 0) + 1
        place = self._places.get((self._rank, key))
        if place is None:
            names = self._names[self._rank]
            place = int(np.count_nonzero(names))
            if place == _CHANNELS:
                raise RuntimeError(f"an emulated rank has more than {_CHANNELS} groups")
            self._places[self._rank, key] = place
            names[place] = key
        items = self._items[self._rank][place]
        at = number % _DEPTH
        items["moment"][at] = moment
        items["number"][at] = number
        return number

    def read(self, name: str, rank: int, number: int) -> float | None:
        """What a rank has told as the ``number``-th of a channel; None before it did.

        Raises:
            RuntimeError: it is long over, and forgotten.
        """
        key = _key(name)
        place = self._places.get((rank, key))
        if place is None:
            found = np.flatnonzero(self._names[rank] == key)
            if not len(found):
                return None
            place = self._places[rank, key] = int(found[0])
        item = self._items[rank][place, number % _DEPTH]
        if item["number"] > number:
            raise RuntimeError(f"rank {rank} is more than {_DEPTH} messages ahead of a reader")
        return float(item["moment"]) if item["number"] == number else None

    def latest(self, name: str, ranks: Iterable[int], number: int) -> float:
        """The latest moment of ``ranks``, once all have told it."""
        latest = 0.0
        for rank in ranks:
            while (moment := self.read(name, rank, number)) is None:
                time.sleep(_NAP_SECONDS)
            latest = max(latest, moment)
        return latest

    def close(self) -> None:
        """Give the memory back; collective."""
        self._names, self._items = [], []
        self._window.Free()


@functools.lru_cache(maxsize=1024)
def _key(name: str) -> int:
    found = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return found % (2**63 - 1) + 1
