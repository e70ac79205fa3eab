"""What is concluded from numbers, on numbers of which the conclusion is known."""

from __future__ import annotations

import math
import os
import random
import sys
from pathlib import Path

import pytest

from hpctrain.health.dispersion import chance, measure
from hpctrain.health.heartbeat import Heartbeat, read_heartbeats
from hpctrain.health.preflight import NodeHealth, _files, _partner, judge
from hpctrain.health.profile import merge
from hpctrain.health.straggler import Timing, diagnose, slow_links
from hpctrain.health.verdict import Arrivals, Position, Report, ranges
from hpctrain.health.verdict import judge as verdict
from hpctrain.health.watchdog import Watchdog
from hpctrain.rundir import RunDir


def timing(rank: int, work: float, comm: float, data: float = 0.0) -> Timing:
    return Timing(rank, f"node{rank // 2}", work, data, comm, 1e6)


def test_the_watchdog_waits_longer_where_steps_are_long(tmp_path: Path) -> None:
    """Five times the slowest step, from the first one on, and never less than it is told."""
    run = RunDir.create("slow", tmp_path)
    watchdog = Watchdog(
        run, 0, ["node0"], Heartbeat(run, 0, 0, 0, [0]),
        hang_after=20.0, every=60.0, arrivals=dict, abort=sys.exit,
    )  # fmt: skip
    watchdog.heartbeat.mark("forward_backward", 1)
    limits = [watchdog.limit]
    for seconds in (90.0, 3.0, 8.0, 60.0, 50.0):
        watchdog.step_took(seconds)
        limits.append(watchdog.limit)
    watchdog.close()
    # The first step, which warms up, counts until there is another.
    assert limits == [15 * 20.0, 5 * 90.0, 20.0, 40.0, 300.0, 300.0]


def test_a_slow_rank_works_longer_and_waits_for_nobody() -> None:
    rows = [timing(0, 1.0, 0.6), timing(1, 1.5, 0.1), timing(2, 1.0, 0.6), timing(3, 1.02, 0.58)]
    (found,) = diagnose(rows, None)
    assert (found.kind, found.ranks) == ("rank", (1,))
    assert "rank 1 on node0" in found.message


def test_a_rank_with_slow_data_is_told_from_one_that_computes_slowly() -> None:
    rows = [timing(r, 1.0, 0.5) for r in range(3)] + [timing(3, 1.0, 0.05, data=0.45)]
    (found,) = diagnose(rows, None)
    assert (found.kind, found.ranks) == ("data", (3,))


def test_a_slow_link_makes_all_wait_and_nobody_work() -> None:
    rows = [timing(rank, 1.0, 0.8) for rank in range(4)]
    assert diagnose(rows, 1e6 / 0.8) == []  # as fast as ever
    (found,) = diagnose(rows, 1e6 / 0.2)
    assert found.kind == "link"
    assert "1.25 MB/s" in found.message
    assert "5 MB/s was reached before" in found.message


def test_alike_ranks_are_left_alone() -> None:
    assert diagnose([timing(rank, 1 + 0.1 * rank, 0.2) for rank in range(3)], 5e6) == []
    assert diagnose([timing(0, 1.0, 0.3), timing(1, 1.0, 0.3)], None) == []


def test_of_two_ranks_the_slow_one_is_named() -> None:
    (found,) = diagnose([timing(0, 1.0, 1.0), timing(1, 2.0, 0.01)], None)
    assert found.ranks == (1,)


def test_the_node_behind_a_slow_link() -> None:
    fast, slow = 1e9, 1e8
    pairs = [("a", "b", fast), ("a", "c", slow), ("b", "c", slow), ("a", "d", fast),
             ("b", "d", fast), ("c", "d", slow)]  # fmt: skip
    assert slow_links(pairs, 0.7) == ["c"]
    assert slow_links([p for p in pairs if "c" not in p], 0.7) == []
    assert slow_links(pairs[:3], 0.7) == ["c"]
    assert slow_links(pairs[:1], 0.7) == []
    assert slow_links([], 0.7) == []


@pytest.mark.parametrize("players", [2, 4, 6, 8, 10])
def test_every_pair_of_nodes_meets_once(players: int) -> None:
    met = set()
    for turn in range(players - 1):
        partners = [_partner(me, turn, players) for me in range(players)]
        assert [partners[other] for other in partners] == list(range(players))  # mutual
        assert all(me != other for me, other in enumerate(partners))
        met |= {(min(me, other), max(me, other)) for me, other in enumerate(partners)}
    assert len(met) == players * (players - 1) // 2


def node(name: str, **values: object) -> NodeHealth:
    return NodeHealth(**{"name": name, "ranks": 1, "flops": 1e12, "memory": 1e11, **values})  # type: ignore[arg-type]


def test_the_node_far_below_the_median_is_bad() -> None:
    nodes = [node("a"), node("b", flops=0.5e12), node("c", flops=0.9e12), node("d")]
    bad, findings = judge(nodes, [], 0.7)
    assert bad == ["b"]
    assert findings == ["b: computes at 500 GFLOP/s, 1 TFLOP/s is usual"]


def test_a_path_that_one_node_cannot_write_is_that_nodes_fault() -> None:
    nodes = [node("a"), node("b", problems=("/scratch/x: Read-only file system",)), node("c")]
    assert judge(nodes, [], 0.7)[0] == ["b"]
    everywhere = [node(name, problems=("/scratch/x: Read-only file system",)) for name in "abc"]
    bad, findings = judge(everywhere, [], 0.7)
    assert bad == []
    assert len(findings) == 3


def test_clocks_apart_are_told() -> None:
    bad, findings = judge([node("a"), node("b", skew=-3.0)], [], 0.7)
    assert bad == []
    assert findings == ["b: its clock is -3.0 s off"]


def test_files_are_really_written_and_space_is_counted(tmp_path: Path) -> None:
    good = _files([tmp_path / "new"], needed_bytes=1)
    assert good["write"] > 0
    assert good["problems"] == ()
    assert list((tmp_path / "new").iterdir()) == []
    full = _files([tmp_path], needed_bytes=2**60)
    assert "are free, planned checkpoints take" in full["problems"][0]
    missing = _files([Path("/proc/nothing")], needed_bytes=1)
    assert missing["problems"][0].startswith("/proc/nothing: ")


def test_spreads_are_the_closed_forms() -> None:
    found = measure(7, [1.0, 3.0], [2.0, 2.0], [0.5, 1.0])
    assert found.loss_spread == pytest.approx(1 / 2)  # standard deviation 1, mean 2
    assert found.norm_spread == 0
    assert found.direction == pytest.approx(0.75)
    assert found.outliers == {}


@pytest.mark.parametrize(
    ("t", "freedom", "probability"),
    # Two-sided, from printed tables of Student's t.
    [(4.303, 2, 0.05), (9.925, 2, 0.01), (2.042, 30, 0.05), (3.460, 60, 0.001)],
)
def test_the_chance_is_that_of_the_tables(t: float, freedom: int, probability: float) -> None:
    assert chance(t, freedom) == pytest.approx(probability, rel=1e-3)


@pytest.mark.parametrize("ranks", [4, 16])
def test_healthy_ranks_seldom_stand_out(ranks: int) -> None:
    draw = random.Random(5)
    looks = 500
    named = 0
    for _ in range(looks):
        norms = [draw.gauss(1.0, 0.2) for _ in range(ranks)]
        named += bool(measure(1, [2.0] * ranks, norms, [0.9] * ranks).outliers)
    assert named / looks < 0.04  # 0.02 is wanted


def test_a_rank_that_is_not_like_the_others_stands_out() -> None:
    norms = [1.0, 1.02, 9.0, 0.98, 1.01]
    found = measure(1, [2.0] * 5, norms, [0.9] * 5)
    assert list(found.outliers) == [2]
    assert "gradient norm 9" in found.outliers[2]
    assert list(measure(1, [2.0, 2.0, math.nan, 2.0], [1.0] * 4, [1.0] * 4).outliers) == [2]
    assert measure(1, [2.0, 2.01, 2.02, 1.99], [1.0] * 4, [1.0] * 4).outliers == {}


def test_heartbeats_of_two_ranks_of_a_node_and_one_of_another(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.health.mkdir()
    beats = [Heartbeat(run, 0, 0, 0, [0, 2]), Heartbeat(run, 0, 2, 0, [0, 2])]
    beats.append(Heartbeat(run, 0, 1, 1, [1]))
    for number, one in enumerate(beats):
        one.mark("update", 10 + number)
    assert [one.rank for one in beats[1].node_beats()] == [0, 2]
    assert [one.leads for one in beats] == [True, False, True]
    for one in beats:
        if one.leads:
            one.publish()
    seen = read_heartbeats(run)
    assert [(one.rank, one.step, one.phase, one.pid) for one in seen] == [
        (0, 10, "update", os.getpid()), (1, 12, "update", os.getpid()),
        (2, 11, "update", os.getpid()),
    ]  # fmt: skip
    paths = {one.path for one in beats}
    for one in beats:
        one.close()
    assert not any(path.exists() for path in paths)


def says(rank: int, step: int, phase: str, count: int, **more: object) -> Report:
    arrived = {"g": Arrivals("dp", (0, 1, 2), count, "all_reduce")}
    return Report(rank, f"node{rank}", Position(step, phase, f"x.py:{rank} in f"), 21.0, arrived,
                  stack=f"stack of {rank}", **more)  # type: ignore[arg-type]  # fmt: skip


def test_the_rank_with_fewer_collectives_has_not_arrived() -> None:
    reports = [says(0, 5, "forward_backward", 9), says(1, 5, "agree", 8),
               says(2, 5, "forward_backward", 9)]  # fmt: skip
    found = verdict(reports, 3, [], 0)
    assert (found.rank, found.host, found.step) == (1, "node1", 5)
    assert "all_reduce number 9 of axis dp (ranks 0-2): ranks 0,2 in it, rank 1 not arrived" in (
        found.text
    )
    assert found.stack == "stack of 1"


def test_a_silent_rank_is_the_cause_and_not_those_that_wait() -> None:
    reports = [
        says(0, 5, "agree", 9, neighbours={0: "S", 1: "T (stopped)"}),
        says(2, 5, "agree", 9),
    ]
    found = verdict(reports, 3, [], 1)
    assert found.rank == 1
    assert "rank 1 on node0 does not answer: its process is T (stopped)" in found.text
    alone = verdict([says(0, 5, "agree", 9)], 2, [], 1, ["node0", "node7"])
    assert (alone.rank, alone.host) == (1, "node7")
    assert "rank 1 on node7 does not answer: its process is stopped or gone" in alone.text


def test_the_rank_furthest_back_where_no_collective_tells() -> None:
    reports = [says(0, 6, "data", 9), says(1, 5, "agree", 9), says(2, 6, "data", 9)]
    assert verdict(reports, 3, [], 0).rank == 1


def test_nobody_is_blamed_where_all_stand_alike() -> None:
    found = verdict([says(rank, 5, "agree", 9) for rank in range(3)], 3, [], 0)
    assert "all ranks stand in the same place" in found.text


def test_ranges() -> None:
    assert ranges([3, 0, 1, 2, 7, 9, 10]) == "0-3,7,9-10"


def test_a_difference_that_many_nodes_have_is_said_once() -> None:
    parts = [("n1", ["\0 has 3 cards, the profile says 4"]), ("n2", ["\0 has 3 cards, the profile "
             "says 4", "\0 differs"]), ("n3", [])]  # fmt: skip
    assert merge(parts) == [
        "n1 and 1 more nodes has 3 cards, the profile says 4", "n2 differs",
    ]  # fmt: skip
