"""Real MPI ranks: shards of any kind, another layout on reading, one rank that fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from checkpoint_rank_programs import (
    find_damaged,
    numbers,
    read_columns,
    read_together,
    save_badly,
    save_sharded,
)

from hpctrain.testing import ranks

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(ranks.unavailable() is not None, reason=str(ranks.unavailable())),
]


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that four ranks wrote: 6 rows are 2, 2, 2, 0."""
    root = tmp_path_factory.mktemp("four")
    results = ranks.run_ranks(4, save_sharded, str(root))
    assert {(r["step"], tuple(r["skipped"]), tuple(r["clean"])) for r in results} == {(7, (), ())}
    return root


def test_plain_h5py_reads_what_four_ranks_wrote(of_four: Path) -> None:
    with h5py.File(of_four / "step00000007" / "tensors.h5") as file:
        assert np.array_equal(file["model/rows"][...], numbers([6, 5]))
        assert np.array_equal(file["model/columns"][...], numbers([8, 12], 1000))
        assert np.array_equal(file["optimizer/exp_avg/wide"][...], numbers([2000, 3001], 7))
        assert np.array_equal(file["model/replicated"][...], numbers([3]))
        assert file["hpctrain/rank_state/generator"][:, 0].tolist() == [0, 1, 2, 3]
        assert file.attrs["world_size"] == 4


@pytest.mark.parametrize("world", [1, 3, 2])
def test_columns_of_another_world(of_four: Path, world: int) -> None:
    assert ranks.run_ranks(world, read_columns, str(of_four)) == [True] * world


def test_all_ranks_agree_on_an_older_one_where_one_byte_is_flipped(
    of_four: Path, tmp_path: Path
) -> None:
    shutil.copytree(of_four / "step00000007", tmp_path / "step00000007")
    ranks.run_ranks(2, save_badly, str(tmp_path), "nothing")  # steps 1 to 3, committed later
    for step in (1, 2, 3):
        path = tmp_path / f"step{step:08d}" / "tensors.h5"
        _flip(path, path.stat().st_size // 2)
    results = ranks.run_ranks(3, find_damaged, str(tmp_path))
    assert all(r == results[0] for r in results)
    assert results[0]["step"] == 7
    assert results[0]["read"] == ""
    assert [step for step, _ in results[0]["skipped"]] == [3, 2, 1]
    assert all("extent model/w[" in reason for _, reason in results[0]["skipped"])


def _flip(path: Path, position: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("file size limit", "rank 1: "),
        ("file size limit of rank 0", ""),
        ("gap", "model/w [400, 1000]: 200000 of 400000 elements are given by no rank"),
        ("overlap", "model/w [400, 1000]: [150:200, 0:1000] is given more than once"),
        ("shape", "model/w: rank 1 gives"),
        ("per_rank", "hpctrain/rank_state/generator [2, 3]: 3 of 6 elements are given by no rank"),
        ("scalars", "not JSON compliant"),
    ],
)
def test_one_bad_rank_is_an_error_on_all_and_costs_nothing(
    tmp_path: Path, how: str, cause: str
) -> None:
    results = ranks.run_ranks(2, save_badly, str(tmp_path), how, timeout=60)
    for result in results:
        assert result["told"].startswith(("CheckpointError", "ValueError"))
        assert cause in result["told"]
        assert result["left"] == ["latest", "step00000001"]
        assert (result["step"], result["skipped"], result["then"]) == (1, [], [1, 3])
    if "limit" in how:
        assert all("File too large" in r["told"] and str(tmp_path) in r["told"] for r in results)
        assert all("the checkpoint of step 2 was not written" in r["told"] for r in results)


def test_what_several_ranks_want_is_read_once_a_node(tmp_path: Path) -> None:
    """38 MB: by each rank of three for itself it were up to three times as much."""
    found = ranks.run_ranks(3, read_together, str(tmp_path), "")
    assert all(one["differ"] == [] and one["told"] == "" for one in found)
    size = sum(path.stat().st_size for path in (tmp_path / "step00000001").iterdir())
    assert size < sum(one["read"] for one in found) < 1.15 * size + (2 << 20)
    assert all(one["left"] == [] for one in found)


@pytest.mark.parametrize("tensor", ["model/wide", "model/tall", "optimizer/unread"])
def test_damage_is_found_by_one_rank_of_those_that_read_together(
    tmp_path: Path, tensor: str
) -> None:
    """Wanted by all, by one, or by nobody."""
    found = ranks.run_ranks(3, read_together, str(tmp_path), tensor)
    told = [one["told"] for one in found if one["told"]]
    assert len(told) == 1
    assert f"extent {tensor}[" in told[0]
    assert "checksum" in told[0]
