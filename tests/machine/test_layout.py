"""Layouts and the rank grid against hand-computed groups and brute force."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import Exit, ImpossibleError
from hpctrain.layout import (
    DENSE_AXES,
    EXPERT_AXES,
    ParallelLayout,
    RankGrid,
    balanced_shares,
    divisors,
    nearest_divisors,
)

# ---- layouts -------------------------------------------------------------------------------


def test_sizes_multiply() -> None:
    layout = ParallelLayout(tp=2, cp=3, pp=5, dp_replicate=7, dp_shard=4, ep=6, etp=2)
    assert layout.dp == 28
    assert layout.world_size == 2 * 3 * 5 * 28
    assert layout.edp == 2 * 3 * 28 // 12
    assert layout.etp * layout.ep * layout.edp * layout.pp == layout.world_size
    assert layout.describe() == "tp2 cp3 pp5 dp_replicate7 dp_shard4 ep6 etp2"
    assert ParallelLayout().describe() == "1 rank"


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_a_degree_is_a_positive_whole_number(value: object) -> None:
    with pytest.raises(ImpossibleError, match=r"cp = .*at least 1"):
        ParallelLayout(cp=value)  # type: ignore[arg-type]
    with pytest.raises(ImpossibleError, match=r"parallel.context = .*at least 1"):
        ParallelLayout.resolve(8, context=value)  # type: ignore[arg-type]


def test_the_expert_mesh_covers_the_stage() -> None:
    with pytest.raises(ImpossibleError) as caught:
        ParallelLayout(tp=2, dp_shard=6, pp=3, ep=5)
    assert caught.value.exit_code == Exit.IMPOSSIBLE
    assert "ep·etp = 5·1 = 5 does not divide tp·cp·dp = 2·1·6 = 12" in caught.value.message
    assert caught.value.hint is not None
    assert "ep 4 or 6 with etp 1" in caught.value.hint


def test_resolve_takes_what_is_left_for_data() -> None:
    assert ParallelLayout.resolve(64, tensor=4, pipeline=2) == ParallelLayout(
        tp=4, pp=2, dp_shard=8
    )
    assert ParallelLayout.resolve(64, tensor=4, data=16, shard=1) == ParallelLayout(
        tp=4, dp_replicate=16
    )
    assert ParallelLayout.resolve(64, data=64, shard=8) == ParallelLayout(
        dp_replicate=8, dp_shard=8
    )


@pytest.mark.parametrize(
    ("world", "tensor", "context", "ranks_per_node", "shard"),
    [(64, 1, 1, 8, 8), (64, 2, 1, 8, 4), (64, 2, 2, 8, 2), (64, 8, 1, 8, 1), (48, 1, 1, 8, 8)],
)
def test_sharding_inside_a_node(
    world: int, tensor: int, context: int, ranks_per_node: int, shard: int
) -> None:
    layout = ParallelLayout.resolve(
        world, tensor=tensor, context=context, shard="node", ranks_per_node=ranks_per_node
    )
    assert layout.dp_shard == shard
    assert layout.world_size == world


@pytest.mark.parametrize(
    ("arguments", "rule", "hint"),
    [
        (
            {"world_size": 48, "tensor": 8, "pipeline": 4},
            "tensor 8 × pipeline 4 × context 1 = 32 does not divide the job's 48 ranks",
            "nearest possible: tensor 6 or 12, or pipeline 3 or 6, or 32 or 64 ranks",
        ),
        (
            {"world_size": 16, "tensor": 2, "data": 4},
            "× data 4 = 8 ranks, but the job has 16",
            "nearest possible: data 8 (or auto) on 16 ranks, or 8 ranks with data 4",
        ),
        (
            {"world_size": 24, "shard": 7},
            "parallel.shard = 7 does not divide the data-parallel degree 24",
            "nearest possible: shard 6 or 8",
        ),
        ({"world_size": 0}, "the job has 0 ranks", None),
    ],
)
def test_what_does_not_fit_names_the_rule_and_the_nearest(
    arguments: dict[str, int], rule: str, hint: str | None
) -> None:
    with pytest.raises(ImpossibleError) as caught:
        ParallelLayout.resolve(**arguments)
    assert rule in caught.value.message
    assert caught.value.hint == hint


@given(st.integers(1, 400), st.integers(1, 30), st.integers(1, 30), st.integers(1, 5))
def test_every_suggested_tensor_degree_works(
    world: int, tensor: int, pipeline: int, context: int
) -> None:
    asked = {"tensor": tensor, "pipeline": pipeline, "context": context}
    if world % math.prod(asked.values()) == 0:
        assert ParallelLayout.resolve(world, **asked).world_size == world
        return
    with pytest.raises(ImpossibleError) as caught:
        ParallelLayout.resolve(world, **asked)
    assert caught.value.hint is not None
    for option in caught.value.hint.removeprefix("nearest possible: ").split(", or "):
        key, _, values = option.partition(" ")
        if key in asked:
            for value in values.split(" or "):
                assert ParallelLayout.resolve(world, **{**asked, key: int(value)}).dp >= 1
        else:
            for ranks in option.removesuffix(" ranks").split(" or "):
                assert ParallelLayout.resolve(int(ranks), **asked).dp >= 1


@given(st.integers(1, 5000), st.integers(1, 6000))
def test_divisors(n: int, wanted: int) -> None:
    assert list(divisors(n)) == [d for d in range(1, n + 1) if n % d == 0]
    near = nearest_divisors(n, wanted)
    assert all(n % d == 0 for d in near)
    assert not any(n % d == 0 for d in range(near[0] + 1, min(wanted, n + 1)))


# ---- unequal shares ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "speeds", "shares"),
    [
        (8, [1, 1, 1, 1], (2, 2, 2, 2)),
        (12, [3, 1], (9, 3)),
        (32, [312, 312, 989, 989], (4, 4, 12, 12)),
        (1, [1, 5], (0, 1)),
    ],
)
def test_shares_by_hand(total: int, speeds: list[float], shares: tuple[int, ...]) -> None:
    assert balanced_shares(total, speeds) == shares


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 1),
    st.booleans(),
    st.data(),
)
def test_shares_end_as_early_as_any(
    total: int, speeds: list[int], minimum: int, limited: bool, data: st.DataObject
) -> None:
    """Against trying every way to hand the units out."""
    limits = None
    if limited:
        limits = [data.draw(st.one_of(st.none(), st.integers(0, 5))) for _ in speeds]
    caps = [total if cap is None else cap for cap in limits or [None] * len(speeds)]
    ways = [
        way
        for way in itertools.product(*(range(minimum, cap + 1) for cap in caps))
        if sum(way) == total
    ]
    if not ways:
        with pytest.raises(ImpossibleError):
            balanced_shares(total, speeds, minimum=minimum, limits=limits)
        return
    shares = balanced_shares(total, speeds, minimum=minimum, limits=limits)
    assert shares in ways
    best = min(max(n / s for n, s in zip(way, speeds, strict=True)) for way in ways)
    assert max(n / s for n, s in zip(shares, speeds, strict=True)) == best


def test_large_shares_are_proportional() -> None:
    shares = balanced_shares(10_000_019, [1.0, 2.0, 4.0])
    assert sum(shares) == 10_000_019
    assert all(abs(n - 10_000_019 * s / 7) <= 1 for n, s in zip(shares, (1, 2, 4), strict=True))


# ---- grid: known groups --------------------------------------------------------------------


def test_megatron_groups() -> None:
    """The groups that Megatron-LM documents for 16 GPUs, tensor 2, pipeline 4, data 2."""
    grid = RankGrid(ParallelLayout(tp=2, pp=4, dp_replicate=2), order=DENSE_AXES)
    assert grid.groups("tp").tolist() == [[2 * i, 2 * i + 1] for i in range(8)]
    assert grid.groups("pp").T.tolist() == [list(range(4 * i, 4 * i + 4)) for i in range(4)]
    assert sorted(grid.groups("dp").tolist()) == [
        [0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15],
    ]  # fmt: skip
    assert grid.coordinates(13) == {
        "pp": 3, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1, "edp": 1, "ep": 0, "etp": 0,
    }  # fmt: skip


def test_five_axes_by_hand() -> None:
    """Rank = ((((pp·2 + dpr)·2 + dps)·2 + cp)·2 + tp) of 32 ranks."""
    grid = RankGrid(ParallelLayout(tp=2, cp=2, pp=2, dp_replicate=2, dp_shard=2), order=DENSE_AXES)
    assert [grid.coordinates(0b10110)[axis] for axis in DENSE_AXES] == [1, 0, 1, 1, 0]
    assert grid.rank(pp=1, dp_replicate=0, dp_shard=1, cp=1, tp=0) == 0b10110
    assert grid.group_of(0b10110, "dp_replicate", "dp_shard", "cp") == (
        16, 18, 20, 22, 24, 26, 28, 30,
    )  # fmt: skip
    assert grid.group_of(0b10110, "cp", "dp_replicate") == (20, 28, 22, 30)
    assert grid.group_of(5) == (5,)
    assert grid.rank_array().shape == (2, 2, 2, 2, 2)


def test_pipeline_innermost() -> None:
    grid = RankGrid(
        ParallelLayout(tp=2, pp=2, dp_shard=2),
        order=("dp_replicate", "dp_shard", "cp", "tp", "pp"),
    )
    assert grid.groups("pp").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("tp").tolist() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    # The array for a DeviceMesh keeps the dimensions in their own order.
    assert grid.rank_array()[1, 0, :, 0, :].tolist() == [[1, 3], [5, 7]]


def test_experts_fold_over_the_ranks_of_a_stage() -> None:
    """Attention tp2·cp2·dp2 and experts etp2·ep2·edp2 over 8 ranks of each of two stages."""
    grid = RankGrid(ParallelLayout(tp=2, cp=2, pp=2, dp_shard=2, ep=2, etp=2))
    assert grid.groups("etp").tolist() == [[2 * i, 2 * i + 1] for i in range(8)]
    assert grid.groups("ep")[:4].tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("edp").tolist() == [[i, i + 4] for i in (0, 1, 2, 3, 8, 9, 10, 11)]
    wide = RankGrid(ParallelLayout(tp=4, dp_shard=2, ep=8))
    assert wide.groups("ep").tolist() == [list(range(8))]
    # The expert mesh numbers a stage's ranks, also where the pipeline is the innermost axis.
    inner = RankGrid(
        ParallelLayout(tp=2, pp=2, dp_shard=2, ep=2),
        order=("dp_replicate", "dp_shard", "cp", "tp", "pp"),
    )
    assert inner.groups("ep").tolist() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert inner.rank(pp=1, edp=1, ep=0) == 5


# ---- grid: properties ----------------------------------------------------------------------


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    sizes = {axis: draw(st.integers(1, 4)) for axis in ("tp", "cp", "pp", "dp_replicate")}
    sizes["dp_shard"] = draw(st.integers(1, 3))
    stage = sizes["tp"] * sizes["cp"] * sizes["dp_replicate"] * sizes["dp_shard"]
    ep = draw(st.sampled_from(divisors(stage)))
    etp = draw(st.sampled_from(divisors(stage // ep)))
    layout = ParallelLayout(**sizes, ep=ep, etp=etp)
    order = tuple(draw(st.permutations(DENSE_AXES)))
    shuffled = draw(st.booleans())
    permutation = (
        tuple(
            draw(st.randoms(use_true_random=False)).sample(
                range(layout.world_size), layout.world_size
            )
        )
        if shuffled
        else None
    )
    return RankGrid(layout, order, permutation)


def brute_force_dense(grid: RankGrid) -> dict[int, dict[str, int]]:
    """Coordinates by counting: nested loops in the order of the axes."""
    found = {}
    ranges = [range(grid.layout.size(axis)) for axis in grid.order]
    for position, at in enumerate(itertools.product(*ranges)):
        rank = position if grid.permutation is None else grid.permutation[position]
        found[rank] = dict(zip(grid.order, at, strict=True))
    return found


def brute_force_expert(grid: RankGrid) -> dict[int, dict[str, int]]:
    """Expert coordinates by counting the ranks of each stage in the order of the dense axes."""
    inner = [axis for axis in grid.order if axis != "pp"]
    found = {}
    dense = brute_force_dense(grid)
    for stage in range(grid.layout.pp):
        ranks = [rank for rank, at in dense.items() if at["pp"] == stage]
        ranks.sort(key=lambda rank: [dense[rank][axis] for axis in inner])
        places = itertools.product(*(range(grid.layout.size(a)) for a in ("edp", "ep", "etp")))
        for rank, (edp, ep, etp) in zip(ranks, places, strict=True):
            found[rank] = {"pp": stage, "edp": edp, "ep": ep, "etp": etp}
    return found


@settings(max_examples=60, deadline=None)
@given(grids(), st.data())
def test_grid_is_brute_force(grid: RankGrid, data: st.DataObject) -> None:
    dense, expert = brute_force_dense(grid), brute_force_expert(grid)
    table = grid.coordinate_table((*DENSE_AXES, "edp", "ep", "etp"))
    assert table.shape == (grid.size, 8)
    for rank in range(grid.size):
        both = {**dense[rank], **expert[rank]}
        assert grid.coordinates(rank) == both
        assert table[rank].tolist() == [both[a] for a in (*DENSE_AXES, "edp", "ep", "etp")]
        assert grid.rank(**dense[rank]) == rank
        assert grid.rank(**expert[rank]) == rank
    mesh, places = data.draw(st.sampled_from([(DENSE_AXES, dense), (EXPERT_AXES, expert)]))
    axes = data.draw(st.lists(st.sampled_from(mesh), unique=True, max_size=len(mesh)))
    groups = grid.groups(*axes)
    assert groups.shape[1] == math.prod(grid.layout.size(axis) for axis in axes)
    assert sorted(groups.reshape(-1).tolist()) == list(range(grid.size))
    for row in groups.tolist():
        fixed = {tuple(places[r][a] for a in mesh if a not in axes) for r in row}
        assert len(fixed) == 1
        assert row == sorted(row, key=lambda r: [places[r][a] for a in axes])
        if any(axis in ("edp", "ep", "etp") for axis in axes) or mesh is DENSE_AXES:
            assert list(grid.group_of(row[-1], *axes)) == row


@settings(max_examples=30, deadline=None)
@given(grids())
def test_array_for_a_device_mesh(grid: RankGrid) -> None:
    for mesh, places in (
        (DENSE_AXES, brute_force_dense(grid)),
        (EXPERT_AXES, brute_force_expert(grid)),
    ):
        array = grid.rank_array(mesh)
        assert array.shape == tuple(grid.layout.size(axis) for axis in mesh)
        assert array.flags["C_CONTIGUOUS"]
        for rank, at in places.items():
            assert array[tuple(at[axis] for axis in mesh)] == rank


def test_ascending_groups() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp_shard=2)
    assert RankGrid(layout).ascending()
    turned = RankGrid(layout, order=("tp", "cp", "dp_shard", "dp_replicate", "pp"))
    assert turned.ascending(), "each axis alone ascends in any order"
    assert not turned.ascending("dp_shard", "cp"), "two axes together are 0, 2, 1, 3"
    assert RankGrid(layout).ascending("dp_shard", "cp")
    swapped = RankGrid(layout, permutation=(1, 0, 2, 3, 4, 5, 6, 7))
    assert not swapped.ascending()
    assert swapped.ascending("cp") is True
    assert not swapped.ascending("tp")


MESH = """
import random
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from hpctrain.layout import DEFAULT_ORDER, DENSE_AXES, EXPERT_AXES, ParallelLayout, RankGrid

layout = ParallelLayout(tp=2, cp=2, pp=2, dp_replicate=2, dp_shard=2, ep=4)
turned = ("tp", "cp", "pp", "dp_shard", "dp_replicate")
shuffled = tuple(random.Random(3).sample(range(32), 32))
sorted_by_torch = 0
for order, permutation in ((DEFAULT_ORDER, None), (turned, None), (DEFAULT_ORDER, shuffled)):
    grid = RankGrid(layout, order, permutation)
    for rank in (0, 5, 17, 31):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=32)
        for names in (DENSE_AXES, EXPERT_AXES):
            mesh = DeviceMesh("cpu", torch.from_numpy(grid.rank_array(names)), mesh_dim_names=names)
            for axis in names:
                ours = grid.group_of(rank, axis)
                torchs = tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
                assert torchs == tuple(sorted(ours)), (axis, rank)
                assert mesh[axis].mesh.tolist() == list(ours)
                if torchs != ours:
                    sorted_by_torch += 1
                    assert not grid.ascending()
            at = dict(zip(names, mesh.get_coordinate()))
            assert at == {axis: grid.coordinates(rank)[axis] for axis in names}
        dist.destroy_process_group()
assert sorted_by_torch, "torch no longer sorts groups: placements may stop caring"
"""


def test_device_meshes_of_torch_hold_our_groups() -> None:
    """Meshes over 32 fake ranks; in a process of its own, for the process group it makes."""
    subprocess.run([sys.executable, "-c", MESH], check=True, timeout=120)


# ---- grid: faults --------------------------------------------------------------------------


def test_faults_of_callers() -> None:
    grid = RankGrid(ParallelLayout(tp=2, dp_shard=2))
    with pytest.raises(ValueError, match="no axis 'tensor'"):
        grid.groups("tensor")
    with pytest.raises(ValueError, match="named twice"):
        grid.groups("dp", "dp_shard")
    with pytest.raises(ValueError, match="different meshes"):
        grid.groups("tp", "ep")
    with pytest.raises(ValueError, match="different meshes"):
        grid.group_of(0, "cp", "edp")
    with pytest.raises(ValueError, match="no rank 4 among 4"):
        grid.coordinates(4)
    with pytest.raises(ValueError, match="tp = 2: the axis has 2 places"):
        grid.rank(tp=2)
    with pytest.raises(ValueError, match="is not one of"):
        grid.rank(tp=0, ep=0)
    with pytest.raises(ValueError, match="must name each of"):
        RankGrid(ParallelLayout(), order=("pp", "tp"))
    with pytest.raises(ValueError, match="does not name each of 4 ranks once"):
        RankGrid(ParallelLayout(tp=4), permutation=(0, 1, 1, 2))
    with pytest.raises(ValueError, match="has 3 entries for 4 ranks"):
        RankGrid(ParallelLayout(tp=4), permutation=(0, 1, 2))
    with pytest.raises(ValueError, match="must be all of"):
        grid.rank_array(("pp", "tp"))


def test_importing_needs_no_numpy() -> None:
    code = (
        "import sys, hpctrain.layout as l\n"
        "g = l.RankGrid(l.ParallelLayout.resolve(16, tensor=2, expert=4))\n"
        "g.coordinates(3), g.rank(tp=1), g.group_of(3, 'dp', 'cp')\n"
        "assert not {'numpy', 'torch', 'pydantic', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_many_ranks_stay_exact() -> None:
    """100,000 ranks: 8 × 125 × 100, spot-checked by hand (time: benchmarks/rank_grid.py)."""
    grid = RankGrid(ParallelLayout(tp=8, pp=125, dp_shard=100))
    assert grid.groups("dp")[0].tolist() == list(range(0, 800, 8))
    assert grid.groups("pp").T[3].tolist()[:2] == [2400, 2401]
    assert grid.coordinates(99_999)["pp"] == 124
    assert np.array_equal(np.sort(grid.groups("tp", "pp"), axis=None), np.arange(100_000))
