"""Trains, kills, restarts, and looks whether anything that was committed is lost.

A run is trained by incarnations of one to four ranks, real processes that are forked from this
one, in which torch is loaded already. Each incarnation goes on from what it finds, writes
checkpoints every few steps to up to four levels, and is ended at a random moment: one rank or
all are killed with SIGKILL, a rank's writer thread dies, storage is slow, fails now and then, is
full, or refuses large files. After each of them every committed checkpoint is verified to the
last byte, and what the next one goes on from must not be older than what was committed last.

The training is real, if small: an MLP with AdamW on torch, data-parallel by sums of gradients.
Its losses are held against those of a run that nothing happened to: equal to the last bit while
the layout stays, within 1e-5 where it changes.

    python tests/faults/crash_harness.py --rounds 1000 --seed 7
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.io import directory
from hpctrain.io.buffers import SaveOptions
from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.comm import Done, SoloCommunicator
from hpctrain.io.flush import WriteOptions
from hpctrain.io.partner import PartnerTier
from hpctrain.io.recover import Level, Recovery
from hpctrain.io.restore import Request
from hpctrain.io.saver import Saver
from hpctrain.io.shards import ShardSpec
from hpctrain.io.store import STORE
from hpctrain.io.tiers import MEMORY, NODE, PARTNER, MemoryTier, NodeTier
from hpctrain.train import rng
from hpctrain.train.sources import Held, TorchSources, as_numpy, dtype_name

STEPS = 120
BATCH = 24
EVERY = {STORE: 3, MEMORY: 1, NODE: 2, PARTNER: 4}
HARM = ("one rank", "all ranks", "writer dies", "slow", "failing", "full", "file size", "none")


class PipeCommunicator:
    """The collectives of a checkpoint over pipes through rank 0; a rank that dies ends all."""

    def __init__(self, rank: int, size: int, links: Sequence[Connection]) -> None:
        self.rank, self.size = rank, size
        self._links = links  # of rank 0: one to each other; of others: one to rank 0

    def allgather(self, sendobj: Any) -> list[Any]:
        try:
            if self.rank:
                self._links[0].send(sendobj)
                return list(self._links[0].recv())
            found = [sendobj, *(link.recv() for link in self._links)]
            for link in self._links:
                link.send(found)
            return found
        except (EOFError, OSError):
            os._exit(7)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        found = self.allgather(sendobj)
        return found if self.rank == root else None

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self.allgather(obj if self.rank == root else None)[root]

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        return self.allgather(sendobj if self.rank == root else None)[root][self.rank]

    def Iallreduce(self, sendbuf: Any, recvbuf: Any) -> Done:
        recvbuf[...] = np.sum(self.allgather(np.asarray(sendbuf)), axis=0)
        return Done()

    def barrier(self) -> None:
        self.allgather(None)

    def Split(self, color: int, key: int) -> PipeCommunicator:
        return self  # all on one node

    def send(self, obj: Any, dest: int) -> None:
        self._through(obj, self.rank, dest)

    def recv(self, *, source: int) -> Any:
        return self._through(None, source, self.rank)

    def _through(self, obj: Any, source: int, dest: int) -> Any:
        raise AssertionError("levels of a machine that several nodes share are never far away")


@dataclasses.dataclass(frozen=True)
class Plan:
    """One incarnation."""

    size: int
    files: str
    levels: tuple[str, ...]
    harm: str
    victim: int
    after: float
    seed: int


def make_model() -> tuple[list[tuple[str, torch.Tensor]], Callable[[torch.Tensor], torch.Tensor]]:
    """Parameters whose rows divide by no number of ranks, and the function they are of."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"first.weight": (6, 5), "first.bias": (6,), "second.weight": (7, 6),
              "second.bias": (7,), "third.weight": (1, 7)}  # fmt: skip
    named = [
        (name, torch.randn(shape, generator=generator).mul(0.5).requires_grad_())
        for name, shape in shapes.items()
    ]
    p = dict(named)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ p["first.weight"].T + p["first.bias"])
        y = torch.tanh(y @ p["second.weight"].T + p["second.bias"])
        return (y @ p["third.weight"].T).squeeze(-1)

    return named, function


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, 5, generator=generator)
    return x, torch.sin(x.sum(1)) + x[:, 0] * x[:, 1]


def rows_of(count: int, rank: int, size: int) -> slice:
    chunk = -(-count // size)
    return slice(min(rank * chunk, count), min((rank + 1) * chunk, count))


class Training:
    """The state of a rank: everything whole, of which it writes its rows."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.named, self.function = make_model()
        self.optimizer = torch.optim.AdamW([p for _, p in self.named], lr=3e-2, fused=True)
        for _, parameter in self.named:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        for _, parameter in self.named:
            for value in self.optimizer.state[parameter].values():
                value.zero_()
        self.named_again()
        self.sources: TorchSources | None = None

    def named_again(self) -> None:
        """The first step only made the states; the weights are as they were."""
        fresh = dict(make_model()[0])
        with torch.no_grad():
            for name, parameter in self.named:
                parameter.copy_(fresh[name])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any] | None, str]]:
        for name, parameter in self.named:
            yield f"model/{name}", parameter, None, ""
            state = self.optimizer.state[parameter]
            for key, value in state.items():
                yield f"optimizer/{key}/{name}", value, state, key

    def held(self) -> TorchSources:
        if self.sources is None:
            rank, size = self.comm.rank, self.comm.size
            held = []
            for name, tensor, state, key in self.tensors():
                whole = tensor.detach()
                shape = tuple(whole.shape)
                if not shape:
                    if rank == size - 1:
                        spec = ShardSpec(name, (), (), (), dtype_name(whole))
                        held.append(Held(spec, whole, tensor, state, key))
                    continue
                window = rows_of(shape[0], rank, size)
                local = whole[window]
                if not local.numel():
                    continue
                offsets = (window.start, *(0 for _ in shape[1:]))
                spec = ShardSpec(name, shape, offsets, tuple(local.shape), dtype_name(whole))
                held.append(Held(spec, local, tensor, state, key))
            self.sources = TorchSources(held)
        return self.sources

    def step(self, number: int) -> float:
        x, y = batch_of(number)
        window = rows_of(BATCH, self.comm.rank, self.comm.size)
        self.optimizer.zero_grad()
        loss = (self.function(x[window]) - y[window]).square().sum() / BATCH
        loss.backward()
        mine = [float(loss.detach()), *(p.grad.numpy() for _, p in self.named)]
        everyone = self.comm.allgather(mine)
        for index, (_, parameter) in enumerate(self.named, start=1):
            total = everyone[0][index].copy()
            for other in everyone[1:]:
                total += other[index]
            parameter.grad.copy_(torch.from_numpy(total))
        self.optimizer.step()
        return sum(one[0] for one in everyone)


def nodes_of(size: int) -> list[int]:
    return [rank * 2 // size for rank in range(size)]


def run_rank(root: Path, shm: Path, plan: Plan, comm: Any) -> None:
    """An incarnation of one rank, to the end of the training if nobody stops it."""
    torch.set_num_threads(1)
    nodes = nodes_of(comm.size)
    node = nodes[comm.rank]
    write = WriteOptions(pwrite=harmful_pwrite(plan, comm.rank))
    if plan.harm == "file size" and comm.rank == plan.victim:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
    training = Training(comm)
    store = CheckpointStore(root / "store", comm)
    # One machine plays all nodes, so that each finds what others stored.
    folders = {MEMORY: shm / "memory", NODE: root / "node", PARTNER: root / "partner"}
    cleaned = store.clean()
    recovery = Recovery(store, [Level(n, f) for n, f in folders.items()], 0)
    choice = recovery.find()
    first = 0
    if choice is not None:
        with recovery.open(choice) as reader:
            requests = [
                Request(name, (0,) * tensor.dim(), as_numpy(tensor.detach()))
                for name, tensor, _, _ in training.tensors()
            ]
            reader.require(requests)
            reader.read_all(requests)
            first = reader.scalars["step"]
    comm.barrier()
    if comm.rank == 0:
        source = "" if choice is None else choice.source
        note(root, "resumed", [first, source, recovery.skipped, cleaned])
    tiers: list[Any] = []
    if MEMORY in plan.levels:
        tiers.append(MemoryTier(folders[MEMORY], comm.rank, leads=comm.rank == 0))
    if NODE in plan.levels:
        tiers.append(
            NodeTier(folders[NODE], comm.rank, leads=comm.rank == 0, keep=1, options=write)
        )
    if PARTNER in plan.levels and comm.size > 1:
        tiers.append(PartnerTier(folders[PARTNER], comm, node, keep=1))
        tiers[-1]._leads = comm.rank == 0
    saver = Saver(
        root / "store",
        comm,
        options=SaveOptions(plan.files, write=write),  # type: ignore[arg-type]
        node=node,
        tiers=tiers,
    )
    training.optimizer.register_step_pre_hook(lambda *_: saver.wait_copied())
    names = {tier.name for tier in tiers} | {STORE}
    for number in range(first + 1, STEPS + 1):
        loss = training.step(number)
        if comm.rank == 0:
            note(root, "losses", [number, loss.hex()])
        conclude(root, comm.rank, saver.poll())
        due = {name for name in names if number % EVERY[name] == 0}
        if number == STEPS:
            due.add(STORE)
        if due:
            saver.save(
                number,
                training.held(),
                scalars={"n": number},
                per_rank=rng.Generators().capture(),
                tiers=due,
            )
    conclude(root, comm.rank, saver.drain())
    if comm.rank == 0:
        note(root, "finished", [])
    os._exit(0)


def conclude(root: Path, rank: int, outcomes: Sequence[Any]) -> None:
    for outcome in outcomes:
        if rank == 0 and outcome.error is not None:
            note(root, "failed", [outcome.step, outcome.error.message])
        elif rank == 0 and outcome.path is not None:
            note(root, "committed", [outcome.step])


def note(root: Path, name: str, values: list[Any]) -> None:
    descriptor = os.open(root / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    # The log is no part of what is tested: limits on file sizes do not count for it.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit[1], limit[1]))
    os.write(descriptor, (json.dumps(values) + "\n").encode())
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    os.close(descriptor)


def notes(root: Path, name: str) -> list[Any]:
    try:
        return [json.loads(line) for line in (root / name).read_text().splitlines()]
    except FileNotFoundError:
        return []


def harmful_pwrite(plan: Plan, rank: int) -> Callable[[int, Any, int], int]:
    dice = random.Random(plan.seed * 100 + rank)
    if plan.harm == "slow":

        def slow(descriptor: int, data: Any, offset: int) -> int:
            time.sleep(dice.uniform(0, 0.03))
            return os.pwrite(descriptor, data, offset)

        return slow
    if plan.harm == "failing" and rank == plan.victim:

        def failing(descriptor: int, data: Any, offset: int) -> int:
            if dice.random() < 0.3:
                code = dice.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS))
                raise OSError(code, os.strerror(code))
            half = data[: max(1, len(data) // 8192 // 2 * 4096)] if dice.random() < 0.3 else data
            return os.pwrite(descriptor, half, offset)

        return failing
    if plan.harm == "writer dies" and rank == plan.victim:
        left = dice.randrange(1, 12)

        def dying(descriptor: int, data: Any, offset: int) -> int:
            nonlocal left
            left -= 1
            if left < 0:
                raise SystemExit("the writer thread ends")
            return os.pwrite(descriptor, data, offset)

        return dying
    return os.pwrite


def incarnation(root: Path, shm: Path, plan: Plan) -> None:
    """Fork the ranks, do harm, and return when all have ended."""
    pipes = [Pipe() for _ in range(plan.size - 1)]
    pids = []
    for rank in range(plan.size):
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                links = [ours for ours, _ in pipes] if rank == 0 else [pipes[rank - 1][1]]
                for index, (ours, theirs) in enumerate(pipes):
                    if rank != 0:
                        ours.close()
                    if rank != index + 1:
                        theirs.close()
                run_rank(root, shm, plan, PipeCommunicator(rank, plan.size, links))
            except BaseException:
                import traceback

                note(root, "crashed", [rank, plan.harm, traceback.format_exc()])
            os._exit(1)
        pids.append(pid)
    for ours, theirs in pipes:
        ours.close()
        theirs.close()
    begun = len(notes(root, "resumed"))
    # Most are killed while they train, some while they start.
    deadline = time.monotonic() + plan.after if plan.after < 0.08 else None
    limit = time.monotonic() + 60.0
    killed = plan.harm not in ("one rank", "all ranks", "slow", "failing", "writer dies", "full")
    alive = set(pids)
    while alive:
        done, _ = os.waitpid(-1, os.WNOHANG)
        if done:
            alive.discard(done)
            continue
        now = time.monotonic()
        if deadline is None and len(notes(root, "resumed")) > begun:
            deadline = now + plan.after
        if not killed and deadline is not None and now > deadline:
            killed = True
            for pid in alive if plan.harm == "all ranks" else {pids[plan.victim]} & alive:
                os.kill(pid, signal.SIGKILL)
        if now > limit:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            note(root, "crashed", [-1, plan.harm, "not over after 60 s"])
            limit = now + 60.0
        time.sleep(0.002)


@contextlib.contextmanager
def small_disk(root: Path, wanted: bool) -> Iterator[bool]:
    """A tmpfs with room for little more than what is kept, in place of the store."""
    if not wanted:
        yield False
        return
    store = root / "store"
    store.mkdir(exist_ok=True)
    saved = root / "saved"
    # In whole pages, as a tmpfs counts: what dead writers left has to fit too.
    files = [p.stat().st_size for p in store.rglob("*") if p.is_file()]
    size = sum(-(-one // 4096) * 4096 for one in files)
    room = max(400, size // 1024 + random.Random(size).randrange(20, 300))
    command = ["mount", "-t", "tmpfs", "-o", f"size={room}k", "tmpfs", str(store)]
    shutil.copytree(store, saved)
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        shutil.rmtree(saved)
        yield False
        return
    shutil.copytree(saved, store, dirs_exist_ok=True)
    try:
        yield True
    finally:
        shutil.rmtree(saved)
        shutil.copytree(store, saved)
        subprocess.run(["umount", "-l", str(store)], check=True)
        shutil.rmtree(store)
        saved.rename(store)


def check_after(root: Path, run: RunRecord) -> None:
    """Nothing that was committed is lost, and nothing that looks committed is not whole."""
    store = CheckpointStore(root / "store", SoloCommunicator())
    steps = directory.by_commit(root / "store")
    logged = [step for (step,) in notes(root, "committed")]
    for step in steps:
        problems = store.verify(step)
        if problems:
            run.faults.append(f"committed step {step} is damaged: {problems[0]}")
    if logged and (not steps or steps[0] < logged[-1]):
        run.faults.append(f"committed step {logged[-1]} is gone, there are {steps}")
    resumed = notes(root, "resumed")[run.resumes :]
    for step, _, skipped, _ in resumed:
        if step < run.committed:
            run.faults.append(f"resumed from {step} after the commit of {run.committed}")
        run.faults += [f"at resuming: {why}" for _, why in skipped if "share" not in why]
    run.resumes += len(resumed)
    # A commit whose note was cut off counts as well.
    run.committed = max([run.committed, *logged, *steps])
    for rank, harm, text in notes(root, "crashed"):
        run.faults.append(f"rank {rank} ({harm}): {text}")


@dataclasses.dataclass
class RunRecord:
    """A run over its incarnations."""

    same_layout: bool
    size: int
    resumes: int = 0
    committed: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)


def check_losses(root: Path, run: RunRecord, reference: dict[int, float]) -> None:
    for number, text in notes(root, "losses"):
        loss = float.fromhex(text)
        if run.same_layout and loss != reference[number]:
            run.faults.append(f"step {number}: loss {loss!r}, should be {reference[number]!r}")
            return
        if abs(loss - reference[number]) > 1e-5:
            run.faults.append(f"step {number}: loss {loss}, of another layout {reference[number]}")
            return


def load_everything() -> None:
    """What torch loads on first use, before the forks and not in each of them."""
    torch.set_num_threads(1)
    Training(PipeCommunicator(0, 1, [])).step(1)


def straight(folder: Path, shm: Path, size: int) -> dict[int, float]:
    """Losses of a run to which nothing happens."""
    root = folder / f"straight{size}"
    root.mkdir()
    incarnation(root, shm, Plan(size, "one", (), "none", 0, 1e9, 0))
    assert notes(root, "finished") == [[]], notes(root, "crashed")
    return {number: float.fromhex(text) for number, text in notes(root, "losses")}


def main(rounds: int, seed: int, budget: float = 1e9) -> dict[str, Any]:
    """Run ``rounds`` incarnations; what happened, and every fault that was found."""
    load_everything()
    dice = random.Random(seed)
    began = time.monotonic()
    counts = dict.fromkeys(HARM, 0)
    summary: dict[str, Any] = {"rounds": 0, "runs": 0, "finished": 0, "faults": [], "harm": counts}
    summary |= {"commits": 0, "failed_saves": 0, "resumed_from": {}}
    with (
        tempfile.TemporaryDirectory(prefix="hpctrain-faults-") as disk,
        tempfile.TemporaryDirectory(prefix="hpctrain-faults-", dir="/dev/shm") as memory,
    ):
        folder, shm = Path(disk), Path(memory)
        reference = {size: straight(folder, shm / f"s{size}", size) for size in (1, 2, 3, 4)}
        while summary["rounds"] < rounds and time.monotonic() - began < budget:
            summary["runs"] += 1
            root = folder / f"run{summary['runs']}"
            root.mkdir()
            run = RunRecord(same_layout=dice.random() < 0.6, size=dice.choice((1, 2, 2, 3, 4)))
            levels = tuple(n for n in (MEMORY, NODE, PARTNER) if dice.random() < 0.4)
            files = dice.choice(("one", "node", "rank"))
            for _ in range(10):
                size = run.size if run.same_layout else dice.choice((1, 2, 3, 4))
                harm = dice.choice(HARM[:-1]) if dice.random() < 0.9 else "none"
                after = dice.uniform(0.05, 0.6)
                plan = Plan(size, files, levels, harm, dice.randrange(size), after,
                            dice.randrange(1 << 30))  # fmt: skip
                with small_disk(root, harm == "full") as mounted:
                    incarnation(root, shm / root.name, plan)
                    check_after(root, run)
                counts[harm] += harm != "full" or mounted
                summary["rounds"] += 1
                if notes(root, "finished") or run.faults or summary["rounds"] >= rounds:
                    break
            check_losses(root, run, reference[run.size])
            summary["finished"] += bool(notes(root, "finished"))
            summary["commits"] += len(notes(root, "committed"))
            summary["failed_saves"] += len(notes(root, "failed"))
            for _, source, _, _ in notes(root, "resumed"):
                words = source or "nothing"
                summary["resumed_from"][words] = summary["resumed_from"].get(words, 0) + 1
            summary["faults"] += [f"run {summary['runs']}: {fault}" for fault in run.faults]
            shutil.rmtree(root, ignore_errors=True)
            shutil.rmtree(shm / root.name, ignore_errors=True)
    summary["seconds"] = time.monotonic() - began
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after that")
    options = parser.parse_args()
    answer = main(options.rounds, options.seed, options.seconds)
    print(json.dumps(answer, indent=1))
    sys.exit(1 if answer["faults"] else 0)
