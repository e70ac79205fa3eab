#!/usr/bin/env python3
"""Our Ulysses attention and expert layer beside DeepSpeed's, in the same processes.

Attention: 8 heads of 64 over a shared sequence, forward and backward, causal; DeepSpeed's
DistributedAttention around PyTorch's attention. Experts: one layer of 16, top 2, nothing dropped,
with the same weights in both, under an even routing and one in which most tokens want the experts
of the first rank. Calls alternate, so that whatever else the machine does meets both; the ratio is
that of the medians, theirs to ours: above 1 ours is faster. ``rows`` is what the busiest rank's
experts work on, ``gap`` the largest difference of the outputs over the largest of them.

    pip install deepspeed && DS_ACCELERATOR=cpu benchmarks/beside_deepspeed.py [--ranks 4] [--json]

Exit code 1 where outputs differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from hpctrain.testing.ranks import run_ranks

HEADS, WIDTH = 8, 64
JOB = """
model:
  layers: 1
  hidden: 256
  heads: 4
  vocab_size: 8
  bias: false
  moe: {{experts: 16, top_k: 2, hidden: 512, balance: 0}}
data: {{path: none, sequence_length: {length}}}
train: {{steps: 1, global_batch: {ranks}}}
"""
EXPERTS = "parallel.expert={ranks}"
ULYSSES = "parallel.context.size={ranks} parallel.context.method=ulysses train.global_batch=1"

Call = Callable[[], Any]


def measure(job: str, layouts: list[str], repeat: int) -> list[dict[str, Any]]:
    """On every rank: outputs' gap, rows and seconds of each call of both."""
    import deepspeed
    import torch

    from hpctrain.layout import RankGrid
    from hpctrain.runtime.bootstrap import bootstrap, shut_down, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.spec.resolve import layout_of
    from hpctrain.testing.parity import _spec, _with_grid

    torch.set_num_threads(1)
    comm = start_mpi()
    ulysses, experts = (_spec(job, comm.size, text.split()) for text in layouts)
    context = bootstrap(comm, RankGrid(layout_of(experts)), RankEnvironment.read(), device="cpu")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    wide = _with_grid(context, RankGrid(layout_of(ulysses)))
    found = []
    cases: dict[str, tuple[Call, Call, Call]] = {"attention": _attention(ulysses, wide)}
    for routing in ("even", "skewed"):
        cases[f"experts, {routing}"] = _experts(experts, context, routing)
    for name, (ours, theirs, rows) in cases.items():
        mine, other = ours(), theirs()
        gap = float((mine - other).abs().max() / mine.abs().max())
        worked = rows()
        seconds: dict[str, list[float]] = {"ours": [], "deepspeed": []}
        for turn in range(repeat):
            pair = [("ours", ours), ("deepspeed", theirs)]
            for who, call in pair if turn % 2 else reversed(pair):
                comm.Barrier()
                began = time.perf_counter()
                call()
                comm.Barrier()
                seconds[who].append(time.perf_counter() - began)
        found.append({"case": name, "gap": gap, "rows": worked, "seconds": seconds})
    shut_down(context)
    return found


def _attention(spec: Any, context: Any) -> tuple[Call, Call, Call]:
    import torch
    import torch.nn.functional as F
    from deepspeed.sequence.layer import DistributedAttention

    from hpctrain.parallel.context import ContextAttention, context_groups

    groups = context_groups(spec, context)
    assert groups is not None
    mine = ContextAttention(groups)
    size = context.size("cp")
    part = spec.data.sequence_length // size
    torch.manual_seed(context.rank)
    x_BNSD = [torch.randn(1, HEADS, part, WIDTH, requires_grad=True) for _ in range(3)]
    # Their own order: tokens, samples, heads, channels.
    x_SBND = [x.detach().permute(2, 0, 1, 3).contiguous().requires_grad_() for x in x_BNSD]

    def inside(*qkv: Any, **_: Any) -> Any:
        q, k, v = (x.permute(1, 2, 0, 3) for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)

    group = context.communicators.along("cp").group
    attention = DistributedAttention(inside, group, scatter_idx=2, gather_idx=0)

    def ours() -> Any:
        y = mine(*x_BNSD)
        y.sum().backward()
        return y.detach()

    def theirs() -> Any:
        y = attention(*x_SBND, 1)
        y.sum().backward()
        return y.detach().view(part, 1, HEADS, WIDTH).permute(1, 2, 0, 3)

    return ours, theirs, lambda: ()


class _Network:
    """Made on the ranks, where torch is: one expert as ours is, for DeepSpeed to copy."""

    @staticmethod
    def make(hidden: int, channels: int) -> Any:
        from torch import nn

        return nn.Sequential(
            nn.Linear(hidden, channels, bias=False),
            nn.GELU(approximate="tanh"),
            nn.Linear(channels, hidden, bias=False),
        )


def _experts(spec: Any, context: Any, routing: str) -> tuple[Call, Call, Call]:
    from deepspeed.moe.layer import MoE
    from moe import _layer

    layer, x, grad = _layer(context, spec, routing)
    dims = spec.model.transformer().moe
    hidden = x.shape[-1]
    size = context.world_size
    theirs_layer = MoE(
        hidden,
        _Network.make(hidden, dims.hidden),
        num_experts=dims.experts,
        ep_size=size,
        k=dims.top_k,
        drop_tokens=False,
        top2_2nd_expert_sampling=False,
    )
    theirs_layer.set_deepspeed_parallelism()
    theirs_layer.deepspeed_moe.gate.wg.weight.data.copy_(layer.router.weight.data)
    local = theirs_layer.deepspeed_moe.experts.deepspeed_experts
    for number, expert in enumerate(local):
        expert[0].weight.data.copy_(layer.experts.up.weight.data[number])
        expert[2].weight.data.copy_(layer.experts.down.weight.data[number])
    worked = {"ours": 0, "deepspeed": 0}

    def count(who: str, rows: int) -> None:
        worked[who] += rows

    layer.experts.register_forward_pre_hook(
        lambda _, args: count("ours", args[0].numel() // hidden)
    )
    for expert in local:
        expert.register_forward_pre_hook(
            lambda _, args: count("deepspeed", args[0].numel() // hidden)
        )

    def rows() -> tuple[int, int]:
        return worked["ours"], worked["deepspeed"]

    def ours() -> Any:
        y = layer(x)
        y.backward(grad)
        return y.detach()

    def theirs() -> Any:
        y, _, _ = theirs_layer(x)
        y.backward(grad)
        return y.detach()

    return ours, theirs, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--tokens", type=int, default=4096, help="of the sequence; of each rank, experts"
    )
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        print("no deepspeed here: pip install deepspeed", file=sys.stderr)
        return 2
    job = JOB.format(length=options.tokens, ranks=options.ranks)
    layouts = [text.format(ranks=options.ranks) for text in (ULYSSES, EXPERTS)]
    env = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    found = run_ranks(options.ranks, measure, job, layouts, options.repeat, timeout=900, env=env)
    report = []
    for number, row in enumerate(found[0]):
        medians = {who: statistics.median(row["seconds"][who]) for who in ("ours", "deepspeed")}
        report.append(
            {
                "case": row["case"],
                **medians,
                "ratio": medians["deepspeed"] / medians["ours"],
                "rows": [
                    max(column) for column in zip(*(r[number]["rows"] for r in found), strict=True)
                ],
                "gap": max(rank[number]["gap"] for rank in found),
            }
        )
    if options.json:
        print(json.dumps(report))
    else:
        print(
            f"{'case':16} {'ours':>10} {'DeepSpeed':>10} {'ratio':>6} "
            f"{'rows, ours':>11} {'theirs':>8} {'gap':>8}"
        )
        for row in report:
            rows = row["rows"] or ("", "")
            print(
                f"{row['case']:16} {1e3 * row['ours']:7.1f} ms {1e3 * row['deepspeed']:7.1f} ms "
                f"{row['ratio']:6.2f} {rows[0]:>11} {rows[1]:>8} {row['gap']:8.1e}"
            )
    return 0 if all(row["gap"] <= 1e-4 for row in report) else 1


if __name__ == "__main__":
    sys.exit(main())
