"""Attention over ranks against attention on one: values, gradients, types, messages."""

from __future__ import annotations

import itertools

import pytest
import torch

from hpctrain.parallel.context_blocks import (
    Merged,
    attend,
    attend_backward,
    plain_attend,
    plain_attend_backward,
    tiles,
)
from hpctrain.spec.sequence import SequenceSplit
from hpctrain.testing.ranks import run_ranks

SPLITS = [SequenceSplit(c, i) for c in (1, 2, 3, 4, 6) for i in (1, 2, 3) if c % i == 0]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_place_is_held_once(split):
    for length in (split.size, 12, 17, 36):
        held = [p for place in range(split.size) for a, b in split.runs(length, place)
                for p in range(a, b)]  # fmt: skip
        assert sorted(held) == list(range(length))
        if length % split.size == 0:
            assert split.even(length)
    assert not split.fits(split.size - 1)


def pairs(split, length, documents, causal):
    """Pairs of (query, key) that the tiles of all members cover, counted."""
    seen = {}
    held = [split.member_runs(length, m) for m in range(split.ring)]
    places = [[p for a, b in runs for p in range(a, b)] for runs in held]
    for mine, block in itertools.product(range(split.ring), repeat=2):
        for tile in tiles(held[mine], held[block], documents, same=mine == block, causal=causal):
            for i, j in itertools.product(range(*tile.rows), range(*tile.keys)):
                if not tile.causal or j <= i:
                    pair = tile.sample, places[mine][i], places[block][j]
                    seen[pair] = seen.get(pair, 0) + 1
    return seen


@pytest.mark.parametrize("ring", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_cover_each_pair_once(ring, causal):
    for length in (ring, 13, 24):
        found = pairs(SequenceSplit(ring), length, None, causal)
        wanted = {(None, q, k) for q in range(length) for k in range(q + 1 if causal else length)}
        assert found == dict.fromkeys(wanted, 1)
        cuts = sorted({0, length // 5, length // 2, length - 1})
        documents = list(itertools.pairwise([*cuts, length]))
        found = pairs(SequenceSplit(ring), length, [documents], causal)
        wanted = {(0, q, k) for a, b in documents for q in range(a, b)
                  for k in range(a, q + 1 if causal else b)}  # fmt: skip
        assert found == dict.fromkeys(wanted, 1)


def test_zigzag_gives_all_members_the_same_work():
    """With chunks dealt in order the last of 4 members would have 7 times the first's pairs."""
    work = {}
    for zigzag in (True, False):
        split = SequenceSplit(4, zigzag=zigzag)
        held = [split.member_runs(64, m) for m in range(4)]
        work[zigzag] = [
            sum(
                (t.rows[1] - t.rows[0]) * (t.keys[1] - t.keys[0]) / (2 if t.causal else 1)
                for b in range(4)
                for t in tiles(held[m], held[b], None, same=m == b)
            )
            for m in range(4)
        ]
    assert len(set(work[True])) == 1
    assert work[False][-1] / work[False][0] == pytest.approx(7)


def test_plain_products_equal_the_fused_kernel():
    """The form for devices without one, over more rows than are computed at once."""
    torch.manual_seed(0)
    q, grad = torch.randn(2, 1, 4, 600, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 600, 8, dtype=torch.float64)
    for causal in (True, False):
        out, lse = attend(q, k, v, causal)
        for a, b in zip(plain_attend(q, k, v, causal), (out, lse), strict=True):
            torch.testing.assert_close(a, b)
        inputs = (grad, q, k, v, out, lse, causal)
        pairs = zip(plain_attend_backward(*inputs), attend_backward(*inputs), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b)


def test_blocks_add_up_to_the_softmax_over_all():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 5, 8)
    k, v = torch.randn(2, 1, 2, 9, 8)
    merged = Merged(q)
    from hpctrain.parallel.context_blocks import Tile

    for first, stop in ((0, 4), (4, 5), (5, 9)):
        merged.add(Tile(None, (0, 5), (first, stop), False), q, k, v)
    torch.testing.assert_close(
        merged.out, torch.nn.functional.scaled_dot_product_attention(q, k, v)
    )


# ---- on ranks -----------------------------------------------------------------------------------


def compare_on_ranks(layouts):
    """Largest relative differences of output and gradients, and bytes sent in the ring."""
    from hpctrain.layout import ParallelLayout, RankGrid
    from hpctrain.model.transformer import CausalAttention
    from hpctrain.parallel.context import (
        ContextAttention,
        ContextGroup,
        ContextGroups,
        SequencePart,
    )
    from hpctrain.parallel.context_blocks import tiles
    from hpctrain.parallel.context_exchange import HeadExchange
    from hpctrain.parallel.context_ring import Ring, ring_attention
    from hpctrain.runtime.bootstrap import bootstrap, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.spec.sequence import count

    comm = start_mpi()
    size = comm.size
    grid = RankGrid(ParallelLayout(cp=size))
    context = bootstrap(comm, grid, RankEnvironment.read(), device="cpu")
    counter = context.communicators.counter
    found = []
    for inner, both_ways, dtype, length, heads, kv, documents, causal in layouts:
        split = SequenceSplit(size, inner)
        between, inside = context.communicators.halves("cp", inner)
        ring = Ring(between, comm.rank // inner, split.ring, both_ways) if split.ring > 1 else None
        exchange = HeadExchange(inside, comm.rank % inner, inner) if inner > 1 else None
        group = ContextGroup(SequencePart(split, comm.rank, length), ring, exchange)
        torch.manual_seed(1)
        kind = getattr(torch, dtype)
        whole = [torch.randn(2, n, length, 8).to(kind).requires_grad_() for n in (heads, kv, kv)]
        grad = torch.randn(2, heads, length, 8).to(kind)
        starts = None
        if documents:
            rows = [[0, length // 3, length // 3 + 1], [0, length // 2]]
            starts = torch.tensor(
                [[max(b for b in row if b <= p) for p in range(length)] for row in rows]
            )
        places = torch.tensor([p for a, b in split.runs(length, comm.rank) for p in range(a, b)])
        # The reference in float64, so that what is measured is ours.
        exact = [x.detach().double().requires_grad_() for x in whole]
        if causal:
            right = CausalAttention()(*exact, starts)
        else:
            right = torch.nn.functional.scaled_dot_product_attention(*exact, enable_gqa=True)
        right.backward(grad.double())
        parts = [x.detach()[:, :, places].requires_grad_() for x in whole]
        counter.take()
        if causal:
            y = ContextAttention(ContextGroups({size: group}, size))(*parts, starts)
        else:
            held = group.member_runs(length)
            mine = held[ring.rank]
            y = ring_attention(
                *parts, ring, [count(r) for r in held],
                lambda m, held=held, mine=mine, ring=ring:
                    tiles(mine, held[m], None, same=m == ring.rank, causal=False),
            )  # fmt: skip
        y.backward(grad[:, :, places])
        sent = counter.operations().get("cp", {}).get("send")
        pairs = [(y, right), *((p.grad, x.grad) for p, x in zip(parts, exact, strict=True))]
        worst = [float((a.double() - b[:, :, places]).norm() / b.norm()) for a, b in pairs]
        found.append((max(worst), 0 if sent is None else sent.bytes))
    return found


#          inner, both ways, type, length, heads, kv heads, documents, causal
LAYOUTS = [
    (1, False, "float32", 32, 4, 2, False, True),
    (1, True, "float32", 32, 4, 2, False, True),
    (1, True, "float64", 29, 4, 4, True, True),
    (1, False, "float32", 32, 4, 2, False, False),
    (1, True, "float32", 30, 4, 1, False, False),
    (1, False, "bfloat16", 32, 4, 2, True, True),
    (2, False, "float32", 32, 4, 2, True, True),
    (2, True, "bfloat16", 31, 5, 5, False, True),
    (4, False, "float64", 30, 6, 2, True, True),
    (4, False, "bfloat16", 32, 4, 1, False, True),
    (4, False, "float32", 4, 7, 7, False, True),
]
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1.2e-2}


@pytest.mark.mpi
def test_equal_to_one_rank():
    for rank in run_ranks(4, compare_on_ranks, LAYOUTS):
        for layout, (worst, _) in zip(LAYOUTS, rank, strict=True):
            assert worst < TOLERANCE[layout[2]], layout
        # 3 hops of keys and values forward and back, and as many of their gradients; a block is
        # 2 tensors of 2 samples, 2 heads, 8 tokens and 8 channels, in 4 bytes.
        block = 2 * 2 * 2 * 8 * 8 * 4
        assert rank[0][1] == rank[1][1] == 9 * block
