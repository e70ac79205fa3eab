#!/usr/bin/env python3
"""Collectives in two levels against flat ones, on two hosts behind a slow link.

Two hosts in network namespaces with 4 ranks each, both directions of their links limited to 200
Mbit/s, gloo on CPU. Flat and hierarchical calls alternate on the same data; the ratio is that of
the medians. ``--crossover`` goes through sizes from 1 KiB up and shows where two levels begin to
pay, which is what MEASURED in hpctrain/runtime/collectives.py was read from.

    benchmarks/collectives.py [--mib N] [--repeat N] [--crossover] [--json]

A ring over 2 x 4 ranks passes 2·7/8·S over the link between the hosts and no algorithm less than
S: 1.75 is the most that two levels can gain over a ring that loses nothing, as long as S stays S.
``packed`` makes it smaller, without loss: messages are normal numbers, as gradients about are. Exit
code 1 where the packed all-reduce gains less than 1.8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from hpctrain.testing.hosts import Hosts
from hpctrain.testing.ranks import run_ranks

TARGET = 1.8
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
SIZES = [2**power for power in range(10, 25, 2)]


def measure(operations: list[str], sizes: list[int], repeat: int) -> list[dict[str, Any]]:
    """On every rank: seconds of each call; a size is of the larger of input and output."""
    import torch
    from mpi4py import MPI

    from hpctrain.layout import RankGrid
    from hpctrain.runtime import collectives
    from hpctrain.runtime.bootstrap import bootstrap, shut_down, start_mpi
    from hpctrain.runtime.environment import RankEnvironment

    torch.set_num_threads(1)
    comm = start_mpi()
    grid = RankGrid.from_sizes({"dp_shard": comm.size})
    context = bootstrap(comm, grid, RankEnvironment.read(), device="cpu")
    group = context.communicators.prepare("dp")
    assert group.levels is not None, "the ranks are on one host"

    generator = torch.Generator().manual_seed(comm.rank)

    def call(operation: str, size: int, algorithm: str) -> float:
        numbers = size // 4
        # Like gradients: normal numbers.
        whole = torch.randn(numbers, generator=generator)
        part = torch.randn(numbers // comm.size, generator=generator)
        arguments = {
            "reduce_scatter": (part, whole),
            "all_gather": (whole, part),
            "all_to_all": (torch.empty_like(whole), whole),
        }.get(operation, (whole,))
        comm.Barrier()
        began = time.perf_counter()
        getattr(collectives, operation)(group, *arguments, algorithm=algorithm)
        return comm.allreduce(time.perf_counter() - began, op=MPI.MAX)

    rows = []
    for operation in operations:
        for size in sizes:
            kinds = ["flat", "hierarchical", *(["packed"] if operation == "all_reduce" else [])]
            seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
            for number in range(repeat + 1):
                # Who goes first alternates too; the first round warms up.
                for algorithm in sorted(seconds, reverse=bool(number % 2)):
                    took = call(operation, size, algorithm)
                    if number:
                        seconds[algorithm].append(took)
            rows.append({"operation": operation, "bytes": size, "seconds": seconds})
    shut_down(context)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=16, help="MiB of a message")
    parser.add_argument("--repeat", type=int, default=7, help="calls of each kind")
    parser.add_argument("--rate", default="200mbit", help="of each host's link, as tc writes it")
    parser.add_argument("--per-host", type=int, default=4, help="ranks a host")
    parser.add_argument("--operation", action="append", choices=OPERATIONS, help="all by default")
    parser.add_argument("--crossover", action="store_true", help="sizes from 1 KiB to 16 MiB")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    operations = options.operation or list(OPERATIONS)
    sizes = SIZES if options.crossover else [options.mib * 2**20]
    with Hosts(2, rate=options.rate) as hosts:
        found = run_ranks(
            2 * options.per_host,
            measure,
            operations,
            sizes,
            options.repeat,
            launcher=hosts.launcher(options.per_host),
            timeout=1800,
        )
    results = []
    for row in found[0]:
        flat, *others = (statistics.median(of) for of in row["seconds"].values())
        for kind, median in zip(list(row["seconds"])[1:], others, strict=True):
            results.append(
                {
                    "operation": row["operation"],
                    "kind": kind,
                    "bytes": row["bytes"],
                    "flat_s": flat,
                    "two_levels_s": median,
                    "ratio": flat / median,
                    "seconds": row["seconds"][kind],
                }
            )
    gain = next((r["ratio"] for r in results[::-1] if r["kind"] == "packed"), None)
    passed = gain is None or gain >= TARGET
    if options.json:
        print(
            json.dumps(
                {
                    "schema_version": 1,
                    "hosts": 2,
                    "ranks_per_host": options.per_host,
                    "rate": options.rate,
                    "target": TARGET,
                    "passed": passed,
                    "rows": results,
                }
            )
        )
    else:
        print("operation                       bytes      flat   two levels   ratio of medians")
        for row in results:
            print(
                f"{row['operation']:14} {row['kind']:12} {row['bytes']:9d} "
                f"{row['flat_s'] * 1e3:7.1f} ms {row['two_levels_s'] * 1e3:9.1f} ms "
                f"{row['ratio']:9.2f}"
            )
        if gain is not None:
            verdict = "ok" if passed else "BELOW"
            print(f"packed all-reduce: {gain:.2f} times, target {TARGET}: {verdict}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
