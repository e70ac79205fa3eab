"""What the planner says of context parallelism against what ranks send, and bytes a rank keeps."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.machine import get_machine
from hpctrain.plan.job import strategy_of, workload_of
from hpctrain.plan.volume import volumes
from hpctrain.testing.parity import _spec
from hpctrain.testing.ranks import run_ranks

pytestmark = pytest.mark.mpi

JOB = """\
model: {layers: 2, hidden: 64, heads: 8, kv_heads: 4, vocab_size: 61}
data: {path: none, sequence_length: 64}
train: {steps: 1, global_batch: 4, micro_batch: 2}
"""
TWO_LEVEL = "parallel.context.method=two-level parallel.context.inner=2"
LAYOUTS = [
    "parallel.context=4",
    "parallel.context=4 parallel.recompute=block",
    "parallel.context.size=4 parallel.context.both_ways=true train.precision=bf16",
    "parallel.context.size=4 parallel.context.method=ulysses",
    "parallel.context.size=4 parallel.context.method=ulysses model.kv_heads=2",
    f"parallel.context.size=4 {TWO_LEVEL}",
    "parallel.context=2 parallel.tensor=2",
]


def measured(layouts: list[str]) -> list[dict[str, Any]]:
    """Calls and bytes on the cp axis by operation, of one step of each layout."""
    from hpctrain.layout import RankGrid
    from hpctrain.parallel.optimizer import make_optimizer
    from hpctrain.parallel.parallelize import parallelize
    from hpctrain.runtime.bootstrap import bootstrap, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.spec.resolve import layout_of
    from hpctrain.testing.parity import _micro_batches, _with_grid
    from hpctrain.train.step import Stepper

    comm = start_mpi()
    specs = [_spec(JOB, comm.size, layout.split()) for layout in layouts]
    first: Any = RankGrid(layout_of(specs[0]))
    context = bootstrap(comm, first, RankEnvironment.read(), device="cpu")
    counter, found = context.communicators.counter, []
    for spec in specs:
        here = _with_grid(context, RankGrid(layout_of(spec)))
        model = parallelize(spec, here)
        stepper = Stepper(model, make_optimizer(model, spec), spec)
        micro_batches = _micro_batches(spec, here, 1)
        counter.take()
        stepper.forward_backward(1, micro_batches)
        tallies = counter.operations()["cp"]
        found.append({name: (tally.calls, tally.bytes) for name, tally in tallies.items()})
    return found


def test_the_planner_counts_what_is_sent():
    by_rank = run_ranks(4, measured, LAYOUTS)
    for number, layout in enumerate(LAYOUTS):
        spec = _spec(JOB, 4, layout.split())
        work, _ = workload_of(spec, get_machine("local"))
        plan = strategy_of(spec)
        expected = {"send": [0, 0.0], "all_to_all": [0, 0.0]}
        for volume in volumes(work, plan):
            if volume.axes != ("cp",):
                continue
            swaps = volume.pattern == "all_to_all"
            entry = expected["all_to_all" if swaps else "send"]
            entry[0] += volume.messages
            entry[1] += volume.bytes
        for rank in by_rank:
            for operation, (calls, size) in expected.items():
                assert rank[number].get(operation, [0, 0]) == [calls, size], (layout, operation)
