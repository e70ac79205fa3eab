"""Reading a checkpoint on all ranks at once: each extent once a node, and checked by somebody.

What one rank of a node wants it reads for itself; what several want they sweep through together
(:mod:`hpctrain.io.sweep`); what nobody wants is read by somebody, to be checked.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import CheckpointError
from hpctrain.io.comm import Communicator, on_all, summed
from hpctrain.io.dtypes import raw_dtype
from hpctrain.io.manifest import Manifest
from hpctrain.io.restore import (
    CheckpointReader,
    DamagedError,
    Job,
    Request,
    differs,
    share_of_extents,
    show_fault,
)
from hpctrain.io.sweep import sweep


class TogetherReader(CheckpointReader):
    """An open checkpoint that all ranks are about to read.

    Args:
        path, manifest, scalars: see :class:`CheckpointReader`.
        world: all ranks.
        mates: those of this rank's node.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        world: Communicator,
        mates: Communicator,
        *,
        scalars: Mapping[str, Any],
    ) -> None:
        super().__init__(path, manifest, scalars=scalars)
        self._world = world
        self._mates = mates
        self._begun = False
        # More threads than twice the cores would only take turns.
        cores = (os.cpu_count() or 1) / mates.size
        self._threads = max(1, min(self._threads, round(2 * cores)))

    def read_all(self, requests: Iterable[Request]) -> None:
        """Fill many arrays; collective the first time, when every extent of the checkpoint is
        checked by some rank.

        Raises:
            DamagedError: on the ranks that found damage, which have to tell the others.
            CheckpointError: on every rank, where one asked for what is not there.
        """
        jobs: list[Job] = []

        def look() -> None:
            jobs.extend(job for request in requests for job in self._jobs(request))

        if self._begun:
            look()
            self._read(jobs)
            return
        self._begun = True
        on_all(self._world, look)
        self._read_together(jobs)
        self._verify = False  # all of it has been

    def _read_together(self, jobs: Sequence[Job]) -> None:
        # Every extent, as what is only to be checked.
        extents = [
            Job(name, entry, index, entry.extents[index], None, None)
            for name, entry, index in share_of_extents(self.manifest, 0, 1)
        ]
        number_of = {(one.name, one.index): number for number, one in enumerate(extents)}
        numbers = [number_of[job.name, job.index] for job in jobs]
        mine = np.zeros(len(extents), np.int64)
        mine[numbers] = 1
        here = summed(self._mates, mine)
        nowhere = np.flatnonzero(summed(self._world, mine) == 0)
        alone = [extents[n] for n in nowhere[self._world.rank :: self._world.size].tolist()]
        wanted: dict[int, list[Job]] = {n: [] for n in np.flatnonzero(here > 1).tolist()}
        for job, number in zip(jobs, numbers, strict=True):
            wanted.get(number, alone).append(job)
        fault = None
        if wanted:
            try:
                fault = self._sweep([(extents[n], parts) for n, parts in wanted.items()])
            except MemoryError:  # each reads for itself
                alone += [job for parts in wanted.values() for job in parts]
        self._read(alone)
        if fault is not None:
            raise DamagedError(fault)

    def _sweep(self, wanted: Sequence[tuple[Job, Sequence[Job]]]) -> str | None:
        """See :func:`hpctrain.io.sweep.sweep`; extents, and what this rank wants of each."""
        dtypes = [raw_dtype(one.entry.torch_dtype) for one, _ in wanted]
        boxes = [one.extent.box for one, _ in wanted]
        sizes = [box.elements * d.itemsize for box, d in zip(boxes, dtypes, strict=True)]

        def shaped(number: int, block: np.ndarray) -> np.ndarray:
            return block.view(dtypes[number]).reshape(boxes[number].shape)

        def read(numbers: Sequence[int], blocks: Sequence[np.ndarray]) -> str | None:
            fault = None
            parts = [(wanted[n][0], shaped(n, b)) for n, b in zip(numbers, blocks, strict=True)]
            for _, run in itertools.groupby(parts, key=lambda part: part[0].extent.file):
                fault = self._read_run([*run]) or fault
            return fault

        def take(number: int, block: np.ndarray) -> None:
            for job in wanted[number][1]:
                assert job.common is not None
                assert job.out is not None
                job.out[...] = shaped(number, block)[job.common.within(boxes[number])]

        return sweep(self._mates, sizes, read, take, threads=min(2, self._threads))

    def _read_run(self, run: Sequence[tuple[Job, np.ndarray]]) -> str | None:
        """Extents of one file into arrays, checked; what is wrong with the first that is."""
        job = run[0][0]
        try:
            file, folder = self._open(job.extent)
        except CheckpointError as error:
            return error.message
        try:
            found = file.read_run([(job.extent, array) for job, array in run])
        except (OSError, EOFError) as error:
            return show_fault(folder, self.manifest, job.name, job.extent, str(error))
        for (job, _), digest in zip(run, found, strict=True):
            fault = differs(job.extent, digest)
            if fault is not None:
                return show_fault(folder, self.manifest, job.name, job.extent, fault)
        return None
