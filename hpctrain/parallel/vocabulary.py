"""Embedding and cross entropy over a vocabulary that is spread over ranks: no full logits.

Each rank has a range of rows of the embedding and of the output layer (Shoeybi et al. 2019,
section 3; the loss is their appendix's fused form: ranks exchange one maximum, one sum and one
logit a token, never logits).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hpctrain.parallel.regions import TensorGroup


def parallel_embedding(
    tokens_BS: Tensor, weight_VH: Tensor, first: int, group: TensorGroup
) -> Tensor:
    """Rows of an embedding of which this rank holds ``first`` to ``first + len(weight)``.

    Returns:
        (B, S, H), whole or this rank's slice of the sequence.
    """
    local = tokens_BS - first
    elsewhere = (local < 0) | (local >= weight_VH.shape[0])
    rows = F.embedding(local.masked_fill(elsewhere, 0), weight_VH)
    return group.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))


def parallel_cross_entropy(
    logits_BSV: Tensor, targets_BS: Tensor, first: int, group: TensorGroup
) -> Tensor:
    """Mean cross entropy in nats, in float32 at least; the same scalar on every rank.

    Args:
        logits_BSV: of this rank's range of the vocabulary.
        targets_BS: int64, in the whole vocabulary.
        first: first token of the range.
        group: the ranks that hold the others.
    """
    logits = logits_BSV.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = _CrossEntropy.apply(logits, targets_BS.flatten(), first, group)  # type: ignore[no-untyped-call]
    return losses.mean()  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, first: int, group: TensorGroup
    ) -> Tensor:
        highest_T = logits_TV.amax(dim=-1)
        dist.all_reduce(highest_T, op=dist.ReduceOp.MAX, group=group.group)
        shifted_TV = logits_TV - highest_T.unsqueeze(-1)
        local_T = targets_T - first
        here_T = (local_T >= 0) & (local_T < logits_TV.shape[-1])
        local_T = local_T.masked_fill(~here_T, 0)
        logit_T = shifted_TV.gather(-1, local_T.unsqueeze(-1)).squeeze(-1).masked_fill(~here_T, 0.0)
        weights_TV = shifted_TV.exp_()
        sums_2T = torch.stack((weights_TV.sum(dim=-1), logit_T))
        dist.all_reduce(sums_2T, group=group.group)
        total_T, logit_T = sums_2T.unbind()
        weights_TV /= total_T.unsqueeze(-1)
        ctx.save_for_backward(weights_TV, local_T, here_T)
        return total_T.log() - logit_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_TV, local_T, here_T = ctx.saved_tensors
        grad_TV = softmax_TV * grad_T.unsqueeze(-1)
        grad_TV.scatter_add_(
            -1, local_T.unsqueeze(-1), (-grad_T * here_T).unsqueeze(-1).to(grad_TV.dtype)
        )
        return grad_TV, None, None, None
