"""Costs of placements against hand computation and plain loops; the improver never loses."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ImpossibleError
from hpctrain.fabric import Fabric, Traffic, UnknownSpeedError, axis_cost
from hpctrain.layout import DEFAULT_ORDER, DENSE_AXES, ParallelLayout, RankGrid, divisors
from hpctrain.machine import LinkKind, Machine, get_machine
from hpctrain.placement import axis_links, default_placement, distinct_orders, place

TOY = """
name: toy
title: four devices, two packages, two cards
kind: generic
node:
  source: made up
  confidence: high
  devices: 4
  device: {name: D, vendor: nvidia}
  packages: [[0, 1], [2, 3]]
  nics:
    - {name: n0, bandwidth: 1, devices: [0, 1], rail: 0}
    - {name: n1, bandwidth: 1, devices: [2, 3], rail: 1}
network:
  source: made up
  confidence: high
  fabric: toy
  nodes_per_group: PER_GROUP
  rail_only: RAIL_ONLY
links:
  package: {source: made up, confidence: high, bandwidth: 8, latency: LATENCY}
  node: {source: made up, confidence: high, bandwidth: 4, aggregate: AGGREGATE, latency: LATENCY}
  rail: {source: made up, confidence: high, bandwidth: 1, latency: LATENCY}
  global: {source: made up, confidence: high, bandwidth: 0.5, latency: LATENCY}
affinity: {source: made up, confidence: high, visible: all}
launch: {source: made up, confidence: high}
environment: {source: made up, confidence: high}
scheduling: {source: made up, confidence: high}
storage: {source: made up, confidence: high}
"""


@pytest.fixture(scope="session")
def toy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


def toy_in(
    directory: Path,
    *,
    per_group: int | str = "null",
    rail_only: bool = False,
    aggregate: float | str = "null",
    latency: float = 0,
) -> Machine:
    path = directory / "toy.yaml"
    text = TOY.replace("PER_GROUP", str(per_group)).replace("LATENCY", str(latency))
    text = text.replace("RAIL_ONLY", str(rail_only).lower()).replace("AGGREGATE", str(aggregate))
    path.write_text(text)
    return get_machine(path)


def cost(fabric: Fabric, layout: ParallelLayout, axes: str, pattern: str, size: float) -> float:
    traffic = Traffic(tuple(axes.split()), pattern, size)  # type: ignore[arg-type]
    return axis_cost(fabric, RankGrid(layout), traffic).seconds


# ---- by hand -------------------------------------------------------------------------------


def test_costs_by_hand(toy_directory: Path) -> None:
    toy = toy_in(toy_directory)
    one, two = Fabric.of(toy, 1), Fabric.of(toy, 2)
    # Two ranks of a package, 2(n-1)/n·8 = 8 bytes at 8 a second.
    assert cost(one, ParallelLayout(tp=2, dp_shard=2), "tp", "all_reduce", 8) == 1.0
    # Four ranks of a node: 2·3/4·8 = 12 bytes at 4 a second.
    assert cost(one, ParallelLayout(tp=4), "tp", "all_reduce", 8) == 3.0
    # Half of that without the reduction.
    assert cost(one, ParallelLayout(tp=4), "tp", "all_gather", 8) == 1.5
    # Pairs of nodes: each of four groups passes 8 bytes, two groups share a card of 1.
    assert cost(two, ParallelLayout(tp=4, dp_shard=2), "dp_shard", "all_reduce", 8) == 16.0
    # All eight ranks: 2·7/8·8 = 14 bytes over both cards of a node, one group.
    assert cost(two, ParallelLayout(tp=8), "tp", "all_reduce", 8) == 7.0
    # All-to-all over two nodes: half of 8 bytes a rank leave, two ranks a card.
    assert cost(two, ParallelLayout(tp=8), "tp", "all_to_all", 8) == 8.0
    # A chain of two stages on two nodes: four pairs, two a card, 8 bytes each way.
    assert cost(two, ParallelLayout(tp=4, pp=2), "pp", "chain", 8) == 16.0
    # A chain inside a node: the link between packages.
    assert cost(one, ParallelLayout(tp=2, pp=2), "pp", "chain", 8) == 2.0
    assert cost(one, ParallelLayout(dp_shard=4), "tp", "all_reduce", 8) == 0.0


def test_aggregate_speed_serves_collectives(toy_directory: Path) -> None:
    """Four devices joined in pairs of 4 with 10 in all: ring and all-to-all use the mesh."""
    fabric = Fabric.of(toy_in(toy_directory, aggregate=10), 1)
    assert cost(fabric, ParallelLayout(tp=4), "tp", "all_gather", 8) == 0.6
    assert cost(fabric, ParallelLayout(tp=4), "tp", "all_to_all", 8) == 0.6


def test_latency_counts_steps_and_messages(toy_directory: Path) -> None:
    fabric = Fabric.of(toy_in(toy_directory, latency=0.25), 2)
    grid = RankGrid(ParallelLayout(tp=8))
    ring = axis_cost(fabric, grid, Traffic(("tp",), "all_reduce", 8, messages=3))
    assert ring.latency == 3 * 2 * 7 * 0.25
    assert ring.seconds == 7.0 + ring.latency
    assert ring.kind is LinkKind.RAIL
    assert (ring.groups, ring.crossing) == (1, 1)


def test_switch_groups_are_slower(toy_directory: Path) -> None:
    toy = toy_in(toy_directory, per_group=1)
    assert cost(Fabric.of(toy, 2), ParallelLayout(tp=8), "tp", "all_reduce", 8) == 14.0
    # One group of switches, given by Slurm, instead.
    near = Fabric.of(toy, 2, groups=[3, 3])
    assert cost(near, ParallelLayout(tp=8), "tp", "all_reduce", 8) == 7.0


def test_changing_rails_costs_a_hop_where_rails_do_not_meet(toy_directory: Path) -> None:
    """Pairs over two nodes on cards of different numbers: two groups a card pass 8 bytes each."""
    grid = RankGrid(ParallelLayout(tp=2, dp_shard=4), permutation=(0, 6, 1, 7, 2, 4, 3, 5))
    for rail_only, inside in ((False, 0.0), (True, 8 / 4)):
        fabric = Fabric.of(toy_in(toy_directory, rail_only=rail_only), 2)
        for pattern in ("all_reduce", "chain"):
            found = axis_cost(fabric, grid, Traffic(("tp",), pattern, 8))  # type: ignore[arg-type]
            assert found.kind is LinkKind.SWITCH_GROUP
            assert (found.network, found.inside) == (16.0, inside)


def test_frontier_shares_its_cards() -> None:
    """Eight GCDs, four cards of 25 GB/s: a gigabyte all-reduced between pairs of nodes."""
    fabric = Fabric.of(get_machine("frontier"), 2)
    layout = ParallelLayout(tp=8, dp_shard=2)
    assert cost(fabric, layout, "tp", "all_reduce", 1e9) == pytest.approx(2 * 7 / 8 / 50)
    assert cost(fabric, layout, "dp_shard", "all_reduce", 1e9) == pytest.approx(2 / 25)
    pairs = ParallelLayout(tp=2, dp_shard=8)
    assert cost(fabric, pairs, "tp", "all_reduce", 1e9) == pytest.approx(1 / 200)


def test_a_card_a_device_is_not_shared() -> None:
    fabric = Fabric.of(get_machine("dgx-h100"), 4)
    layout = ParallelLayout(tp=8, dp_shard=4)
    assert cost(fabric, layout, "dp_shard", "all_gather", 4e9) == pytest.approx(3 / 50)
    assert [
        (link.axis, link.kind, link.nodes) for link in axis_links(RankGrid(layout), fabric)
    ] == [
        ("dp_shard", LinkKind.RAIL, 4),
        ("tp", LinkKind.NODE, 1),
        ("edp", LinkKind.RAIL, 4),
    ]


def test_mixed_machines() -> None:
    fast, slow = get_machine("dgx-h100"), get_machine("dgx-a100")
    fabric = Fabric.mixed([(fast, 1), (slow, 1)])
    assert fabric.size == 16
    layout = ParallelLayout(tp=8, pp=2)
    # Inside, the slower machine's NVLink; between, the slower machine's cards.
    assert cost(fabric, layout, "tp", "all_gather", 8e9) == pytest.approx(7 / 300)
    assert cost(fabric, layout, "pp", "chain", 5e9) == pytest.approx(5 / 25)
    thin = Fabric.mixed([(fast, 1), (slow, 1)], between=1e9)
    assert cost(thin, layout, "pp", "chain", 5e9) == pytest.approx(5.0)
    assert fabric.device_peaks("bf16").tolist() == [989e12] * 8 + [312e12] * 8
    assert np.isnan(fabric.device_peaks("int4")).all()
    assert fabric.place(11) == (1, 3)


def test_unknown_speeds_are_not_guessed() -> None:
    fabric = Fabric.of(get_machine("marenostrum5"), 2)
    layout = ParallelLayout(tp=4, dp_shard=2)
    with pytest.raises(UnknownSpeedError, match="node links of marenostrum5 is not known"):
        cost(fabric, layout, "tp", "all_reduce", 1e9)
    placed = place(layout, fabric, [Traffic(("tp",), "all_reduce", 1e9)])
    assert placed.grid == RankGrid(layout)
    assert placed.seconds is None
    assert "not known" in placed.note
    measured = Fabric.of(get_machine("marenostrum5"), 2, speeds={LinkKind.NODE: 100e9})
    assert cost(measured, layout, "tp", "all_reduce", 1e9) == pytest.approx(1.5 / 100)


def test_a_layout_fills_its_nodes() -> None:
    with pytest.raises(ImpossibleError, match=r"8 ranks \(tp8\).*places for 16"):
        default_placement(ParallelLayout(tp=8), Fabric.of(get_machine("dgx-h100"), 2))
    with pytest.raises(ImpossibleError, match="9 ranks a node"):
        Fabric.of(get_machine("dgx-h100"), 2, 9)


# ---- against plain loops -------------------------------------------------------------------


def loops(fabric: Fabric, grid: RankGrid, traffic: Traffic) -> float:
    """The documented cost, rank by rank, for a fabric of one toy machine without rail_only."""
    n = 1
    for axis in traffic.axes:
        n *= grid.layout.size(axis)
    card_seconds: dict[tuple[int, int], float] = defaultdict(float)
    inside_seconds = [0.0]
    seen = set()

    def node(rank: int) -> int:
        return rank // 4

    def package(rank: int) -> int:
        return rank % 4 // 2

    def rate(ranks: tuple[int, ...]) -> float:
        switches = {fabric.groups[node(r)] for r in ranks}
        around = sorted({node(r) for r in ranks})
        measured = 9.0
        if fabric.node_rates is not None:
            for a, b in zip(around, around[1:] + around[:1], strict=True):
                measured = min(measured, float(fabric.node_rates[a, b]))
        return min(measured, 0.5 if len(switches) > 1 else 1.0)

    def mesh(ranks: list[int]) -> float:
        together = float(fabric.together[0])
        if len({package(r) for r in ranks}) == 1:
            return 8.0
        return min(together, 4.0 * (len(ranks) - 1))

    for rank in range(grid.size):
        group = grid.group_of(rank, *traffic.axes)
        if group in seen:
            continue
        seen.add(group)
        homes = {node(r) for r in group}
        if traffic.pattern == "chain":
            for a, b in itertools.pairwise(group):
                if node(a) == node(b):
                    speed = 8.0 if package(a) == package(b) else 4.0
                    inside_seconds.append(traffic.bytes / speed)
                else:
                    for here, there in ((a, b), (b, a)):
                        speed = 1.0 if fabric.groups[node(a)] == fabric.groups[node(b)] else 0.5
                        if fabric.node_rates is not None:
                            speed = min(speed, float(fabric.node_rates[node(here), node(there)]))
                        card_seconds[node(here), package(here)] += traffic.bytes / speed
            continue
        for home in homes:
            here = [r for r in group if node(r) == home]
            if traffic.pattern == "all_to_all":
                for r in here:
                    out = traffic.bytes * (n - len(here)) / n
                    card_seconds[home, package(r)] += out / rate(group)
                if len(here) > 1:
                    inside_seconds.append(traffic.bytes * (len(here) - 1) / n / mesh(here))
                continue
            volume = traffic.bytes * (n - 1) / n
            if traffic.pattern == "all_reduce":
                volume *= 2
            cards = {package(r) for r in here}
            if len(homes) > 1:
                for card in cards:
                    card_seconds[home, card] += volume / len(cards) / rate(group)
            if len(here) > 1:
                inside_seconds.append(volume / mesh(here))
    return max(max(card_seconds.values(), default=0.0), max(inside_seconds))


@st.composite
def problems(draw: st.DrawFn) -> tuple[ParallelLayout, int, list[int], list[Traffic], list[int]]:
    nodes = draw(st.integers(1, 6))
    left, sizes = 4 * nodes, {}
    for axis in draw(st.permutations(("tp", "cp", "pp", "dp_shard"))):
        sizes[axis] = draw(st.sampled_from(divisors(left)))
        left //= sizes[axis]
    sizes["dp_replicate"] = left
    groups = draw(st.lists(st.integers(0, 2), min_size=nodes, max_size=nodes))
    traffic = [
        Traffic(
            axes,
            draw(st.sampled_from(("all_reduce", "all_gather", "reduce_scatter", "all_to_all")))
            if axes != ("pp",)
            else "chain",
            draw(st.integers(0, 50)),
            exposed=draw(st.sampled_from((0.25, 1.0))),
        )
        for axes in (("tp",), ("pp",), ("cp", "tp"), ("dp_replicate", "dp_shard", "cp"))
    ]
    permutation = draw(st.permutations(range(4 * nodes)))
    return ParallelLayout(**sizes), nodes, groups, traffic, permutation


@settings(max_examples=80, deadline=None)
@given(problem=problems(), seed=st.one_of(st.none(), st.integers(0, 10**6)))
def test_costs_are_the_loops(problem: object, seed: int | None, toy_directory: Path) -> None:
    layout, nodes, groups, traffic, permutation = problem  # type: ignore[misc]
    rates = None
    if seed is not None:
        rates = np.random.default_rng(seed).choice([0.1, 0.7, np.nan, 3.0], (nodes, nodes))
    fabric = Fabric.of(toy_in(toy_directory, aggregate=10), nodes, groups=groups, node_rates=rates)
    for grid in (RankGrid(layout), RankGrid(layout, DENSE_AXES, tuple(permutation))):
        for one in traffic:
            found = axis_cost(fabric, grid, one)
            assert found.seconds == pytest.approx(loops(fabric, grid, one), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(problem=problems(), ascending=st.booleans())
def test_never_worse_than_the_default(
    problem: object, ascending: bool, toy_directory: Path
) -> None:
    layout, nodes, groups, traffic, _ = problem  # type: ignore[misc]
    fabric = Fabric.of(toy_in(toy_directory, aggregate=10), nodes, groups=groups)
    placed = place(layout, fabric, traffic, swaps=60, ascending=ascending)
    assert placed.seconds is not None
    assert placed.grid.ascending() or not ascending
    default = sum(one.exposed * loops(fabric, RankGrid(layout), one) for one in traffic)
    mine = sum(one.exposed * loops(fabric, placed.grid, one) for one in traffic)
    assert placed.default_seconds == pytest.approx(default, rel=1e-9)
    assert placed.seconds == pytest.approx(mine, rel=1e-9)
    assert mine <= default * (1 + 1e-12)
    assert placed.gain >= 1.0


# ---- the improver --------------------------------------------------------------------------


def test_heavy_traffic_moves_inside(toy_directory: Path) -> None:
    """Replicas that move far more than tensor groups belong inside the node.

    Two nodes, tp 2, dp 4: by default dp groups span both nodes; with dp innermost each fills a
    node (2·3/4·80 = 120 bytes at 4) and tp crosses (8 bytes, four groups, two a card).
    """
    fabric = Fabric.of(toy_in(toy_directory), 2)
    layout = ParallelLayout(tp=2, dp_replicate=4)
    traffic = [Traffic(("tp",), "all_reduce", 8), Traffic(("dp_replicate",), "all_reduce", 80)]
    placed = place(layout, fabric, traffic)
    assert placed.grid.order[-1] == "dp_replicate"
    assert [one.seconds for one in placed.costs] == [16.0, 30.0]
    # By default: tp inside packages (1 s), each dp group has two ranks and both cards a node,
    # two groups: 120 bytes a card.
    assert placed.default_seconds == 1.0 + 120.0
    assert placed.gain == pytest.approx(121 / 46)


def test_nodes_are_sorted_by_switch_group(toy_directory: Path) -> None:
    """Shard groups of two nodes stay under one switch although the nodes alternate."""
    fabric = Fabric.of(toy_in(toy_directory), 4, groups=[0, 1, 0, 1])
    layout = ParallelLayout(dp_replicate=2, dp_shard=8)
    traffic = [
        Traffic(("dp_shard",), "all_gather", 80),
        Traffic(("dp_replicate",), "all_reduce", 1),
    ]
    placed = place(layout, fabric, traffic, swaps=0)
    assert {fabric.groups[placed.place(r)[0]] for r in placed.grid.group_of(0, "dp_shard")} == {0}
    assert placed.costs[0].kind is LinkKind.RAIL
    assert placed.costs[0].seconds == 35.0
    assert placed.default_seconds is not None
    assert placed.default_seconds >= 70.0


def test_swaps_mend_what_no_order_can(toy_directory: Path) -> None:
    """Tensor groups of 3 on nodes of 4, four stages: all stages' neighbours cross nodes.

    In every order some card serves three of the pipeline's hops; swapping two ranks leaves two.
    The tensor groups cost the same: 2·2/3·8 bytes through one card.
    """
    fabric = Fabric.of(toy_in(toy_directory), 3)
    layout = ParallelLayout(tp=3, pp=4)
    traffic = [Traffic(("tp",), "all_reduce", 8), Traffic(("pp",), "chain", 1)]
    ordered = place(layout, fabric, traffic, swaps=0)
    swapped = place(layout, fabric, traffic, swaps=600, ascending=False)
    assert [one.seconds for one in ordered.costs] == pytest.approx([32 / 3, 3.0])
    assert [one.seconds for one in swapped.costs] == pytest.approx([32 / 3, 2.0])
    assert not swapped.grid.ascending()
    kept = place(layout, fabric, traffic, swaps=600)
    assert kept.grid.ascending()


def test_nodes_move_away_from_a_slow_link(toy_directory: Path) -> None:
    """Measured: nodes 0 and 1 (and 2 and 3) reach each other at a tenth of the cards' rate."""
    rates = np.full((4, 4), 5.0)
    rates[0, 1] = rates[1, 0] = rates[2, 3] = rates[3, 2] = 0.1
    fabric = Fabric.of(toy_in(toy_directory), 4, node_rates=rates)
    layout = ParallelLayout(dp_replicate=2, dp_shard=8)
    traffic = [
        Traffic(("dp_shard",), "all_gather", 16),
        Traffic(("dp_replicate",), "all_reduce", 0.1),
    ]
    placed = place(layout, fabric, traffic)
    groups = [{placed.place(r)[0] for r in row} for row in placed.grid.groups("dp_shard").tolist()]
    assert {frozenset(group) for group in groups}.isdisjoint({frozenset({0, 1}), frozenset({2, 3})})
    # 7/8·16 = 14 bytes over two cards of 1 byte a second; by default 14 / 2 / 0.1 = 70 s.
    assert placed.costs[0].seconds == 7.0
    assert axis_cost(fabric, RankGrid(layout), traffic[0]).seconds == 70.0
    chain = Traffic(("dp_replicate",), "chain", 8)
    assert axis_cost(fabric, RankGrid(layout), chain).seconds == 16.0
    with pytest.raises(ValueError, match="shape"):
        Fabric.of(toy_in(toy_directory), 3, node_rates=rates)


def test_orders_skip_idle_axes() -> None:
    assert distinct_orders(ParallelLayout(tp=2, pp=2)) == [
        ("dp_replicate", "dp_shard", "cp", "pp", "tp"),
        ("dp_replicate", "dp_shard", "cp", "tp", "pp"),
    ]
    assert len(distinct_orders(ParallelLayout(2, 2, 2, 2, 2))) == 120
    assert distinct_orders(ParallelLayout()) == [DEFAULT_ORDER]


def test_importing_needs_no_numpy() -> None:
    code = "import sys, hpctrain.placement; assert not {'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
