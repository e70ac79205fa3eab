"""One checkpoint on its way: copied by one thread, sealed, and handed to the writer."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.io.flush import Abandoned
from hpctrain.io.parts import Part, Sealer
from hpctrain.io.sources import Sources
from hpctrain.io.staging import Batch, Staging

_POLL_SECONDS = 0.0005
_PATIENCE_SECONDS = 0.05


class Snapshot:
    """A checkpoint in flight on this rank.

    The training thread makes it and copies what may change at once; the copier thread runs
    :meth:`copy`, in which :meth:`wait_copied` of the training thread joins; the writer thread
    waits in :meth:`wait_ready` and :meth:`wait_sealed`.

    Args:
        step: optimizer steps done.
        sequence: number of this save in its directory.
        staging: a free buffer.
        sources: what is copied.
        sealer: of the buffer's layout.
        scalars: JSON values; rank 0's are stored.
        tiers: names of the levels it goes to.
        batches: what is still to be copied of the sources.
        per_rank: gives the arrays of this rank's own.
    """

    def __init__(
        self,
        *,
        step: int,
        sequence: int,
        staging: Staging,
        sources: Sources,
        sealer: Sealer,
        scalars: Mapping[str, Any],
        tiers: frozenset[str],
        batches: Sequence[Batch],
        per_rank: Callable[[], Mapping[str, np.ndarray]],
    ) -> None:
        self.step = step
        self.sequence = sequence
        self.staging = staging
        self.tiers = tiers
        self.begun = time.perf_counter()
        self.copy_seconds = 0.0
        self.scalars_too_long = False
        # Set by the writer thread, agreed on by all ranks in the training thread.
        self.reached: set[str] = set()
        self.faults: dict[str, str] = {}
        self.done = False
        self.committing = False
        self.committed = False
        self.commit_fault: str | None = None
        self.abandoned = False
        self.part: Part | None = None
        self._sources = sources
        self._sealer = sealer
        self._scalars = scalars
        self._error: str | None = None
        self._per_rank = per_rank
        self._batches = batches
        self._left: deque[int] = deque(range(len(batches)))
        self._copied_flags = bytearray(len(batches))
        self._ordered = False
        self._low = 0
        self._prepared = threading.Event()
        self._issued = threading.Event()
        self._confirmed = threading.Event()
        self._landed = threading.Event()
        self._sealed = threading.Event()

    @property
    def error(self) -> str | None:
        """Why there is nothing to write: a tensor changed too early, or a bug."""
        return self._error

    @property
    def news(self) -> bool:
        """Whether this rank has done something that the others may wait for."""
        return self.done and (
            not self.committing or self.committed or self.commit_fault is not None
        )

    @property
    def copied(self) -> bool:
        """Whether nothing is left to be copied."""
        return self._issued.is_set()

    @property
    def confirmed(self) -> bool:
        """Whether the training thread has seen that nothing changed before it was copied."""
        return self._confirmed.is_set()

    # ---- training thread --------------------------------------------------------------------

    def wait_copied(self) -> None:
        """Return when the tensors may change; copies itself what is not yet begun."""
        if not self._ordered:
            if not self._issued.is_set():
                self._copy_batches()
                self._issued.wait()
            self._sources.order()
            self._ordered = True
            # torch counts a change when it is done: the copier may have met one that was not.
            try:
                self._sources.confirm()
            except HpctrainError as error:
                self._error = error.message
            self._confirmed.set()

    # ---- copier thread ----------------------------------------------------------------------

    def copy(self) -> None:
        """Copy everything, check that nothing changed meanwhile, and take the checksums."""
        try:
            if self.staging.plan.scalars is not None:
                self._set_scalars()
            for index, array in enumerate(self._per_rank().values(), len(self._sources.specs)):
                place = self.staging.view(index)[0]
                if place.shape != array.shape or place.dtype != array.dtype:
                    raise ValueError("a rank's own array is of another form than before")
                np.copyto(place, array)
            self._prepared.set()
            began = time.perf_counter()
            self._copy_batches()
            while not all(self._copied_flags):  # the training thread has the last ones
                time.sleep(_POLL_SECONDS)
            self._sources.check()
            self._issued.set()
            self._sources.settle()
            self._landed.set()
            self.copy_seconds = time.perf_counter() - began
            self.part = self._sealer.seal(
                self.staging,
                step=self.step,
                sequence=self.sequence,
                scalars=self._scalars,
            )
        except HpctrainError as error:
            self._error = error.message
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
        finally:
            for event in (self._prepared, self._issued, self._landed, self._sealed):
                event.set()

    def _set_scalars(self) -> None:
        text = json.dumps(self._scalars, allow_nan=False).encode()
        self.scalars_too_long = len(text) > self.staging.scalars_room
        self.staging.set_scalars(text)

    def _copy_batches(self) -> None:
        batches, left, flags, sources = (
            self._batches,
            self._left,
            self._copied_flags,
            self._sources,
        )
        while True:
            try:
                number = left.popleft()
            except IndexError:
                return
            try:
                sources.copy(batches[number].items)
            except BaseException as error:
                self._error = f"{type(error).__name__}: {error}"
            flags[number] = 1

    # ---- writer thread ----------------------------------------------------------------------

    def wait_ready(self, piece: int, end: int) -> None:
        """Return when the bytes of a piece before ``end`` are there.

        Raises:
            Abandoned: they never will be.
        """
        self._prepared.wait()
        if self._sources.lands_at_settle:
            self._landed.wait()
        while not self._has(piece, end):
            if self._error is not None:
                raise Abandoned
            time.sleep(_POLL_SECONDS)

    def _has(self, piece: int, end: int) -> bool:
        batches, flags = self._batches, self._copied_flags
        while self._low < len(batches) and flags[self._low]:
            self._low += 1
        if self._low == len(batches):
            return True
        first = batches[self._low]
        return (first.piece, first.start) >= (piece, end)

    def wait_sealed(self) -> Part:
        """The part, when the checksums are there and the training thread has seen that nothing
        was copied while it changed: before that no level may show it as whole.

        Raises:
            CheckpointError: there will be none.
            Abandoned: nobody waits for it any more.
        """
        self._sealed.wait()
        while self._error is None and not self._confirmed.wait(_PATIENCE_SECONDS):
            if self.abandoned:
                raise Abandoned
        if self._error is not None or self.part is None:
            raise CheckpointError(self._error or "the snapshot was not taken")
        return self.part

    def wanted(self) -> bool:
        """Whether writing it still makes sense."""
        return not self.abandoned and self._error is None
