"""Any layout goes on from any other's checkpoint: parameters and optimizer, bit for bit.

All in one start of eight ranks. Every layout is trained, and saved, once; of the 144 ways from
one to another the suite goes a sample that has each layout on both sides.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_rank_programs import DENSE, EXPERTS, FOLDED, JOB, MISSING, go_on_everywhere

from hpctrain.testing import ranks

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(ranks.unavailable() is not None, reason=str(ranks.unavailable())),
]
COUNT = len(DENSE)


def goes_on(folder: Path, pairs: list[list[int]], timeout: float) -> None:
    assert COUNT == 12
    assert sorted({world for world, _, _ in DENSE}) == [1, 2, 3, 4, 5, 6, 7, 8]
    program = str(folder), JOB, DENSE, pairs, MISSING
    answer = ranks.run_ranks(8, go_on_everywhere, *program, timeout=timeout)[0]
    assert answer["faults"] == []
    # 4 blocks of 16 parameters, two embeddings and the last norm; the same of three states each.
    assert set(answer["tensors"]) == {4 * (4 * 16 + 4)}
    for name, told in zip(MISSING, answer["told"], strict=True):
        assert "does not fit the model" in told, told
        assert name in told


@pytest.mark.timeout(400)
def test_layouts_resume_on_others(tmp_path: Path) -> None:
    pairs = [[s, n] for n in range(1, COUNT) for s in {n - 1, n // 2}] + [[COUNT - 1, 0]]
    goes_on(tmp_path, pairs, 390)


@pytest.mark.whole
@pytest.mark.timeout(1200)
def test_any_of_twelve_layouts_resumes_on_any_other(tmp_path: Path) -> None:
    goes_on(tmp_path, [[s, n] for s in range(COUNT) for n in range(COUNT)], 1180)


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_any_folded_layout_resumes_on_any_other(tmp_path: Path) -> None:
    """Context, experts and their sharers on 1 to 8 ranks; 64 ways from one to another."""
    every = range(len(FOLDED))
    program = str(tmp_path), EXPERTS, FOLDED, [[s, n] for s in every for n in every], ()
    answer = ranks.run_ranks(8, go_on_everywhere, *program, timeout=880)[0]
    assert answer["faults"] == []
    # 4 blocks of 12 dense parameters, a router and 2 matrices of experts; embeddings and norm.
    assert set(answer["tensors"]) == {4 * (4 * (12 + 3) + 4)}
