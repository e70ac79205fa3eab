"""Links of an emulated machine: what is sent arrives when that machine would deliver it.

Every collective and message goes through PyTorch's own operators as ever (hpctrain.runtime.counting
notes them there); here each takes the time of the emulated link, on the ranks' emulated clocks:

- a collective that the caller waits for begins when the last member came, by its clock;
- one that runs beside computation: the same, one after another in a group, and whoever waits for
  it goes on when it is over;
- a message to another rank arrives when the link is free and has carried it;
- shards of parameters are gathered ahead of their use and scattered beside computing
  (hpctrain.shard_streams), and the optimizer waits for all of it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.runtime.emulated_clock import Board, EmulatedClock
from hpctrain.shard_streams import ShardStreams

TIED, COPIES = 1, 2
"""Tags of messages that hold gradients: of a tied embedding, of a stage that two ranks hold."""
_INSIDE_BLOCKS = frozenset({"tp", "pp", "ep", "etp"})
"""Axes whose collectives wait for no gradients; those of context ranks do where they sum some."""
_FROM_ROOT = frozenset({"broadcast", "scatter"})
"""Operations that wait for the root alone; of others with a root, the root waits for all."""
_KEPT = 64
"""Real sends that may be under way behind the emulated ones."""


class EmulatedLinks:
    """Times of one rank's links.

    Args:
        table: from hpctrain.plan.emulation.
        rank: of this process.
        comm: of all ranks; collective.

    Attributes:
        clock: of this rank.
        buckets: that the gradients of replicas are summed in.
    """

    def __init__(self, table: Mapping[str, Any], rank: int, comm: Any) -> None:
        self._axes: Mapping[str, Mapping[str, Sequence[float]]] = table["links"]
        self._near, self._far = table["near"], table["far"]
        self._kept: Sequence[float] = table["messages"]
        self._tied = float(table["tied"])
        self._per_node = int(table["ranks_per_node"])
        self._gathered = frozenset(table["gathered"])
        self._scattered = {(axis, operation) for axis, operation in table["scattered"]}
        self._shards = ShardStreams(float(table["unhidden"]))
        self._rank = rank
        self.buckets = int(table["buckets"])
        self.clock = EmulatedClock()
        self._board = Board(comm)
        self._threads: dict[Any, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._sent: dict[Any, deque[tuple[Any, Any]]] = {}
        self._received: dict[str, int] = {}
        self._free: dict[str, float] = {}
        self._taken: dict[tuple[str, int], float] = {}
        self._known: dict[str, threading.Event] = {}
        self._held: set[Held] = set()

    def seconds(self, axis: str, operation: str, size: int) -> float:
        """Of a collective in which this rank hands in ``size`` bytes; 0 on unknown axes."""
        found = self._axes.get(axis, {}).get(operation)
        return 0.0 if found is None else found[0] + found[1] * size

    def message_seconds(self, axis: str, size: int, peer: int, tag: int = 0) -> float:
        """Of a message of ``size`` bytes to a global rank; ``tag`` says what it holds."""
        if tag == TIED:
            return self._tied
        if "send" in self._axes.get(axis, {}):
            return self.seconds(axis, "send", size)
        same = self._rank // self._per_node == peer // self._per_node
        fixed, each = self._near if same else self._far
        return float(fixed + each * self._kept[tag == COPIES] * size)

    # ---- collectives ------------------------------------------------------------------------

    def wait(
        self, axis: str, operation: str, size: int, group: dist.ProcessGroup, root: int | None,
        start: Callable[[], Any],
    ) -> tuple[Any, float, float]:  # fmt: skip
        """A collective whose caller waits.

        Args:
            axis, operation, size: see :meth:`seconds`.
            group: its members.
            root: the member that sends to all or gets from all, where there is one.
            start: starts the real one, and returns its work last.

        Returns:
            What ``start`` gave, and when it began and ended on this rank.
        """
        scattered = (axis, operation) in self._scattered
        began = self.clock.now
        inside = axis in _INSIDE_BLOCKS or (axis == "cp" and operation != "all_reduce")
        if not (scattered or inside):
            self.drain()
        number = self._board.tell(group.group_name, self.clock.now)
        result = start()
        _work_of(result).wait()
        ready = self._latest(group, operation, root, number)
        seconds = self.seconds(axis, operation, size)
        if scattered:
            self.clock.reach(self._shards.scatter(self.clock.now, ready, seconds))
        else:
            # A group's operations are carried one after another.
            if (known := self._known.get(group.group_name)) is not None:
                known.wait()
            self.clock.reach(max(ready, self._free.get(group.group_name, 0.0)) + seconds)
        return result, began, self.clock.now

    def _latest(
        self, group: dist.ProcessGroup, operation: str, root: int | None, number: int
    ) -> float:
        """When the last member came that this rank waits for."""
        ranks = dist.get_process_group_ranks(group)
        if root is not None and operation in _FROM_ROOT:
            ranks = [ranks[root]]
        elif root is not None and ranks[root] != self._rank:
            ranks = [self._rank]
        return self._board.latest(group.group_name, ranks, number)

    def drain(self) -> None:
        """Wait for all that runs beside computation; what comes next is not gathered ahead."""
        for name, known in self._known.items():
            known.wait()
            self.clock.reach(self._free[name])
        self.clock.reach(self._shards.drain(self.clock.now))

    def later(
        self, axis: str, operation: str, size: int, group: dist.ProcessGroup, root: int | None,
        start: Callable[[], Any], note: Callable[[float, float], None],
    ) -> Any:  # fmt: skip
        """A collective that runs beside computation.

        Args:
            axis, operation, size, group, root, start: see :meth:`wait`.
            note: told when it began and ended.

        Returns:
            What ``start`` gave, with the work to hold in the place of the real one.
        """
        ahead = axis in self._gathered and operation == "all_gather"
        moment = self._shards.asked(self.clock.now) if ahead else self.clock.now
        number = self._board.tell(group.group_name, moment)
        result = start()
        work, seconds = _work_of(result), self.seconds(axis, operation, size)
        future: torch.futures.Future[None] = torch.futures.Future()
        held = self._hold(Held(self, future))
        held.gathering = (seconds, axis == "edp") if ahead else None
        known = threading.Event()
        name = group.group_name
        if not ahead:
            self._known[name] = known

        def carry() -> None:
            work.wait()
            ready = self._latest(group, operation, root, number)
            if ahead:
                held.over = self._shards.gather(ready, seconds)
            else:
                held.over = self._free[name] = max(ready, self._free.get(name, 0.0)) + seconds
                known.set()
            note(moment, held.over)
            self.clock.sleep_until(held.over)
            future.set_result(None)

        # What is gathered shares one stream, whatever group it is of.
        self._carry("gathered" if ahead else name, carry, future, known)
        return (*result[:-1], held.boxed()) if isinstance(result, tuple) else held.boxed()

    # ---- messages ---------------------------------------------------------------------------

    def send(
        self, axis: str, group: dist.ProcessGroup, to: int, size: int, tag: int,
        start: Callable[[], Any], tensors: Any,
    ) -> Any:  # fmt: skip
        """A message: the work to hold; ``start`` really sends."""
        peer = dist.get_global_rank(group, to)
        key, now = (axis, to), self.clock.now
        # One after another: a message starts when it was asked for and the link is free.
        over = max(now, self._taken.get(key, 0.0)) + self.message_seconds(axis, size, peer, tag)
        self._taken[key] = over
        self._board.tell(f"{group.group_name} to {peer} {tag}", over)
        future: torch.futures.Future[None] = torch.futures.Future()

        def carry() -> None:
            self.clock.sleep_until(over)
            sent = self._sent.setdefault(key, deque())
            sent.append((dist.Work.unbox(start()), tensors))
            future.set_result(None)
            while len(sent) > _KEPT:
                sent.popleft()[0].wait()

        self._carry(key, carry, future)
        return self._hold(Held(self, future)).boxed()

    def receive(
        self, group: dist.ProcessGroup, source: int, tag: int, start: Callable[[], Any]
    ) -> Any:
        """A message to come: the work to hold; whoever waits for it goes on when it arrives."""
        peer = dist.get_global_rank(group, source)
        name = f"{group.group_name} to {self._rank} {tag}"
        key = f"{name} of {peer}"
        number = self._received[key] = self._received.get(key, 0) + 1
        work = dist.Work.unbox(start())

        def arrived() -> float:
            return self._board.latest(name, (peer,), number)

        return self._hold(Held(self, work, arrived)).boxed()

    # ---- the rest ---------------------------------------------------------------------------

    def close(self) -> None:
        """End all threads when what they were given is done; collective."""
        for thread in self._threads.values():
            thread.shutdown()
        for sent in self._sent.values():
            while sent:
                sent.popleft()[0].wait()
        self._board.close()

    def _hold(self, held: Held) -> Held:
        """Keep it until somebody has waited for it: C++ alone would let go of its Python part."""
        self._held.add(held)
        return held

    def take(self, over: float, gathering: tuple[float, bool] | None) -> None:
        """The caller goes on when something is ``over`` that it has waited for: parameters, for
        which ``gathering`` says how long that took and whether they are experts', or else."""
        if gathering is not None:
            seconds, inner = gathering
            over = self._shards.use(self.clock.now, over, seconds, inner=inner)
        self.clock.reach(over)

    def forget(self, held: Held) -> None:
        """Somebody has waited."""
        self._held.discard(held)

    def _carry(
        self, key: Any, task: Callable[[], None], future: Any, known: threading.Event | None = None
    ) -> None:
        """Do a task on the thread of ``key``; whoever waits learns of it where it fails."""

        def work() -> None:
            try:
                task()
            except Exception as error:
                future.set_exception(error)
            finally:
                if known is not None:
                    known.set()

        self._thread(key).submit(work)

    def _thread(self, key: Any) -> ThreadPoolExecutor:
        with self._lock:
            if key not in self._threads:
                self._threads[key] = ThreadPoolExecutor(1, thread_name_prefix=f"link-{key}")
            return self._threads[key]


class Held(dist.Work):
    """Work whose end is a moment of the emulated clock.

    Args:
        links: of this rank.
        real: what really has to be over first, a future or a work.
        arrived: tells the moment then; without, ``over`` is it.

    Attributes:
        over: when it ends.
        gathering: seconds that parameters are gathered for, and whether they are experts' inside
            of a block; None of all else.
    """

    def __init__(
        self, links: EmulatedLinks, real: Any, arrived: Callable[[], float] | None = None
    ) -> None:
        super().__init__()
        self._links, self._real, self._arrived = links, real, arrived
        self.over = 0.0
        self.gathering: tuple[float, bool] | None = None

    def wait(self, timeout: Any = None) -> bool:
        self._real.wait()
        if self._links.clock.mine:
            over = self.over if self._arrived is None else self._arrived()
            self._links.take(over, self.gathering)
        self._links.forget(self)
        return True

    def is_completed(self) -> bool:
        """Whether waiting would take no real time."""
        over = self._real.is_completed if isinstance(self._real, dist.Work) else self._real.done
        return bool(over())

    def get_future(self) -> Any:
        """Of what the caller does not wait for by :meth:`wait`: :meth:`EmulatedLinks.drain`."""
        self._links.forget(self)
        return self._real


def _work_of(result: Any) -> Any:
    return dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
