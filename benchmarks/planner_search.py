"""How long it takes to score every valid layout of a trillion parameters on 3,072 devices.

    python benchmarks/planner_search.py [--json]

One core; the model of PTD-P (Narayanan et al. 2021, table 1), 3,072 A100, batch 3,072.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from hpctrain.plan.inputs import Workload
from hpctrain.plan.platform import CATALOGUE
from hpctrain.plan.search import search
from hpctrain.plan.shapes import ModelShape
from hpctrain.plan.software import STACKS, calibration


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = ModelShape(
        layers=128,
        hidden=25600,
        heads=160,
        kv_heads=160,
        head_dim=160,
        ffn_hidden=102400,
        vocab=51200,
        positions=2048,
        dropout=True,
    )
    work = Workload(
        model=model,
        sequence=2048,
        global_batch=3072,
        dtype="fp16",
        platform=CATALOGUE["A100-80G"],
        stack=STACKS["megatron-2021"],
        values=calibration("A100", "megatron-2021").values,
    )
    cpu, wall = time.process_time(), time.perf_counter()
    found = search(work, 3072)
    result = {
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "layouts_scored": found.scored,
        "branches_too_big": found.too_big,
        "best_seconds": found.best[0].seconds,
        "best": found.best[0].strategy.layout.describe(),
    }
    if args.json:
        json.dump(result, sys.stdout)
    else:
        print(
            f"{found.scored} layouts scored in {result['cpu_seconds']:.2f} s of CPU "
            f"({result['wall_seconds']:.2f} s), {found.too_big} branches hold nothing that fits; "
            f"best {result['best_seconds']:.1f} s a step: {result['best']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
