"""Write docs/frontier-study.md: the form of the Frontier study, with this planner's predictions.

Simulates the sweeps of docs/examples/frontier on a model of Frontier, which takes about two
minutes and no more than one core:

    python docs/make_frontier_study.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
DOCS = Path(__file__).parent
EXAMPLES = DOCS / "examples" / "frontier"
PUBLISHED = {"22B": 38.38, "175B": 36.14, "1T": 31.96}
"""Percent of peak, abstract of the study."""
ABSTRACT = {
    ("175B", "weak"): "100 % on 1,024 GCDs", ("1T", "weak"): "100 % on 3,072 GCDs",
    ("175B", "strong"): "89 %", ("1T", "strong"): "87 %",
}  # fmt: skip

HEAD = """\
# The Frontier study's form

Dash et al. 2023, *Optimizing Distributed Training on Frontier for Large Language Models*, trained
GPT models of 22B, 175B and one trillion parameters on Frontier. Its abstract gives percentages of
peak and efficiencies of weak and strong scaling. This page has tables of the same form, **none of
it measured on Frontier**: each step is the pipeline's own table of actions, run event by event
with the times that this project's planner gives a model of Frontier (`machine: {simulate:
frontier}`, see [scaling](scaling.md)). Written by

```console
$ python docs/make_frontier_study.py
```

The abstract states no layouts, batches or counting of FLOPs. The layouts here are the planner's
fastest that fit 64 GB a GCD; they recompute nothing, and their schedules leave smaller bubbles than
1F1B's. So the columns are to be compared, not to agree: our prediction is of another configuration,
and is higher. Nothing was calibrated on the abstract's numbers.
"""


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        found = {
            path.stem: _report(Path(folder), path) for path in sorted(EXAMPLES.glob("*-*.yaml"))
        }
    text = "\n".join([HEAD, *_peak(found), *_scaling(found, "weak"), *_scaling(found, "strong"),
                      *_layouts()])  # fmt: skip
    (DOCS / "frontier-study.md").write_text(text.rstrip("\n") + "\n")


def _report(folder: Path, sweep: Path) -> dict[str, Any]:
    """Run a sweep and read its report."""
    runs = folder / sweep.stem
    command = [HPCTRAIN, "sweep", str(sweep), "--runs", str(runs)]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = runs.iterdir()
    command = [HPCTRAIN, "report", str(made), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _points(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [point for series in report["series"] for point in series["points"]]


def _peak(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "## Share of peak", "",
        "Model FLOP/s over 191.5 TFLOP/s, half of an MI250X's dense half precision; no layer is "
        "computed twice, so hardware FLOP/s are the same.", "",
        "| model | GCDs | step | TFLOP/s a GCD | of peak, predicted | of peak, abstract | "
        "that share of 191.5 TFLOP/s |",
        "|:--|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for name, sweep in (("22B", "22b-peak"), ("175B", "175b-weak"), ("1T", "1t-weak")):
        point = _points(found[sweep])[-1]
        share = PUBLISHED[name]
        lines.append(
            f"| {name} | {point['devices']:,} | {point['step_seconds']:.2f} s | "
            f"{point['model_flops_per_device'] / 1e12:.1f} | {100 * point['mfu']:.2f} % | "
            f"{share} % | {share / 100 * 191.5:.1f} |"
        )
    return [*lines, ""]


def _scaling(found: dict[str, dict[str, Any]], kind: str) -> list[str]:
    words = {
        "weak": "The batch grows with the devices; efficiency is T(smallest) / T.",
        "strong": "The same batch on more devices; efficiency is T(smallest) · n(smallest) / "
        "(T · n).",
    }
    lines = [f"## {kind.capitalize()} scaling", "", words[kind], "",
             "| model | GCDs | sequences a step | step | tokens/s | efficiency, simulated | "
             "by the planner's closed form | abstract |",
             "|:--|--:|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for name, stem in (("175B", "175b"), ("1T", "1t")):
        points = _points(found[f"{stem}-{kind}"])
        for point in points:
            batch = point["tokens_per_second"] * point["step_seconds"] / 2048
            last = ABSTRACT[name, kind] if point is points[-1] else ""
            lines.append(
                f"| {name} | {point['devices']:,} | {batch:,.0f} | "
                f"{point['step_seconds']:.1f} s | {point['tokens_per_second']:,.0f} | "
                f"{100 * point['efficiency']:.1f} % | "
                f"{100 * point['predicted_efficiency']:.1f} % | {last} |"
            )
    return [*lines, ""]


def _layouts() -> list[str]:
    lines = ["## Jobs", ""]
    for name in ("22b", "175b", "1t"):
        text = (EXAMPLES / f"{name}.yaml").read_text().rstrip("\n")
        lines += [f"[{name}.yaml](examples/frontier/{name}.yaml)", "", "```yaml", text, "```", ""]
    return lines


if __name__ == "__main__":
    main()
