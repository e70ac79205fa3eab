"""Near levels: every way of losing some of them leaves the newest save that is still whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from level_rank_programs import lose, lose_nodes, restore_levels, save_levels

from hpctrain.errors import CheckpointError
from hpctrain.io.parity import chunk_of, lines_of
from hpctrain.io.partner import partner_of
from hpctrain.testing import ranks

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(ranks.unavailable() is not None, reason=str(ranks.unavailable())),
]
NEAR = ["memory", "node", "partner"]
SAVES = [[1, ["store"]], [2, ["store", *NEAR]], [3, [*NEAR]], [4, ["memory"]]]


def saved(folder: Path, files: str = "rank", saves: list[list[object]] = SAVES) -> None:
    told = ranks.run_ranks(4, save_levels, str(folder), saves, files)
    assert told[0] == [[step, sorted(tiers), "", []] for step, tiers in saves]
    assert all(answer == told[0] for answer in told)


def restored(folder: Path, world: int = 4, wanted: int = -1) -> dict[str, object]:
    answers = ranks.run_ranks(world, restore_levels, str(folder), wanted)
    assert all(answer == answers[0] for answer in answers), answers
    assert answers[0].pop("right", True) is True
    return answers[0]


@pytest.mark.parametrize("files", ["rank", "one"])
def test_each_loss_falls_back_to_the_next_level(tmp_path: Path, files: str) -> None:
    saved(tmp_path, files)
    assert restored(tmp_path) == {"step": 4, "source": "the nodes' memory", "skipped": []}
    # A node went down and lost its memory: its part of step 3 is on its storage, and the other
    # node's part still in the other buffer.
    lose(tmp_path, "node1/memory")
    found = restored(tmp_path)
    assert (found["step"], found["source"]) == (3, "the nodes' memory and the nodes' storage")
    # Its disk is gone too: the other node has a copy, which is sent over.
    lose(tmp_path, "node1/node", "node1/partner")
    found = restored(tmp_path)
    assert found["step"] == 3
    assert found["source"] == "the nodes' memory and the partner nodes' copies"
    # Another number of ranks needs other shares on each node.
    assert restored(tmp_path, world=3)["step"] == 3
    # Both copies of some share are gone: what is committed is left.
    lose(tmp_path, "node0/partner")
    found = restored(tmp_path)
    assert (found["step"], found["source"]) == (2, "the parallel file system")
    assert [step for step, _ in found["skipped"]] == [4, 3]
    assert restored(tmp_path, world=2)["step"] == 2


@pytest.mark.parametrize("files", ["rank", "one"])
def test_a_set_of_nodes_can_lose_one_of_them(tmp_path: Path, files: str) -> None:
    """Five nodes in sets of two and three: one lost of each comes back, two of one do not."""
    losses: list[list[int]] = [[], [1, 3], [0, 4], [2], [2, 3]]
    answers = ranks.run_ranks(5, lose_nodes, str(tmp_path), 2, files, losses)
    assert answers[0]["told"] == [[n, ["parity"], [], "None"] for n in (1, 2)]
    for answer in answers:
        assert [f["step"] for f in answer["found"]] == [2, 2, 2, 2, None]
        assert all(f["right"] and not f["skipped"] for f in answer["found"][:-1])
        assert "no whole share of rank 2, 3" in answer["found"][-1]["skipped"][0][1]
        # A damaged parity is not taken for good.
        assert answer["damaged"]["step"] is None
        assert "no whole share of rank 4" in answer["damaged"]["skipped"][0][1]
    if files == "rank":
        bytes_of = {
            path.name: path.stat().st_size
            for node in range(4)
            for path in tmp_path.glob(f"node{node}/parity/here/step00000002.*/*")
        }
        # Rank 0 has the largest share: its own file and the one of all headers.
        largest = bytes_of["rank00000.h5"] + bytes_of["tensors.h5"]
        assert bytes_of["parity-00000"] == largest
        assert bytes_of["parity-00002"] == -(-largest // 2 // 4096) * 4096


@pytest.mark.parametrize(
    ("nodes", "size", "lines"),
    [
        ([0, 1, 2, 3], 2, [(0, 1), (2, 3)]),
        ([0, 0, 1, 1], 8, [(0, 2), (1, 3)]),
        ([0, 1, 2, 3, 4], 2, [(0, 1), (2, 3, 4)]),
    ],
)
def test_lines(nodes: list[int], size: int, lines: list[tuple[int, ...]]) -> None:
    found = lines_of(nodes, size)
    assert sorted(set(found.values())) == lines
    assert all(rank in line for rank, line in found.items())
    for line in lines:
        for member in range(len(line)):
            others = [holder for holder in range(len(line)) if holder != member]
            chunks = [chunk_of(member, holder, len(line)) for holder in others]
            assert sorted(chunks) == list(range(len(line) - 1))


def test_a_rank_alone_in_its_line_is_refused() -> None:
    for nodes in ([0, 0], [0, 1, 1]):
        with pytest.raises(CheckpointError, match="has no counterpart on another node"):
            lines_of(nodes, 2)


def test_an_older_step_that_was_asked_for(tmp_path: Path) -> None:
    saved(tmp_path)
    assert restored(tmp_path, wanted=1)["source"] == "the parallel file system"
    assert restored(tmp_path, wanted=3)["source"] == "the nodes' memory"
    lose(tmp_path, "node0/memory", "node1/memory")
    assert restored(tmp_path, wanted=3)["source"] == "the nodes' storage"
    assert restored(tmp_path, wanted=7) == {"step": None, "skipped": []}


def test_a_damaged_share_is_taken_from_the_next_level(tmp_path: Path) -> None:
    saved(tmp_path, saves=[[1, ["store", *NEAR]]])
    image = tmp_path / "node1" / "memory" / "here" / "slot0" / "rank00003.h5"
    _flip_all(image)
    found = restored(tmp_path)
    assert found["step"] == 1
    assert found["source"] == "the nodes' memory and the nodes' storage"
    assert "share of rank 3" in found["skipped"][0][1]
    assert "checksum" in found["skipped"][0][1]
    # A damaged part is no part.
    part = tmp_path / "node0" / "memory" / "here" / "slot0" / "part-00000"
    part.write_bytes(part.read_bytes()[:-1])
    assert restored(tmp_path)["step"] == 1
    for level in ("node", "partner"):
        for path in (tmp_path / "node1" / level).rglob("rank*.h5"):
            _flip_all(path)
    for path in (tmp_path / "node0").rglob("partner/**/rank*.h5"):
        _flip_all(path)
    assert restored(tmp_path)["source"] == "the parallel file system"


def _flip_all(path: Path) -> None:
    """Flip a bit in every page: some of them hold padding, which no number depends on."""
    data = bytearray(path.read_bytes())
    for position in range(0, len(data), 4096):
        data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("tier", ["memory", "node", "partner"])
def test_killed_while_a_share_is_stored(tmp_path: Path, tier: str) -> None:
    from level_rank_programs import killed_in_the_middle

    # The ranks leave without a result, as killed ones do.
    with pytest.raises(ranks.RanksFailed):
        ranks.run_ranks(4, killed_in_the_middle, str(tmp_path), tier)
    assert restored(tmp_path)["step"] == 1


def test_retention_of_a_level(tmp_path: Path) -> None:
    saved(tmp_path, saves=[[step, NEAR] for step in (1, 2, 3)])
    for node in (0, 1):
        for level in ("node", "partner"):
            folder = tmp_path / f"node{node}" / level / "here"
            assert [path.name.split(".")[0] for path in folder.iterdir()] == ["step00000003"]
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("nodes", "partners"),
    [
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 1, 2], [1, 2, 0]),
        ([0, 0, 0, 1, 1], [3, 4, 3, 0, 1]),
        ([0, 0], [None, None]),
    ],
)
def test_partners(nodes: list[int], partners: list[int | None]) -> None:
    assert [partner_of(rank, nodes) for rank in range(len(nodes))] == partners
