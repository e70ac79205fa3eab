"""The planner against published measurements: step time, ranking, out of memory, memory.

    python benchmarks/planner_accuracy.py [--measurements CSV] [--out-of-memory CSV] [--json]

Any file of the same columns will do. Rows that cannot be modelled are counted and named. With the
shipped files the two halves are shown as well: numbers fitted on one half of the (source, model)
groups, errors on it and on the other half.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import published_rows
import yaml
from planner_ranking import Outcome, ranking, source_name
from planner_tables import markdown, show
from published_rows import Row, half_of, shown_memory

from hpctrain.errors import HpctrainError
from hpctrain.plan.memory import limit
from hpctrain.plan.software import calibration
from hpctrain.plan.steptime import StepModel

DATA = Path(__file__).parent / "data"
MEASUREMENTS = DATA / "published_measurements.csv"
OUT_OF_MEMORY = DATA / "published_out_of_memory.csv"
ANCHORS = DATA / "anchors.csv"
VTRAIN = ("vtrainM-001", "vtrainM-043", "vtrainM-088")
"""Layouts of one model that vTrain measured far apart."""


def predicted(row: Row, table: Mapping[str, Mapping[str, float]] | None = None) -> float:
    """Seconds of the row's step; with the shipped calibration where ``table`` is None."""
    values = calibration(row.work.platform.family, row.work.stack.name, table).values
    return StepModel(row.work.calibrated(values)).step(row.plan).seconds


def used_share(row: Row) -> float:
    """Fullest stage's memory over what a device can hold."""
    return max(stage.total for stage in StepModel(row.work).memory(row.plan)) / limit(row.work)


def outcomes(
    rows: Iterable[Row], table: Mapping[str, Mapping[str, float]] | None = None
) -> list[Outcome]:
    return [Outcome(r, predicted(r, table), used_share(r)) for r in rows]


def modelled(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[str, str]]]:
    """Rows that the planner gives a time and a size for, and (id, reason) of the others."""
    kept, left = [], []
    for row in rows:
        try:
            usable = math.isfinite(predicted(row)) and math.isfinite(used_share(row))
            reason = "" if usable else "the planner's time or memory of it is not finite"
        except (HpctrainError, ValueError, ArithmeticError, LookupError, AssertionError) as error:
            reason = f"the planner has no model of it: {error}"
        if reason:
            left.append((row.ident, reason))
        else:
            kept.append(row)
    return kept, left


def summary(found: Sequence[Outcome]) -> dict[str, float]:
    """Mean and median of the absolute errors and the mean error of rows with a measured time."""
    errors = [o.error for o in found if o.row.seconds]
    if not errors:
        return {"rows": 0}
    return {
        "rows": len(errors),
        "mean_abs_error": statistics.fmean(abs(e) for e in errors),
        "median_abs_error": statistics.median(abs(e) for e in errors),
        "bias": statistics.fmean(errors),
    }


def grouped(found: Iterable[Outcome], key: Callable[[Outcome], str]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in found:
        groups[key(outcome)].append(outcome)
    return {name: summary(members) for name, members in groups.items()}


def size_name(row: Row) -> str:
    billions = row.work.model.parameters / 1e9
    for bound in (3, 10, 30, 100, 300):
        if billions < bound:
            return f"below {bound}B"
    return "300B and more"


def out_of_memory(fits: Sequence[Outcome], failed: Sequence[Row]) -> dict[str, Any]:
    """Share of rows whose fitting or failing is told right."""
    missed = [r for r in failed if used_share(r) <= 1.0]
    refused = [o.row for o in fits if o.used > 1.0]
    total = len(fits) + len(failed)
    right = total - len(missed) - len(refused)
    return {
        "oom_rows": len(failed),
        "fitting_rows": len(fits),
        "oom_accuracy": right / total if total else math.nan,
        "oom_missed": len(missed) / len(failed) if failed else math.nan,
        "missed": [r.ident for r in missed],
        "refused": [r.ident for r in refused],
    }


def out_of_memory_halves(fits: Sequence[Outcome], failed: Sequence[Row]) -> list[dict[str, float]]:
    """Verdicts on rows that had no say in the two constants of the memory model that can be
    picked on such rows: the fixed part of a process and the share that can be filled. Both are
    picked on one half of the groups (see ``halves``), the verdicts are on the other."""
    cases = []
    for row, ran in [(o.row, True) for o in fits] + [(r, False) for r in failed]:
        stages = StepModel(row.work).memory(row.plan)
        most = max(stage.total - stage.context for stage in stages)
        cases.append((half_of(row), ran, most, row.work.platform.memory_bytes))

    def wrong(half: int, fixed: float, share: float) -> tuple[int, int, int, int]:
        mine = [c for c in cases if c[0] == half]
        told = [(ran, most + fixed * 2**30 <= share * memory) for _, ran, most, memory in mine]
        missed = sum(fit and not ran for ran, fit in told)
        refused = sum(ran and not fit for ran, fit in told)
        return missed + refused, missed, len(mine), sum(not ran for ran, _ in told)

    found = []
    grid = [(f / 2, s / 100) for f in range(9) for s in range(90, 101)]
    for half in (0, 1):
        fixed, share = min(grid, key=lambda at: (wrong(half, *at)[0], at))
        errors, missed, rows, out = wrong(1 - half, fixed, share)
        if rows:
            found.append(
                {
                    "picked_on": half,
                    "fixed_gib": fixed,
                    "share": share,
                    "rows": rows,
                    "oom_accuracy": 1 - errors / rows,
                    "oom_missed": missed / out if out else 0.0,
                }
            )
    return found


def memory_errors(found: Sequence[Outcome]) -> dict[str, Any]:
    """Error of the memory of rows that state one."""
    errors = {}
    for o in found:
        if not o.row.memory:
            continue
        stages = StepModel(o.row.work).memory(o.row.plan)
        if "rank 0" in o.row.raw.get("notes", ""):
            stages = stages[:1]
        elif "first/last" in o.row.raw.get("notes", ""):
            stages = (stages[0], stages[-1])
        shown = max(shown_memory(o.row, s) for s in stages)
        errors[o.row.ident] = shown / o.row.memory - 1
    if not errors:
        return {"rows": 0}
    return {
        "rows": len(errors),
        "mean_abs_error": statistics.fmean(abs(e) for e in errors.values()),
        "bias": statistics.fmean(errors.values()),
    }


def anchors(found: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Predicted beside published, in the publication's own convention, for the anchor rows."""
    table = []
    for o in found:
        row = o.row
        name = source_name(row)
        vendor = name == "dgxc" and row.work.dtype == "bf16"
        if name not in ("ptdp", "korth", "anchor") and not vendor and row.ident not in VTRAIN:
            continue
        if not row.seconds:
            continue
        entry: dict[str, Any] = {
            "id": row.ident,
            "model": row.model,
            "devices": row.devices,
            "layout": row.plan.layout.describe(),
            "micro_batch": row.plan.micro_batch,
            "recompute": row.plan.recompute,
            "published_seconds": row.seconds,
            "predicted_seconds": o.predicted,
            "error": o.error,
        }
        if name == "ptdp":
            stated = float(row.raw["achieved_tflops_per_gpu"])
            entry["published_tflops"] = stated
            entry["predicted_tflops"] = stated * row.seconds / o.predicted
        table.append(entry)
    return table


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is printed."""
    rows, left = published_rows.load(args.measurements)
    failed, left_oom = published_rows.load(args.out_of_memory)
    rows, more = modelled(rows)
    failed, more_oom = modelled(failed)
    left, left_oom = [*left, *more], [*left_oom, *more_oom]
    found = outcomes(rows)
    timed = [o for o in found if o.row.seconds]
    untimed = [(o.row.ident, "no measured time is stated") for o in found if not o.row.seconds]
    kinds = {k: summary([o for o in timed if o.row.kind == k]) for k in ("dense", "moe", "long")}
    guessed = [o for o in timed if not o.row.known]
    whole = summary(timed)
    result: dict[str, Any] = {
        "step_time_mean_abs_error": whole.get("mean_abs_error", math.nan),
        "step_time_median_abs_error": whole.get("median_abs_error", math.nan),
        "rows_used": int(whole["rows"]),
        "rows_not_modelled": len(left) + len(untimed),
        "not_modelled": dict([*left, *untimed]),
        "oom_not_modelled": dict(left_oom),
        "unknown_accelerators": sorted({o.row.accelerator for o in guessed}),
        "dense": kinds["dense"],
        "moe": kinds["moe"],
        "long_context": kinds["long"],
        "by_source": grouped(timed, lambda o: source_name(o.row)),
        "by_accelerator": grouped(
            timed, lambda o: f"{o.row.work.platform.name}, {o.row.work.stack.name}"
        ),
        "by_size": grouped(timed, lambda o: size_name(o.row)),
        "ranking": ranking(timed),
        "memory": memory_errors(found),
        "anchors": anchors(timed + outcomes(published_rows.load(ANCHORS)[0])),
        **out_of_memory(found, failed),
    }
    if args.measurements == MEASUREMENTS:
        result["halves"] = halves(rows)
        result["not_fitted_by_source"] = not_fitted(rows)
        if args.out_of_memory == OUT_OF_MEMORY:
            result["oom_halves"] = out_of_memory_halves(found, failed)
    if args.rows:
        result["rows"] = [
            {
                "id": o.row.ident,
                "measured": o.row.seconds,
                "predicted": o.predicted,
                "error": o.error,
                "memory_used": o.used,
                "filled": list(o.row.filled),
            }
            for o in found
        ]
    return result


def halves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Errors of the two calibrations that were fitted on one half of the groups each."""
    found = []
    for half in (0, 1):
        path = DATA / f"calibration_half_{half}.yaml"
        if not path.exists():
            continue
        table = yaml.safe_load(path.read_text("utf-8"))
        members = set(table.pop("groups"))
        inside = [r for r in rows if published_rows.group_of(r) in members and r.kind != "moe"]
        outside = [r for r in rows if published_rows.group_of(r) not in members and r.kind != "moe"]
        found.append(
            {
                "fitted_on": half,
                "on_it": summary(outcomes(inside, table)),
                "on_the_other": summary(outcomes(outside, table)),
            }
        )
    return found


def not_fitted(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Errors by source, each row under the calibration of the half that it is not in."""
    found: list[Outcome] = []
    for half in (0, 1):
        table = yaml.safe_load((DATA / f"calibration_half_{half}.yaml").read_text("utf-8"))
        members = set(table.pop("groups"))
        found += outcomes([r for r in rows if published_rows.group_of(r) not in members], table)
    return grouped(found, lambda o: source_name(o.row))


def _finite(value: Any) -> Any:
    """Numbers that JSON has no word for become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS)
    parser.add_argument("--out-of-memory", type=Path, default=OUT_OF_MEMORY)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--markdown", action="store_true", help="the tables of docs/planner.md")
    parser.add_argument("--rows", action="store_true", help="with --json: every row as well")
    args = parser.parse_args(argv)
    result = report(args)
    if args.json:
        json.dump(_finite(result), sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
    elif args.markdown:
        print(markdown(result))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
