"""A rank of an emulated machine: real communicators, schedules and checkpoints, emulated time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.errors import UsageError
from hpctrain.parallel.emulate import Passes
from hpctrain.records import read_json
from hpctrain.runtime.emulated_links import EmulatedLinks
from hpctrain.spec.shadow import shadow

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hpctrain.rundir import RunDir
    from hpctrain.runtime.context import RankContext
    from hpctrain.runtime.counting import Counter
    from hpctrain.spec.job import JobSpec

_SAMPLES = 2**20


@dataclass(frozen=True)
class Emulation:
    """What an emulated machine changes of a rank.

    Attributes:
        spec: the job with a model just wide enough for its cut.
        passes: seconds of the passes of its blocks.
        tokens: a sample of the job's own model, for the records.
    """

    spec: JobSpec
    passes: Passes
    tokens: int
    _update_seconds: float
    _links: EmulatedLinks
    _counter: Counter

    @classmethod
    def read(cls, run: RunDir, spec: JobSpec, context: RankContext) -> Emulation:
        """Take the run's table; the links of ``context`` are those of the emulated machine then.

        Collective over all ranks.

        Raises:
            UsageError: there is no table, or it is damaged.
        """
        table = read_json(run.emulation)
        assert spec.data.sequence_length is not None
        try:
            assert table is not None
            forward, inputs, weights = table["block"]
            links = EmulatedLinks(table, context.rank, context.comm)
            counter = context.communicators.counter
            counter.emulate(links)
            return cls(
                spec=shadow(spec),
                passes=Passes(
                    forward, inputs, weights, table["head"], table["embedding"],
                    dense=table["dense"] and tuple(table["dense"]),
                    vocabulary=table["vocabulary"], pace=links.clock, note=counter.compute,
                ),
                tokens=spec.data.sequence_length,
                _update_seconds=table["optimizer"] + table["step"],
                _links=links,
                _counter=counter,
            )  # fmt: skip
        except (AssertionError, KeyError, TypeError, ValueError):
            raise UsageError(
                f"{run.emulation}: no table of an emulated machine",
                hint="hpctrain submit writes it",
            ) from None

    def update(self) -> None:
        """The time of the optimizer's step, and what else is fixed in a step, once all gradients
        are there."""
        self._links.drain()
        self._links.clock.spend(self._update_seconds)
        self._counter.compute(self._update_seconds)

    def step_over(self, comm: Any) -> None:
        """All ranks have agreed to go on: their clocks show the same. Collective."""
        clock = self._links.clock
        clock.reach(comm.allreduce(clock.now, op=_max()))
        clock.anchor()

    def source(self) -> TokensOfNoFile:
        """Samples that no file holds: what they are makes no difference to time."""
        return TokensOfNoFile(self.spec, self.tokens)


def _max() -> Any:
    from mpi4py import MPI

    return MPI.MAX


class TokensOfNoFile:
    """Sequences that are a function of their number.

    Args:
        spec: of the small model.
        units: tokens that a sample counts as.
    """

    def __init__(self, spec: JobSpec, units: int) -> None:
        assert spec.data.sequence_length and spec.model.vocab_size
        self._length, self._vocab = spec.data.sequence_length, spec.model.vocab_size
        self.units_per_sample = units

    def __len__(self) -> int:
        return _SAMPLES

    def read(self, indices: NDArray[np.int64]) -> Any:
        rows = torch.from_numpy(indices).unsqueeze(1) * 31 + torch.arange(self._length + 1)
        rows = rows.remainder(self._vocab)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def document_starts(self, indices: NDArray[np.int64]) -> torch.Tensor | None:
        return None
