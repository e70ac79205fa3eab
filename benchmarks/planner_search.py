"""How long it takes to score every valid layout of a trillion parameters on 3,072 devices.

    python benchmarks/planner_search.py [--json] [--frontier]

One core; the model of PTD-P (Narayanan et al. 2021, table 1), 3,072 A100, batch 3,072. With
``--frontier`` instead the best layouts of three models on Frontier beside the share of peak that
Dash et al. 2023 reached in layouts which their abstract does not state: nothing is fitted to it.
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
from hpctrain.plan.space import Space

FRONTIER = (
    ("22B", (48, 6144, 48), 64, 512, 0.3838),
    ("175B", (96, 12288, 96), 1024, 1024, 0.3614),
    ("1T", (128, 25600, 128), 3072, 3072, 0.3196),
)
"""Model; layers, width, heads; devices, samples a step (both assumed); share of peak published."""


def gpt(layers: int, hidden: int, heads: int, dropout: bool = False) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden=4 * hidden,
        vocab=51200,
        positions=2048,
        dropout=dropout,
    )


def frontier() -> None:
    """Prints predicted shares of peak of the fastest layouts beside the published ones."""
    for name, shape, devices, batch, published in FRONTIER:
        model, platform = gpt(*shape), CATALOGUE["MI250X"]
        work = Workload(
            model=model,
            sequence=2048,
            global_batch=batch,
            dtype="bf16",
            platform=platform,
            stack=STACKS["pytorch-2023"],
            values=calibration("MI250X", "pytorch-2023").values,
        )
        space = Space(
            tensor=(1, 2, 4, 8), context=(1,), schedules=("1f1b",), recompute=("full",),
            states=("zero1",),
        )  # fmt: skip
        best = search(work, devices, space, keep=1).best[0]
        rate = batch * 2048 / best.seconds / devices / platform.peak_flops("bf16")
        print(
            f"{name} on {devices}: {best.strategy.layout.describe()}, predicted "
            f"{rate * model.hardware_flops_per_token(2048):.1%} of peak in hardware FLOPs "
            f"({rate * model.model_flops_per_token(2048):.1%} in model FLOPs), published "
            f"{published:.1%}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--frontier", action="store_true")
    args = parser.parse_args()
    if args.frontier:
        frontier()
        return 0
    work = Workload(
        model=gpt(128, 25600, 160, dropout=True),
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
