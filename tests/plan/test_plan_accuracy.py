"""The planner against published measurements: what docs/planner.md claims holds."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*args: str) -> dict:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "planner_accuracy.py", "--json", *args],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def report() -> dict:
    return run("--rows")


def test_step_times(report):
    assert report["step_time_mean_abs_error"] <= 0.10
    assert report["step_time_median_abs_error"] <= 0.07
    assert report["rows_used"] == 525 and report["rows_not_modelled"] == 0


def test_step_times_of_groups_that_were_not_fitted(report):
    assert len(report["halves"]) == 2
    for half in report["halves"]:
        assert half["on_it"]["rows"] + half["on_the_other"]["rows"] == 521
        assert half["on_the_other"]["mean_abs_error"] <= 0.10
        assert half["on_the_other"]["median_abs_error"] <= 0.07


def test_out_of_memory(report):
    assert report["oom_accuracy"] >= 0.97
    assert report["oom_missed"] <= 0.02
    assert report["oom_rows"] == 221


def test_out_of_memory_of_rows_that_had_no_say(report):
    """The two constants that can be picked on such rows, picked on the other half."""
    assert [half["picked_on"] for half in report["oom_halves"]] == [0, 1]
    for half in report["oom_halves"]:
        assert half["rows"] >= 350
        assert half["oom_accuracy"] >= 0.97
        assert half["oom_missed"] <= 0.02


def test_memory_where_it_is_stated(report):
    assert report["memory"]["rows"] == 43
    assert report["memory"]["mean_abs_error"] <= 0.08


def test_the_predicted_best_is_good_enough(report):
    """Choosing by prediction costs at most 5 % against choosing by measurement."""
    assert len(report["ranking"]) >= 10
    for group in report["ranking"]:
        assert group["chosen_over_best"] <= 0.05, group


def test_anchors(report):
    """PTD-P's table 1, Korthikanti's four pairs, Llama 3.1 70B and 405B from 64 to 2,048 H100."""
    anchors = {a["id"]: a for a in report["anchors"]}
    for ident in [f"ptdp-{n:03}" for n in range(1, 11)] + [f"korth-{n:03}" for n in range(1, 9)]:
        assert abs(anchors[ident]["error"]) <= 0.08, anchors[ident]
    weak = [anchors[f"dgxc-{n:03}"] for n in range(11, 17)]
    assert [a["devices"] for a in weak] == [64, 128, 256, 512, 1024, 2048]
    assert all(abs(a["error"]) <= 0.05 for a in weak)
    # both measured and predicted, weak scaling costs nothing
    growth = weak[-1]["predicted_seconds"] / weak[0]["predicted_seconds"]
    assert growth == pytest.approx(1, abs=0.02)


def test_vtrain_anchors(report):
    """The wrong layout of a 39.1B model on 512 A100 is twice as slow: 13.876 s against 24.17 s."""
    rows = {r["id"]: r for r in report["rows"]}
    good, bad = rows["vtrainM-043"], rows["vtrainM-088"]
    assert bad["measured"] / good["measured"] == pytest.approx(1.74, abs=0.01)
    assert bad["predicted"] / good["predicted"] == pytest.approx(1.74, rel=0.1)


def test_the_page_shows_what_the_benchmark_prints():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "planner_accuracy.py", "--markdown"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    page = (BENCHMARKS.parent / "docs" / "planner.md").read_text(encoding="utf-8")
    assert len(done.stdout.splitlines()) > 60, done.stderr
    assert done.stdout in page, "paste the output of --markdown into docs/planner.md"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_any_file_of_the_same_columns_will_do(tmp_path):
    """Unknown machines, empty cells, nonsense: counted and named, never dropped."""
    rows = rows_of(BENCHMARKS / "data" / "published_measurements.csv")
    template = dict.fromkeys(rows[0], "")
    chosen = rows[0]
    odd = [
        {**chosen, "id": "new-1", "gpu": "TPU-v9", "source": "nobody 2031"},
        {**chosen, "id": "new-2", "gpu": "MI300X", "source": "nobody", "gpus_per_node": ""},
        {**chosen, "id": "new-3", "vocab": "", "micro_batch": "", "dp": "", "kv_heads": ""},
        {**chosen, "id": "new-4", "step_time_s": "", "achieved_tflops_per_gpu": ""},
        {**chosen, "id": "new-5", "tp": "7"},
        {**template, "id": "new-6"},
        {**chosen, "id": "new-7", "layers": "many"},
        {**chosen, "id": "new-7", "layers": "nan"},
        {**chosen, "id": "", "micro_batch": "0", "seq": "inf"},
        {**chosen, "id": "new-8", "schedule": "of my own", "recompute": "SAC", "dtype": "mxfp8"},
    ]
    path = write(tmp_path / "odd.csv", [{**row, "weather": "fine"} for row in odd])
    path.write_text("\ufeff" + path.read_text() + "\n,,,\nshort,row\n", encoding="utf-8")
    found = run("--measurements", str(path), "--out-of-memory", str(path))
    assert found["rows_used"] == 4
    assert found["rows_not_modelled"] == 7
    left = found["not_modelled"]
    assert set(left) == {
        "new-4", "new-5", "new-6", "new-7", "new-7 line 9", "line 10", "short"
    }  # fmt: skip
    assert "7" in left["new-5"] and "layers" in left["new-7"] and "seq" in left["line 10"]
    assert found["unknown_accelerators"] == ["TPU-v9"]
    assert "halves" not in found
    assert math.isfinite(found["step_time_mean_abs_error"])


def test_conventions_of_published_rates(tmp_path):
    """One speed, stated three ways: hardware FLOPs, model FLOPs, causal attention at half."""
    rows = rows_of(BENCHMARKS / "data" / "published_measurements.csv")
    by_id = {r["id"]: r for r in rows}
    hardware = by_id["ptdp-001"]  # 137 TFLOP/s with recomputation is 3.53 s
    model = {**hardware, "id": "model-1", "source": "Korthikanti 2022"}
    rate = 137.0 * (72 * (1 + 2048 / (6 * 2304) + 51200 / (12 * 24 * 2304)))
    rate /= 96 * (1 + 2048 / (6 * 2304) + 51200 / (16 * 24 * 2304))
    model["achieved_tflops_per_gpu"] = str(rate)
    path = write(tmp_path / "two.csv", [hardware, model])
    found = run("--measurements", str(path), "--rows", "--out-of-memory", str(path))
    seconds = [r["measured"] for r in found["rows"]]
    assert seconds[0] == pytest.approx(3.53, abs=0.01)
    assert seconds[1] == pytest.approx(seconds[0])
