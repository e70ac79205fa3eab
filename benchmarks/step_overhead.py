#!/usr/bin/env python3
"""What our training loop costs: tokens/s of it over tokens/s of a loop written by hand.

Both train the same model from the same weights on the same token file, in one process a rank,
in alternating blocks of steps (ours, hand-written, ours, …), so that whatever else the machine
does meets both. Ours is the whole of a run's loop: reading ahead, dropout keys, agreement of the
ranks, metrics and state files; no checkpoints. The hand-written loop is what a careful user of
PyTorch writes: DDP or FSDP2, fused AdamW, torch's clipping, samples cut from a NumPy array in
memory.

    benchmarks/step_overhead.py [--case one --case ddp --case fsdp2] [--blocks N] [--json]

Exit code 1 where a ratio is below the target.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpctrain.testing.jobs import make_run
from hpctrain.testing.ranks import run_ranks

TARGET = 0.97
CASES = {"one": (1, "none"), "ddp": (2, "none"), "fsdp2": (2, "zero3"), "fsdp2-4": (4, "zero3")}
JOB = """
name: step-overhead
model: {{layers: 4, hidden: 192, heads: 6, vocab_size: 256, position: rotary, norm: rmsnorm,
  activation: swiglu, bias: false}}
parallel: {{sharding: {sharding}}}
data: {{path: tokens.h5, sequence_length: 128}}
train: {{steps: 1000000, global_batch: {batch}, lr: 1e-3}}
health: {{hang_after: 0}}  # the other loop leaves no marks
"""


class HandWritten:
    """A training loop without hpctrain, but for the model."""

    def __init__(self, spec: Any, rank: int, world_size: int, mesh: Any, path: str) -> None:
        import h5py
        import torch

        from hpctrain.model.build import build_model

        self.rank, self.world_size = rank, world_size
        self.batch, self.length = spec.train.global_batch, spec.data.sequence_length
        self.clip = spec.train.clip
        with h5py.File(path) as file:
            self.tokens = file["tokens"][:]
        samples = (len(self.tokens) - 1) // self.length
        self.order = torch.randperm(samples, generator=torch.Generator().manual_seed(1))
        self.position = 0
        model = build_model(spec)
        if spec.parallel.sharding == "zero3":
            from torch.distributed.fsdp import fully_shard

            for block in model.layers.values():
                fully_shard(block, mesh=mesh["dp_shard"])
            fully_shard(model, mesh=mesh["dp_shard"])
        elif world_size > 1:
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.model = model
        decay = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": spec.train.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=spec.train.lr,
            betas=spec.train.betas,
            fused=True,
        )

    def step(self) -> float:
        import numpy as np
        import torch
        import torch.nn.functional as F

        share = self.batch // self.world_size
        first = self.position + self.rank * share
        self.position = (self.position + self.batch) % (len(self.order) - self.batch)
        rows = [
            self.tokens[i * self.length : (i + 1) * self.length + 1]
            for i in self.order[first : first + share].tolist()
        ]
        batch = torch.from_numpy(np.stack(rows).astype(np.int64))
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def measure(root: str, blocks: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """On every rank: wall and CPU seconds of each block of each loop."""
    import torch

    from hpctrain.health.monitor import Monitor
    from hpctrain.layout import RankGrid
    from hpctrain.optim.adamw import build_optimizer
    from hpctrain.parallel.parallelize import parallelize
    from hpctrain.rundir import RunDir
    from hpctrain.runtime.bootstrap import bootstrap, shut_down, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.runtime.stopping import StopWatch
    from hpctrain.spec import read_job
    from hpctrain.spec.resolve import layout_of
    from hpctrain.train.checkpointing import Checkpointer
    from hpctrain.train.data import Batches, open_source
    from hpctrain.train.loop import Trainer
    from hpctrain.train.metrics import Recorder
    from hpctrain.train.state import TrainState
    from hpctrain.train.step import Stepper

    torch.set_num_threads(1)
    run = RunDir(Path(root))
    comm = start_mpi()
    spec = read_job(run.job).spec
    context = bootstrap(comm, RankGrid(layout_of(spec)), RankEnvironment.read())
    model = parallelize(spec, context)
    optimizer = build_optimizer(model.parameters(), spec.train)
    batches = Batches(open_source(spec), spec, context, start=0)
    recorder = Recorder(
        run,
        writes=context.is_first,
        attempt=0,
        total_steps=spec.train.steps,
        world_size=context.world_size,
    )
    monitor = Monitor(run, spec, context, 0, recorder.event)
    ours = Trainer(
        spec=spec,
        context=context,
        state=TrainState(model, optimizer),
        stepper=Stepper(model, optimizer, spec),
        batches=batches,
        checkpointer=Checkpointer(run.checkpoints, spec, context),
        recorder=recorder,
        stopwatch=StopWatch(stop_file=run.stop_file if context.is_first else None),
        monitor=monitor,
    )
    assert spec.data.path is not None
    theirs = HandWritten(spec, context.rank, context.world_size, context.mesh, spec.data.path)
    loops = {"ours": ours.step, "hand_written": theirs.step}
    seconds: dict[str, dict[str, list[float]]] = {
        clock: {name: [] for name in loops} for clock in ("wall", "cpu")
    }
    for block in range(blocks + 1):
        # Who goes first alternates too.
        for name in sorted(loops, reverse=bool(block % 2)):
            comm.Barrier()
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                loops[name]()
            cpu = time.process_time() - cpu
            comm.Barrier()
            if block:  # the first warms up
                seconds["wall"][name].append(time.perf_counter() - began)
                seconds["cpu"][name].append(cpu)
    monitor.close()
    batches.close()
    shut_down(context)
    return seconds


def run_case(name: str, blocks: int, steps: int, batch: int) -> dict[str, Any]:
    ranks, sharding = CASES[name]
    with tempfile.TemporaryDirectory(prefix="hpctrain-benchmark-") as folder:
        _write_tokens(Path(folder) / "tokens.h5")
        job = JOB.format(sharding=sharding, batch=batch)
        run = make_run(job, Path(folder), f"ranks_per_node={ranks}")
        env = {"OMP_NUM_THREADS": "1"}
        found = run_ranks(ranks, measure, str(run.root), blocks, steps, timeout=1200, env=env)
    ours, theirs = found[0]["wall"]["ours"], found[0]["wall"]["hand_written"]
    cpu = {
        loop: sum(statistics.median(rank["cpu"][loop]) for rank in found)
        for loop in ("ours", "hand_written")
    }
    tokens = steps * batch * 128
    pairs = statistics.quantiles([b / a for a, b in zip(ours, theirs, strict=True)], n=4)
    ratio = statistics.median(theirs) / statistics.median(ours)
    return {
        "case": name,
        "ranks": ranks,
        "sharding": sharding,
        "tokens_per_second": tokens / statistics.median(ours),
        "hand_written_tokens_per_second": tokens / statistics.median(theirs),
        "ratio": ratio,
        "ratio_of_pairs_quartiles": pairs,
        "cpu_ratio": cpu["hand_written"] / cpu["ours"],
        "passed": ratio >= TARGET,
    }


def _write_tokens(path: Path) -> None:
    import h5py
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("tokens", data=tokens).attrs["vocab_size"] = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="all by default")
    parser.add_argument("--blocks", type=int, default=15, help="measured blocks of each loop")
    parser.add_argument("--steps", type=int, default=4, help="steps a block")
    parser.add_argument("--batch", type=int, default=32, help="sequences a step, over all ranks")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    results = []
    for name in options.case or CASES:
        result = run_case(name, options.blocks, options.steps, options.batch)
        results.append(result)
        low, _, high = result["ratio_of_pairs_quartiles"]
        print(
            f"{name:6} {result['ranks']} rank(s): ours {result['tokens_per_second']:8.0f} "
            f"tokens/s, by hand {result['hand_written_tokens_per_second']:8.0f}, ratio "
            f"{result['ratio']:.3f} (middle half of the pairs {low:.3f} to {high:.3f}), "
            f"of CPU time {result['cpu_ratio']:.3f}, target {TARGET}: "
            f"{'ok' if result['passed'] else 'BELOW'}",
            file=sys.stderr if options.json else sys.stdout,
            flush=True,
        )
    if options.json:
        print(json.dumps({"schema_version": 1, "target": TARGET, "cases": results}))
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
