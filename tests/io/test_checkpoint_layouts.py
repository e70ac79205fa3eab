"""Any layout goes on from any other's checkpoint: parameters and optimizer, bit for bit.

All in one start of eight ranks. Every layout is trained, and saved, once; of the 144 ways from
one to another the suite goes a sample that has each layout on both sides.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_rank_programs import LAYOUTS, MISSING, go_on_everywhere

from hpctrain.testing import ranks

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(ranks.unavailable() is not None, reason=str(ranks.unavailable())),
]
COUNT = len(LAYOUTS)


def goes_on(folder: Path, pairs: list[list[int]], timeout: float) -> None:
    assert COUNT == 12
    assert sorted({world for world, _, _ in LAYOUTS}) == [1, 2, 3, 4, 5, 6, 7, 8]
    answer = ranks.run_ranks(8, go_on_everywhere, str(folder), pairs, timeout=timeout)[0]
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
