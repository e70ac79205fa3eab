"""What each rank trains on at each step: a pure function of (seed, position in the order).

The order of samples is global. At a step the ranks take consecutive slices of one global
batch, so another data-parallel size sees the same samples in the same step.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from hpctrain.errors import ImpossibleError, UsageError
from hpctrain.io.order import SampleOrder
from hpctrain.io.tokens import TokenFile
from hpctrain.model.build import call_user
from hpctrain.parallel.batch import MicroBatch
from hpctrain.parallel.context import sequence_part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec

    Indices = NDArray[np.int64]


class Source(Protocol):
    """Samples by index."""

    units_per_sample: int
    """Tokens a sample; 1 where samples are no sequences."""

    def __len__(self) -> int: ...

    def read(self, indices: Indices) -> Any:
        """One batch of the given samples, on the CPU."""

    def document_starts(self, indices: Indices) -> torch.Tensor | None:
        """Place where each token's document begins, (samples, tokens); None where all are one."""


class TokenSource:
    """Sequences of a token file; the target of each token is the next one."""

    def __init__(
        self, path: str, sequence_length: int, vocab_size: int | None, *, separate: bool = False
    ) -> None:
        self.separate = separate
        self.file = TokenFile(path, sequence_length)
        self.units_per_sample = sequence_length
        if vocab_size is not None and self.file.vocab_size > vocab_size:
            raise UsageError(
                f"data.path: {path} was tokenized with {self.file.vocab_size} tokens, but "
                f"model.vocab_size is {vocab_size}",
                hint=f"set model.vocab_size to {self.file.vocab_size} or more",
            )

    def __len__(self) -> int:
        return len(self.file)

    def read(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(self.file.read(indices).astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def document_starts(self, indices: Indices) -> torch.Tensor | None:
        return torch.from_numpy(self.file.document_starts(indices)) if self.separate else None


class UserSource:
    """A data set of the user's: ``__len__`` and ``__getitem__``."""

    units_per_sample = 1

    def __init__(self, dataset: Any, entry: str) -> None:
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                raise UsageError(
                    f"data.module: {entry} returned a {type(dataset).__name__} without {method}"
                )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: Indices) -> Any:
        from torch.utils.data import default_collate

        return default_collate([self.dataset[int(index)] for index in indices])

    def document_starts(self, indices: Indices) -> torch.Tensor | None:
        return None


def open_source(spec: JobSpec) -> Source:
    """The data of a job.

    Raises:
        UsageError: the file or function is missing, or does not fit the model.
    """
    data = spec.data
    if data.module is not None:
        return UserSource(call_user(data.module, data.args, "data.module"), data.module)
    assert data.path is not None
    assert data.sequence_length is not None
    vocabulary = spec.model.vocab_size if spec.model.module is None else None
    if data.documents == "each":
        from hpctrain.train.sequences import SequenceSource

        return SequenceSource(data.path, data.sequence_length, vocabulary)
    separate = data.documents == "separate"
    source = TokenSource(data.path, data.sequence_length, vocabulary, separate=separate)
    if separate:
        source.document_starts(np.zeros(1, np.int64))  # a file without documents is told of now
    return source


def open_batches(source: Source, spec: JobSpec, context: RankContext, start: int) -> Batches:
    """The batches of a job; ``start`` as in :class:`Batches`."""
    from hpctrain.train.sequences import SequenceBatches, SequenceSource

    if isinstance(source, SequenceSource):
        return SequenceBatches(source, spec, context, start)
    return Batches(source, spec, context, start)


class Batches:
    """The micro-batches of this rank, read one step ahead by a thread.

    Args:
        source: of samples.
        spec: resolved job.
        context: of this rank.
        start: samples of the order already taken by all ranks (the data cursor).
    """

    def __init__(self, source: Source, spec: JobSpec, context: RankContext, start: int) -> None:
        train = spec.train
        assert isinstance(train.micro_batch, int)
        if len(source) < train.global_batch:
            raise ImpossibleError(
                f"train.global_batch: {train.global_batch} samples a step, but the data holds "
                f"only {len(source)}",
                hint="make the batch or data.sequence_length smaller, or bring more data",
            )
        self.source = source
        self.order = SampleOrder(len(source), seed=train.seed, block=spec.data.shuffle_block)
        self.global_batch = train.global_batch
        self.micro_batch = train.micro_batch
        self.share = train.global_batch // context.size("dp")
        self.first = context.coordinate("dp") * self.share
        self.part = sequence_part(spec, context) if spec.model.module is None else None
        self.device = context.device
        self.position = start
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="hpctrain-data")
        self._ahead: Future[list[MicroBatch]] = self._reader.submit(self._read, start)

    @property
    def units_per_step(self) -> int:
        """Tokens (or samples) of a step, all ranks."""
        return self.global_batch * self.source.units_per_sample

    def next_step(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the next step."""
        micro_batches = self._ahead.result()
        self.position += self.global_batch
        self._ahead = self._reader.submit(self._read, self.position)
        for micro in micro_batches:
            yield _on(micro, self.device)

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, position: int) -> list[MicroBatch]:
        start = position + self.first
        found = []
        for offset in range(0, self.share, self.micro_batch):
            keys = np.arange(start + offset, start + offset + self.micro_batch, dtype=np.int64)
            samples = self.order.indices(int(keys[0]), len(keys))
            micro = MicroBatch(
                self.source.read(samples),
                torch.from_numpy(keys),
                starts=self.source.document_starts(samples),
            )
            found.append(micro if self.part is None else self.part.take(micro))
        return found


def _on(micro: MicroBatch, device: torch.device) -> MicroBatch:
    return MicroBatch(
        _to(micro.batch, device),
        micro.keys.to(device),
        _to(micro.positions, device),
        _to(micro.starts, device),
        micro.weight,
        micro.degree,
    )


def _to(batch: Any, device: torch.device) -> Any:
    """The batch on the device, whatever containers it is made of."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_to(value, device) for value in batch)
    return batch
