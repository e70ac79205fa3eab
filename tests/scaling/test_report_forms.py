"""The forms of a report: page, CSV, JSON, Markdown, comparison; what each has to hold."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from scaling_synthetic import write_run, write_sweep

from hpctrain.errors import UsageError
from hpctrain.records import read_json, write_json
from hpctrain.rundir import RunDir
from hpctrain.scaling import tables
from hpctrain.scaling.analysis import analyse
from hpctrain.scaling.charts import Line, Mark, line_plot
from hpctrain.scaling.collect import collect
from hpctrain.scaling.compare import compare
from hpctrain.scaling.origins import mask, masked_job
from hpctrain.scaling.page import _ideal, render
from hpctrain.scaling.published import published

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
STRONG = "job: job.yaml\nkind: strong\naxes: {ranks_per_node: [1, 2, 4]}\nrepeats: 2\n"


@pytest.fixture
def sweep(tmp_path):
    times = {1: [[8.0] * 9, [8.1] * 9], 2: [[4.0] * 9, []], 4: "memory: too much"}
    return write_sweep(tmp_path, STRONG, times)


def report_of(path, **options):
    return analyse(collect([path]), warm_up=5, **options)


def test_the_page_needs_nothing_else_and_is_well_formed(sweep):
    page = render(report_of(sweep))
    assert not re.search(r"<script|<link|<img|src=|@import|url\(|https?://", page)
    body = page.partition("<!doctype html>\n")[2].replace('<meta charset="utf-8">', "")
    body = re.sub(r'<meta name="viewport"[^>]*>', "", body)
    root = ET.fromstring(body)
    plots = root.findall(".//figure")
    assert [plot.find("figcaption").text for plot in plots] == [
        "Speed-up", "Parallel efficiency", "Tokens a second", "Model FLOP/s of a device",
        "Time of a step", "Peak memory of rank 0",
    ]  # fmt: skip
    assert "prefers-color-scheme:dark" in page
    assert "cannot run: memory: too much" in page
    assert "is failed: node lost" in page


def test_an_ideal_line_for_each_size_of_baseline(tmp_path):
    root = write_sweep(tmp_path, STRONG, {n: [[8.0 / n] * 9] * 2 for n in (1, 2, 4)})
    report = report_of(root)
    (one,) = report.series
    two = dataclasses.replace(one, baseline=one.rows[1])
    for series, found in (((one,), [(1, 1), (4, 4)]), ((one, one), [(1, 1), (4, 4)]),
                          ((one, two), [(1, 1), (4, 4), (2, 1), (4, 2)])):  # fmt: skip
        lines = _ideal(dataclasses.replace(report, series=series), speedup=True)
        assert [(mark.x, mark.y) for line in lines for mark in line.marks] == found
        assert [line.name for line in lines] == ["ideal", ""][: len(lines)]
        (flat,) = _ideal(dataclasses.replace(report, series=series), speedup=False)
        assert [(mark.x, mark.y) for mark in flat.marks] == [(1, 1.0), (4, 1.0)]


def test_an_emulated_report_says_so_on_every_plot(tmp_path):
    facts = {"machine": "frontier", "device": "MI250X", "emulated": "frontier"}
    root = write_sweep(tmp_path, STRONG, {n: [[8.0 / n] * 9] * 2 for n in (1, 2, 4)},
                       hardware=facts)  # fmt: skip
    report = report_of(root)
    assert report.title == "Strong scaling: sweep (emulated: frontier)"
    page = render(report)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert len(captions) >= 4
    assert all(caption.endswith("(emulated: frontier)") for caption in captions)
    assert "Nothing here was measured on that machine" in page
    assert "# Strong scaling: sweep (emulated: frontier)" in tables.markdown(report)
    real = write_run(tmp_path / "both", [], [8.0] * 9)
    write_run(tmp_path / "both", ["ranks_per_node=2"], [4.0] * 9, hardware=facts)
    with pytest.raises(UsageError, match="different hardware"):
        report_of(real.root.parent)


def test_csv_and_json_have_the_same_numbers(sweep):
    report = report_of(sweep)
    rows = list(csv.DictReader(tables.comma_separated(report).splitlines()))
    data = json.loads(json.dumps(tables.document(report)))
    points = data["series"][0]["points"]
    assert [float(row["efficiency"] or "nan") for row in rows][:2] == [
        points[0]["efficiency"], points[1]["efficiency"],
    ]  # fmt: skip
    assert rows[2]["step_seconds"] == ""
    assert rows[2]["flags"] == "cannot run: memory: too much"
    assert points[1]["step_seconds"] == 4.0
    assert data["kind"] == "strong"
    assert "Narayanan" in " ".join(data["formulas"])


def test_secrets_are_masked_everywhere(tmp_path):
    secret = "s3cr3t-value"
    run = write_run(tmp_path, [f"env.WANDB_API_KEY={secret}", "env.MODE=fast"], [8.0] * 9)
    origin = read_json(run.provenance)
    origin["caller"] = {
        "hpctrain": "0.1.0", "host": "login1", "argv": ["hpctrain", f"--token={secret}"],
        "environment": {"NCCL_DEBUG": "INFO", "HF_TOKEN": secret, "PROXY": f"http://u:{secret}@h/"},
        "git": {"commit": "0123456789abcdef", "branch": "main", "root": "/x"},
    }  # fmt: skip
    write_json(run.provenance, origin)
    run.script.write_text(f"#!/bin/bash\n  export WANDB_API_KEY={secret}\n  export MODE=fast\n")
    report = report_of(run.root)
    texts = [render(report), tables.markdown(report), json.dumps(tables.document(report))]
    assert not [text for text in texts if secret in text]
    assert "NCCL_DEBUG=INFO" in texts[0]
    assert "commit 0123456789ab" in texts[0]
    # All of the job's own variables may be secrets.
    assert "MODE=fast" not in texts[0]
    assert "env: ***" in texts[0]
    assert mask("db_password: hunter2") == "db_password: ***"
    assert mask("--api-key=abc --lr=1") == "--api-key=*** --lr=1"
    assert masked_job("env: {A: b}\nname: x") == "env: ***\nname: x"


def test_inputs_have_checksums(tmp_path):
    data = tmp_path / "t.h5"
    data.write_bytes(b"abc")
    run = write_run(tmp_path / "runs", [f"data.path={data}"], [8.0] * 9)
    found = tables.document(report_of(run.root))["origins"][0]["inputs"]
    # SHA-256 of "abc", FIPS 180-2, appendix B.1
    assert found[0]["sha256"].startswith("ba7816bf8f01cfea414140de5dae2223")
    assert found[0]["bytes"] == 3


def test_published_rows_stand_beside_the_same_model(tmp_path):
    run = write_run(tmp_path, ["model=gpt-22b", "machine=dgx-a100"], [8.0] * 9)
    rows = published(report_of(run.root))
    korthikanti = [row for row in rows if row.source.startswith("Korthikanti")]
    assert {row.step_seconds for row in korthikanti} == {"1.42", "1.1"}  # table 5
    frontier = [row for row in rows if "Frontier study" in row.source]
    assert [row.share for row in frontier] == ["38.38"]  # its abstract
    assert published(report_of(write_run(tmp_path / "o", [], [8.0] * 9).root)) == []


def test_comparing_two_versions(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    times = {n: [[8.0 / n] * 9, [8.08 / n] * 9] for n in (1, 2, 4)}
    before = write_sweep(tmp_path / "a", STRONG, times)
    after = write_sweep(
        tmp_path / "b", STRONG,
        {1: [[10.0] * 9, [10.1] * 9], 2: [[4.0] * 9, [4.04] * 9], 4: [[1.0] * 9, [1.01] * 9]},
    )  # fmt: skip
    slower, same, faster = compare(collect([before]), collect([after]))
    assert slower.ratio.value == pytest.approx(8.04 / 10.05)
    assert slower.verdict == "slower"
    assert same.ratio.value == pytest.approx(1.0)
    assert same.verdict == "no difference beyond noise"
    assert faster.verdict == "faster"

    def call(*arguments, code):
        done = subprocess.run([HPCTRAIN, "report", *arguments], capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    done = call("--compare", before, after, "--fail-below", "0.95", code=3)
    assert "ranks_per_node=1: 0.800 of the first's speed" in done.stderr
    call("--compare", before, after, "--fail-below", "0.75", code=0)
    call("--compare", before, code=2)
    call(before, "--fail-below", "0.9", "--no-plan", code=0)
    call(before, "-o", tmp_path / "x.pdf", code=2)
    done = call(before, "-o", tmp_path / "x.html", "-o", tmp_path / "x.md", "--json", code=0)
    assert (tmp_path / "x.html").stat().st_size > 10_000
    assert json.loads(done.stdout)["title"] == "Strong scaling: sweep"


def test_single_runs_are_compared_by_their_steps(tmp_path):
    times = [1.0 + 0.01 * n for n in range(20)]
    one = write_run(tmp_path / "a", [], times)
    two = write_run(tmp_path / "b", ["train.lr=2e-3"], [2 * t for t in times])
    (pair,) = compare(collect([one.root]), collect([two.root]))
    assert pair.ratio.value == pytest.approx(0.5)
    assert pair.significant
    assert pair.test.startswith("rank sum")


def test_a_plot_places_its_points():
    svg = line_plot(
        "t", [Line("a", [Mark(1, 1.0, 0.5, 1.5, "one"), Mark(4, 2.0)])],
        x_title="x", y_title="y", show=lambda v: f"{v:g}",
    )  # fmt: skip
    root = ET.fromstring(svg)
    points = root.find(".//polyline[@class='line s-c0']").get("points").split()
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in points)
    bottom, top = 330 - 46, 16
    # from 0 at the bottom to the highest tick, 2, at the top: 1.0 lies half way
    assert y2 == pytest.approx(top, abs=0.1)
    assert y1 == pytest.approx((bottom + top) / 2, abs=0.1)
    assert x1 < x2
    assert root.find(".//title").text == "a: one"


def test_runs_with_nothing_to_measure(tmp_path):
    run = write_run(tmp_path, [], [], status="failed", reason="lost")
    report = report_of(run.root)
    assert report.series[0].baseline is None
    assert "none was measured" in " ".join(tables.formulas(report))
    render(report)
    with pytest.raises(UsageError, match="neither a run, nor a sweep"):
        collect([tmp_path / "nothing"])
    assert isinstance(run, RunDir)
