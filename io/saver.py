"""Saving in the background: the training thread gives a snapshot away and goes on.

Three threads of a rank share the work, none of which calls MPI or holds Python's lock while it
moves bytes: the training thread, a copier (tensors to buffer, checksums) and a writer (buffer to
storage). What all ranks have to know they tell each other in :meth:`Saver.poll`, which the
training thread calls at step boundaries: one small sum on a communicator of the saver's own, and
only while something is in flight. So every rank sees a checkpoint finish, fail or free its
buffer at the same step, and a rank that fails leaves none waiting.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.io import directory
from hpctrain.io.buffers import Buffers, SaveOptions
from hpctrain.io.comm import Communicator, fault_text, on_root, summed
from hpctrain.io.directory import step_name
from hpctrain.io.flush import Abandoned
from hpctrain.io.snapshot import Snapshot
from hpctrain.io.sources import Sources
from hpctrain.io.store import STORE, StoreTier
from hpctrain.io.tiers import MEMORY, MemoryTier, Tier
from hpctrain.io.worker import Worker

_IDLE_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a checkpoint ended; the same on every rank but for ``warnings``.

    Attributes:
        step: optimizer steps done.
        path: its directory on the parallel file system, None where it went to other levels
            only.
        bytes: of all its files.
        seconds: from the save to the end.
        tiers: levels that hold it on every rank.
        warnings: what went wrong without harm to it (rank 0): levels, and whatever else the
            background had to say meanwhile (retention, leftovers).
        error: why it is not there.
    """

    step: int
    path: Path | None
    bytes: int
    seconds: float
    tiers: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    error: CheckpointError | None = None

    @classmethod
    def failed(cls, step: int, error: CheckpointError) -> Outcome:
        """One that never began."""
        return cls(step, None, 0, 0.0, error=error)


class Saver:
    """Saves checkpoints of one run in the background.

    Args:
        root: directory of the checkpoints; made by the first save.
        comm: all ranks; used by nobody else, and by the training thread alone.
        keep: newest checkpoints kept in ``root``.
        options: see there.
        node: number of this rank's node.
        tiers: further levels, nearest first.

    Attributes:
        copy_seconds: how long the copying of the last checkpoints took.
    """

    def __init__(
        self,
        root: Path,
        comm: Communicator,
        *,
        keep: int = 2,
        options: SaveOptions | None = None,
        node: int = 0,
        tiers: Sequence[Tier] = (),
    ) -> None:
        self.root = Path(root)
        self.comm = comm
        self.options = options or SaveOptions()
        self.node = node
        writer = on_root(comm, directory.writer)
        self.store = StoreTier(self.root, comm.rank, writer, keep, self.options.write)
        self._tiers: dict[str, Tier] = {tier.name: tier for tier in (*tiers, self.store)}
        self._sequence = self._newest_sequence()
        memory = next((t for t in tiers if isinstance(t, MemoryTier)), None)
        self._buffers = Buffers(comm, self.options, node, memory)
        self._flight: list[Snapshot] = []
        self.copy_seconds: deque[float] = deque(maxlen=100)
        self._latest: Snapshot | None = None
        self._finished: list[Outcome] = []
        self._warnings: deque[str] = deque()
        self._hurry = False
        self._copier = Worker("checkpoint-copier")
        self._writer = Worker("checkpoint-writer")
        self._keeper = Worker("checkpoint-keeper")

    def _newest_sequence(self) -> int:
        """Of all levels of all ranks, the store's looked up by rank 0 for all; and not below the
        time, for an earlier start may have had levels that this one does not look at, and what
        they hold must not pass for newer than what is saved now."""
        near = [t.newest_sequence() for t in self._tiers.values() if t is not self.store]

        def stored() -> int:
            return max(self.store.newest_sequence(), time.time_ns() // 1_000_000)

        newest: int = on_root(self.comm, stored)
        found: list[int] = self.comm.allgather(max(near, default=0))
        return max(newest, *found)

    # ---- the training thread ----------------------------------------------------------------

    def save(
        self,
        step: int,
        sources: Sources,
        *,
        scalars: Mapping[str, Any],
        per_rank: Callable[[], Mapping[str, np.ndarray]],
        tiers: Iterable[str] = (STORE,),
    ) -> bool:
        """Begin a checkpoint; collective. False where it was skipped: all buffers are in use,
        or the only level it was for is out of order.

        Until :meth:`wait_copied` returns, the tensors of ``sources`` must not change, but for
        those it calls eager.

        Args:
            step: optimizer steps done.
            sources: what this rank writes. Over all ranks each tensor is given exactly once:
                of replicas, one rank hands one in.
            scalars: JSON values; rank 0's are stored.
            per_rank: gives arrays that differ between ranks, such as states of random number
                generators; called in a background thread, so it has to know them already. The
                same names, dtypes and shapes on every rank and in every call.
            tiers: levels it goes to.

        Raises:
            CheckpointError: on every rank: gaps or overlaps between the ranks' shards, or no
                memory for the buffers.
        """
        self.wait_copied()
        buffers = self._buffers
        if buffers.outdated(sources):
            while self._flight:
                time.sleep(_IDLE_SECONDS)
                self._advance()
            fault = buffers.lay_out(sources, per_rank)
            if fault is not None:
                self._warnings.append(fault)
                del self._tiers[MEMORY]
        asked = frozenset(tiers) & self._tiers.keys()
        if not asked:
            return False
        staging = buffers.free(self._flight)
        if staging is None and self.options.when_busy == "skip":
            self._advance()
            staging = buffers.free(self._flight)
            if staging is None:
                return False
        while staging is None:
            time.sleep(_IDLE_SECONDS)
            self._advance()
            staging = buffers.free(self._flight)
        self._sequence += 1
        buffers.forget(staging)
        sources.begin()
        batches = buffers.arranged(staging, sources)
        snapshot = Snapshot(
            step=step,
            sequence=self._sequence,
            staging=staging,
            sources=sources,
            sealer=buffers.sealer,
            scalars={**scalars, "step": step},
            tiers=asked,
            batches=batches,
            per_rank=per_rank,
        )
        self._flight.append(snapshot)
        self._latest = snapshot
        self._copier.do(lambda: self._take(snapshot))
        return True

    def _take(self, snapshot: Snapshot) -> None:
        self._writer.do(lambda: self._write(snapshot))
        snapshot.copy()

    def wait_copied(self) -> None:
        """Return when the tensors of the last save may change. To be called before they do."""
        if self._latest is not None:
            self._latest.wait_copied()
            self._latest = None

    def poll(self) -> list[Outcome]:
        """Checkpoints that ended since the last call; collective, to be called at step
        boundaries. Cheap, and free while nothing is in flight."""
        if self._latest is not None and self._latest.copied:
            self.wait_copied()
        if self._flight:
            self._advance()
        if not self._finished:
            return []
        finished, self._finished = self._finished, []
        if finished and self._warnings:
            told = [self._warnings.popleft() for _ in range(len(self._warnings))]
            last = finished[-1]
            finished[-1] = replace(last, warnings=(*last.warnings, *told))
        return finished

    @property
    def busy(self) -> bool:
        """Whether anything is in flight; the same on every rank."""
        return bool(self._flight)

    def drain(self) -> list[Outcome]:
        """Wait for everything in flight; collective. The bandwidth cap does not count now."""
        self.wait_copied()
        self._hurry = True
        try:
            pause = 0.0002
            while self._flight:
                self._advance()
                if self._flight:
                    time.sleep(pause)
                    pause = min(2 * pause, 0.002)
            self._keeper.wait()
        finally:
            self._hurry = False
        return self.poll()

    def close(self, *, forget: bool = True) -> None:
        """Stop the threads and free the memory; what is in flight is given up.

        Args:
            forget: remove what lies at other levels than the parallel file system; for a run
                that ended in good order and has its state there.
        """
        for snapshot in self._flight:
            snapshot.abandoned = True
        for worker in (self._copier, self._writer, self._keeper):
            worker.stop()
        for tier in self._tiers.values():
            tier.close(forget=forget)
        self._buffers.close()

    # ---- the writer thread ------------------------------------------------------------------

    def _write(self, snapshot: Snapshot) -> None:
        names = [name for name in self._tiers if name in snapshot.tiers]
        # What lies in memory has only to be confirmed, for which the others need not wait.
        if MEMORY in names and len(names) > 1:
            names.remove(MEMORY)
            shown = threading.Event()

            def show() -> None:
                self._write_to(MEMORY, snapshot)
                shown.set()

            self._keeper.do(show)
            for name in names:
                self._write_to(name, snapshot)
            shown.wait()
        else:
            for name in names:
                self._write_to(name, snapshot)
        if self.comm.size == 1 and STORE in snapshot.reached:
            # There is nobody to agree with.
            self._commit(snapshot)
        snapshot.done = True

    def _write_to(self, name: str, snapshot: Snapshot) -> None:
        try:
            self._tiers[name].write(snapshot, hurry=lambda: self._hurry)
            snapshot.reached.add(name)
        except Abandoned:
            snapshot.faults[name] = snapshot.error or "given up because another rank failed"
        except HpctrainError as error:
            snapshot.faults[name] = error.message
        except BaseException as error:
            # Whatever ends this thread, the training thread must not wait for it.
            snapshot.faults[name] = fault_text(error)

    def _commit(self, snapshot: Snapshot) -> None:
        try:
            self.store.commit(snapshot)
            snapshot.committed = True
        except Abandoned:
            snapshot.commit_fault = snapshot.error or "given up"
        except HpctrainError as error:
            snapshot.commit_fault = error.message
        except BaseException as error:
            snapshot.commit_fault = fault_text(error)

    # ---- agreement --------------------------------------------------------------------------

    def _advance(self) -> None:
        if not self._flight:
            return
        alone = self.comm.size == 1 and MEMORY not in self._tiers
        if alone and not any(snapshot.news for snapshot in self._flight):
            return
        names = list(self._tiers)
        size = self.comm.size
        rows = [_status(snapshot, names) for snapshot in self._flight]
        if size > 1:
            rows = summed(self.comm, np.array(rows, np.int64)).tolist()
        for snapshot, row in zip(tuple(self._flight), rows, strict=True):
            done, failed, committed, commit_failed, *reached = row
            everywhere = tuple(n for n, count in zip(names, reached, strict=True) if count == size)
            if MEMORY in everywhere:
                self._buffers.in_memory = snapshot.staging
            if failed:
                snapshot.abandoned = True
            if done < size:
                continue
            if failed or commit_failed:
                self._over(snapshot, everywhere, failed=True)
            elif STORE not in snapshot.tiers or committed:
                self._over(snapshot, everywhere, failed=False)
            elif self.comm.rank == 0 and not snapshot.committing:
                snapshot.committing = True
                self._keeper.do(_call(self._commit, snapshot))

    def _over(self, snapshot: Snapshot, everywhere: tuple[str, ...], *, failed: bool) -> None:
        """A checkpoint ended, on every rank in the same call."""
        self._flight = [other for other in self._flight if other is not snapshot]
        self.copy_seconds.append(snapshot.copy_seconds)
        self._buffers.too_small |= snapshot.scalars_too_long
        if failed:
            everywhere = tuple(name for name in everywhere if name != STORE)
        # From here on every rank knows what is durable.
        self._keeper.do(_call(self._tidy, snapshot, everywhere, failed))
        seconds = time.perf_counter() - snapshot.begun
        error = self._failure(snapshot) if failed else None
        stored = STORE in everywhere
        plan = snapshot.staging.plan
        self._finished.append(
            Outcome(
                step=snapshot.step,
                path=self.root / step_name(snapshot.step) if stored else None,
                bytes=plan.total_bytes,
                seconds=seconds,
                tiers=everywhere,
                warnings=self._tier_warnings(snapshot),
                error=error,
            )
        )

    def _failure(self, snapshot: Snapshot) -> CheckpointError:
        """The first rank's reason, on all ranks; collective, and only where one failed."""
        mine = snapshot.commit_fault or snapshot.error or snapshot.faults.get(STORE)
        if snapshot.abandoned and snapshot.error is None and self._is_echo(snapshot):
            mine = None
        faults = self.comm.allgather(mine)
        told = [(rank, fault) for rank, fault in enumerate(faults) if fault is not None]
        rank, fault = told[0] if told else (0, "unknown reason")
        where = f"rank {rank}: " if self.comm.size > 1 else ""
        more = f" (and {len(told) - 1} more ranks)" if len(told) > 1 else ""
        return CheckpointError(
            f"the checkpoint of step {snapshot.step} was not written: {where}{fault}{more}",
            hint="what was written of it is removed; the ones before are kept",
        )

    @staticmethod
    def _is_echo(snapshot: Snapshot) -> bool:
        return snapshot.faults.get(STORE) == "given up because another rank failed"

    def _tier_warnings(self, snapshot: Snapshot) -> tuple[str, ...]:
        return tuple(
            f"level {name}: {fault}" for name, fault in snapshot.faults.items() if name != STORE
        )

    def _tidy(self, snapshot: Snapshot, levels: tuple[str, ...], failed: bool) -> None:
        if failed and self.comm.rank == 0:
            self.store.discard(snapshot)
        for name in levels:
            try:
                self._warnings.extend(self._tiers[name].retain(snapshot))
            except Exception as error:
                self._warnings.append(f"level {name}: {fault_text(error)}")


def _status(snapshot: Snapshot, names: Sequence[str]) -> list[int]:
    must = STORE if STORE in snapshot.tiers else None
    done = snapshot.done and snapshot.confirmed
    failed = done and (
        snapshot.error is not None
        or (must in snapshot.faults if must else not snapshot.reached.issuperset(snapshot.tiers))
    )
    return [
        int(done),
        int(failed),
        int(snapshot.committed),
        int(snapshot.commit_fault is not None),
        *(int(name in snapshot.reached) for name in names),
    ]


def _call(function: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: function(*args)
