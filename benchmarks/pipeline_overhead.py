#!/usr/bin/env python3
"""Our executor's 1F1B against torch.distributed.pipelining's Schedule1F1B.

Both train the same stages of the same model from the same weights on the same tokens, in the
same processes, in alternating blocks of steps, so that whatever else the machine does meets
both. A step is forward and backward of all micro-batches, clipping by the global norm and AdamW.

    benchmarks/pipeline_overhead.py [-p 2] [-m 8] [--blocks 15] [--json]

Exit code 1 where ours is slower than 0.97 of torch's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

from hpctrain.testing.ranks import run_ranks

TARGET = 0.97
LENGTH = 128
JOB = """
model: {{layers: {layers}, hidden: 192, heads: 6, vocab_size: 256, position: rotary, norm: rmsnorm,
  activation: swiglu, bias: false, tied_embeddings: false}}
parallel: {{pipeline: {ranks}}}
data: {{path: none, sequence_length: 128}}
train: {{steps: 1000000, global_batch: {batch}, micro_batch: 4, lr: 1e-3}}
"""


class Torch:
    """Schedule1F1B over the stages of this rank."""

    def __init__(self, spec: Any, context: Any, micro_batches: int) -> None:
        import torch
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        from hpctrain.model.init import init_parameters
        from hpctrain.model.transformer import Transformer, next_token_loss
        from hpctrain.optim.adamw import build_optimizer
        from hpctrain.schedule.job import stage_layers

        dims = spec.model.transformer()
        self.rank, self.ranks = context.coordinate("pp"), context.size("pp")
        self.group = context.mesh["pp"].get_group()
        self.clip = spec.train.clip
        self.model = Transformer(
            dims,
            layers=stage_layers(spec, dims.layers, self.ranks)[self.rank],
            has_embedding=self.rank == 0,
            has_head=self.rank == self.ranks - 1,
        )
        init_parameters(self.model, spec.train.seed)
        device = torch.device("cpu")
        stage = PipelineStage(self.model, self.rank, self.ranks, device, group=self.group)
        self.schedule = Schedule1F1B(stage, micro_batches, loss_fn=next_token_loss)
        self.optimizer = build_optimizer(self.model.parameters(), spec.train)

    def step(self, batches: list[Any]) -> float:
        import torch
        import torch.distributed as dist

        losses: list[Any] = []
        if self.rank == 0:
            self.schedule.step(torch.cat([micro.batch[0] for micro in batches]))
        elif self.rank == self.ranks - 1:
            targets = torch.cat([micro.batch[1] for micro in batches])
            self.schedule.step(target=targets, losses=losses)
        else:
            self.schedule.step()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
        dist.all_reduce(squares, group=self.group)
        scale = (self.clip / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(sum(losses)) / len(batches)


class Ours:
    """The executor, through the training step."""

    def __init__(self, spec: Any, context: Any) -> None:
        from hpctrain.optim.adamw import build_optimizer
        from hpctrain.parallel.parallelize import parallelize
        from hpctrain.train.step import Stepper

        model = parallelize(spec, context)
        self.ranks = context.size("pp")
        self.stepper = Stepper(model, build_optimizer(model.parameters(), spec.train), spec)
        self.number = 0

    def step(self, batches: list[Any]) -> float:
        self.number += 1
        loss = self.stepper.forward_backward(self.number, batches)
        self.stepper.update(self.number)
        return float(loss) / self.ranks


def measure(job: str, blocks: int, steps: int) -> dict[str, Any]:
    """On every rank: wall and CPU seconds of each block of each loop, and first losses."""
    import torch

    from hpctrain.layout import RankGrid
    from hpctrain.runtime.bootstrap import bootstrap, shut_down, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.spec.resolve import layout_of
    from hpctrain.testing.parity import _micro_batches, _spec

    torch.set_num_threads(1)
    comm = start_mpi()
    spec = _spec(job, comm.size, [])
    context = bootstrap(comm, RankGrid(layout_of(spec)), RankEnvironment.read(), device="cpu")
    batches = _micro_batches(spec, context, 1)
    loops = {"ours": Ours(spec, context), "torch": Torch(spec, context, len(batches))}
    losses: dict[str, list[float]] = {name: [] for name in loops}
    found: dict[str, Any] = {clock: {name: [] for name in loops} for clock in ("wall", "cpu")}
    for block in range(blocks + 1):
        for name in sorted(loops, reverse=bool(block % 2)):  # who goes first alternates too
            comm.Barrier()
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                losses[name].append(loops[name].step(batches))
            cpu = time.process_time() - cpu
            comm.Barrier()
            if block:  # the first warms up
                found["wall"][name].append(time.perf_counter() - began)
                found["cpu"][name].append(cpu)
    shut_down(context)
    return found | {"losses": {name: of[:5] for name, of in losses.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-p", "--ranks", type=int, default=2)
    parser.add_argument("-m", "--micro-batches", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=15, help="measured blocks of each loop")
    parser.add_argument("--steps", type=int, default=2, help="steps a block")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    batch = 4 * options.micro_batches
    job = JOB.format(layers=2 * options.ranks, ranks=options.ranks, batch=batch)
    ranks = run_ranks(options.ranks, measure, job, options.blocks, options.steps, timeout=1800)
    ours, theirs = (ranks[0]["wall"][name] for name in ("ours", "torch"))
    last = ranks[-1]["losses"]
    assert all(abs(a - b) < 1e-3 for a, b in zip(last["ours"], last["torch"], strict=True)), last
    cpu = {
        name: sum(statistics.median(rank["cpu"][name]) for rank in ranks)
        for name in ("ours", "torch")
    }
    ratio = statistics.median(theirs) / statistics.median(ours)
    tokens = options.steps * batch * LENGTH
    result = {
        "ranks": options.ranks,
        "micro_batches": options.micro_batches,
        "tokens_per_second": tokens / statistics.median(ours),
        "torch_tokens_per_second": tokens / statistics.median(theirs),
        "ratio": ratio,
        "ratio_of_pairs_quartiles": statistics.quantiles(
            [b / a for a, b in zip(ours, theirs, strict=True)], n=4
        ),
        "cpu_ratio": cpu["torch"] / cpu["ours"],
        "passed": ratio >= TARGET,
    }
    low, _, high = result["ratio_of_pairs_quartiles"]
    print(
        f"1f1b on {options.ranks} ranks, {options.micro_batches} micro-batches: ours "
        f"{result['tokens_per_second']:.0f} tokens/s, torch's "
        f"{result['torch_tokens_per_second']:.0f}, ratio {ratio:.3f} (middle half of the pairs "
        f"{low:.3f} to {high:.3f}), of CPU time {result['cpu_ratio']:.3f}, target {TARGET}: "
        f"{'ok' if result['passed'] else 'BELOW'}",
        file=sys.stderr if options.json else sys.stdout,
    )
    if options.json:
        print(json.dumps({"schema_version": 1, "target": TARGET, **result}))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
