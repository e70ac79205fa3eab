#!/usr/bin/env python3
"""Ways to dispatch tokens to experts against each other, on two hosts behind a slow link.

Two hosts in network namespaces with some ranks each, both directions of their links limited, gloo
on CPU; experts lie on all ranks. For each way and each routing: seconds of a forward and backward
of one layer of experts (median, slowest rank), bytes that left a host over its link (the kernel's
own count), rows that the busiest rank worked on, and the largest difference from the flat way.

    benchmarks/moe.py [--rate 200mbit] [--per-host N] [--tokens N] [--hidden N] [--top-k N]
                      [--experts N] [--repeat N] [--json]

Exit code 1 where two levels do not cut the bytes over the link.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from hpctrain.testing.hosts import Hosts
from hpctrain.testing.ranks import run_ranks

WAYS = {
    "flat": "parallel.dispatch.kind=flat",
    "flat, 2 parts": "parallel.dispatch.chunks=2",
    "two levels": "parallel.dispatch.kind=hierarchical",
    "two levels, 2 parts": "parallel.dispatch.kind=hierarchical parallel.dispatch.chunks=2",
    "flat, copies": "parallel.dispatch.copies=4",
}
ROUTINGS = ("even", "skewed")


def measure(job: str, repeat: int) -> list[dict[str, Any]]:
    """On every rank: what each way took, for each routing."""
    import torch

    from hpctrain.layout import RankGrid
    from hpctrain.runtime.bootstrap import bootstrap, shut_down, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.spec.resolve import layout_of
    from hpctrain.testing import parity

    torch.set_num_threads(1)
    comm = start_mpi()
    specs = {name: parity._spec(job, comm.size, text.split()) for name, text in WAYS.items()}
    grid = RankGrid(layout_of(specs["flat"]))
    context = bootstrap(comm, grid, RankEnvironment.read(), device="cpu")
    rows = []
    for routing in ROUTINGS:
        layers = {name: _layer(context, spec, routing) for name, spec in specs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        sent: dict[str, int] = {}
        worked: dict[str, int] = {}
        outputs: dict[str, Any] = {}
        for number in range(repeat + 1):
            for name, (layer, x, grad) in layers.items():
                counts: list[int] = []
                hook = layer.experts.register_forward_pre_hook(
                    lambda _, args, counts=counts: counts.append(args[0].shape[0])
                )
                comm.Barrier()
                before, began = _sent_bytes(), time.perf_counter()
                y = layer(x)
                y.backward(grad)
                took = time.perf_counter() - began
                comm.Barrier()
                hook.remove()
                sent[name] = _sent_bytes() - before
                worked[name], outputs[name] = sum(counts), y.detach()
                if number:  # the first round warms up
                    seconds[name].append(took)
        rows += [
            {
                "routing": routing,
                "way": name,
                "seconds": seconds[name],
                "link_bytes": sent[name],
                "rows": worked[name],
                "difference": float((outputs[name] - outputs["flat"]).abs().max()),
            }
            for name in WAYS
        ]
    shut_down(context)
    return rows


def _layer(context: Any, spec: Any, routing: str) -> tuple[Any, Any, Any]:
    import torch

    from hpctrain.model.init import init_parameters
    from hpctrain.model.transformer import Transformer
    from hpctrain.parallel.expert import Place, cut_experts, expert_group, spread_experts

    dims = spec.model.transformer()
    model = Transformer(dims)
    init_parameters(model, 0)
    router = model.layers["0"].ffn.router.weight.data
    if routing == "skewed":
        # The first experts, all on the first rank, are what nearly every token wants.
        router[: dims.moe.top_k, 0] += 4
    place = Place(context.coordinate("ep"), context.size("ep"))
    cut_experts(model, place, reduced=False)
    spread_experts(model, expert_group(spec, context, None))
    generator = torch.Generator().manual_seed(context.rank)
    shape = (spec.train.global_batch // context.world_size, spec.data.sequence_length, dims.hidden)
    x = torch.randn(shape, generator=generator)
    x[..., 0] = 1
    return model.layers["0"].ffn, x.requires_grad_(), torch.randn(shape, generator=generator)


def _sent_bytes() -> int:
    """Bytes that this host has sent over its link, as the kernel counts them."""
    total = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            total += int(numbers.split()[8])
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--per-host", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=24)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ranks = 2 * options.per_host
    job = f"""\
model:
  layers: 1
  hidden: {options.hidden}
  heads: 4
  vocab_size: 8
  bias: false
  moe: {{experts: {options.experts}, top_k: {options.top_k}, hidden: 128, balance: 0}}
data: {{path: none, sequence_length: {options.tokens}}}
train: {{steps: 1, global_batch: {ranks}}}
parallel: {{expert: {ranks}}}
"""
    with Hosts(2, rate=options.rate) as hosts:
        launcher = hosts.launcher(options.per_host)
        found = run_ranks(ranks, measure, job, options.repeat, launcher=launcher, timeout=500)
    report = []
    for number, row in enumerate(found[0]):
        each = [rank[number] for rank in found]
        slowest = [max(one["seconds"][i] for one in each) for i in range(options.repeat)]
        report.append(
            {
                "routing": row["routing"],
                "way": row["way"],
                "seconds": statistics.median(slowest),
                # All ranks of a host see the same counter; the largest span of one of each host.
                "link_bytes": max(one["link_bytes"] for one in each),
                "rows": max(one["rows"] for one in each),
                "difference": max(one["difference"] for one in each),
            }
        )
    if options.json:
        print(json.dumps(report))
    else:
        heads = ("seconds", "MB over link", "rows", "gap")
        print(f"{'routing':8} {'way':20} {heads[0]:>8} {heads[1]:>13} {heads[2]:>6} {heads[3]:>8}")
        for row in report:
            print(
                f"{row['routing']:8} {row['way']:20} {row['seconds']:8.3f} "
                f"{row['link_bytes'] / 1e6:13.2f} {row['rows']:6d} {row['difference']:8.1e}"
            )
    by_key = {(row["routing"], row["way"]): row for row in report}
    gains = all(
        by_key[routing, "two levels"]["link_bytes"] < by_key[routing, "flat"]["link_bytes"]
        for routing in ROUTINGS
    )
    return 0 if gains else 1


if __name__ == "__main__":
    sys.exit(main())
