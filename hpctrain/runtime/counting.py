"""Calls, bytes and seconds of communication, by axis of the layout.

Whoever starts a collective (DDP's reducer, FSDP2, DTensor, functional collectives, a call to
torch.distributed) ends in the same operators of PyTorch's dispatcher, ``c10d::allreduce_`` and
its sisters. :meth:`Counter.install` puts a kernel of ours before each of them, which starts the
operation as before and notes it: no wrapper around process groups, no hook a framework part, and
nothing is missed. Messages are counted where they are sent. docs/communicators.md defines every
number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

OTHER = "other"
"""Groups that are not ours: a user's own."""

Payload = Callable[[Sequence[Any], int, int], tuple[int, float]]
"""(arguments of the operator, group size, own place) -> (bytes handed in, bytes to move)."""


@dataclass(slots=True)
class Tally:
    """Sums over operations of one kind on one axis.

    Attributes:
        calls: operations.
        bytes: handed in by this rank.
        volume: that a bandwidth-optimal algorithm moves out of a rank, mean over the group.
    """

    calls: int = 0
    bytes: int = 0
    volume: float = 0.0


@dataclass(slots=True)
class _Flight:
    """Operations of an axis under way, and for how long there was at least one."""

    under_way: int = 0
    since: float = 0.0
    seconds: float = 0.0


class Counter:
    """Counts communication by axis; safe to use from several threads."""

    def __init__(self) -> None:
        self._axes: dict[str, str] = {}
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._flights: dict[str, _Flight] = {}
        self._lock = threading.Lock()
        self._library: Any = None  # torch.library.Library, which is not typed
        self._timed = False

    # ---- what is counted -------------------------------------------------------------------

    def name(self, group: dist.ProcessGroup, axis: str) -> None:
        """Count operations of ``group`` under ``axis`` from now on."""
        self._axes[group.group_name] = axis

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """The axis that operations of ``group`` are counted under."""
        return self._axes.get(group.group_name, OTHER)

    def add(self, axis: str, operation: str, size: int, volume: float) -> None:
        """Note one operation; ``size`` and ``volume`` are bytes, see :class:`Tally`."""
        with self._lock:
            tally = self._tallies.get((axis, operation))
            if tally is None:
                tally = self._tallies[axis, operation] = Tally()
            tally.calls += 1
            tally.bytes += size
            tally.volume += volume

    def begin(self, axis: str, since: float | None = None) -> None:
        """An operation of ``axis`` is under way, since ``time.perf_counter()`` = ``since``."""
        began = time.perf_counter() if since is None else since
        with self._lock:
            flight = self._flights.get(axis)
            if flight is None:
                flight = self._flights[axis] = _Flight()
            if flight.under_way == 0:
                flight.since = began
            flight.under_way += 1

    def end(self, axis: str) -> None:
        """An operation of ``axis`` is done."""
        now = time.perf_counter()
        with self._lock:
            flight = self._flights[axis]
            flight.under_way -= 1
            if flight.under_way == 0:
                flight.seconds += now - flight.since

    @contextmanager
    def during(self, axis: str) -> Iterator[None]:
        """The body is time of communication on ``axis``, for example waiting for a message."""
        self.begin(axis)
        try:
            yield
        finally:
            self.end(axis)

    # ---- what was counted ------------------------------------------------------------------

    def read(self) -> dict[str, dict[str, float]]:
        """``calls``, ``bytes``, ``volume`` and ``seconds`` of each axis since the last take."""
        with self._lock:
            return self._read(time.perf_counter())

    def take(self) -> dict[str, dict[str, float]]:
        """As :meth:`read`, and start from zero: what a step's record holds."""
        now = time.perf_counter()
        with self._lock:
            found = self._read(now)
            self._tallies.clear()
            for flight in self._flights.values():
                flight.seconds, flight.since = 0.0, now
            return found

    def operations(self) -> dict[str, dict[str, Tally]]:
        """Tallies by axis and operation (``all_reduce``, ``send`` …) since the last take."""
        found: dict[str, dict[str, Tally]] = {}
        with self._lock:
            for (axis, operation), tally in self._tallies.items():
                found.setdefault(axis, {})[operation] = Tally(
                    tally.calls, tally.bytes, tally.volume
                )
        return found

    def _read(self, now: float) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for (axis, _), tally in self._tallies.items():
            row = found.setdefault(axis, {"calls": 0, "bytes": 0, "volume": 0.0, "seconds": 0.0})
            row["calls"] += tally.calls
            row["bytes"] += tally.bytes
            row["volume"] += tally.volume
        for axis, flight in self._flights.items():
            seconds = flight.seconds + (now - flight.since if flight.under_way else 0.0)
            if axis not in found and seconds > 0:
                found[axis] = {"calls": 0, "bytes": 0, "volume": 0.0, "seconds": 0.0}
            if axis in found:
                found[axis]["seconds"] = seconds
        return found

    # ---- PyTorch's operators ---------------------------------------------------------------

    @property
    def installed(self) -> bool:
        """Whether operations are noted."""
        return self._library is not None

    def install(self, device: str) -> None:
        """Note every collective and message of this process from now on.

        Args:
            device: type of device that computes. With ``cpu`` seconds are noted too; with a GPU
                operations end on its streams, and waiting for them would cost more than a count
                is worth.
        """
        if self._library is not None:
            return
        self._timed = device == "cpu"
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name, (operation, group_at, payload) in _OPERATORS.items():
            self._put_before(name, operation, group_at, payload)

    def close(self) -> None:
        """PyTorch's own kernels again."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _put_before(self, name: str, operation: str, group_at: int, payload: Payload) -> None:
        assert self._library is not None
        axes = self._axes
        timed = self._timed and operation != "send"  # a message has no future to ask
        operator = getattr(torch.ops.c10d, name).default
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def counted(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
            began = time.perf_counter()
            # Releases the GIL, as PyTorch's own calls do. Starting an operation with it held can
            # deadlock: gloo's thread wants it to drop a callback while it holds gloo's queue.
            result = operator.redispatch(keys & after, *args)
            group = dist.ProcessGroup.unbox(args[group_at])
            members = group.size()
            if members > 1:
                axis = axes.get(group.group_name, OTHER)
                self.add(axis, operation, *payload(args, members, group.rank()))
                if timed:
                    # The one truth value among the arguments is async_op.
                    waits = any(one is False for one in args)
                    self._time(result, axis, began, waits)
            return result

        self._library.impl(operator, counted, "BackendSelect", with_keyset=True)

    def _time(self, result: Any, axis: str, began: float, waits: bool) -> None:
        """Note when an operation is done; ``waits``: its caller waits for it at once."""
        work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
        try:
            future = work.get_future()
        except RuntimeError:
            # gloo's reduce-scatter has no future. Where the caller waits, so can we.
            if waits:
                self.begin(axis, began)
                work.wait()
                self.end(axis)
            return
        self.begin(axis, began)
        future.add_done_callback(lambda _: self.end(axis))


# ---- payloads ------------------------------------------------------------------------------


def _bytes(tensors: Any) -> int:
    """Bytes of a tensor, a list of tensors, or lists of them."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(one) for one in tensors)


def volume_of(operation: str, size: int, members: int) -> float:
    """Bytes that a bandwidth-optimal algorithm moves out of a rank, mean over the group.

    ``2(n-1)/n·S`` for an all-reduce of S bytes, ``(n-1)/n·S`` for what is reduced, scattered or
    sent around, ``(n-1)·s`` for gathering shards of s bytes (Patarasuk and Yuan 2009; Thakur et
    al. 2005).

    Args:
        operation: as in :meth:`Counter.operations`.
        size: bytes handed in by a rank.
        members: ranks of the group.
    """
    if operation == "all_reduce":
        return 2 * size * (members - 1) / members
    if operation in ("all_gather",):
        return float(size * (members - 1))
    if operation in ("send",):
        return float(size)
    return size * (members - 1) / members


def _whole(operation: str, at: int) -> Payload:
    """Of operations that hand in the tensors of argument ``at``."""

    def payload(args: Sequence[Any], members: int, place: int) -> tuple[int, float]:
        size = _bytes(args[at])
        return size, volume_of(operation, size, members)

    return payload


def _uneven(args: Sequence[Any], members: int, place: int) -> tuple[int, float]:
    """All-to-all of one tensor: what stays here is not moved."""
    tensor, splits = args[1], args[4]
    size = _bytes(tensor)
    if not splits:
        return size, volume_of("all_to_all", size, members)
    rows = tensor.shape[0]
    kept = size // rows * splits[place] if rows else 0
    return size, float(size - kept)


def _lists(args: Sequence[Any], members: int, place: int) -> tuple[int, float]:
    size = _bytes(args[1])
    return size, float(size - _bytes(args[1][place]))


def _nothing(args: Sequence[Any], members: int, place: int) -> tuple[int, float]:
    return 0, 0.0


# Operator -> (operation, which argument is the group, payload).
_OPERATORS: dict[str, tuple[str, int, Payload]] = {
    "allreduce_": ("all_reduce", 1, _whole("all_reduce", 0)),
    "allreduce_coalesced_": ("all_reduce", 1, _whole("all_reduce", 0)),
    "reduce_": ("reduce", 1, _whole("reduce", 0)),
    "broadcast_": ("broadcast", 1, _whole("broadcast", 0)),
    "allgather_": ("all_gather", 2, _whole("all_gather", 1)),
    "_allgather_base_": ("all_gather", 2, _whole("all_gather", 1)),
    "allgather_coalesced_": ("all_gather", 2, _whole("all_gather", 1)),
    "allgather_into_tensor_coalesced_": ("all_gather", 2, _whole("all_gather", 1)),
    "reduce_scatter_": ("reduce_scatter", 2, _whole("reduce_scatter", 1)),
    "_reduce_scatter_base_": ("reduce_scatter", 2, _whole("reduce_scatter", 1)),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 2, _whole("reduce_scatter", 1)),
    "alltoall_base_": ("all_to_all", 2, _uneven),
    "alltoall_": ("all_to_all", 2, _lists),
    "gather_": ("gather", 2, _whole("gather", 1)),
    "scatter_": ("scatter", 2, _whole("scatter", 1)),
    "send": ("send", 1, _whole("send", 0)),
    "barrier": ("barrier", 1, _nothing),
}
