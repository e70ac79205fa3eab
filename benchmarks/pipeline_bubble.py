#!/usr/bin/env python3
"""Measured bubble of every pipeline schedule against the simulator's.

Ranks run the real executor, messages and all, on layers that sleep a set time in each pass, so
that four ranks keep time on two cores. The measured bubble is 1 - mean busy time of a rank over the
time from the first rank's start to the last one's end.

    benchmarks/pipeline_bubble.py [--schedule zb-v ...] [-p 4] [-m 8] [--seconds 0.05] [--json]

Exit code 1 where a bubble is more than 3 % (absolute) off the simulator's, or where zb-v's is
more than a third of 1f1b's.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hpctrain.schedule import Costs, make, names, simulate
from hpctrain.testing.ranks import run_ranks

OFF = 0.03
LAYERS = 8
JOB = """
model: {{layers: {layers}, hidden: 8, heads: 1, vocab_size: 16}}
parallel: {{pipeline: {ranks}, emulate: {seconds}, schedule: "{schedule}"}}
data: {{path: none, sequence_length: 8}}
train: {{steps: 1, global_batch: {micro_batches}, micro_batch: 1}}
"""


def measure(
    schedules: list[str], micro_batches: int, seconds: float, steps: int
) -> dict[str, list[dict[str, Any]]]:
    """On every rank, for each schedule and step: start, end and busy time in seconds."""
    from hpctrain.layout import RankGrid
    from hpctrain.parallel.parallelize import parallelize
    from hpctrain.runtime.bootstrap import bootstrap, shut_down, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.spec.resolve import layout_of
    from hpctrain.testing.parity import _micro_batches, _spec

    comm = start_mpi()
    found: dict[str, list[dict[str, Any]]] = {}
    context = None
    for name in schedules:
        job = JOB.format(
            layers=LAYERS,
            ranks=comm.size,
            seconds=seconds,
            schedule=name,
            micro_batches=micro_batches,
        )
        spec = _spec(job, comm.size, [])
        if context is None:
            grid = RankGrid(layout_of(spec))
            context = bootstrap(comm, grid, RankEnvironment.read(), device="cpu")
        pipeline = parallelize(spec, context).pipeline
        assert pipeline is not None
        found[name] = []
        for step in range(steps + 1):
            batches = _micro_batches(spec, context, step)
            pipeline.spans = []
            comm.Barrier()
            pipeline.run(batches, [batch.keys for batch in batches])
            spans = pipeline.spans
            if step:  # the first one warms up
                busy = sum(span.end - span.start for span in spans)
                found[name].append({"start": spans[0].start, "end": spans[-1].end, "busy": busy})
    shut_down(context)
    return found


def bubbles(
    schedules: list[str], ranks: int, micro_batches: int, seconds: float, steps: int
) -> list[dict[str, Any]]:
    """Measured and simulated bubble of each schedule; of several steps the shortest counts."""
    longest = len(schedules) * (steps + 1) * LAYERS * micro_batches * seconds
    by_rank = run_ranks(
        ranks, measure, schedules, micro_batches, seconds, steps, timeout=240 + 2 * longest
    )
    results = []
    for name in schedules:
        steps_found = [
            (
                max(rank["end"] for rank in of_step) - min(rank["start"] for rank in of_step),
                sum(rank["busy"] for rank in of_step) / ranks,
            )
            for of_step in zip(*(rank[name] for rank in by_rank), strict=True)
        ]
        makespan, busy = min(steps_found)
        times = Costs(*[LAYERS / ranks * seconds] * 3)
        timeline = simulate(make(name, ranks=ranks, micro_batches=micro_batches), times)
        results.append(
            {
                "schedule": name,
                "measured": 1 - busy / makespan,
                "simulated": timeline.bubble_fraction,
                "makespan": makespan,
                "simulated_makespan": timeline.makespan,
            }
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", action="append", help="all by default")
    parser.add_argument("-p", "--ranks", type=int, default=4)
    parser.add_argument("-m", "--micro-batches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.05, help="of a layer's pass")
    parser.add_argument("--steps", type=int, default=3, help="measured, after one to warm up")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    schedules = options.schedule or [*names(), "1f1b+2bp"]
    results = bubbles(
        schedules, options.ranks, options.micro_batches, options.seconds, options.steps
    )
    good = True
    for result in results:
        result["passed"] = abs(result["measured"] - result["simulated"]) <= OFF
        good &= result["passed"]
        print(
            f"{result['schedule']:12} bubble {result['measured']:.3f}, simulated "
            f"{result['simulated']:.3f}; {result['makespan']:.3f} s, simulated "
            f"{result['simulated_makespan']:.3f} s: {'ok' if result['passed'] else 'OFF'}",
            file=sys.stderr if options.json else sys.stdout,
        )
    by_name = {result["schedule"]: result["measured"] for result in results}
    if {"1f1b", "zb-v"} <= by_name.keys():
        good &= by_name["zb-v"] <= by_name["1f1b"] / 3
    if options.json:
        print(json.dumps({"schema_version": 1, "tolerance": OFF, "schedules": results}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
