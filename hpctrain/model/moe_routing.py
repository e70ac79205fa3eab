"""Which experts a token visits: choice, capacity, and the losses that even out the load.

All of it is a function of single sequences, so that neither the micro-batch nor the rank that a
sequence lies on changes anything. T tokens, B sequences of S, E experts, k choices of a token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpctrain.spec.transformer import MoeDims

DROPPED = -1
"""In place of an expert's number: this choice is not followed."""


def scores_of(logits: Tensor, moe: MoeDims) -> Tensor:
    """Affinity of each token to each expert, of the shape of ``logits`` (…, E)."""
    return logits.softmax(-1) if moe.router == "softmax" else logits.sigmoid()


@torch.no_grad()
def choose(scores: Tensor, moe: MoeDims, bias: Tensor | None = None) -> Tensor:
    """The experts of each token, best first; of equal ones that with the lower number.

    With groups, as in DeepSeek-V3 (2024, section 2.1.2): a group counts by the sum of its two
    best experts (its best, where top_k is 1), and only experts of the best groups are chosen.

    Args:
        scores: (…, E).
        moe: of the model.
        bias: (E,), added for the choice only.

    Returns:
        (…, k) int64.
    """
    wanted = scores if bias is None else scores + bias
    if moe.groups > 1:
        grouped = wanted.view(*wanted.shape[:-1], moe.groups, -1)
        best = grouped.sort(dim=-1, descending=True).values[..., : min(2, moe.top_k)].sum(-1)
        chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., : moe.top_groups]
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen, True)
        wanted = grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)
    return wanted.sort(dim=-1, descending=True, stable=True).indices[..., : moe.top_k]


def weights_of(scores: Tensor, experts: Tensor, moe: MoeDims) -> Tensor:
    """Factors of the chosen experts' outputs, (…, k)."""
    weights = scores.gather(-1, experts)
    if moe.normalize and moe.top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scale


def capacity_of(tokens: int, moe: MoeDims) -> int:
    """Most tokens of a sequence that an expert takes (Lepikhin et al. 2020, section 2.2)."""
    assert moe.capacity is not None
    return max(1, math.ceil(moe.capacity * tokens * moe.top_k / moe.experts))


@torch.no_grad()
def within_capacity(experts_BSk: Tensor, moe: MoeDims) -> Tensor:
    """The same choices, DROPPED where the expert is full.

    All first choices of a sequence come before its second ones, and earlier tokens before later
    ones (Fedus et al. 2021, Lepikhin et al. 2020).
    """
    samples, length, k = experts_BSk.shape
    queue = experts_BSk.transpose(1, 2).flatten(1)  # (B, k·S)
    order = queue.argsort(dim=1, stable=True)
    ranked = queue.gather(1, order)
    # The place of each in the queue of its expert: its place among all less that of the first.
    first = torch.searchsorted(ranked, ranked)
    place = torch.arange(k * length, device=queue.device) - first
    keep = torch.zeros_like(queue, dtype=torch.bool)
    keep.scatter_(1, order, place < capacity_of(length, moe))
    return queue.masked_fill(~keep, DROPPED).view(samples, k, length).transpose(1, 2)


@torch.no_grad()
def loads_of(experts_BSk: Tensor, experts: int) -> Tensor:
    """How often each sequence chose each expert: (B, E) int64."""
    flat = experts_BSk.flatten(1)
    loads = flat.new_zeros(flat.shape[0], experts)
    return loads.scatter_add_(1, flat, torch.ones_like(flat))


def balance_loss(scores_BSE: Tensor, loads_BE: Tensor, tokens: int, moe: MoeDims) -> Tensor:
    """E/(k·S)·Σ_e load_e · mean score_e, averaged over sequences: 1 when all is even.

    Shazeer et al. 2017 and Fedus et al. 2021 (section 2.2), over each sequence as in DeepSeek-V3
    (2024, equation 17). Scores that do not sum to 1 are normalised.

    Args:
        scores_BSE: of the tokens at hand, all of a sequence or some.
        loads_BE: of whole sequences, before capacity.
        tokens: of a whole sequence.
        moe: of the model.
    """
    if moe.router == "sigmoid":
        scores_BSE = scores_BSE / (scores_BSE.sum(-1, keepdim=True) + 1e-20)
    mean_BE = scores_BSE.sum(1) / tokens
    fraction_BE = loads_BE.to(mean_BE.dtype) * (moe.experts / (moe.top_k * tokens))
    return (fraction_BE * mean_BE).sum(-1).mean()


def z_loss(logits_BSE: Tensor, tokens: int) -> Tensor:
    """Mean of (log Σ exp logits)² over tokens (Zoph et al. 2022, equation 5)."""
    return logits_BSE.logsumexp(-1).square().sum(1).mean() / tokens
