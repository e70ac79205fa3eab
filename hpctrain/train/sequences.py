"""Steps of whole documents from a token file, each document a sequence of its own length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel.batch import MicroBatch
from hpctrain.parallel.context_mixed import dealer_of
from hpctrain.train.data import Batches, TokenSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec


class SequenceSource(TokenSource):
    """Documents of a token file; those longer than a sample are cut into several sequences.

    Attributes:
        firsts: first token of each sequence in the file.
        lengths: inputs of each; the last one's target is the token after it.

    Raises:
        UsageError: no document has two tokens.
    """

    def __init__(self, path: str, sequence_length: int, vocab_size: int | None) -> None:
        super().__init__(path, sequence_length, vocab_size, separate=True)
        self.firsts, self.lengths = cut(self.file.document_bounds, sequence_length)
        if not len(self.firsts):
            raise UsageError(f"data.path: no document of {path} has two tokens")

    def __len__(self) -> int:
        return len(self.firsts)

    def sequence(self, index: int) -> torch.Tensor:
        """Inputs of a sequence and one token more, int64."""
        first = int(self.firsts[index])
        tokens = self.file.slice(first, first + int(self.lengths[index]) + 1)
        return torch.from_numpy(tokens.astype(np.int64))


def cut(bounds: NDArray[np.int64], longest: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First tokens and numbers of inputs of the sequences that documents make.

    Args:
        bounds: where each document begins, and where the last one ends.
        longest: inputs of a sequence at most.
    """
    inputs = np.maximum(np.diff(bounds) - 1, 0)
    pieces = -(-inputs // longest)
    document = np.repeat(np.arange(len(inputs)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    firsts = bounds[:-1][document] + number * longest
    return firsts, np.minimum(inputs[document] - number * longest, longest)


class SequenceBatches(Batches):
    """As :class:`Batches`, with ``global_batch`` sequences a step, dealt by their lengths."""

    def __init__(
        self, source: SequenceSource, spec: JobSpec, context: RankContext, start: int
    ) -> None:
        self.sequences = source
        self.dealer = dealer_of(spec, context)
        super().__init__(source, spec, context, start)

    @property
    def units_per_step(self) -> int:
        """Tokens of the step that was taken last, all ranks."""
        taken = self.order.indices(max(0, self.position - self.global_batch), self.global_batch)
        return int(self.sequences.lengths[taken].sum())

    def _read(self, position: int) -> list[MicroBatch]:
        indices = self.order.indices(position, self.global_batch)
        return self.dealer.micro_batches(
            self.sequences.lengths[indices].tolist(),
            lambda number: self.sequences.sequence(int(indices[number])),
            position,
        )
