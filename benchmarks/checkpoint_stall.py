#!/usr/bin/env python3
"""How long a checkpoint holds training up: ours beside torch.save and DCP, in one run.

All variants save the same state, a GPT of 110 million parameters with AdamW (1.32 GB, 784
tensors), every third step of the same loop, in one process and in turn. The loop runs in two
ways: with the device's compute emulated (forward and backward are a sleep, so the host's cores
are free, as they are beside a GPU), and with real forward and backward on both cores.

- blocking: what the training thread does for a checkpoint, in ms: the call, and what it waits
  before the optimizer may change the parameters. Median over the checkpoints, and the worst.
- slowdown: time of the steps over that of the same steps without checkpoints, which are measured
  before and after; the last checkpoint's end is not waited for, its steps run on.
- copy_hidden: part of the copying that the training thread did not wait for.

DCP's asynchronous saves are waited for where they would otherwise save values of a later step;
its best correct variant is asynchronous staging, waited for before the optimizer. Exit code 1
where a target is missed.

    benchmarks/checkpoint_stall.py [--json] [--steps N] [--variant NAME ...] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.testing.jobs import make_run
from hpctrain.testing.ranks import run_ranks

TARGETS = {
    "blocking_ratio_torch_save": (">=", 1000.0),
    "blocking_ratio_dcp_async": (">=", 50.0),
    "slowdown_emulated": ("<=", 1.02),
    "slowdown_computing": ("<=", 1.10),
}
EVERY = 3
VARIANTS = (
    "torch_save",
    "dcp_save",
    "dcp_async_thread",
    "dcp_async_process",
    "dcp_async_staging",
    "hpctrain",
)
JOB = """
name: checkpoint-stall
model: {{layers: {layers}, hidden: {hidden}, heads: 12, vocab_size: {vocabulary}}}
data: {{path: tokens.h5, sequence_length: 128}}
train: {{steps: 1000000, global_batch: 1, lr: 1e-4}}
checkpoint: {{every: 3, keep: 1, path: {path}}}
"""


class Step:
    """One training step in two halves, so that a checkpoint's waits stand where they must."""

    def __init__(self, state: Any, spec: Any, emulate: float) -> None:
        import torch

        self.state, self.spec, self.emulate = state, spec, emulate
        self.model = state.model.whole
        self.first = [p.detach().flatten()[:1] for p in state.model.parameters()]
        vocabulary = spec.model.vocab_size
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(vocabulary, (1, 129), generator=generator)

    def forward_backward(self) -> None:
        if self.emulate:
            time.sleep(self.emulate)
            return
        logits = self.model(self.rows[:, :-1])
        self.state.model.token_loss(logits, self.rows[:, 1:]).backward()

    def update(self) -> None:
        """The optimizer, or on the emulated device a trace of it: the step's number in every
        parameter."""
        import torch

        self.state.step += 1
        if not self.emulate:
            self.state.optimizer.step()
            self.state.optimizer.zero_grad(set_to_none=False)
            return
        with torch.no_grad():
            for value in self.first:
                value.fill_(float(self.state.step))


class Saver:
    """What every variant has: begin a checkpoint, wait before the update, finish."""

    asynchronous = False

    def save(self) -> None: ...
    def before_update(self) -> None: ...
    def after_step(self) -> None: ...
    def finish(self) -> None: ...


class TorchSave(Saver):
    def __init__(self, state: Any, folder: Path) -> None:
        self.state, self.folder = state, folder

    def values(self) -> dict[str, Any]:
        model = dict(self.state.model.named_parameters())
        states = self.state.optimizer.state
        moments = {
            f"optimizer.{key}.{name}": value
            for name, parameter in model.items()
            for key, value in states[parameter].items()
        }
        return {f"model.{name}": p.detach() for name, p in model.items()} | moments

    def save(self) -> None:
        import torch

        path = self.folder / "state.pt"
        with open(path.with_suffix(".tmp"), "wb") as stream:
            torch.save(self.values(), stream)
            stream.flush()
            os.fsync(stream.fileno())
        path.with_suffix(".tmp").rename(path)


class Dcp(TorchSave):
    def __init__(self, state: Any, folder: Path, kind: str) -> None:
        from torch.distributed.checkpoint import staging
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        super().__init__(state, folder)
        self.kind = kind
        self.number = 0
        self.upload: Any = None
        self.staged: Any = None
        self.stager: Any = None
        self.type = AsyncCheckpointerType.THREAD
        if kind == "dcp_async_process":
            self.type = AsyncCheckpointerType.PROCESS
        if kind == "dcp_async_staging":
            # Its shared buffers are kept between saves; pinned memory needs a GPU.
            self.stager = staging.DefaultStager(
                staging.StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=True,
                    use_async_staging=True,
                    use_non_blocking_copy=False,
                )
            )

    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.number += 1
        folder = self.folder / f"dcp{self.number % 2}"
        if self.kind == "dcp_save":
            dcp.save(self.values(), checkpoint_id=folder)
            return
        if self.upload is not None:
            self.upload.result()
        answer = dcp.async_save(
            self.values(),
            checkpoint_id=folder,
            async_checkpointer_type=self.type,
            async_stager=self.stager,
        )
        self.upload = getattr(answer, "upload_completion", answer)
        self.staged = getattr(answer, "staging_completion", None)

    def before_update(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def finish(self) -> None:
        if self.upload is not None:
            self.upload.result()
        if self.stager is not None:
            self.stager.close()


class Ours(Saver):
    def __init__(self, state: Any, checkpointer: Any) -> None:
        self.state, self.checkpointer = state, checkpointer
        self.failed: list[Any] = []
        self.last = -1

    def save(self) -> None:
        self._note(self.checkpointer.save(self.state))

    def before_update(self) -> None:
        self.checkpointer.saver.wait_copied()

    def after_step(self) -> None:
        self._note(self.checkpointer.poll(0.0))

    def finish(self) -> None:
        self._note(self.checkpointer.saver.drain())

    def _note(self, outcomes: list[Any]) -> None:
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
            self.last = max(self.last, outcome.step)


def run_steps(step: Step, saver: Saver, steps: int) -> dict[str, Any]:
    """Steps with a checkpoint every third: seconds, blocking of each checkpoint."""
    blocking: list[float] = []
    began = time.perf_counter()
    for number in range(1, steps + 1):
        step.forward_backward()
        waited = time.perf_counter()
        saver.before_update()
        waited = time.perf_counter() - waited
        step.update()
        after = time.perf_counter()
        saver.after_step()
        # The waits of a checkpoint belong to the one that was begun last.
        if blocking:
            blocking[-1] += waited + time.perf_counter() - after
        if number % EVERY == 0 and number < steps:
            call = time.perf_counter()
            saver.save()
            blocking.append(time.perf_counter() - call)
    seconds = time.perf_counter() - began
    drained = time.perf_counter()
    saver.finish()
    return {
        "seconds": seconds,
        "drain_seconds": time.perf_counter() - drained,
        "blocking_ms": [1e3 * value for value in blocking],
    }


def measure(root: str, folder: str, variants: list[str], steps: int, mode: str) -> dict[str, Any]:
    """In the one rank: every variant, with steps without checkpoints before and after."""
    import torch

    from hpctrain.layout import RankGrid
    from hpctrain.optim.adamw import build_optimizer
    from hpctrain.parallel.parallelize import parallelize
    from hpctrain.rundir import RunDir
    from hpctrain.runtime.bootstrap import bootstrap, shut_down, start_mpi
    from hpctrain.runtime.environment import RankEnvironment
    from hpctrain.spec import read_job
    from hpctrain.spec.resolve import layout_of
    from hpctrain.train.checkpointing import Checkpointer
    from hpctrain.train.state import TrainState

    torch.set_num_threads(os.cpu_count() or 1)
    spec = read_job(RunDir(Path(root)).job).spec
    context = bootstrap(start_mpi(), RankGrid(layout_of(spec)), RankEnvironment.read())
    model = parallelize(spec, context)
    optimizer = build_optimizer(model.parameters(), spec.train)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = TrainState(model, optimizer)
    step = Step(state, spec, 0.9 if mode == "emulated" else 0.0)
    sources = state.sources()
    found: dict[str, Any] = {
        "bytes": sum(s.bytes for s in sources.specs),
        "tensors": len(sources.specs),
        "parameters": sum(p.numel() for p in model.parameters()),
        "variants": {},
    }
    for _ in range(2):
        step.forward_backward()
        step.update()
    for name in variants:
        target = Path(folder) / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        checkpointer = None
        saver: Saver
        if name == "hpctrain":
            checkpointer = Checkpointer(target, spec, context)
            saver = Ours(state, checkpointer)
        elif name == "torch_save":
            saver = TorchSave(state, target)
        else:
            saver = Dcp(state, target, name)
        # Buffers, thread pools and helper processes are made by a first checkpoint.
        saver.save()
        saver.before_update()
        saver.finish() if name == "hpctrain" else None
        plain = Saver()
        before = run_steps(step, plain, steps)["seconds"]
        result = run_steps(step, saver, steps)
        after = run_steps(step, plain, steps)["seconds"]
        result["plain_seconds"] = [before, after]
        if checkpointer is not None:
            result["good"] = check(checkpointer, state, saver.last, mode)
            result["copy_seconds"] = list(checkpointer.saver.copy_seconds)
            checkpointer.saver.close()
        found["variants"][name] = result
        shutil.rmtree(target, ignore_errors=True)
    shut_down(context)
    return found


def check(checkpointer: Any, state: Any, step: int, mode: str) -> bool:
    """The last checkpoint is whole and, on the emulated device, holds its own step's values."""
    if checkpointer.store.verify(step):
        return False
    if mode != "emulated":
        return True
    with checkpointer.store.open(step) as reader:
        return all(
            reader.read(f"model/{name}", (0,) * p.dim(), (1,) * p.dim()).item() == float(step)
            for name, p in state.model.named_parameters()
        )


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    rows = {}
    for name, result in found["variants"].items():
        plain = statistics.mean(result["plain_seconds"])
        rows[name] = {
            "blocking_ms": statistics.median(result["blocking_ms"]),
            "worst_blocking_ms": max(result["blocking_ms"]),
            "checkpoints": len(result["blocking_ms"]),
            "slowdown": result["seconds"] / plain,
            "plain_seconds": result["plain_seconds"],
            "seconds": result["seconds"],
            "drain_seconds": result["drain_seconds"],
        }
        if "good" in result:
            rows[name]["verified"] = result["good"]
            copied = statistics.median(result["copy_seconds"])
            rows[name]["copy_ms"] = 1e3 * copied
            rows[name]["copy_hidden"] = max(0.0, 1 - rows[name]["blocking_ms"] / 1e3 / copied)
    return rows


def report(answer: dict[str, Any], out: Callable[[str], None]) -> None:
    for mode in ("emulated", "computing"):
        if mode not in answer:
            continue
        out(
            f"{mode}: {answer['parameters'] / 1e6:.0f} M parameters, {answer['bytes'] / 1e9:.2f} GB"
        )
        for name, row in answer[mode].items():
            out(
                f"  {name:18} blocking {row['blocking_ms']:9.2f} ms (worst "
                f"{row['worst_blocking_ms']:9.2f}), slowdown {row['slowdown']:.3f}"
                + (f", copy {row['copy_ms']:.0f} ms hidden {row['copy_hidden']:.3f}, verified "
                   f"{row['verified']}" if "copy_hidden" in row else "")
            )  # fmt: skip
    for key, (sense, target) in TARGETS.items():
        if key in answer:
            word = "ok" if answer["passed"][key] else "MISSED"
            out(f"{key} {answer[key]:.2f} (target {sense} {target:g}): {word}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--steps", type=int, default=25, help="steps of each block")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="all by default")
    parser.add_argument("--mode", action="append", choices=("emulated", "computing"))
    parser.add_argument("--folder", type=Path, help="where checkpoints go; a real disk")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try this program")
    options = parser.parse_args()
    variants = list(options.variant or VARIANTS)
    shape = {"layers": 12, "hidden": 768, "vocabulary": 32768}
    if options.small:
        shape = {"layers": 2, "hidden": 96, "vocabulary": 512}
    answer: dict[str, Any] = {"schema_version": 1, "targets": TARGETS, "every": EVERY}
    with tempfile.TemporaryDirectory(prefix="hpctrain-stall-", dir=options.folder) as folder:
        run = make_run(JOB.format(path=f"{folder}/checkpoints", **shape), Path(folder))
        for mode in options.mode or ("emulated", "computing"):
            found = run_ranks(
                1,
                measure,
                str(run.root),
                folder,
                variants,
                options.steps,
                mode,
                timeout=3600,
                env={"OMP_NUM_THREADS": str(os.cpu_count() or 1)},
            )[0]
            answer |= {key: found[key] for key in ("bytes", "tensors", "parameters")}
            answer[mode] = summarise(found)
    rows = answer.get("emulated", {})
    if "hpctrain" in rows:
        own = rows["hpctrain"]["blocking_ms"]
        answer["copy_hidden"] = rows["hpctrain"]["copy_hidden"]
        if "torch_save" in rows:
            answer["blocking_ratio_torch_save"] = rows["torch_save"]["blocking_ms"] / own
        if "dcp_async_staging" in rows:
            answer["blocking_ratio_dcp_async"] = rows["dcp_async_staging"]["blocking_ms"] / own
    for mode in ("emulated", "computing"):
        if "hpctrain" in answer.get(mode, {}):
            answer[f"slowdown_{mode}"] = answer[mode]["hpctrain"]["slowdown"]
    answer["passed"] = {
        key: answer[key] >= target if sense == ">=" else answer[key] <= target
        for key, (sense, target) in TARGETS.items()
        if key in answer
    }
    report(answer, lambda text: print(text, file=sys.stderr if options.json else sys.stdout))
    if options.json:
        print(json.dumps(answer))
    return 0 if all(answer["passed"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
