#!/usr/bin/env python3
"""What the rank grid and the placement cost, at sizes up to 100,000 ranks.

For each size: building the coordinates of all ranks and the groups of every axis of both meshes,
against a plain double loop that only counts to the same number of (rank, axis) pairs; and judging
one placement of the dense axes on Frontier nodes.

    benchmarks/rank_grid.py [--json] [--repeat N]

Exit code 1 where 100,000 ranks take longer than the plain loop over them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

from hpctrain.fabric import Fabric, Traffic, axis_cost
from hpctrain.layout import DENSE_AXES, EXPERT_AXES, ParallelLayout, RankGrid
from hpctrain.machine import get_machine

LAYOUTS = {
    1_024: ParallelLayout(tp=8, pp=8, dp_replicate=2, dp_shard=8, ep=16),
    10_000: ParallelLayout(tp=8, pp=25, dp_replicate=5, dp_shard=10, ep=10),
    100_000: ParallelLayout(tp=8, cp=2, pp=25, dp_replicate=10, dp_shard=25, ep=40),
}
AXES = (*DENSE_AXES, *EXPERT_AXES[1:])


def best(work: Callable[[], object], repeat: int) -> float:
    """Seconds of the fastest of ``repeat`` runs."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def all_groups(layout: ParallelLayout) -> None:
    grid = RankGrid(layout)
    grid.coordinate_table(AXES)
    for axis in AXES:
        grid.groups(axis)
    grid.groups("dp", "cp")


def permuted_groups(layout: ParallelLayout) -> None:
    grid = RankGrid(layout, permutation=tuple(range(layout.world_size - 1, -1, -1)))
    for axis in AXES:
        grid.groups(axis)


def plain_loop(layout: ParallelLayout) -> int:
    found = 0
    for _ in range(layout.world_size):
        for _ in AXES:
            found += 1
    return found


def judge(layout: ParallelLayout, fabric: Fabric) -> None:
    grid = RankGrid(layout)
    for axes, pattern in (
        (("tp",), "all_reduce"), (("pp",), "chain"), (("dp", "cp"), "reduce_scatter"),
        (("ep",), "all_to_all"),
    ):  # fmt: skip
        axis_cost(fabric, grid, Traffic(axes, pattern, 1e9))  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    frontier = get_machine("frontier")
    rows = []
    for ranks, layout in LAYOUTS.items():
        assert layout.world_size == ranks
        fabric = Fabric.of(frontier, ranks // 8)
        seconds = best(lambda layout=layout: all_groups(layout), asked.repeat)
        loop = best(lambda layout=layout: plain_loop(layout), asked.repeat)
        rows.append(
            {
                "ranks": ranks,
                "groups_s": seconds,
                "permuted_s": best(lambda layout=layout: permuted_groups(layout), asked.repeat),
                "plain_loop_s": loop,
                "ratio": seconds / loop,
                "judge_s": best(
                    lambda layout=layout, fabric=fabric: judge(layout, fabric), asked.repeat
                ),
            }
        )
    if asked.json:
        print(json.dumps({"schema_version": 1, "rows": rows}))
    else:
        print("  ranks   all groups   permuted   plain loop   ratio   judging a placement")
        for row in rows:
            groups, permuted, loop, judged = (
                row[key] * 1e3 for key in ("groups_s", "permuted_s", "plain_loop_s", "judge_s")
            )
            print(
                f"{row['ranks']:7d} {groups:9.1f} ms {permuted:7.1f} ms {loop:9.1f} ms "
                f"{row['ratio']:7.2f} {judged:12.1f} ms"
            )
    return 0 if rows[-1]["ratio"] <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
