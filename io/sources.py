"""Where a tensor's elements are while a snapshot of them is taken.

The parts of this package that copy, write and commit know tensors only by their
:class:`~hpctrain.io.shards.ShardSpec`; a :class:`Sources` hides whether the elements lie in host
memory, on a device or somewhere else, and what has to happen before they may change again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from hpctrain.io.shards import ShardSpec, TensorShard
from hpctrain.io.staging import Item


class Sources(Protocol):
    """What a rank hands in for a checkpoint.

    Attributes:
        specs: the rank's boxes of the global tensors. The same tuple object as long as nothing
            about them changes, so that a layout is worked out once.
        eager: indices of those that may change during forward and backward; they are copied
            before the save returns.
        lands_at_settle: copies are only issued by :meth:`copy` and have landed after
            :meth:`settle`; otherwise each has landed when :meth:`copy` returns.
    """

    @property
    def specs(self) -> tuple[ShardSpec, ...]: ...
    @property
    def eager(self) -> frozenset[int]: ...
    @property
    def lands_at_settle(self) -> bool: ...

    def register(self, images: Sequence[np.ndarray]) -> Callable[[], None]:
        """Called in the training thread with the buffers that all copies go to, when they are
        made: a device copies faster into memory that it knows. What comes back is called before
        they are freed."""

    def begin(self) -> None:
        """Called in the training thread when a snapshot begins."""

    def copy(self, items: Sequence[Item]) -> None:
        """Copy parts of shards to their places, or see to it that this will happen.

        Called by several threads at once, for different parts; must not hold Python's lock
        for long.
        """

    def confirm(self) -> None:
        """Called in the training thread when it is told that the tensors may change.

        Raises:
            CheckpointError: a tensor was changed before.
        """

    def check(self) -> None:
        """Called in a background thread after the last copy was issued, before the tensors may
        change.

        Raises:
            CheckpointError: a tensor was changed before it was copied.
        """

    def settle(self) -> None:
        """Called in a background thread after :meth:`check`: return when all have landed."""

    def order(self) -> None:
        """Called in the training thread, after the last copy was issued and before the tensors
        change: make what the device does next wait for the copies."""


class HostSources:
    """Arrays in host memory that nobody changes before :meth:`check`."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self.specs = tuple(shard.spec for shard in shards)
        self.eager: frozenset[int] = frozenset()
        self.lands_at_settle = False
        self._arrays = [shard.array for shard in shards]

    def register(self, images: Sequence[np.ndarray]) -> Callable[[], None]:
        return lambda: None

    def begin(self) -> None:
        return

    def copy(self, items: Sequence[Item]) -> None:
        for item in items:
            np.copyto(item.out, self._arrays[item.index][item.rows])

    def confirm(self) -> None:
        return

    def check(self) -> None:
        return

    def settle(self) -> None:
        return

    def order(self) -> None:
        return
