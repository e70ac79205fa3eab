"""Train in one layout, save, go on in another: what ranks do in the tests of layouts.

Worlds of different sizes share one start of the ranks: the first so many of them are the world,
the others wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import CheckpointError
from hpctrain.io.buffers import SaveOptions
from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.recover import Recovery
from hpctrain.io.saver import Saver
from hpctrain.testing import parity

JOB = """\
model: {layers: 4, hidden: 6, heads: 2, vocab_size: 26, ffn_hidden: 10}
data: {path: none, sequence_length: 8}
train: {steps: 9, micro_batch: 1, lr: 5e-3, eps: 1e-6}
"""
EXPERTS = """\
model: {layers: 4, hidden: 8, heads: 4, vocab_size: 26, moe: {experts: 4, top_k: 2, hidden: 10}}
data: {path: none, sequence_length: 8}
train: {steps: 9, micro_batch: 1, lr: 5e-3, eps: 1e-6}
"""
# What follows the number of ranks is the layout, and how many files its checkpoints have.
DENSE = [
    (1, "", "one"),
    (2, "sharding=zero3", "one"),
    (2, "tensor=2", "rank"),
    (2, "pipeline=2", "one"),
    (3, "sharding=zero1", "rank"),
    (4, "sharding=zero3", "one"),
    (4, "tensor=2 pipeline=2 stage_layers=[3,1]", "one"),
    (4, "sharding=zero2 shard=2", "node"),
    (5, "sharding=zero2", "rank"),
    (6, "pipeline=3 data=2 stage_layers=[1,2,1] sharding=zero1", "one"),
    (7, "", "one"),
    (8, "tensor=2 pipeline=2 data=2 sharding=zero3", "rank"),
]
FOLDED = [
    (1, "", "one"),
    (2, "context=2 expert=2 sharding=zero3", "rank"),
    (4, "tensor=2 context=2 expert=2 expert_tensor=2", "one"),
    (4, "pipeline=2 context=2 expert=2 schedule=zb-v", "rank"),
    (8, "tensor=2 pipeline=2 context=2 expert=4 sharding=zero1", "node"),
    (8, "context=2 data=4 expert=4 expert_tensor=2 sharding=zero1", "one"),
    (8, "pipeline=2 data=4 expert=2 sharding=zero3", "one"),
    (8, "tensor=2 data=4 expert=2 expert_tensor=2 sharding=zero2", "rank"),
]
STEPS = 2
Whole = dict[str, np.ndarray]
Layout = tuple[int, str, str]


def go_on_everywhere(
    root: str, job: str, layouts: list[Layout], pairs: list[list[int]], missing: Sequence[str]
) -> dict[str, Any]:
    """Train and save in every layout, then go on from each first of a pair in its second.

    Returns:
        On rank 0: a line about everything that is not as it should be, how many tensors the
        model and its optimizer have, and what was said where a tensor is missing.
    """
    from hpctrain.runtime.bootstrap import start_mpi
    from hpctrain.runtime.waiting import barrier

    comm = start_mpi()
    trained: list[Whole] = []
    faults: list[str] = []
    told: list[str] = []

    def go_on(fresh: Any, number: int, sources: list[int]) -> None:
        for source in sources:
            state = fresh()
            _restore(state, Path(root) / str(source))
            words = f"{source} -> {number}"
            found = _gather(state, faults, words)
            if comm.rank == 0:
                _compare(found, trained[source], faults, words)

    for number, layout in enumerate(layouts):
        with _world(comm, job, layout) as fresh:
            if fresh is not None:
                state = fresh()
                _train(state)
                trained.append(_gather(state, faults, f"layout {number}"))
                _save(state, Path(root) / str(number), layout[2])
                if number == LACKING:
                    for name in missing:
                        _save(state, _folder_without(root, name), "one", leave_out=name)
                if number == ASKING:
                    told = [_refused(fresh(), _folder_without(root, name)) for name in missing]
                go_on(fresh, number, [s for s, target in pairs if target == number and s <= number])
        barrier(comm)
    # Making a world takes longer than all else: again only where it is wanted.
    for number, layout in enumerate(layouts):
        later = [s for s, target in pairs if target == number and s > number]
        if later:
            with _world(comm, job, layout) as fresh:
                if fresh is not None:
                    go_on(fresh, number, later)
            barrier(comm)
    return {"faults": faults, "tensors": [len(whole) for whole in trained], "told": told}


LACKING, ASKING = 2, 5
"""Layouts that write a checkpoint without a tensor, and are asked to go on from it."""
MISSING = ("model/layers.1.ffn.up.weight", "optimizer/exp_avg_sq/layers.3.attention_norm.weight")


@contextmanager
def _world(comm: Any, job: str, layout: Layout) -> Iterator[Any]:
    """What makes fresh TrainStates in a layout, on the ranks that it has; None on others."""
    from mpi4py import MPI

    from hpctrain.layout import RankGrid
    from hpctrain.parallel.optimizer import make_optimizer
    from hpctrain.parallel.parallelize import parallelize
    from hpctrain.runtime.bootstrap import bootstrap, shut_down
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.spec.resolve import layout_of
    from hpctrain.train.state import TrainState

    ranks, words, _ = layout
    inside = comm.rank < ranks
    own = comm.Split(0 if inside else MPI.UNDEFINED, comm.rank)
    if not inside:
        yield None
        return
    axes = [word for word in words.split() if word in ("tensor=2", "context=2")]
    data = ranks // 2 ** len(axes) // _pipeline(words)
    batch = data * _pipeline(words)
    sets = [*(f"parallel.{word}" for word in words.split()), f"train.global_batch={batch}"]
    spec = parity._spec(job, ranks, sets)
    grid = RankGrid(layout_of(spec))
    context = bootstrap(own, grid, RankEnvironment.read(), device="cpu")

    def fresh() -> Any:
        model = parallelize(spec, context)
        state = TrainState(model, make_optimizer(model, spec))
        state.spec = spec  # type: ignore[attr-defined]
        return state

    yield fresh
    shut_down(context)


def _pipeline(words: str) -> int:
    return next((int(w[-1]) for w in words.split() if w.startswith("pipeline=")), 1)


def _train(state: Any) -> None:
    from hpctrain.train.step import Stepper

    spec, context = state.spec, state.model.context
    stepper = Stepper(state.model, state.optimizer, spec)
    for step in range(1, STEPS + 1):
        stepper.forward_backward(step, parity._micro_batches(spec, context, step))
        stepper.update(step)
        state.step += 1
        state.samples += spec.train.global_batch
        state.tokens += spec.train.global_batch * 8


def _save(state: Any, root: Path, files: str, leave_out: str | None = None) -> None:
    from hpctrain.train import rng
    from hpctrain.train.sources import TorchSources

    comm = state.model.context.comm
    sources = state.sources()
    if leave_out is not None:
        held = [e.held() for e in state._entries() if e.part.writer and e.part.name != leave_out]
        sources = TorchSources(held)
    node = comm.rank % 2
    saver = Saver(root, comm, options=SaveOptions(files), node=node)  # type: ignore[arg-type]
    saver.save(state.step, sources, scalars=state.scalars(), per_rank=rng.Generators().capture())
    (outcome,) = saver.drain()
    saver.close()
    if outcome.error is not None:
        raise outcome.error


def _restore(state: Any, root: Path) -> None:
    comm = state.model.context.comm
    recovery = Recovery(CheckpointStore(root, comm), [], 0)
    choice = recovery.find()
    assert choice is not None, recovery.skipped
    with recovery.open(choice) as reader:
        state.restore(reader)
        comm.Barrier()
    assert (state.step, choice.step) == (STEPS, STEPS)


def _gather(state: Any, faults: list[str], words: str) -> Whole:
    """Every tensor whole, on rank 0; all ranks' boxes are laid into it, and copies must agree."""
    boxes = []
    for entry in state._entries():
        part = entry.part
        array = part.local.detach().numpy().copy()
        boxes.append((part.name, part.global_shape, part.offsets, array, part.writer))
    whole: Whole = {}
    written: Whole = {}
    for name, shape, offsets, array, writer in (
        box for some in state.model.context.comm.gather(boxes) or [] for box in some
    ):
        window = tuple(slice(a, a + n) for a, n in zip(offsets, array.shape, strict=True))
        place = whole.setdefault(name, np.full(shape, np.nan, np.float32))
        there = place[window]
        if not np.array_equal(there, array) and not np.isnan(there).all():
            faults.append(f"{words}: ranks hold different copies of {name}")
        place[window] = array
        count = written.setdefault(name, np.zeros(shape, np.int64))
        count[window] += writer
    for name, count in written.items():
        if not np.all(count == 1) or np.isnan(whole[name]).any():
            faults.append(f"{words}: {name} is not written exactly once")
    return whole


def _compare(found: Whole, right: Whole, faults: list[str], words: str) -> None:
    if found.keys() != right.keys():
        faults.append(f"{words}: other tensors: {sorted(found.keys() ^ right.keys())}")
        return
    for name, array in right.items():
        if found[name].tobytes() != array.tobytes():
            faults.append(f"{words}: {name} is not what was saved")


def _folder_without(root: str, name: str) -> Path:
    return Path(root) / f"without-{name.rpartition('/')[2]}"


def _refused(state: Any, folder: Path) -> str:
    """What the ranks are told that go on from a checkpoint without a tensor."""
    told = ""
    try:
        _restore(state, folder)
    except CheckpointError as error:
        told = error.message
    return "\n".join(sorted(set(state.model.context.comm.allgather(told))))
