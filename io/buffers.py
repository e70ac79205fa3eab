"""The buffers of a saver: made for a layout, handed out, and made anew where it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from hpctrain.errors import CheckpointError
from hpctrain.io.comm import Communicator, on_all, summed
from hpctrain.io.flush import WriteOptions
from hpctrain.io.parts import Sealer
from hpctrain.io.plan import FileKind, RankPlan, make_plan, rank_state_spec
from hpctrain.io.shards import ShardSpec
from hpctrain.io.sources import Sources
from hpctrain.io.staging import Batch, Item, Staging
from hpctrain.io.tiers import MemoryTier

WhenBusy = Literal["wait", "skip"]
_SCALARS_ROOM = 32 << 10


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How checkpoints are taken.

    Attributes:
        files: one, a node or a rank.
        buffers: checkpoints that may be in flight at a time; each costs the rank's share of
            the state in host memory.
        when_busy: where all buffers are taken, wait for one or skip the checkpoint.
        write: see WriteOptions.
    """

    files: FileKind = "one"
    buffers: int = 2
    when_busy: WhenBusy = "wait"
    write: WriteOptions = field(default_factory=WriteOptions)


class InUse(Protocol):
    """What holds a buffer."""

    @property
    def staging(self) -> Staging: ...


class Buffers:
    """Makes the buffers of a rank and knows which is free.

    Args:
        comm: all ranks.
        options: how many, and of how many files.
        node: number of this rank's node.
        memory: the level that they lie at, if there is one.

    Attributes:
        in_memory: the buffer whose contents are the newest at the level in memory.
        too_small: the scalars did not fit: the next layout gives them more room.
    """

    def __init__(
        self, comm: Communicator, options: SaveOptions, node: int, memory: MemoryTier | None
    ) -> None:
        self.comm = comm
        self.options = options
        self.node = node
        self.in_memory: Staging | None = None
        self.too_small = False
        self._memory = memory
        self._room = _SCALARS_ROOM
        self._plan: RankPlan | None = None
        self._specs: tuple[ShardSpec, ...] = ()
        self._sealer: Sealer | None = None
        self._all: list[Staging] = []
        self._batches: dict[int, tuple[frozenset[int], Sequence[Batch]]] = {}
        self._release: Callable[[], None] = _nothing

    @property
    def sealer(self) -> Sealer:
        """Of the layout."""
        assert self._sealer is not None
        return self._sealer

    def outdated(self, sources: Sources) -> bool:
        """Whether any rank needs another layout; collective."""
        same = (
            self._plan is not None
            and not self.too_small
            and (sources.specs is self._specs or sources.specs == self._specs)
        )
        if self.comm.size == 1:
            return not same
        return bool(summed(self.comm, np.array([0 if same else 1], np.int64))[0])

    def lay_out(
        self, sources: Sources, per_rank: Callable[[], Mapping[str, np.ndarray]]
    ) -> str | None:
        """Make a layout and its buffers; collective, while none is in use.

        Returns:
            Why the level in memory had to be left out; the same on every rank.

        Raises:
            CheckpointError: on every rank: gaps or overlaps between the ranks' shards, or no
                memory.
        """
        self.close()
        if self.too_small:
            self._room, self.too_small = 4 * self._room, False
        rank, size = self.comm.rank, self.comm.size
        specs = (
            *sources.specs,
            *(rank_state_spec(name, array, rank, size) for name, array in per_rank().items()),
        )
        plan = make_plan(
            self.comm, specs, files=self.options.files, node=self.node, scalars_bytes=self._room
        )
        fault = self._make(plan)
        self._release = sources.register([image for s in self._all for image in s.images])
        self._plan, self._specs = plan, sources.specs
        self._sealer = Sealer(plan)
        return fault

    def _make(self, plan: RankPlan) -> str | None:
        fault = None
        if self._memory is not None:
            try:
                self._map(plan, self._memory)
            except CheckpointError as error:
                # The same on every rank. Other levels need no room in a tmpfs.
                self.close()
                fault = f"level {self._memory.name} is left out: {error.message}"
                self._memory = None
            else:
                return None

        def make() -> None:
            for _ in range(self.options.buffers):
                self._all.append(Staging(plan))

        on_all(self.comm, make)
        return fault

    def _map(self, plan: RankPlan, memory: MemoryTier) -> None:
        numbers = range(self.options.buffers)
        # A restart on the same layout finds its newest image and must not overwrite it.
        held = self.comm.allgather(tuple(memory.held(n, plan.digest) for n in numbers))
        if not any(held[0]) or any(other != held[0] for other in held):
            held = []
            on_all(self.comm, memory.clear)

        def make() -> None:
            for number in numbers:
                keep = bool(held and held[0][number])
                self._all.append(Staging(plan, memory.folder(number), keep=keep))

        on_all(self.comm, make)
        if held:
            self.in_memory = self._all[max(numbers, key=lambda n: held[0][n])]

    def close(self) -> None:
        """Free the memory."""
        self._plan = None
        self.in_memory = None
        self._release()
        self._release = _nothing
        for staging in self._all:
            staging.close()
        self._all = []
        self._batches = {}

    def free(self, in_use: Iterable[InUse]) -> Staging | None:
        """A buffer that may be overwritten, if there is one."""
        taken = [user.staging for user in in_use]
        for staging in self._all:
            if not any(staging is other for other in taken) and (
                staging is not self.in_memory or len(self._all) == 1
            ):
                return staging
        return None

    def forget(self, staging: Staging) -> None:
        """A buffer is about to be overwritten."""
        if self._memory is not None:
            self._memory.forget(staging)

    def arranged(self, staging: Staging, sources: Sources) -> Sequence[Batch]:
        """What can be copied later; what cannot is copied now."""
        eager = sources.eager
        if eager:
            there = [index for index in eager if staging.plan.places[index] is not None]
            sources.copy([Item(index, ..., staging.view(index)) for index in there])
        known = self._batches.get(id(staging))
        if known is None or known[0] is not eager:
            own = range(len(sources.specs), len(staging.plan.specs))
            known = self._batches[id(staging)] = (eager, staging.batches(eager.union(own)))
        return known[1]


def _nothing() -> None:
    return
