"""Vocabulary Parallelism (Yeung et al. 2024): embedding and output layer over all ranks of a
pipeline, as passes of their own between those of the stages.

Every rank has some rows of the embedding and of the output layer, whichever stages it holds::

    E        rows of this rank's tokens          COMBINE  their sum, to the first stage
    SHARE    the last stage's output, to all
    S        logits and softmax of this rank's rows
    STATS    maxima and sums of the softmax, to all (two barriers only)
    T        gradient of the output layer
    COMBINE  gradient of the last stage's output, to the last stage
    SHARE    gradient of the first stage's input, to all
    D        gradient of the embedding

With one barrier (the paper's algorithm 2) S works with the rank's own maximum and sum, makes the
gradient of its input as well, and COMBINE corrects it; with two (algorithm 1) T waits for STATS.

Letters of shapes: B samples, S positions, T = B·S tokens, H width, V this rank's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.errors import ImpossibleError
from hpctrain.model.transformer import Embedding, Transformer, places_in_documents
from hpctrain.parallel.model import Cut
from hpctrain.parallel.regions import TensorGroup, share
from hpctrain.parallel.split_backward import add_weight_grad
from hpctrain.parallel.tensor import slice_of
from hpctrain.runtime.lane import Handle, Lane
from hpctrain.schedule.actions import Action, ActionKind

if TYPE_CHECKING:
    from hpctrain.parallel.pipeline_stages import Stages, Wire
    from hpctrain.schedule import Schedule
    from hpctrain.spec.transformer import TransformerDims

K = ActionKind


def spread_vocabulary(
    stages: Stages,
    dims: TransformerDims,
    schedule: Schedule,
    rank: int,
    group: TensorGroup | None,
) -> dict[str, Cut]:
    """Take embedding and output layer from the stages and add this rank's rows, as the last chunk.

    The rows are a transformer with nothing but embedding and output layer, tied or not, so that
    names and initial weights are those of the whole model.

    Args:
        stages: on the meta device, cut by tensor parallelism; changed in place.
        dims: of the whole model.
        schedule: with vocabulary passes.
        rank: in the pipeline.
        group: tensor group; its ranks share what a rank of the pipeline has.

    Returns:
        Cuts of the rows.

    Raises:
        ImpossibleError: fewer tokens than ranks.
    """
    for stage in stages.modules:
        _without_vocabulary(stage, group)
    stages.copies.clear()
    tensor_rank, tensor_ranks = (group.rank, group.size) if group is not None else (0, 1)
    ranks = schedule.ranks * tensor_ranks
    if dims.vocab_size < ranks:
        raise ImpossibleError(
            f"parallel.schedule: {ranks} ranks cannot share model.vocab_size = {dims.vocab_size}"
        )
    first, end = share(dims.vocab_size, ranks, rank * tensor_ranks + tensor_rank)
    module = Transformer(dims, layers=range(0), device="meta")
    assert module.embedding is not None and module.head is not None
    module.embedding.positions = module.norm = None
    cuts: dict[str, Cut] = {}
    for name, layer in (("embedding.tokens", module.embedding.tokens), ("head", module.head)):
        weight = layer.weight
        cuts[f"{name}.weight"] = Cut(tuple(weight.shape), (first, 0), axes=("pp", "tp"))
        layer.weight = nn.Parameter(weight.detach()[first:end].clone())
    module._tie()
    if dims.tied_embeddings:
        del cuts["head.weight"]
    stages.modules.append(module)
    return cuts


def _without_vocabulary(module: nn.Module, group: TensorGroup | None) -> None:
    """Take embedding and output layer from a stage, in place; positions and norm stay."""
    assert isinstance(module, Transformer)
    if module.embedding is not None:
        module.embedding.tokens = nn.Identity()  # type: ignore[assignment]
        if group is not None:
            module.embedding.__class__ = _SummedEmbedding
            module.embedding.group = group  # type: ignore[assignment]
    if module.head is not None:
        module.head = nn.Identity()  # type: ignore[assignment]


class _SummedEmbedding(Embedding):
    """Takes this tensor rank's part of the embedded tokens."""

    group: TensorGroup

    def forward(
        self,
        x_BSH: Tensor,
        positions: Tensor,
        keys: Tensor | None,
        starts: Tensor | None = None,
    ) -> Tensor:
        x_BSH = self.group.leave(x_BSH)
        if self.positions is not None:
            rows = places_in_documents(positions, starts)
            x_BSH = x_BSH + self.positions(slice_of(rows, self.group))
        return self.dropout(x_BSH, keys, positions)  # type: ignore[no-any-return]


@dataclass(slots=True)
class _Softmax:
    """Of one micro-batch between S and T."""

    x: Tensor
    """(T, H), the output layer's input."""
    weights: Tensor
    """(T, V), e^(logit - highest)."""
    highest: Tensor
    """(T,) of this rank's rows, then of all."""
    total: Tensor
    """(T,) sum of the weights, of this rank's rows, then of all."""
    target: Tensor
    """(T,) row of the target here, and whether it is here."""
    here: Tensor
    logit: Tensor
    """(T,) of the target, 0 where it is elsewhere; then of all."""
    grad: Tensor | None = None
    """(T, H), one barrier: weights @ rows, before normalisation."""


class Vocabulary:
    """The passes of one rank.

    Args:
        module: this rank's rows, with their weights gathered.
        first: its first row in the vocabulary.
        groups: process groups of the pipeline, for what is shared and combined at the first stage
            and at the last: (kind, whether at the first). Operations of one group run in the order
            in which a rank asks for them, and one that waits for its root holds up the next.
        sums: group of all ranks that have rows, tensor ranks too.
        lane: for what waits for the sums of all ranks.
        rank: of this process in them.
        roots: ranks in them of the first and the last stage.
        tensor: tensor group, if any.
        wire: form of what passes between stages.
        barriers: 1 or 2.
        scale: factor of the loss of a micro-batch.

    Attributes:
        take: called where a pass has what it needs; takes the pass' time on an emulated machine.
    """

    def __init__(
        self,
        module: nn.Module,
        first: int,
        groups: Mapping[tuple[ActionKind, bool], Any],
        sums: Any,
        lane: Lane,
        rank: int,
        roots: tuple[int, int],
        tensor: TensorGroup | None,
        wire: Wire,
        barriers: int,
        scale: float,
    ) -> None:
        assert isinstance(module, Transformer)
        self.module = module
        self.first = first
        self.groups, self.sums, self.lane = groups, sums, lane
        self.rank, self.roots, self.tensor = rank, roots, tensor
        self.wire, self.barriers, self.scale = wire, barriers, scale
        self.losses: list[Tensor] = []
        self.take: Callable[[ActionKind], None] = lambda kind: None
        self._batches: Sequence[Any] = ()
        self._softmax: dict[int, _Softmax] = {}
        self._corrected: dict[int, Handle[None]] = {}
        self._own: dict[tuple[ActionKind, bool, int], Tensor] = {}
        self._pending: dict[tuple[ActionKind, bool, int], tuple[Any, Tensor]] = {}
        self.passes: dict[ActionKind, Callable[[int], None]] = {
            K.E: self._embed,
            K.S: self._logits,
            K.T: self._output_gradient,
            K.D: self._embedding_gradient,
        }

    def begin(self, batches: Sequence[Any]) -> None:
        """Before a step: (tokens, targets) of its micro-batches."""
        self._batches = batches
        self.losses = []

    # ---- for the stages ---------------------------------------------------------------------

    def embedded(self, j: int) -> Tensor:
        """Input of the first stage, (B, S, H), summed over the pipeline."""
        return self._wait(K.COMBINE, True, j).to(self.wire.stream)

    def give_output(self, j: int, output: Tensor) -> None:
        """Output of the last stage."""
        self._own[K.SHARE, False, j] = output

    def output_gradient(self, j: int) -> Tensor:
        """Gradient of the last stage's output."""
        if self.barriers == 1:
            self._wait_for_sums(j)
        grad = self._wait(K.COMBINE, False, j)
        if self.tensor is not None:
            grad = self.tensor.start_reduce(grad).wait()
        return grad.to(self.wire.stream)

    def give_input_gradient(self, j: int, grad: Tensor) -> None:
        """Gradient of the first stage's input."""
        self._own[K.SHARE, True, j] = grad

    # ---- collectives ------------------------------------------------------------------------

    @torch.no_grad()
    def share(self, action: Action) -> None:
        """Start to send the root's tensor to all."""
        j, first = _micro_batch(action), action.stage == 0
        tensor = self._own.pop((K.SHARE, first, j), None)
        if tensor is None:
            samples, length = self._batches[j][0].shape
            sliced = self.tensor is not None and self.tensor.sequence and not first
            length = length // self.tensor.size if sliced and self.tensor is not None else length
            shape = (samples, length, self.module.dims.hidden)
            tensor = torch.empty(shape, dtype=self.wire.dtype, device=self._batches[j][0].device)
        tensor = tensor.to(self.wire.dtype).contiguous()
        group = self.groups[K.SHARE, first]
        work = dist.broadcast(tensor, group=group, group_src=action.peer, async_op=True)
        self._pending[K.SHARE, first, j] = work, tensor

    def _combine(self, j: int, *, first: bool) -> None:
        """Start to sum the ranks' tensors at the root, as soon as this rank has its own.

        A list may name this later, when it needs no more than to be over; what counts is that all
        ranks have the passes that come before it in one order.
        """
        tensor, group = self._own.pop((K.COMBINE, first, j)), self.groups[K.COMBINE, first]
        root = self.roots[0 if first else 1]
        work = dist.reduce(tensor, group=group, group_dst=root, async_op=True)
        self._pending[K.COMBINE, first, j] = work, tensor

    def finish(self) -> None:
        """Wait for what this rank was no root of."""
        for handle in self._corrected.values():
            handle.wait()
        self._corrected.clear()
        for work, _ in self._pending.values():
            work.wait()
        self._pending.clear()
        self._batches = ()
        assert not self._softmax and not self._own

    def _wait_for_sums(self, j: int) -> None:
        handle = self._corrected.pop(j, None)
        if handle is not None:
            handle.wait()

    def _wait(self, kind: ActionKind, first: bool, j: int) -> Tensor:
        work, tensor = self._pending.pop((kind, first, j))
        work.wait()
        return tensor

    # ---- passes -----------------------------------------------------------------------------

    @property
    def _rows(self) -> Tensor:
        assert self.module.head is not None
        return self.module.head.weight

    def _local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(row here or 0, whether it is here) of each token."""
        local = tokens - self.first
        here = (local >= 0) & (local < self._rows.shape[0])
        return local.masked_fill(~here, 0), here

    @torch.no_grad()
    def _embed(self, j: int) -> None:
        assert self.module.embedding is not None
        self.take(K.E)
        local, here = self._local(self._batches[j][0])
        rows = nn.functional.embedding(local, self.module.embedding.tokens.weight)
        rows = rows.masked_fill_(~here.unsqueeze(-1), 0.0)
        self._own[K.COMBINE, True, j] = rows.to(self.wire.dtype)
        self._combine(j, first=True)

    @torch.no_grad()
    def _embedding_gradient(self, j: int) -> None:
        assert self.module.embedding is not None
        grad = self._wait(K.SHARE, True, j)
        self.take(K.D)
        local, here = self._local(self._batches[j][0])
        weight = self.module.embedding.tokens.weight
        grad = grad.masked_fill(~here.unsqueeze(-1), 0.0).to(weight.dtype)
        found = torch.zeros_like(weight) if weight.grad is None else weight.grad
        found.index_add_(0, local.flatten(), grad.flatten(0, 1))
        weight.grad = found

    @torch.no_grad()
    def _logits(self, j: int) -> None:
        x_BSH = self._wait(K.SHARE, False, j)
        self.take(K.S)
        if self.tensor is not None and self.tensor.sequence:
            x_BSH = self.tensor.gather(x_BSH)
        x = x_BSH.flatten(0, 1)
        rows = self._rows.to(x.dtype)
        logits = (x @ rows.T).float()
        highest = logits.amax(dim=-1)
        weights = logits.sub_(highest.unsqueeze(-1))
        target, here = self._local(self._batches[j][1].flatten())
        logit = weights.gather(-1, target.unsqueeze(-1)).squeeze(-1) + highest
        weights = weights.exp_()
        softmax = self._softmax[j] = _Softmax(
            x, weights, highest, weights.sum(-1), target, here, logit.masked_fill(~here, 0.0)
        )
        if self.barriers == 1:
            softmax.grad = (weights.to(x.dtype) @ rows).float()
        sums = self._correct if self.barriers == 1 else self._reduce_stats
        self._corrected[j] = self.lane.run(lambda: sums(j))

    def _reduce_stats(self, j: int) -> None:
        """From this rank's rows to all: maximum, sum and the target's logit."""
        softmax = self._softmax[j]
        highest = softmax.highest.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.sums)
        factor = (softmax.highest - highest).exp_()
        sums = torch.stack((softmax.total * factor, softmax.logit))
        dist.all_reduce(sums, group=self.sums)
        softmax.total, softmax.logit = sums.unbind()
        softmax.highest = highest
        softmax.weights.mul_((factor / softmax.total).unsqueeze(-1))
        if softmax.grad is not None:
            softmax.grad.mul_((factor / softmax.total).unsqueeze(-1))

    def _correct(self, j: int) -> None:
        """One barrier: the gradient of the output, once maximum and sum of all are known, to the
        root. Beside the passes, which would otherwise wait for the last rank's."""
        self._reduce_stats(j)
        softmax = self._softmax[j]
        grad = softmax.grad
        assert grad is not None
        rows = self._rows[softmax.target].float()
        grad -= rows.masked_fill_(~softmax.here.unsqueeze(-1), 0.0)
        softmax.grad = None
        self._give_gradient(j, grad)
        self._note_loss(softmax)
        self._combine(j, first=False)

    @torch.no_grad()
    def _output_gradient(self, j: int) -> None:
        self._wait_for_sums(j)
        self.take(K.T)
        softmax = self._softmax.pop(j)
        grad = softmax.weights  # a softmax since the ranks' sums are known
        ones = softmax.here.unsqueeze(-1).to(grad.dtype)
        grad.scatter_add_(-1, softmax.target.unsqueeze(-1), -ones)
        grad = grad.to(softmax.x.dtype)
        if self.barriers == 2:
            self._note_loss(softmax)
            self._give_gradient(j, (grad @ self._rows.to(grad.dtype)).float())
            self._combine(j, first=False)
        scale = self.scale / len(softmax.x)
        add_weight_grad(
            self._rows, (grad * scale).to(self._rows.dtype), softmax.x.to(self._rows.dtype)
        )

    def _give_gradient(self, j: int, grad: Tensor) -> None:
        samples = len(self._batches[j][0])
        grad *= self.scale / len(grad)
        self._own[K.COMBINE, False, j] = grad.to(self.wire.dtype).view(samples, -1, grad.shape[-1])

    def _note_loss(self, softmax: _Softmax) -> None:
        if self.rank == self.roots[1]:
            self.losses.append((softmax.total.log() + softmax.highest - softmax.logit).mean())


def _micro_batch(action: Action) -> int:
    assert action.micro_batch is not None
    return action.micro_batch
