"""Calls, bytes and seconds of communication, by axis of the layout.

Whoever starts a collective (DDP's reducer, FSDP2, DTensor, functional collectives, a call to
torch.distributed) ends in the same operators of PyTorch's dispatcher, ``c10d::allreduce_`` and
its sisters. :meth:`Counter.install` puts a kernel of ours before each of them, which starts the
operation as before and notes it: no wrapper around process groups, no hook a framework part, and
nothing is missed. Messages are counted where they are sent. docs/communicators.md defines every
number.

What happens in a step is only noted, in queues that any thread may append to; it is sorted by
axis and added up when somebody asks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from hpctrain.runtime.emulated_links import EmulatedLinks

OTHER = "other"
"""Groups that are not ours: a user's own."""

_MOST_NOTES = 8192
"""Notes that are kept before they are added up without being asked."""


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


class Counter:
    """Counts communication by axis; safe to use from several threads.

    Attributes:
        links: of an emulated machine, whose time every operation takes.
    """

    def __init__(self) -> None:
        self._axes: dict[str, str] = {}
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._seconds: dict[str, float] = {}
        self._until: dict[str, float] = {}
        # (operation, group of PyTorch, bytes, parts) of each operation that PyTorch started.
        self._notes: deque[tuple[str, Any, int, Any]] = deque()
        # (axis, or group of PyTorch, began, ended)
        self._spans: deque[tuple[Any, float, float]] = deque()
        # Collectives entered since the start, by group: [members, count, newest].
        self._entered: dict[str, list[Any]] = {}
        self._lock = threading.Lock()
        self._library: Any = None  # torch.library.Library, which is not typed
        self._timed = False
        self._computed = 0.0
        self.links: EmulatedLinks | None = None

    # ---- what is counted -------------------------------------------------------------------

    def name(self, group: dist.ProcessGroup, axis: str) -> None:
        """Count operations of ``group`` under ``axis`` from now on."""
        with self._lock:
            self._settle()
            self._axes[group.group_name] = axis

    def forget(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Add up what ``groups`` did so far, for they are about to be destroyed."""
        with self._lock:
            self._settle()
            for group in groups:
                self._axes.pop(group.group_name, None)
                self._entered.pop(group.group_name, None)

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """The axis that operations of ``group`` are counted under."""
        return self._axes.get(group.group_name, OTHER)

    def add(self, axis: str, operation: str, size: int, volume: float) -> None:
        """Note one operation; ``size`` and ``volume`` are bytes, see :class:`Tally`."""
        with self._lock:
            self._add(axis, operation, size, volume)

    @contextmanager
    def during(self, axis: str) -> Iterator[None]:
        """The body is time of communication on ``axis``, for example waiting for a message."""
        began = self.now()
        try:
            yield
        finally:
            self._spans.append((axis, began, self.now()))

    def now(self) -> float:
        """Seconds of the clock that all that is noted here goes by."""
        return time.perf_counter() if self.links is None else self.links.clock.now

    def compute(self, seconds: float) -> None:
        """Note time of computing, where somebody knows it."""
        self._computed += seconds

    def take_computed(self) -> float:
        """Seconds of computing that were noted since the last take."""
        found, self._computed = self._computed, 0.0
        return found

    # ---- what was counted ------------------------------------------------------------------

    def read(self) -> dict[str, dict[str, float]]:
        """``calls``, ``bytes``, ``volume`` and ``seconds`` of each axis since the last take.

        An operation counts from its start, its seconds from its end.
        """
        with self._lock:
            return self._read()

    def take(self) -> dict[str, dict[str, float]]:
        """As :meth:`read`, and start from zero: what a step's record holds."""
        with self._lock:
            found = self._read()
            self._tallies.clear()
            self._seconds.clear()
            return found

    def entered(self) -> dict[str, tuple[str, tuple[int, ...], int, str]]:
        """Collectives that this rank has entered since the start, by name of the process group:
        axis, members, how many, and the newest. Messages are none."""
        with self._lock:
            self._settle()
            return {
                name: (self._axes.get(name, OTHER), members, count, operation)
                for name, (members, count, operation) in self._entered.items()
            }

    def operations(self) -> dict[str, dict[str, Tally]]:
        """Tallies by axis and operation (``all_reduce``, ``send`` …) since the last take."""
        found: dict[str, dict[str, Tally]] = {}
        with self._lock:
            self._settle()
            for (axis, operation), tally in self._tallies.items():
                found.setdefault(axis, {})[operation] = Tally(
                    tally.calls, tally.bytes, tally.volume
                )
        return found

    def _read(self) -> dict[str, dict[str, float]]:
        self._settle()
        found: dict[str, dict[str, float]] = {
            axis: {"calls": 0, "bytes": 0, "volume": 0.0, "seconds": 0.0}
            for axis in dict.fromkeys((*(axis for axis, _ in self._tallies), *self._seconds))
        }
        for (axis, _), tally in self._tallies.items():
            row = found[axis]
            row["calls"] += tally.calls
            row["bytes"] += tally.bytes
            row["volume"] += tally.volume
        for axis, seconds in self._seconds.items():
            found[axis]["seconds"] = seconds
        return found

    def _add(self, axis: str, operation: str, size: int, volume: float) -> None:
        tally = self._tallies.get((axis, operation))
        if tally is None:
            tally = self._tallies[axis, operation] = Tally()
        tally.calls += 1
        tally.bytes += size
        tally.volume += volume

    def _settle(self) -> None:
        """Add up what was noted since the last time."""
        while self._notes:
            operation, boxed, size, parts = self._notes.popleft()
            group = dist.ProcessGroup.unbox(boxed)
            members = group.size()
            if members > 1 and operation != "send":
                row = self._entered.get(group.group_name)
                if row is None:
                    ranks = tuple(dist.get_process_group_ranks(group))
                    row = self._entered[group.group_name] = [ranks, 0, ""]
                row[1] += 1
                row[2] = operation
            if members > 1:
                volume = volume_of(operation, size, members)
                if parts is not None:
                    volume = float(size - parts[group.rank()])
                self._add(self.axis_of(group), operation, size, volume)
        spans: dict[str, list[tuple[float, float]]] = {}
        while self._spans:
            where, began, ended = self._spans.popleft()
            if not isinstance(where, str):
                group = dist.ProcessGroup.unbox(where)
                if group.size() == 1:
                    continue
                where = self.axis_of(group)
            spans.setdefault(where, []).append((began, ended))
        for axis, listed in spans.items():
            until = self._until.get(axis, 0.0)
            for began, ended in sorted(listed):
                # What ran beside another operation of the axis counts once.
                self._seconds[axis] = self._seconds.get(axis, 0.0) + max(
                    0.0, ended - max(began, until)
                )
                until = max(until, ended)
            self._until[axis] = until

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

    def emulate(self, links: EmulatedLinks) -> None:
        """Let communication take the time of an emulated machine's links; after install()."""
        self.links = links
        self._put_before_receives()

    def close(self) -> None:
        """PyTorch's own kernels again."""
        if self.links is not None:
            self.links.close()
            self.links = None
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _put_before(self, name: str, operation: str, group_at: int, payload: Payload) -> None:
        operator = getattr(torch.ops.c10d, name).default
        root_at = _ROOTS.get(name)
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        timed = self._timed and operation != "send"  # a message has no future to ask
        notes, spans, clock = self._notes, self._spans, time.perf_counter

        def counted(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
            links = self.links
            if links is not None and operation != "barrier" and links.clock.mine:
                return emulated(links, keys, *args)
            # What other threads do has no part in an emulated machine's time.
            take_time = timed and links is None
            began = clock()
            # Releases the GIL, as PyTorch's own calls do. Starting an operation with it held can
            # deadlock: gloo's thread wants it to drop a callback while it holds gloo's queue.
            result = operator.redispatch(keys & after, *args)
            group = args[group_at]
            notes.append((operation, group, *payload(args)))
            if take_time:
                work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
                # The one truth value among the arguments is async_op: without it the caller
                # waits at once, and so can we.
                if any(one is False for one in args):
                    work.wait()
                    spans.append((group, began, clock()))
                else:
                    _when_done(work, lambda: spans.append((group, began, clock())))
            if len(notes) > _MOST_NOTES:
                with self._lock:
                    self._settle()
            return result

        def emulated(links: EmulatedLinks, keys: torch._C.DispatchKeySet, *args: Any) -> Any:
            """As counted, but on the links of an emulated machine."""
            group = args[group_at]
            size, parts = payload(args)
            notes.append((operation, group, size, parts))
            ours = dist.ProcessGroup.unbox(group)
            axis = self.axis_of(ours)

            def start() -> Any:
                return operator.redispatch(keys & after, *args)

            if operation == "send":
                return links.send(axis, ours, int(args[2]), size, int(args[3]), start, args[0])
            if not _grows_with_model(args):
                size = 0  # counts and marks, whatever the model's width
            root = None if root_at is None else int(args[root_at])
            if any(one is False for one in args):
                result, began, ended = links.wait(axis, operation, size, ours, root, start)
                spans.append((group, began, ended))
                return result
            return links.later(
                axis, operation, size, ours, root, start,
                lambda began, ended: spans.append((group, began, ended)),
            )  # fmt: skip

        self._library.impl(operator, counted, "BackendSelect", with_keyset=True)

    def _put_before_receives(self) -> None:
        """Messages count where they are sent, but take their time where they arrive."""
        operator = torch.ops.c10d.recv_.default
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def receive(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
            links = self.links
            if links is None or not links.clock.mine:
                return operator.redispatch(keys & after, *args)
            group = dist.ProcessGroup.unbox(args[1])
            return links.receive(
                group, int(args[2]), int(args[3]), lambda: operator.redispatch(keys & after, *args)
            )

        self._library.impl(operator, receive, "BackendSelect", with_keyset=True)


def _when_done(work: dist.Work, note: Callable[[], None]) -> None:
    try:
        future = work.get_future()
    except RuntimeError:  # gloo's reduce-scatter has none
        return
    future.add_done_callback(lambda _: note())


# ---- payloads ------------------------------------------------------------------------------

Payload = Callable[[Sequence[Any]], tuple[int, Any]]
"""Arguments of an operator -> (bytes handed in, bytes for each member where they may differ)."""


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
    if operation == "all_gather":
        return float(size * (members - 1))
    if operation == "send":
        return float(size)
    return size * (members - 1) / members


def _bytes(tensors: Any) -> int:
    """Bytes of a tensor, a list of tensors, or lists of them."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors))


def _grows_with_model(args: Sequence[Any]) -> bool:
    """Whether an operation's tensors hold numbers, or bytes of such: no counts, no marks."""
    for one in args:
        while isinstance(one, list | tuple) and one:
            one = one[0]
        if isinstance(one, torch.Tensor):
            return one.is_floating_point() or one.dtype == torch.uint8
    return False


def _first(args: Sequence[Any]) -> tuple[int, None]:
    """Of operations that change what they are given."""
    return _bytes(args[0]), None


def _second(args: Sequence[Any]) -> tuple[int, None]:
    """Of operations with an output and an input."""
    return _bytes(args[1]), None


def _split(args: Sequence[Any]) -> tuple[int, list[int] | None]:
    """All-to-all of one tensor, cut evenly or at the places that the fifth argument gives."""
    tensor, splits = args[1], args[4]
    size = tensor.nbytes
    if not splits:
        return size, None
    row = size // max(1, tensor.shape[0])
    return size, [row * rows for rows in splits]


def _lists(args: Sequence[Any]) -> tuple[int, list[int]]:
    parts = [tensor.nbytes for tensor in args[1]]
    return sum(parts), parts


def _nothing(args: Sequence[Any]) -> tuple[int, None]:
    return 0, None


# Operator -> (operation, which argument is the group, payload).
_OPERATORS: dict[str, tuple[str, int, Payload]] = {
    "allreduce_": ("all_reduce", 1, _first),
    "allreduce_coalesced_": ("all_reduce", 1, _first),
    "reduce_": ("reduce", 1, _first),
    "broadcast_": ("broadcast", 1, _first),
    "allgather_": ("all_gather", 2, _second),
    "_allgather_base_": ("all_gather", 2, _second),
    "allgather_coalesced_": ("all_gather", 2, _second),
    "allgather_into_tensor_coalesced_": ("all_gather", 2, _second),
    "reduce_scatter_": ("reduce_scatter", 2, _second),
    "_reduce_scatter_base_": ("reduce_scatter", 2, _second),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 2, _second),
    "alltoall_base_": ("all_to_all", 2, _split),
    "alltoall_": ("all_to_all", 2, _lists),
    "gather_": ("gather", 2, _second),
    "scatter_": ("scatter", 2, _second),
    "send": ("send", 1, _first),
    "barrier": ("barrier", 1, _nothing),
}

_ROOTS = {"broadcast_": 2, "reduce_": 3, "gather_": 3, "scatter_": 3}
"""Operator -> which argument is the root, by its place in the group."""
