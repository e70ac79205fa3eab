"""Bytes a rank holds between two steps, by kind of sharding: counted, not estimated.

    python benchmarks/sharding_memory.py [RANKS]

Prints a Markdown table: parameters, gradients as they stand before the update, and optimizer
states of the rank that holds most, for a small transformer with AdamW or Muon.
"""

from __future__ import annotations

import sys
from typing import Any

from hpctrain.testing.ranks import run_ranks

JOB = """\
model: {layers: 4, hidden: 128, heads: 4, vocab_size: 512}
data: {path: none, sequence_length: 16}
train: {steps: 1, global_batch: 4}
"""
KINDS = [
    *(f"parallel.sharding={kind}" for kind in ("none", "zero1", "zero2", "zero3")),
    *(f"parallel.sharding={kind} train.optimizer.kind=muon" for kind in ("none", "zero1")),
]


def held(kinds: list[str]) -> list[list[int]]:
    """[parameters, gradients, states] in bytes of each kind on this rank."""
    from hpctrain.layout import RankGrid
    from hpctrain.parallel.model import local_of
    from hpctrain.parallel.optimizer import make_optimizer
    from hpctrain.parallel.parallelize import parallelize
    from hpctrain.runtime.bootstrap import bootstrap, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.spec.resolve import layout_of
    from hpctrain.testing import parity
    from hpctrain.train.step import Stepper

    comm = start_mpi()
    specs = [parity._spec(JOB, comm.size, kind.split()) for kind in kinds]
    context: Any = bootstrap(
        comm, RankGrid(layout_of(specs[0])), RankEnvironment.read(), device="cpu"
    )
    found = []
    for spec in specs:
        here = parity._with_grid(context, RankGrid(layout_of(spec)))
        model = parallelize(spec, here)
        optimizer = make_optimizer(model, spec)
        stepper = Stepper(model, optimizer, spec)
        stepper.forward_backward(1, parity._micro_batches(spec, here, 1))
        gradients = sum(local_of(p.grad).nbytes for p in model.parameters() if p.grad is not None)
        stepper.update(1)
        parameters = sum(local_of(p).nbytes for p in model.parameters())
        states = sum(local_of(s).nbytes for d in optimizer.state.values() for s in d.values())
        found.append([parameters, gradients, states])
    return found


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    everyone = run_ranks(ranks, held, KINDS, timeout=300)
    print(f"{ranks} ranks; KiB on the rank with most\n")
    print("| sharding | optimizer | parameters | gradients | states |\n|---|---|---|---|---|")
    for index, kind in enumerate(KINDS):
        most = [max(rank[index][column] for rank in everyone) / 1024 for column in range(3)]
        name = kind.split()[0].removeprefix("parallel.sharding=")
        optimizer = "muon" if "muon" in kind else "adamw"
        print(f"| {name} | {optimizer} | " + " | ".join(f"{value:.0f}" for value in most) + " |")


if __name__ == "__main__":
    main()
