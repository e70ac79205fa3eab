"""Fits the planner's calibration to published measurements; writes hpctrain/plan/calibration.yaml.

One set of numbers an (accelerator family, software stack). Each number has a prior of a physical
mean and width; sets with few rows stay near it. Rates that belong to the accelerator are drawn
together over its stacks, habits of the software over accelerators (two passes). The loss is
Huber's on log(predicted / measured), so single odd rows do not steer it.

    python benchmarks/fit_calibration.py [--measurements CSV] [--write]
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import published_rows
import yaml
from published_rows import Row, half_of

from hpctrain.plan.software import Calibration, apply, calibration, restrict, stack
from hpctrain.plan.steptime import StepModel

DATA = Path(__file__).parent / "data"
TABLE = Path(__file__).parent.parent / "hpctrain" / "plan" / "calibration.yaml"

# name: (scale, prior width on that scale). "share" lives in (0, 1) on a logit scale.
NUMBERS: Mapping[str, tuple[str, float]] = {
    "gemm": ("share", 0.30),
    "gemm_fp8": ("share", 0.40),
    "gemm_traffic": ("log", 0.40),
    "wave": ("share", 1.00),
    "flash1": ("share", 0.50),
    "flash2": ("share", 0.50),
    "cudnn": ("share", 0.50),
    "head_exponent": ("log", 0.70),
    "softmax": ("log", 0.30),
    "misaligned": ("log", 0.50),
    "memory": ("share", 0.40),
    "unfused_norm": ("log", 0.30),
    "layer_seconds": ("log", 1.40),
    "link": ("share", 1.20),
    "network": ("share", 0.90),
    "hop_seconds": ("log", 0.50),
    "tp_overlap": ("share", 1.00),
    "tp_backward_overlap": ("share", 1.00),
    "dp_overlap": ("share", 1.00),
    "pp_overlap": ("share", 1.00),
    "fsdp_overlap": ("share", 1.00),
    "expert_overlap": ("share", 1.00),
}
HARDWARE = (
    "gemm", "gemm_fp8", "gemm_traffic", "wave", "flash1", "flash2", "cudnn", "head_exponent",
    "misaligned", "memory", "link",
)  # fmt: skip
HUBER = 0.06

# Physical starting points where the general one of Calibration is far off: share of peak that a
# large product reaches (vendors' and third parties' measurements), attention kernels by device.
# Where an accelerator has no rows, its prior is what it does: 0.93 of what a product alone was
# measured to reach, as A100 and H100 show in training.
PRIORS: Mapping[str, Mapping[str, float]] = {
    "A100": {"gemm": 0.82, "flash1": 0.30, "flash2": 0.55, "cudnn": 0.58},
    "H100": {"gemm": 0.80, "flash1": 0.17, "flash2": 0.40, "cudnn": 0.50, "gemm_fp8": 0.70},
    "B200": {"gemm": 0.78, "flash2": 0.35, "cudnn": 0.45, "gemm_fp8": 0.70},
    "V100": {"gemm": 0.80, "flash1": 0.25, "flash2": 0.25},
    "MI250X": {"gemm": 0.56, "flash1": 0.20, "flash2": 0.28, "cudnn": 0.28, "memory": 0.75},
    "MI300X": {
        "gemm": 0.475, "gemm_fp8": 0.42, "flash2": 0.27, "cudnn": 0.32, "memory": 0.72,
        "link": 0.70,
    },
    "PVC": {"gemm": 0.60, "flash2": 0.25, "memory": 0.65},
    "megatron-2021": {"tp_backward_overlap": 0.7, "misaligned": 14.0},
    "megatron-deepspeed-2021": {"pp_overlap": 0.3},
    "pytorch-2023": {"pp_overlap": 0.3},
    "oneflow-2021": {"dp_overlap": 0.7},
    "pytorch-2024": {"dp_overlap": 0.5, "fsdp_overlap": 0.8},
    "megatron-core-2024": {
        "tp_overlap": 0.6, "dp_overlap": 0.9, "pp_overlap": 0.8, "expert_overlap": 0.2,
    },
}  # fmt: skip


def key_of(row: Row) -> tuple[str, str]:
    return row.work.platform.family, row.work.stack.name


def predict(row: Row, values: Calibration) -> float:
    return StepModel(row.work.calibrated(values)).step(row.plan).seconds


def _to(name: str, value: float) -> float:
    if NUMBERS[name][0] == "log":
        return math.log(value)
    value = min(max(value, 1e-4), 1 - 1e-4)
    return math.log(value / (1 - value))


def _back(name: str, value: float) -> float:
    if NUMBERS[name][0] == "log":
        return math.exp(value)
    return 1 / (1 + math.exp(-value))


def _used(rows: Sequence[Row], software: str) -> list[str]:
    """Numbers that can matter to these rows."""
    kernels = {r.work.kernel for r in rows}
    unused = {"flash1", "flash2", "cudnn"} - kernels
    if not kernels & {"flash1", "flash2", "cudnn"}:
        unused.add("head_exponent")
    if not kernels & {"torch", "fused"}:
        unused |= {"softmax", "misaligned"}
    if all(r.work.norms_fused for r in rows):
        unused.add("unfused_norm")
    if all(r.work.model.head_dim % 8 == 0 for r in rows):
        unused.add("misaligned")
    if not any(r.work.dtype == "fp8" for r in rows):
        unused.add("gemm_fp8")
    overlaps = {n for n in NUMBERS if n.endswith("overlap")}
    unused |= overlaps - set(stack(software).overlap)
    return [n for n in NUMBERS if n not in unused]


def fit_set(
    rows: Sequence[Row], prior: Calibration, names: Sequence[str], tight: Mapping[str, float]
) -> dict[str, float]:
    """Numbers of one set: damped Gauss-Newton on the Huber loss with a Gaussian prior."""
    software = rows[0].work.stack
    center = np.array([_to(n, getattr(prior, n)) for n in names])
    width = np.array([NUMBERS[n][1] * tight.get(n, 1.0) for n in names])
    weights = _weights(rows)
    # the prior weighs as much as a handful of rows, so that it yields to evidence
    precision = 4.0 / width**2 * HUBER

    def values(x: np.ndarray) -> Calibration:
        named = {n: _back(n, v) for n, v in zip(names, x, strict=True)}
        return restrict(apply(prior, named), software)

    def residuals(x: np.ndarray) -> np.ndarray:
        v = values(x)
        return np.array([math.log(predict(r, v) / r.seconds) for r in rows if r.seconds])

    def loss(r: np.ndarray, x: np.ndarray) -> float:
        a = np.abs(r)
        huber = np.where(a < HUBER, 0.5 * a * a / HUBER, a - 0.5 * HUBER)
        return float(np.sum(weights * huber) + 0.5 * np.sum(precision * (x - center) ** 2))

    x = center.copy()
    r = residuals(x)
    best, damping = loss(r, x), 1e-2
    for _ in range(40):
        jacobian = np.empty((len(r), len(names)))
        for i in range(len(names)):
            moved = x.copy()
            moved[i] += 0.02
            jacobian[:, i] = (residuals(moved) - r) / 0.02
        w = weights / np.maximum(np.abs(r), HUBER)
        normal = jacobian.T @ (jacobian * w[:, None]) + np.diag(precision)
        slope = jacobian.T @ (w * r) + precision * (x - center)
        gained = 0.0
        for _ in range(8):
            step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope)
            step = np.clip(step, -0.6, 0.6)
            trial = residuals(x + step)
            value = loss(trial, x + step)
            if value < best:
                gained = best - value
                x, r, best = x + step, trial, value
                damping = max(damping * 0.3, 1e-6)
                break
            damping *= 5
        if gained < 1e-5 * best:
            break
    return {n: _back(n, v) for n, v in zip(names, x, strict=True)}


def _weights(rows: Sequence[Row]) -> np.ndarray:
    """Rows of long series count less each, so that short series are heard."""
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for r in rows:
        sizes[r.series, r.model] += 1
    return np.array([sizes[r.series, r.model] ** -0.3 for r in rows if r.seconds])


def prior_of(family: str, software: str) -> Calibration:
    values = apply(Calibration(), PRIORS.get(software, {}))
    return apply(values, PRIORS.get(family, {}))


def fit(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """The table of calibration.yaml from rows with measured times."""
    sets: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.seconds and row.known and not row.doubtful:
            sets[key_of(row)].append(row)
    names = {k: _used(v, k[1]) for k, v in sets.items()}
    first = {k: fit_set(v, prior_of(*k), names[k], {}) for k, v in sets.items()}
    families = _means(first, sets, HARDWARE, 0)
    software = _means(first, sets, [n for n in NUMBERS if n not in HARDWARE], 1)
    table: dict[str, dict[str, float]] = {}
    for name, values in PRIORS.items():
        table[name] = dict(values)
    for level in (families, software):
        for name, values in level.items():
            table.setdefault(name, {}).update(values)
    for key, members in sets.items():
        prior = apply(apply(Calibration(), table.get(key[1], {})), table.get(key[0], {}))
        second = fit_set(members, prior, names[key], dict.fromkeys(HARDWARE, 0.7))
        table["/".join(key)] = {**second, "rows": float(len(members))}
    return table


def _means(
    found: Mapping[tuple[str, str], Mapping[str, float]],
    sets: Mapping[tuple[str, str], Sequence[Row]],
    names: Sequence[str],
    level: int,
) -> dict[str, dict[str, float]]:
    """Means of the numbers over sets that share a family (0) or a stack (1), by root of rows."""
    gathered: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for key, values in found.items():
        weight = math.sqrt(len(sets[key]))
        for name in names:
            if name in values:
                gathered[key[level]][name].append((weight, _to(name, values[name])))
    return {
        group: {
            name: _back(name, sum(w * v for w, v in pairs) / sum(w for w, _ in pairs))
            for name, pairs in by_name.items()
        }
        for group, by_name in gathered.items()
    }


def with_table(row: Row, table: Mapping[str, Mapping[str, float]]) -> float:
    """Prediction of a row under a table."""
    return predict(row, calibration(*key_of(row), table).values)


def errors(rows: Iterable[Row], table: Mapping[str, Mapping[str, float]]) -> list[float]:
    """log(predicted / measured) of each row that has a measured time."""
    return [math.log(with_table(r, table) / r.seconds) for r in rows if r.seconds]


def round_off(table: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {k: float(f"{v:.4g}") for k, v in values.items()} for name, values in table.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measurements", type=Path, default=DATA / "published_measurements.csv")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} and both halves")
    parser.add_argument("--sources", action="store_true", help="also leave each source out in turn")
    args = parser.parse_args()
    rows, _ = published_rows.load(args.measurements)
    rows += published_rows.load(DATA / "anchors.csv")[0]
    table = fit(rows)
    _report("all rows, fitted on all", rows, table)
    spreads: dict[str, list[float]] = defaultdict(list)
    for half in (0, 1):
        inside = [r for r in rows if half_of(r) == half]
        outside = [r for r in rows if half_of(r) != half]
        halved = fit(inside)
        _report(f"half {half}, fitted on it", inside, halved)
        _report(f"half {1 - half}, fitted on half {half}", outside, halved)
        for row, error in zip(
            [r for r in outside if r.seconds], errors(outside, halved), strict=True
        ):
            spreads["/".join(key_of(row))].append(abs(error))
        if args.write:
            groups = sorted({published_rows.group_of(r) for r in inside})
            text = yaml.safe_dump({**round_off(halved), "groups": groups}, sort_keys=True)
            (DATA / f"calibration_half_{half}.yaml").write_text(text, encoding="utf-8")
    if args.sources:
        for source in dict.fromkeys(r.ident.rsplit("-", 1)[0] for r in rows):
            kept = [r for r in rows if not r.ident.startswith(f"{source}-")]
            left = [r for r in rows if r.ident.startswith(f"{source}-")]
            _report(f"{source}, fitted on the other sources", left, fit(kept))
    if args.write:
        for name, values in spreads.items():
            # robust deviation of rows that were not fitted
            table[name]["spread"] = max(0.04, 1.4826 * float(np.median(values)))
        text = yaml.safe_dump(round_off(table), sort_keys=True)
        TABLE.write_text(f"# Written by benchmarks/fit_calibration.py.\n{text}", encoding="utf-8")


def _report(title: str, rows: Sequence[Row], table: Mapping[str, Mapping[str, float]]) -> None:
    for label, kinds in (("dense", ("dense", "long")), ("moe", ("moe",))):
        logs = np.array(errors([r for r in rows if r.kind in kinds], table))
        if len(logs):
            off = np.abs(np.exp(logs) - 1)
            print(
                f"{title + ' ' + label:52s} n={len(off):3d} mean {off.mean():6.1%} "
                f"median {np.median(off):6.1%} bias {logs.mean():+6.1%}"
            )


if __name__ == "__main__":
    main()
