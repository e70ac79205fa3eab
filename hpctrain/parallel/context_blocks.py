"""Attention of some queries to some keys, and how the results of several such blocks add up.

A softmax over all keys is the softmaxes over blocks of keys, weighted by their sums; with the
logarithm of each sum at hand the blocks may come one after the other, from wherever they lie
(log-sum-exp merging; Liu et al. 2023, Ring Attention, section 3; Dao et al. 2022, section 3.1).
The gradient of a block needs nothing of the others but the whole softmax's log-sum-exp.

Shapes: B samples, N query heads, K key-value heads, S places, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.spec.sequence import Run, count

_ROWS = 512
"""Queries whose scores exist at once where no fused kernel is used."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys all pairs of which, or those in causal order, belong together.

    Attributes:
        sample: of the batch; None is all of them.
        rows: queries, as places in what this rank holds.
        keys: keys, as places in the block.
        causal: rows and keys are the same places, and a row sees those up to its own.
    """

    sample: int | None
    rows: Run
    keys: Run
    causal: bool

    def of_rows(self, x_BNSD: Tensor) -> Tensor:
        """A view of the tile's rows of a (B, N, S, …) tensor."""
        return _cut(x_BNSD, self.sample, self.rows)

    def of_keys(self, x_BKSD: Tensor) -> Tensor:
        """A view of the tile's keys of a (B, K, S, …) tensor."""
        return _cut(x_BKSD, self.sample, self.keys)


def _cut(x: Tensor, sample: int | None, run: Run) -> Tensor:
    return (x if sample is None else x[sample : sample + 1])[:, :, run[0] : run[1]]


def tiles(
    mine: Sequence[Run],
    block: Sequence[Run],
    documents: Sequence[Sequence[Run]] | None,
    *,
    same: bool,
    causal: bool = True,
) -> list[Tile]:
    """What of the pairs of this rank's queries and a block's keys has to be computed.

    Args:
        mine: places of the queries in the sequence, ascending.
        block: places of the keys, ascending.
        documents: of each sample, the places of its documents in order; without, the sequence is
            one document. A query sees keys of its own document only.
        same: the block is this rank's own.
        causal: a query sees keys up to its own place.

    Returns:
        Tiles that share no pair. Of runs that do not lie inside each other none is cut finer
        than documents are.
    """
    if documents is None:
        return _tiles_of(None, mine, block, (0, max(mine[-1][1], block[-1][1])), same, causal)
    return [
        tile
        for sample, listed in enumerate(documents)
        for document in listed
        for tile in _tiles_of(sample, mine, block, document, same, causal)
    ]


def _tiles_of(
    sample: int | None,
    mine: Sequence[Run],
    block: Sequence[Run],
    document: Run,
    same: bool,
    causal: bool,
) -> list[Tile]:
    first, stop = document
    if same or not causal:
        rows = (_before(mine, first), _before(mine, stop))
        keys = (_before(block, first), _before(block, stop))
        full = rows[0] < rows[1] and keys[0] < keys[1]
        return [Tile(sample, rows, keys, same and causal)] if full else []
    found: list[Tile] = []
    for a, b in mine:
        begin, end = max(a, first), min(b, stop)
        if begin >= end:
            continue
        rows = (_before(mine, begin), _before(mine, end))
        keys = (_before(block, first), _before(block, begin))
        if keys[0] >= keys[1]:
            continue
        if found and found[-1].keys == keys and found[-1].rows[1] == rows[0]:
            rows = (found.pop().rows[0], rows[1])
        found.append(Tile(sample, rows, keys, False))
    return found


def _before(runs: Sequence[Run], place: int) -> int:
    """How many places of the runs come before ``place``."""
    return count([(a, min(b, place)) for a, b in runs if a < place])


def documents_of(starts_BS: Tensor) -> list[list[Run]]:
    """Places of the documents of each sample.

    Args:
        starts_BS: int64, place of the first token of each token's document.
    """
    length = starts_BS.shape[1]
    found = []
    for row in starts_BS.cpu():
        firsts = torch.unique_consecutive(row).tolist()
        found.append(list(zip(firsts, [*firsts[1:], length], strict=True)))
    return found


# ---- kernels ----------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ/√D)·v, and the logarithm of each softmax's sum.

    Args:
        q: (B, N, S, D).
        k, v: (B, K, T, D); K divides N.
        causal: row i sees keys up to i.

    Returns:
        (B, N, S, D) of the type of ``q`` (of float32 from the plain form), and (B, N, S).
    """
    if q.device.type == "cpu":
        found: tuple[Tensor, Tensor]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return found
    return plain_attend(q, k, v, causal)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the inputs of one block.

    Args:
        grad, out: of the whole softmax, (B, N, S, D).
        lse: of the whole softmax, (B, N, S).
        q, k, v, causal: as of :func:`attend`.
    """
    if q.device.type == "cpu":
        found: tuple[Tensor, Tensor, Tensor]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )
        return found
    return plain_attend_backward(grad, q, k, v, out, lse, causal)


def plain_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """:func:`attend` in plain products, some rows at a time; on any device."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(groups, 1) for x in (k, v))
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    for first, rows in _row_blocks(q):
        scores = _scores(rows, k, first, causal)
        some = lse[:, :, first : first + rows.shape[2]]
        torch.logsumexp(scores, -1, out=some)
        out[:, :, first : first + rows.shape[2]] = (scores - some.unsqueeze(-1)).exp_() @ v
    return out, lse


def plain_attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`attend_backward` in plain products."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(groups, 1) for x in (k, v))
    of_q = torch.empty(q.shape, dtype=dtype, device=q.device)
    of_k, of_v = torch.zeros_like(k), torch.zeros_like(v)
    scale = q.shape[-1] ** -0.5
    for first, rows in _row_blocks(q):
        some = slice(first, first + rows.shape[2])
        weights = (_scores(rows, k, first, causal) - lse[:, :, some].unsqueeze(-1)).exp_()
        g = grad[:, :, some].to(dtype)
        of_v += weights.transpose(-1, -2) @ g
        inner = g @ v.transpose(-1, -2)
        inner -= (g * out[:, :, some]).sum(-1, keepdim=True)
        inner.mul_(weights).mul_(scale)
        of_q[:, :, some] = inner @ k
        of_k += inner.transpose(-1, -2) @ rows.to(dtype)
    of_k, of_v = (x.view(len(x), heads, groups, *x.shape[2:]).sum(2) for x in (of_k, of_v))
    return of_q, of_k, of_v


def _row_blocks(q: Tensor) -> list[tuple[int, Tensor]]:
    return [(i * _ROWS, rows) for i, rows in enumerate(torch.split(q, _ROWS, dim=2))]


def _scores(rows: Tensor, k: Tensor, first: int, causal: bool) -> Tensor:
    scores: Tensor = rows.to(k.dtype) @ k.transpose(-1, -2) * rows.shape[-1] ** -0.5
    if causal:
        places = torch.arange(first, first + rows.shape[2], device=rows.device)
        later = torch.arange(k.shape[2], device=rows.device) > places.unsqueeze(-1)
        scores.masked_fill_(later, float("-inf"))
    return scores


class Merged:
    """The softmax over all blocks so far, for all rows of this rank.

    Args:
        q_BNSD: the queries; sums are kept in float32 at least.
    """

    def __init__(self, q_BNSD: Tensor) -> None:
        dtype = torch.promote_types(q_BNSD.dtype, torch.float32)
        self.out = torch.zeros(q_BNSD.shape, dtype=dtype, device=q_BNSD.device)
        self.lse = torch.full(q_BNSD.shape[:3], float("-inf"), dtype=dtype, device=q_BNSD.device)

    def add(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take the keys of a tile in; all tensors whole, the tile says what of them."""
        found, sums = attend(tile.of_rows(q), tile.of_keys(k), tile.of_keys(v), tile.causal)
        out, lse = tile.of_rows(self.out), tile.of_rows(self.lse)
        # -inf of a row that has met no key becomes a weight of 1.
        out.lerp_(found.to(out.dtype), torch.sigmoid(sums - lse).unsqueeze(-1).to(out.dtype))
        lse.copy_(torch.logaddexp(lse, sums.to(lse.dtype)))
