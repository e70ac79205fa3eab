#!/usr/bin/env python3
"""Emulated ranks against the simulator: the same job both ways, for one cut after another.

    benchmarks/emulation.py [--only NAME ...] [--json] [--keep DIR]

An emulated Frontier: 8 blocks of width 6,144, sequences of 2,048, a vocabulary of 51,200,
micro-batches of one; with experts 4 blocks of width 4,096, three of them with 16 experts. Ranks
are real and talk by real messages; the simulator runs a table. Exit code 1 where their steps are
more than 3 % apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hpctrain.rundir import RunDir

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
NEAR = 0.03
JOB = """\
name: emulation
machine: {{{how}: frontier}}
nodes: {nodes}
ranks_per_node: {ranks}
model: {{{model}}}
data: {{path: not-read.h5, sequence_length: 2048}}
train: {{steps: 4, global_batch: {batch}, micro_batch: 1, precision: bf16}}
parallel: {parallel}
checkpoint: {{every: 100}}
"""
EXPERTS = "layers: 4, hidden: 4096, heads: 32, vocab_size: 51200, " + (
    "moe: {experts: 16, top_k: 2, hidden: 2048, dense_layers: 1}"
)
DENSE = "layers: 8, hidden: 6144, heads: 48, vocab_size: 51200"
CUTS = {  # what it is: nodes, ranks a node, global batch, parallel
    "pipeline 4, 1F1B": (1, 4, 8, "{pipeline: 4}"),
    "pipeline 4, 1F1B, recomputed": (1, 4, 8, "{pipeline: 4, recompute: full}"),
    "pipeline 4, ZB-V": (1, 4, 8, "{pipeline: 4, schedule: zb-v}"),
    "pipeline 4, Hanayo": (1, 4, 8, "{pipeline: 4, schedule: hanayo}"),
    "pipeline 4, BitPipe": (1, 4, 8, "{pipeline: 4, schedule: bitpipe, chunks: 2}"),
    "pipeline 4 on 2 nodes, interleaved": (2, 2, 8, "{pipeline: 4, schedule: interleaved}"),
    "tensor 4": (1, 4, 8, "{tensor: 4}"),
    "context 4, ring": (1, 4, 8, "{context: 4}"),
    "context 4, Ulysses": (1, 4, 8, "{context: {size: 4, method: ulysses}}"),
    "4 replicas": (1, 4, 32, "{data: 4}"),
    "8 replicas, zero1": (1, 8, 32, "{sharding: zero1}"),
    "8 replicas, zero2": (1, 8, 32, "{sharding: zero2}"),
    "8 replicas, zero3, one micro-batch": (1, 8, 8, "{sharding: zero3}"),
    "2 x 4 replicas, zero3 in a node": (2, 4, 16, "{sharding: zero3, shard: 4}"),
    "pipeline 2, 4 replicas, zero2": (1, 8, 16, "{pipeline: 2, sharding: zero2}"),
    "pipeline 2, 4 replicas, zero3": (1, 8, 16, "{pipeline: 2, sharding: zero3}"),
    "pipeline 2, 2 replicas, ZeroPP": (
        1, 4, 8, "{pipeline: 2, schedule: zeropp, sharding: zero3}"
    ),
    "tensor 2, pipeline 2, 2 replicas, zero1": (
        1, 8, 8, "{tensor: 2, pipeline: 2, sharding: zero1}"
    ),
    "tensor 2, context 2, pipeline 2": (1, 8, 8, "{tensor: 2, context: 2, pipeline: 2}"),
    "8 expert ranks": (1, 8, 16, "{expert: 8}"),
    "2 expert ranks, 4 replicas, zero3": (1, 4, 8, "{expert: 2, sharding: zero3}"),
    "4 expert ranks, tensor 2, 4 replicas": (1, 8, 16, "{expert: 4, tensor: 2}"),
    "4 expert ranks, pipeline 2, 4 replicas": (1, 8, 16, "{expert: 4, pipeline: 2}"),
    "pipeline 4, 1F1B, spread vocabulary": (1, 4, 8, "{pipeline: 4, schedule: 1f1b+vocab}"),
}  # fmt: skip


def step_seconds(folder: Path, how: str, nodes: int, ranks: int, batch: int, cut: str) -> float:
    """Of the last step of a run."""
    model = EXPERTS if "expert" in cut else DENSE
    job = JOB.format(model=model, how=how, nodes=nodes, ranks=ranks, batch=batch, parallel=cut)
    folder = folder / how  # of runs that start in one second the names tell no order
    folder.mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(job)
    done = subprocess.run(
        [HPCTRAIN, "submit", "job.yaml", "--launcher", "local"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{cut}: {done.returncode}\n{done.stderr}")
    return list(RunDir.all(folder / "runs")[-1].read_steps())[-1].step_seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--keep", type=Path, help="leave runs there")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, (nodes, ranks, batch, cut) in CUTS.items():
            if options.only and not any(part in name for part in options.only):
                continue
            simulated = step_seconds(folder, "simulate", nodes, ranks, batch, cut)
            emulated = step_seconds(folder, "emulate", nodes, ranks, batch, cut)
            off = emulated / simulated - 1.0
            rows.append({"cut": name, "ranks": nodes * ranks, "simulated": simulated,
                         "emulated": emulated, "off": off})  # fmt: skip
            print(
                f"{name:40} {nodes * ranks:3} ranks  simulated {simulated:.3f} s  "
                f"emulated {emulated:.3f} s  {100 * off:+.1f} %",
                file=sys.stderr,
            )
    if options.json:
        print(json.dumps({"schema_version": 1, "cuts": rows}))
    return int(any(abs(r["off"]) > NEAR for r in rows))


if __name__ == "__main__":
    sys.exit(main())
