"""Context parallelism beside one rank: time, memory and messages of a step; plans of mixed lengths.

    python benchmarks/context.py [SEQUENCE] [STEPS]

Prints Markdown tables. Memory is the most that tensors held at once in a step, less what stood
before it (parameters), on the rank where that is most; sent are bytes of messages and exchanges of
attention on a rank. All ranks share the cores of this machine: more make a step no faster here.
The last table is a simulation, of a batch whose lengths are log-normal.
"""

from __future__ import annotations

import statistics
import sys
import time
import weakref
from typing import Any

from hpctrain.schedule.lengths import Costs, degrees, long_tailed, plan_lengths, static_plan
from hpctrain.testing.ranks import run_ranks

JOB = """\
model: {{layers: 2, hidden: 256, heads: 8, kv_heads: 4, vocab_size: 4096, position: rotary, norm: rmsnorm, activation: swiglu, bias: false}}
data: {{path: none, sequence_length: {length}}}
train: {{steps: 1, global_batch: 1}}
"""  # noqa: E501
METHOD = "parallel.context.method"
CASES = {
    1: {"one rank": "", "one rank, streamed": "parallel.stream=256"},
    2: {
        "ring": "parallel.context=2",
        "ulysses": f"parallel.context.size=2 {METHOD}=ulysses",
    },
    4: {
        "ring": "parallel.context=4",
        "ring, both ways": "parallel.context.size=4 parallel.context.both_ways=true",
        "ulysses": f"parallel.context.size=4 {METHOD}=ulysses",
        "two-level, 2 × 2": f"parallel.context.size=4 {METHOD}=two-level parallel.context.inner=2",
        "ring, streamed": "parallel.context=4 parallel.stream=256",
        "linear attention": "parallel.context=4 model.attention=linear model.position=none",
    },
}


def live_bytes() -> Any:
    """A mode that knows the bytes of all storages it has met, and the most of them at once."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Live(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: dict[int, int] = {}
            self.now = self.peak = 0

        def _gone(self, key: int) -> None:
            self.now -= self.sizes.pop(key, 0)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            for one in tree_leaves((args, kwargs, result)):
                if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                    storage = one.untyped_storage()
                    key = storage._cdata
                    if key not in self.sizes:
                        self.sizes[key] = storage.nbytes()
                        self.now += storage.nbytes()
                        weakref.finalize(storage, self._gone, key)
            self.peak = max(self.peak, self.now)
            return result

    return Live()


def measure(length: int, steps: int, layouts: list[str]) -> list[tuple[float, int, int]]:
    """(seconds of a step, peak bytes, bytes sent for attention) of each layout on this rank."""
    import torch

    from hpctrain.layout import RankGrid
    from hpctrain.parallel.parallelize import parallelize
    from hpctrain.runtime.bootstrap import bootstrap, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.spec.resolve import layout_of
    from hpctrain.testing.parity import _micro_batches, _spec, _with_grid
    from hpctrain.train.step import loss_of

    torch.set_num_threads(1)
    comm = start_mpi()
    job = JOB.format(length=length)
    specs = [_spec(job, comm.size, layout.split()) for layout in layouts]
    first: Any = RankGrid(layout_of(specs[0]))
    context = bootstrap(comm, first, RankEnvironment.read(), device="cpu")
    counter, found = context.communicators.counter, []
    for spec in specs:
        here = _with_grid(context, RankGrid(layout_of(spec)))
        model = parallelize(spec, here)
        # Without DDP: its gradients have buckets of their own, which are no matter of attention.
        module = getattr(model.whole, "module", model.whole)
        loss = loss_of(spec, model)
        (micro,) = _micro_batches(spec, here, 1)

        def step(loss: Any = loss, module: Any = module, micro: Any = micro) -> None:
            loss(module, micro, micro.keys).backward()

        step()
        times = []
        for _ in range(steps):
            comm.Barrier()
            began = time.perf_counter()
            step()
            comm.Barrier()
            times.append(time.perf_counter() - began)
        counter.take()
        with live_bytes() as live:
            for parameter in model.parameters():
                parameter.grad.view(-1)  # met before: they stand
                parameter.data.view(-1)
            before = live.now
            step()
        sent = sum(
            tally.bytes
            for operation, tally in counter.operations().get("cp", {}).items()
            if operation in ("send", "all_to_all")
        )
        found.append((statistics.median(times), live.peak - before, sent))
    return found


def lengths_table() -> None:
    """Idle time of static packing and of a plan, for a model of 7e9 parameters."""
    costs = Costs(
        token=6 * 7e9 / 150e12,
        pair=12 * 32 * 4096 / 150e12,
        wire=32 * 2 * 1024 * 2 * 4 / 40e9,
        hop=32 * 3 * 20e-6,
    )
    print("| ranks | longest | degree, static | step, static | step, planned | idle, static "
          "| idle, planned | degrees used |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for ranks, longest in ((8, 32768), (32, 131072), (128, 131072)):
        lengths = long_tailed(8 * ranks, 2048, longest, seed=1)
        static = static_plan(lengths, ranks, 8192, costs)
        planned = plan_lengths(lengths, ranks, 8192, costs)
        share = [plan.idle / (ranks * plan.makespan) for plan in (static, planned)]
        used = {d: sum(p.degree == d for p in planned.packs) for d in degrees(ranks)}
        print(
            f"| {ranks} | {max(lengths)} | {static.packs[0].degree} | {static.makespan:.1f} s | "
            f"{planned.makespan:.1f} s | {share[0]:.1%} | {share[1]:.1%} | "
            + ", ".join(f"{d}: {n}" for d, n in used.items() if n)
            + " |"
        )


def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    print(f"{length} tokens\n\n| ranks | | s a step | MiB a rank | MiB sent a rank |")
    print("|---|---|---|---|---|")
    for ranks, cases in CASES.items():
        everyone = run_ranks(ranks, measure, length, steps, list(cases.values()), timeout=900)
        for index, name in enumerate(cases):
            seconds, peak, sent = (max(rank[index][column] for rank in everyone)
                                   for column in range(3))  # fmt: skip
            print(f"| {ranks} | {name} | {seconds:.2f} | {peak / 2**20:.1f} | {sent / 2**20:.1f} |")
    print()
    lengths_table()


if __name__ == "__main__":
    main()
