#!/usr/bin/env python3
"""Scaling studies shown to be right: real ranks, emulated ranks against what was put in, speed.

    benchmarks/scaling.py [--real] [--emulated] [--most 64] [--render] [--json] [--keep DIR]

- ``--real``: strong and weak sweeps on 1, 2 and 4 real ranks of this machine, with their reports.
- ``--emulated``: weak scaling of an emulated Frontier on 1 to ``--most`` real ranks. Fails below
  97 %, or where the time split or the step is more than 3 % of the step off the simulator's.
- ``--render``: how long 1,000 points take to be listed and checked. Fails above 5 s of a core.

Without a choice all three. Numbers hold for the machine that prints them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
TEXT = "the quick brown fox jumps over the lazy dog. " * 4000
REAL = """\
name: real
ranks_per_node: 1
model: {layers: 4, hidden: 128, heads: 4, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 128}
train: {steps: 16, global_batch: 16, lr: 1e-3}
checkpoint: {every: 100}
"""
EMULATED = """\
name: emulated
machine: {emulate: frontier}
nodes: 1
ranks_per_node: 1
model: {layers: 4, hidden: 6144, heads: 48, vocab_size: 51200}
data: {path: not-read.h5, sequence_length: 4096}
train: {steps: 4, global_batch: 16, micro_batch: 2, precision: bf16}
checkpoint: {every: 100}
"""
NEAR = 0.03


def call(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [HPCTRAIN, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"hpctrain {' '.join(arguments)}: {done.returncode}\n{done.stderr}")
    return done.stdout


def sweep(folder: Path, name: str, text: str) -> dict[str, Any]:
    """Run a sweep; its report as data, which stays in ``folder`` as a page too."""
    (folder / f"{name}.yaml").write_text(text)
    call(folder, "sweep", f"{name}.yaml", "--launcher", "local")
    answer = call(folder, "report", name, "--json", "-o", f"{name}.html", "-o", f"{name}.md")
    found: dict[str, Any] = json.loads(answer)
    return found


def points(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [point for series in report["series"] for point in series["points"]]


def real(folder: Path) -> list[dict[str, Any]]:
    (folder / "real-job.yaml").write_text(REAL)
    (folder / "text.txt").write_text(TEXT)
    call(folder, "data", "tokenize", "text.txt", "-o", "tokens.h5", "--force")
    found = []
    for kind in ("strong", "weak"):
        text = f"job: real-job.yaml\nkind: {kind}\naxes: {{ranks_per_node: [1, 2, 4]}}\n"
        for point in points(sweep(folder, f"real-{kind}", text)):
            found.append({"kind": kind, **point})
            print(
                f"{kind:6} {point['devices']} ranks: step {1000 * point['step_seconds']:.1f} ms, "
                f"efficiency {100 * point['efficiency']:.1f} %",
                file=sys.stderr,
            )
    return found


def emulated(folder: Path, most: int) -> tuple[list[dict[str, Any]], bool]:
    """Weak scaling of data-parallel ranks; each against the simulator with the same tables."""
    (folder / "emulated-job.yaml").write_text(EMULATED)
    sizes = [(1, 1), (1, 8), (2, 8), (4, 8), (8, 8)]
    sizes = [(n, r) for n, r in sizes if n * r <= most]
    rows = f"nodes: {[n for n, _ in sizes]}, ranks_per_node: {[r for _, r in sizes]}"
    text = f"job: emulated-job.yaml\nkind: weak\nzip: [{{{rows}}}]\n"
    measured = points(sweep(folder, "emulated-weak", text))
    (folder / "simulated-job.yaml").write_text(EMULATED.replace("emulate:", "simulate:"))
    expected = points(
        sweep(folder, "simulated-weak", text.replace("emulated-job", "simulated-job"))
    )
    good = True
    for mine, theirs in zip(measured, expected, strict=True):
        step = theirs["step_seconds"]
        off = mine["step_seconds"] / step - 1
        kinds = {*mine["seconds"], *theirs["seconds"]}
        apart = {k: (mine["seconds"].get(k, 0) - theirs["seconds"].get(k, 0)) / step for k in kinds}
        worst = max(apart, key=lambda kind: abs(apart[kind]))
        fine = abs(off) <= NEAR and abs(apart[worst]) <= NEAR and mine["efficiency"] >= 1 - NEAR
        good &= fine
        mine |= {"simulated_step_seconds": step, "step_off": off, "split_off": apart}
        print(
            f"{mine['devices']:3} ranks: step {mine['step_seconds']:.3f} s, simulated {step:.3f} s "
            f"({100 * off:+.1f} %), efficiency {100 * mine['efficiency']:.1f} %; split at most "
            f"{100 * abs(apart[worst]):.1f} % of a step off ({worst}): {'ok' if fine else 'OFF'}",
            file=sys.stderr,
        )
    return measured, good


def render(folder: Path) -> tuple[float, float]:
    """Seconds of a dry run of 1,000 points: of a core, and by the clock."""
    (folder / "real-job.yaml").write_text(REAL)
    numbers = list(range(1, 11))
    (folder / "thousand.yaml").write_text(
        "job: real-job.yaml\naxes:\n  ranks_per_node: [1, 2, 4, 8, 16]\n"
        f"  parallel.tensor: [1, 2]\n  train.global_batch: {[16 * n for n in numbers]}\n"
        f"  train.seed: {numbers}\n"
    )
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    call(folder, "sweep", "thousand.yaml", "--dry-run", "--launcher", "local")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--most", type=int, default=64, help="ranks of the emulated machine")
    parser.add_argument("--keep", type=Path, help="leave runs and reports there")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    everything = not (options.real or options.emulated or options.render)
    answer: dict[str, Any] = {"schema_version": 1}
    good = True
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.render or everything:
            used, seconds = render(folder)
            answer["thousand_points_seconds"] = {"core": used, "clock": seconds}
            good &= used < 5.0
            print(f"1,000 points: {used:.2f} s of a core, {seconds:.2f} s", file=sys.stderr)
        if options.real or everything:
            answer["real"] = real(folder)
        if options.emulated or everything:
            answer["emulated"], fine = emulated(folder, options.most)
            good &= fine
    if options.json:
        print(json.dumps(answer))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
