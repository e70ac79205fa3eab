"""Saving behind the training's back: what is stored, when it waits, what it costs in memory."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hpctrain.errors import CheckpointError
from hpctrain.io.buffers import SaveOptions
from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.comm import SoloCommunicator
from hpctrain.io.flush import WriteOptions
from hpctrain.io.interval import daly, steps_between, young
from hpctrain.io.recover import Level, Recovery
from hpctrain.io.saver import Saver
from hpctrain.io.shards import ShardSpec, TensorShard
from hpctrain.io.sources import HostSources
from hpctrain.io.store import STORE
from hpctrain.io.tiers import MEMORY, NODE, MemoryTier, NodeTier, held_parts
from hpctrain.train.rng import Generators, restore
from hpctrain.train.sources import Held, TorchSources


class Model:
    """Torch parameters with Adam, and how they go into checkpoints."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.parameters = {
            name: torch.zeros(shape, requires_grad=True) for name, shape in shapes.items()
        }
        for parameter in self.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.5, fused=True)
        self.step()
        self.sources = TorchSources(list(self._held()))

    def _held(self) -> Iterator[Held]:
        for name, parameter in self.parameters.items():
            yield _whole(f"model/{name}", parameter, None, "")
            state = self.optimizer.state[parameter]
            for key, value in state.items():
                yield _whole(f"optimizer/{key}/{name}", value, state, key)

    def step(self) -> None:
        self.optimizer.step()

    def values(self) -> dict[str, np.ndarray]:
        return {f"model/{n}": p.detach().numpy().copy() for n, p in self.parameters.items()}


def _whole(name: str, tensor: torch.Tensor, state: dict[str, Any] | None, key: str) -> Held:
    local = tensor.detach()
    shape = tuple(local.shape)
    return Held(
        ShardSpec(name, shape, (0,) * len(shape), shape, "float32"), local, tensor, state, key
    )


def saver_in(root: Path, **options: Any) -> Saver:
    return Saver(root, SoloCommunicator(), keep=100, options=SaveOptions(**options))


def read(root: Path, step: int, name: str) -> np.ndarray:
    with CheckpointStore(root, SoloCommunicator()).open(step) as reader:
        shape = reader.tensors()[name][0]
        return reader.read(name, (0,) * len(shape), shape)


def test_the_optimizers_step_waits_for_the_copy(tmp_path: Path) -> None:
    """Steps right after saves, of a state that takes long to copy: no later value is stored."""
    model = Model({"large": (3000, 1000), "small": (7,)})
    saver = saver_in(tmp_path)
    model.optimizer.register_step_pre_hook(lambda *_: saver.wait_copied())
    expected, outcomes = {}, []
    for step in range(1, 9):
        expected[step] = model.values()
        assert saver.save(step, model.sources, scalars={}, per_rank=dict)
        model.step()
        outcomes += saver.poll()
    outcomes += saver.drain()
    saver.close()
    assert [(o.step, o.error) for o in outcomes] == [(step, None) for step in expected]
    for step, values in expected.items():
        for name, value in values.items():
            assert np.array_equal(read(tmp_path, step, name), value), (step, name)
        assert read(tmp_path, step, "optimizer/step/large") == step


@pytest.mark.parametrize("name", ["large", "small"])
def test_a_change_past_the_optimizer_never_reaches_the_file(tmp_path: Path, name: str) -> None:
    """In place, right after the save: the old values are stored, or nothing is and it says so;
    the next save takes that tensor before it returns."""
    model = Model({"large": (3000, 1000), "small": (7,)})
    saver = saver_in(tmp_path)
    failed = []
    for step in range(1, 9):
        before = model.values()
        saver.save(step, model.sources, scalars={}, per_rank=dict)
        with torch.no_grad():
            model.parameters[name].add_(100.0)
        saver.wait_copied()
        (outcome,) = saver.drain()
        if outcome.error is None:
            assert np.array_equal(read(tmp_path, step, f"model/{name}"), before[f"model/{name}"])
        else:
            failed.append(step)
            assert f"model/{name}: changed between the save" in outcome.error.message
    saver.close()
    # A copy may have been quicker than the change; the first that was not is the last to fail.
    assert len(failed) <= 1
    stored = CheckpointStore(tmp_path, SoloCommunicator()).steps()
    assert stored == [step for step in range(1, 9) if step not in failed]


def test_replaced_tensors_are_noticed(tmp_path: Path) -> None:
    model = Model({"w": (100, 10)})
    saver = saver_in(tmp_path)
    saver.save(1, model.sources, scalars={}, per_rank=dict)
    saver.drain()
    state = model.optimizer.state[model.parameters["w"]]
    state["exp_avg_sq"] = state["exp_avg_sq"].clone()
    saver.save(2, model.sources, scalars={}, per_rank=dict)
    (outcome,) = saver.drain()
    assert outcome.error is not None
    assert "were replaced" in outcome.error.message
    assert not model.sources.still_valid()
    saver.close()


class Gate:
    """A pwrite that waits until it is let through."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waiting = threading.Event()

    def __call__(self, descriptor: int, data: Any, offset: int) -> int:
        self.waiting.set()
        self.open.wait()
        return os.pwrite(descriptor, data, offset)


def shards(value: float) -> HostSources:
    array = np.full((50, 40), value, np.float32)
    return HostSources([TensorShard("model/w", (50, 40), (0, 0), array, "float32")])


def test_saving_does_not_wait_for_storage_and_two_are_in_flight_at_most(tmp_path: Path) -> None:
    gate = Gate()
    saver = saver_in(tmp_path, when_busy="skip", write=WriteOptions(pwrite=gate))
    began = time.perf_counter()
    assert saver.save(1, shards(1), scalars={}, per_rank=dict)
    assert saver.save(2, shards(2), scalars={}, per_rank=dict)
    assert not saver.save(3, shards(3), scalars={}, per_rank=dict)
    assert time.perf_counter() - began < 5
    assert gate.waiting.wait(10)
    assert saver.poll() == []
    assert saver.busy
    assert CheckpointStore(tmp_path, SoloCommunicator()).steps() == []
    gate.open.set()
    assert [outcome.step for outcome in saver.drain()] == [1, 2]
    assert saver.save(4, shards(4), scalars={}, per_rank=dict)
    saver.drain()
    saver.close()
    assert read(tmp_path, 2, "model/w")[0, 0] == 2
    assert CheckpointStore(tmp_path, SoloCommunicator()).steps() == [1, 2, 4]


def test_waiting_for_a_buffer(tmp_path: Path) -> None:
    gate = Gate()
    saver = saver_in(tmp_path, when_busy="wait", write=WriteOptions(pwrite=gate))
    saver.save(1, shards(1), scalars={}, per_rank=dict)
    saver.save(2, shards(2), scalars={}, per_rank=dict)
    threading.Timer(0.2, gate.open.set).start()
    began = time.perf_counter()
    assert saver.save(3, shards(3), scalars={}, per_rank=dict)
    assert time.perf_counter() - began > 0.1
    assert {o.step for o in saver.drain()} == {1, 2, 3}
    saver.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_an_error_surfaces_with_path_and_reason_and_the_previous_one_stays(
    tmp_path: Path, code: int
) -> None:
    fail = threading.Event()

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if fail.is_set():
            raise OSError(code, os.strerror(code))
        return os.pwrite(descriptor, data, offset)

    saver = saver_in(tmp_path, write=WriteOptions(pwrite=pwrite))
    saver.save(1, shards(1), scalars={}, per_rank=dict)
    assert [o.error for o in saver.drain()] == [None]
    fail.set()
    saver.save(2, shards(2), scalars={}, per_rank=dict)
    outcomes = []
    while not outcomes:  # as a training loop does, step by step
        outcomes = saver.poll()
    (outcome,) = outcomes
    assert outcome.path is None
    assert isinstance(outcome.error, CheckpointError)
    assert "the checkpoint of step 2 was not written" in outcome.error.message
    assert os.strerror(code) in outcome.error.message
    assert str(tmp_path / "step00000002.tmp-") in outcome.error.message
    fail.clear()
    saver.save(3, shards(3), scalars={}, per_rank=dict)
    saver.drain()
    saver.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step00000001", "step00000003"]
    store = CheckpointStore(tmp_path, SoloCommunicator())
    assert store.verify(1) == store.verify(3) == []


def test_a_bandwidth_cap_holds_and_draining_lifts_it(tmp_path: Path) -> None:
    array = np.ones((48 << 20) // 4, np.float32)
    sources = HostSources([TensorShard("model/w", array.shape, (0,), array, "float32")])
    saver = saver_in(tmp_path, write=WriteOptions(bandwidth=32 << 20))
    saver.save(1, sources, scalars={}, per_rank=dict)
    began = time.perf_counter()
    while saver.busy:
        saver.poll()
        time.sleep(0.01)
    assert time.perf_counter() - began > 1.2  # 48 MiB at 32 MiB/s
    saver.save(2, sources, scalars={}, per_rank=dict)
    began = time.perf_counter()
    saver.drain()
    assert time.perf_counter() - began < 1.2
    saver.close()


def test_memory_is_flat_over_a_hundred_saves(tmp_path: Path) -> None:
    """Of what saving itself takes, two buffers and what is around them, and of the process."""
    model = Model({f"w{number}": (700, 1000) for number in range(4)})
    model.step()
    process = psutil.Process()
    before = process.memory_info().rss
    saver = saver_in(tmp_path)
    saver.store.keep = 1
    model.optimizer.register_step_pre_hook(lambda *_: saver.wait_copied())
    sizes = []
    for step in range(1, 111):
        saver.save(step, model.sources, scalars={}, per_rank=dict)
        model.step()
        assert all(outcome.error is None for outcome in saver.poll())
        sizes.append(process.memory_info().rss)
    saver.drain()
    saver.close()
    settled = sizes[10:]
    assert len(settled) == 100
    assert max(settled) < 1.1 * min(settled)
    state = 3 * 4 * 4 * 700 * 1000
    held = [size - before for size in settled]
    assert 2 * state <= max(held) < 2.2 * state + (4 << 20)
    assert max(held) < 1.1 * min(held)


def test_scalars_may_outgrow_their_place(tmp_path: Path) -> None:
    saver = saver_in(tmp_path)
    saver.save(1, shards(1), scalars={"note": "short"}, per_rank=dict)
    saver.save(2, shards(2), scalars={"note": "x" * 40_000}, per_rank=dict)
    errors = {outcome.step: outcome.error for outcome in saver.drain()}
    assert errors[1] is None
    assert errors[2] is not None and "scalars of" in errors[2].message
    saver.save(3, shards(3), scalars={"note": "x" * 40_000}, per_rank=dict)
    assert [o.error for o in saver.drain()] == [None]
    saver.close()
    with CheckpointStore(tmp_path, SoloCommunicator()).open(3) as reader:
        assert reader.scalars["note"] == "x" * 40_000


def test_another_reader_while_checkpoints_are_written(tmp_path: Path) -> None:
    """A second program never sees half a checkpoint, whenever it looks."""
    saver = saver_in(tmp_path)
    saver.store.keep = 2
    seen: set[int] = set()
    faults: list[str] = []
    stop = threading.Event()

    def look() -> None:
        store = CheckpointStore(tmp_path, SoloCommunicator())
        while not stop.is_set():
            for step in store.steps()[-1:]:
                try:
                    with store.open(step) as reader:
                        found = reader.read("model/w", (0, 0), (50, 40))
                except CheckpointError as error:
                    # Retention may take it away between the look and the reading.
                    if step in store.steps():
                        faults.append(error.message)
                    continue
                if not np.all(found == step):
                    faults.append(f"step {step} holds {found[0, 0]}")
                seen.add(step)

    reader = threading.Thread(target=look)
    reader.start()
    for step in range(1, 60):
        saver.save(step, shards(step), scalars={}, per_rank=dict)
        saver.wait_copied()
        saver.poll()
    saver.drain()
    stop.set()
    reader.join()
    saver.close()
    assert faults == []
    assert len(seen) > 3


def test_the_quick_look_at_generators_sees_every_draw() -> None:
    """numpy's state is asked for only where it may have changed, among others by a normal number
    that was drawn before and only now given out."""
    quick = Generators()

    def state(generators: Generators) -> dict[str, list[float]]:
        return {k: np.nan_to_num(v).tolist() for k, v in generators.capture()().items()}

    draws = (
        lambda: None,
        lambda: np.random.rand(3),
        lambda: np.random.randn(1),
        lambda: np.random.randn(1),
        lambda: np.random.seed(3),
        lambda: random.gauss(0, 1),
        lambda: torch.rand(1),
    )
    for draw in draws * 2:
        draw()
        assert state(quick) == state(Generators())
    saved = quick.capture()()
    drawn = random.random(), np.random.randn(), float(torch.rand(1))
    restore(saved)
    assert (random.random(), np.random.randn(), float(torch.rand(1))) == drawn


def test_intervals_of_young_and_daly() -> None:
    # C = 60 s, M = 24 h: Young's √(2·60·86400) = 3220.0 s.
    assert young(60, 86400) == pytest.approx(3219.94, abs=0.01)
    # Daly adds √(2CM)·(√(C/2M)/3 + C/18M) and takes C off: 3219.94 + 20.00 + 0.12 − 60.
    assert daly(60, 86400) == pytest.approx(3180.06, abs=0.05)
    assert daly(200, 100) == 100
    assert steps_between(60, 86400, 2.0, 30) == 1590
    # One that takes longer to write than Daly's interval cannot be taken more often than that.
    assert steps_between(0.001, 3600, 1.0, 50) == 55
    assert steps_between(0.001, 3600, 100.0, 1) == 1


class Late(HostSources):
    """As where the training thread is in the middle of changing a tensor that is copied, which
    only its own look afterwards can tell."""

    def confirm(self) -> None:
        raise CheckpointError("model/w: changed")


@pytest.mark.parametrize("levels", [{MEMORY}, {MEMORY, NODE}, {MEMORY, NODE, STORE}])
def test_no_level_shows_a_snapshot_before_the_training_thread_has_confirmed_it(
    tmp_path: Path, levels: set[str]
) -> None:
    comm = SoloCommunicator()
    tiers = [
        MemoryTier(tmp_path / "memory", 0, leads=True),
        NodeTier(tmp_path / "node", 0, leads=True, keep=1, options=WriteOptions()),
    ]
    saver = Saver(tmp_path / "store", comm, tiers=tiers)
    array = np.full((50, 40), 1, np.float32)
    shard = TensorShard("model/w", (50, 40), (0, 0), array, "float32")

    def shown() -> list[int]:
        return steps_held(tmp_path / "memory") + steps_held(tmp_path / "node")

    for number, kind in enumerate((HostSources, Late, HostSources), start=1):
        assert saver.save(number, kind([shard]), scalars={}, per_rank=dict, tiers=levels)
        deadline = time.monotonic() + 10
        while not saver._flight[-1].copied:  # checksums follow in milliseconds
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.1)
        assert number not in shown()
        (outcome,) = saver.drain()
        assert (outcome.error is None) == (kind is HostSources)
        assert steps_held(tmp_path / "memory") == {1: [1], 2: [1], 3: [1, 3]}[number]
        if NODE in levels:
            assert steps_held(tmp_path / "node") == {1: [1], 2: [1], 3: [3]}[number]
    saver.close(forget=False)
    assert CheckpointStore(tmp_path / "store", comm).steps() == ([1, 3] if STORE in levels else [])


def steps_held(folder: Path) -> list[int]:
    """Of the saves that a level shows as whole."""
    return sorted(part.step for _, part in held_parts(folder))


def test_a_level_that_was_off_meanwhile_does_not_hide_what_was_committed(tmp_path: Path) -> None:
    """Steps 1 to 5 in memory; then a start without that level commits step 6; then with it."""
    comm = SoloCommunicator()
    memory = tmp_path / "memory"
    saver = Saver(tmp_path / "store", comm, tiers=[MemoryTier(memory, 0, leads=True)])
    for step in range(1, 6):
        assert saver.save(step, shards(step), scalars={}, per_rank=dict, tiers={MEMORY})
        saver.drain()
    saver.close(forget=False)
    saver = Saver(tmp_path / "store", comm)
    assert saver.save(6, shards(6), scalars={}, per_rank=dict)
    saver.drain()
    saver.close()
    recovery = Recovery(CheckpointStore(tmp_path / "store", comm), [Level(MEMORY, memory)], 0)
    assert max(share.step for share in recovery._survey()) == 5
    choice = recovery.find()
    assert choice is not None
    assert choice.step == 6
