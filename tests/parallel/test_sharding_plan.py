"""Ragged shards: every row once, whole blocks, even by bytes."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ImpossibleError
from hpctrain.parallel.ragged import WHOLE, Piece, plan_ragged
from hpctrain.testing.jobs import make_run

SHAPES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(0, 7)), min_size=1, max_size=12
)


@given(SHAPES, st.integers(1, 9))
def test_every_row_has_one_owner_and_blocks_stay_whole(drawn, ranks):
    shapes = [(rows, columns) for rows, columns, _ in drawn]
    blocks = [block for _, _, block in drawn]
    plan = plan_ragged(shapes, ranks, blocks, 4)
    owners = [[-1] * rows for rows, _ in shapes]
    for piece in plan.pieces:
        assert 0 <= piece.start < piece.stop
        for row in range(piece.start, piece.stop):
            assert owners[piece.tensor][row] == -1
            owners[piece.tensor][row] = piece.owner
    for rows, block in zip(owners, blocks, strict=True):
        assert -1 not in rows
        step = block or max(1, len(rows))
        for start in range(0, len(rows), step):
            assert len(set(rows[start : start + step])) == 1
    pairs = [(piece.owner, piece.tensor) for piece in plan.pieces]
    assert len(set(pairs)) == len(pairs), "one run of rows of a tensor on a rank"
    loads = [0] * ranks
    for piece in plan.pieces:
        loads[piece.owner] += 4 * shapes[piece.tensor][1] * (piece.stop - piece.start)
    assert tuple(loads) == plan.loads


@given(SHAPES, st.integers(1, 9))
def test_the_largest_load_is_near_the_mean(drawn, ranks):
    shapes = [(rows, columns) for rows, columns, _ in drawn]
    blocks = [block for _, _, block in drawn]
    units = [
        4 * columns * (rows if block == WHOLE else min(block, rows))
        for (rows, columns), block in zip(shapes, blocks, strict=True)
    ]
    mean = sum(4 * math.prod(shape) for shape in shapes) / ranks
    assert max(plan_ragged(shapes, ranks, blocks).loads) <= mean + 2 * max(units)


def test_matrices_first_and_vectors_fill_the_gaps():
    """12 + 8 + 4 rows of whole matrices on two ranks are 12 and 12; 8 single rows even out."""
    plan = plan_ragged([(12, 1), (8, 1), (4, 1), (8, 1)], 2, [WHOLE, WHOLE, WHOLE, 1], 2)
    assert plan.pieces == (
        Piece(0, 0, 0, 12), Piece(3, 0, 0, 4),
        Piece(1, 1, 0, 8), Piece(2, 1, 0, 4), Piece(3, 1, 4, 8),
    )  # fmt: skip
    assert plan.loads == (32, 32)
    one = plan_ragged([(12, 1), (6, 1)], 2, [WHOLE, 2], 1)
    assert one.loads == (12, 6), "what one matrix takes is not cut"


def test_a_model_of_gpt2_xl_on_48_ranks_is_even():
    """48 layers of width 1600: whole matrices, and the rest in rows; within 10 % of the mean."""
    layer = [(1600, 1600)] * 4 + [(6400, 1600), (1600, 6400), (1600,), (1600,), (6400,)]
    shapes = [(50257, 1600), (1024, 1600), *layer * 48]
    blocks = [1 if len(shape) == 1 or shape[0] > 6400 else WHOLE for shape in shapes]
    began = time.perf_counter()
    plan = plan_ragged(shapes, 48, blocks)
    assert time.perf_counter() - began < 2.0
    mean = sum(4 * math.prod(shape) for shape in shapes) / 48
    assert sum(plan.loads) == pytest.approx(48 * mean)
    assert max(plan.loads) < 1.1 * mean


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="0 ranks"):
        plan_ragged([(4, 4)], 0)
    with pytest.raises(ValueError, match="block"):
        plan_ragged([(4, 4)], 2, -1)


@pytest.mark.parametrize(
    ("override", "key"),
    [("parallel.tensor=2", "parallel.tensor"), ("parallel.sharding=zero3", "parallel.sharding")],
)
@pytest.mark.parametrize("kind", ["adamw8bit", "muon", "shampoo"])
def test_matrix_optimizers_refuse_cut_matrices(tmp_path, kind, override, key):
    job = """\
ranks_per_node: 2
model: {layers: 1, hidden: 8, heads: 2, vocab_size: 16}
data: {path: none, sequence_length: 8}
train: {steps: 1, global_batch: 2}
"""
    with pytest.raises(ImpossibleError, match=f"{key}.*{kind} needs whole matrices") as error:
        make_run(job, tmp_path, f"train.optimizer={kind}", override)
    assert error.value.exit_code == 3
