"""Parity: a layout trains as one rank does, in losses, norms and every gradient.

::

    def test_my_layout():
        worst = check_parity(4, JOB, ["parallel.tensor=2", "parallel.data=2"])
        assert worst["loss"] < 1e-5 and worst["gradient"] < 1e-4

All layouts of one call run on the same ranks, one after the other. Rank 0 trains the job alone
as well, on the same tokens, and compares step by step.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.testing.ranks import run_ranks

Report = dict[str, Any]


def check_parity(
    ranks: int,
    job: str,
    *layouts: Sequence[str],
    steps: int = 10,
    timeout: float = 380.0,
    learns: float = 0.3,
    per_node: int | None = None,
) -> list[Report]:
    """Train a job in several layouts on ``ranks`` MPI ranks, and on one.

    Args:
        ranks: of every layout.
        job: text of the job file; its data section is not read, tokens are drawn.
        layouts: overrides that make each layout.
        steps: optimizer steps.
        timeout: seconds for all.
        learns: the loss of one rank has to fall by this much, or parity means little.
        per_node: take so many ranks for a node, whatever host they are on.

    Returns:
        For each layout the largest differences: ``loss`` (absolute), ``norm`` and ``gradient``
        (of each parameter the L2 norm of the difference over that of one rank's gradient, or
        over a thousandth of the mean over all parameters where that is more), ``worst`` (its
        name), ``losses``, and ``axes`` that rank 0 communicated along.
    """
    reports: list[Report] = run_ranks(
        ranks,
        _on_ranks,
        job,
        [list(layout) for layout in layouts],
        steps,
        per_node,
        timeout=timeout,
    )[0]
    for layout, report in zip(layouts, reports, strict=True):
        report["layout"] = " ".join(layout)
        fallen = report["reference"][0] - report["reference"][-1]
        assert fallen >= learns, f"one rank's loss fell by {fallen} only"
    return reports


def _on_ranks(job: str, layouts: list[list[str]], steps: int, per_node: int | None) -> list[Report]:
    from hpctrain.layout import RankGrid
    from hpctrain.runtime.bootstrap import bootstrap, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.runtime.waiting import barrier
    from hpctrain.spec.resolve import layout_of

    comm = start_mpi()
    specs = [_spec(job, comm.size, layout) for layout in layouts]
    context = bootstrap(comm, RankGrid(layout_of(specs[0])), RankEnvironment.read(), device="cpu")
    reports = []
    references: dict[str, Any] = {}
    current = None  # process groups are slow to make, and each holds three threads
    for layout, spec in zip(layouts, specs, strict=True):
        grid = RankGrid(layout_of(spec))
        if current is None or current.grid.layout != grid.layout:
            if current is not None:
                current.communicators.free()
            current = None
            gc.collect()
            current = _with_grid(context, grid, per_node)
        found = _train(current, spec, steps)
        axes = sorted(context.communicators.counter.take())
        if comm.rank == 0:
            # What is no matter of the layout (dropout, heads …) belongs to the reference too.
            options = [o for o in layout if not o.startswith(("parallel.", "train.micro_batch"))]
            key = " ".join(options)
            if key not in references:
                references[key] = _train(_alone(context), _spec(job, 1, options), steps)
            reports.append(_compare(found, references[key]) | {"axes": axes})
    barrier(comm)  # rank 0 trains alone meanwhile
    return reports


def _spec(job: str, ranks: int, overrides: Sequence[str]) -> Any:
    from hpctrain.spec import parse_job, resolve
    from hpctrain.spec.resolve import check

    @dataclasses.dataclass(frozen=True)
    class Site:
        devices_per_node: int | None = ranks

    resolved = resolve(parse_job(job, overrides=tuple(overrides)), Site(), Path("/"))
    check(resolved)
    return resolved.spec


def _with_grid(context: Any, grid: Any, per_node: int | None = None) -> Any:
    """The same ranks in another layout, with groups of its own."""
    from hpctrain.runtime.communicators import Communicators

    first = context.communicators
    nodes = first.nodes if per_node is None else [rank // per_node for rank in range(grid.size)]
    made = Communicators(first.comm, grid, nodes, first.device, first.counter)
    return dataclasses.replace(context, grid=grid, mesh=made.mesh, communicators=made)


def _alone(context: Any) -> Any:
    """Rank 0 as the only rank of a job."""
    from mpi4py import MPI

    from hpctrain.layout import ParallelLayout, RankGrid

    grid = RankGrid(ParallelLayout())
    return dataclasses.replace(
        context,
        rank=0,
        world_size=1,
        comm=MPI.COMM_SELF,
        grid=grid,
        mesh=None,
        communicators=_Alone,
    )


class _Alone:
    """Groups of a rank without others: there is none, and nothing is made."""

    @staticmethod
    def along(*_axes: str) -> Any:
        @dataclasses.dataclass(frozen=True)
        class One:
            group: Any = None
            size: int = 1
            place: int = 0

        return One()


def _train(context: Any, spec: Any, steps: int) -> dict[str, Any]:
    """Losses, norms and the gradients of every step (on rank 0, whole tensors by name)."""
    from hpctrain.parallel.optimizer import make_optimizer
    from hpctrain.parallel.parallelize import parallelize
    from hpctrain.train.agreement import agree
    from hpctrain.train.step import Stepper

    model = parallelize(spec, context)
    optimizer = make_optimizer(model, spec)
    stepper = Stepper(model, optimizer, spec)
    losses, norms, gradients = [], [], []
    for step in range(1, steps + 1):
        loss = stepper.forward_backward(step, _micro_batches(spec, context, step))
        model.sum_partial_gradients()
        gradients.append(_whole_gradients(model))
        # The sum over tensor ranks is done: update() must not add it up again.
        model.sum_partial_gradients = lambda: None  # type: ignore[method-assign]
        norms.append(float(stepper.update(step)))
        del model.sum_partial_gradients
        losses.append(agree(context.comm, float(loss), 0.0, 0).loss)
    return {"losses": losses, "norms": norms, "gradients": gradients}


def _micro_batches(spec: Any, context: Any, step: int) -> list[Any]:
    import torch

    from hpctrain.parallel.batch import MicroBatch
    from hpctrain.parallel.context import sequence_part
    from hpctrain.parallel.context_mixed import dealer_of

    batch, length = spec.train.global_batch, spec.data.sequence_length
    vocabulary = spec.model.vocab_size
    generator = torch.Generator().manual_seed(step)
    # Small tokens are frequent, so that there is something to learn within a few steps.
    drawn = torch.rand(batch, length + 1, generator=generator, dtype=torch.float64)
    rows = (vocabulary * drawn**4).long()
    if spec.data.documents == "each":
        # Few are long, as in collected texts.
        drawn = torch.rand(batch, generator=generator) ** 3
        lengths = (1 + drawn * (length - 1)).long().tolist()
        deal = dealer_of(spec, context).micro_batches
        return deal(lengths, lambda number: rows[number, : lengths[number] + 1], step * batch)
    starts = None
    if spec.data.documents == "separate":
        begins = torch.rand(batch, length, generator=generator) < 0.15
        starts = torch.where(begins, torch.arange(length), 0).cummax(1).values
    split = sequence_part(spec, context)
    share = batch // context.size("dp")
    first = context.coordinate("dp") * share
    found = []
    for start in range(first, first + share, spec.train.micro_batch):
        part = slice(start, start + spec.train.micro_batch)
        keys = torch.arange(part.start, part.stop) + step * batch
        whole = MicroBatch(
            (rows[part, :-1], rows[part, 1:]), keys, starts=None if starts is None else starts[part]
        )
        found.append(split.take(whole))
    return found


def _whole_gradients(model: Any) -> dict[str, Any]:
    """Every gradient of the whole model on rank 0; each box from the rank that writes it."""
    import numpy as np

    from hpctrain.runtime.waiting import barrier

    boxes = []
    for name, parameter in model.named_parameters():
        part = model.part(name, parameter.grad, like=name)
        if part.writer:
            array = part.local.double().numpy()
            boxes.append((name, part.global_shape, part.offsets, array))
    barrier(model.context.comm)  # rank 0 may be training alone; MPI's gather would spin
    whole: dict[str, Any] = {}
    for name, shape, offsets, array in itertools.chain(*(model.context.comm.gather(boxes) or [])):
        box = tuple(slice(a, a + n) for a, n in zip(offsets, array.shape, strict=True))
        whole.setdefault(name, np.full(shape, np.nan))[box] = array
    return whole


def _compare(found: dict[str, Any], reference: dict[str, Any]) -> Report:
    import numpy as np

    worst, name = 0.0, ""
    for mine, right in zip(found["gradients"], reference["gradients"], strict=True):
        assert mine.keys() == right.keys(), mine.keys() ^ right.keys()
        # Some gradients are zero but for rounding: a bias of the keys shifts all scores alike.
        floor = 1e-3 * float(np.sqrt(sum((g**2).sum() for g in right.values()) / len(right)))
        for key, expected in right.items():
            size = max(float(np.linalg.norm(expected)), floor)
            difference = float(np.linalg.norm(mine[key] - expected)) / size
            if not difference <= worst:  # also where it is not a number
                worst, name = difference, key
    pairs = list(zip(found["norms"], reference["norms"], strict=True))
    losses = list(zip(found["losses"], reference["losses"], strict=True))
    return {
        "loss": max(abs(a - b) for a, b in losses),
        "norm": max(abs(a - b) / b for a, b in pairs),
        "gradient": worst,
        "worst": name,
        "losses": found["losses"],
        "reference": reference["losses"],
    }
