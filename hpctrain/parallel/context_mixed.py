"""Steps of whole documents: each sequence on as many ranks as its length asks for.

The ranks of all context groups together share the sequences of a step by
:func:`~hpctrain.schedule.lengths.plan_lengths`. Every rank works the same plan out from the
lengths alone, so nothing is exchanged. Sequences that share a group are packed into one row, each
a document of its own, and the row lies over the group as any sequence does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.parallel.batch import MicroBatch
from hpctrain.parallel.context import SequencePart
from hpctrain.schedule.lengths import Costs, Pack, plan_lengths
from hpctrain.spec.sequence import SequenceSplit

if TYPE_CHECKING:
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec


@dataclass(frozen=True)
class Dealer:
    """Deals the sequences of a step to the ranks.

    Attributes:
        ranks: data- and context-parallel ones together.
        rank: this one.
        widest: ranks of a context group, the most that a sequence can have.
        capacity: tokens that a rank can hold in one forward and backward.
        costs: of the model.
    """

    ranks: int
    rank: int
    widest: int
    capacity: int
    costs: Costs

    def micro_batches(
        self, lengths: Sequence[int], read: Callable[[int], Tensor], first_key: int
    ) -> list[MicroBatch]:
        """What this rank works on, in order.

        Args:
            lengths: input tokens of every sequence of the step.
            read: number in the step -> its inputs and one more token, (length + 1,) int64.
            first_key: number of the step's first sequence in the whole run.

        Returns:
            One micro-batch at least: ranks without work take part in the step's sums with
            a token that counts nothing.
        """
        plan = plan_lengths(lengths, self.ranks, self.capacity, self.costs, self.widest)
        mine = plan.of_rank(self.rank)
        if not mine:
            nothing = torch.zeros(1, 1, dtype=torch.int64)
            key = torch.tensor([first_key])
            return [MicroBatch((nothing, nothing), key, starts=nothing, weight=0.0, degree=1)]
        # The step divides by the number of micro-batches, which differs from rank to rank.
        share = self.ranks * len(mine) / sum(lengths)
        return [self._micro_batch(pack, lengths, read, first_key, share) for pack in mine]

    def _micro_batch(
        self,
        pack: Pack,
        lengths: Sequence[int],
        read: Callable[[int], Tensor],
        first_key: int,
        share: float,
    ) -> MicroBatch:
        rows = [read(number) for number in pack.sequences]
        counts = torch.tensor([lengths[number] for number in pack.sequences])
        starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        whole = MicroBatch(
            (
                torch.cat([row[:-1] for row in rows]).unsqueeze(0),
                torch.cat([row[1:] for row in rows]).unsqueeze(0),
            ),
            torch.tensor([first_key + pack.sequences[0]]),
            starts=starts.unsqueeze(0),
        )
        length = int(counts.sum())
        part = SequencePart(SequenceSplit(pack.degree), self.rank - pack.first, length)
        held = part.take(whole)
        tokens = held.batch[0].shape[1]
        return MicroBatch(
            held.batch, held.keys, held.positions, held.starts, tokens * share, pack.degree
        )


def dealer_of(spec: JobSpec, context: RankContext) -> Dealer:
    """The dealer of a job whose samples are whole documents."""
    size = spec.parallel.context.size
    dims, longest = spec.model.transformer(), spec.data.sequence_length
    assert longest is not None, "a token file has a longest sequence"
    # FLOPs stand for seconds: only their ratio matters.
    costs = Costs(token=dims.model_flops_per_token(0), pair=12.0 * dims.layers * dims.hidden)
    rank = context.coordinate("dp") * size + context.coordinate("cp")
    return Dealer(context.size("dp") * size, rank, size, -(-longest // size), costs)
