"""hpctrain schedule show, list, compare and check, as a person or a program calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")


def hpctrain(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HPCTRAIN, "schedule", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        check=False,
    )


def test_show_in_text():
    done = hpctrain("show", "--schedule", "zb-v", "-p", "4", "-m", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("zb-v: 4 ranks, 2 chunks each, 8 micro-batches; makespan 25.5")
    assert done.stdout.count("\nrank ") == 4
    assert "\x1b" not in done.stdout


def test_show_as_json():
    done = hpctrain("show", "--schedule", "1f1b", "-p", "4", "-m", "8", "--json")
    data = json.loads(done.stdout)
    assert data["bubble_fraction"] == pytest.approx(3 / 11)
    assert data["peak_activations"] == [4, 3, 2, 1]


def test_show_writes_picture_trace_and_table_that_check_reads(tmp_path):
    done = hpctrain(
        *("show", "--schedule", "hanayo", "-o", "waves=2", "--transfer", "0.1"),
        *("--svg", "a.svg", "--trace", "a.trace.json", "--table", "a.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.svg").read_text().startswith("<svg ")
    assert json.loads((tmp_path / "a.trace.json").read_text())["traceEvents"]
    assert json.loads((tmp_path / "a.json").read_text())["options"] == {"waves": 2}
    checked = hpctrain("check", "a.json", cwd=tmp_path)
    assert checked.returncode == 0
    assert "all is well" in checked.stdout


def test_check_finds_a_missing_receive(tmp_path):
    hpctrain("show", "--schedule", "1f1b", "-p", "2", "-m", "2", "--table", "a.json", cwd=tmp_path)
    document = json.loads((tmp_path / "a.json").read_text())
    document["actions"][1].remove(["RECV_F", 1, 0, 0, 0])
    (tmp_path / "b.json").write_text(json.dumps(document))
    done = hpctrain("check", "b.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "rank 1: RECV_F stage 1 micro-batch 0 peer 0 is missing" in done.stderr
    (tmp_path / "c.json").write_text("{}")
    assert hpctrain("check", "c.json", cwd=tmp_path).returncode == 2
    (tmp_path / "d.json").write_text("no json")
    assert hpctrain("check", "d.json", cwd=tmp_path).returncode == 2
    assert hpctrain("check", "nowhere.json", cwd=tmp_path).returncode == 2


def test_the_times_are_used():
    slow = hpctrain("show", "--schedule", "zb-h1", "--weight-grad", "0", "--json")
    even = hpctrain("show", "--schedule", "zb-h1", "--json")
    bubbles = [json.loads(done.stdout)["bubble_fraction"] for done in (slow, even)]
    assert bubbles[0] > bubbles[1] == pytest.approx(1 / 9)


def test_the_automatic_one_plans_for_the_times_given():
    done = hpctrain(
        *("show", "--schedule", "auto", "-p", "4", "-m", "12", "-o", "limit=3"),
        *("--input-grad", "1.3", "--transfer", "0.1", "--json"),
    )
    data = json.loads(done.stdout)
    assert max(data["peak_activations"]) <= 3
    half = hpctrain(
        *("show", "--schedule", "v-half", "-p", "4", "-m", "12"),
        *("--input-grad", "1.3", "--transfer", "0.1", "--json"),
    )
    assert data["makespan"] <= json.loads(half.stdout)["makespan"]


def test_list_and_compare():
    listed = hpctrain("list")
    assert listed.returncode == 0
    assert "zb-v" in listed.stdout
    assert "+2bp" in listed.stdout
    methods = {m["name"] for m in json.loads(hpctrain("list", "--json").stdout)["methods"]}
    compared = hpctrain("compare", "-p", "4", "-m", "8", "--json")
    data = json.loads(compared.stdout)
    assert {row["schedule"] for row in data["schedules"]} | set(data["refused"]) == methods
    spans = [row["makespan"] for row in data["schedules"]]
    assert spans == sorted(spans)
    odd = hpctrain("compare", "-p", "3", "-m", "7")
    assert odd.returncode == 0
    assert "schedule bitpipe: an even number of ranks" in odd.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("show", "--schedule", "zbv"), 2, "did you mean 'zb-v'?"),
        (("show", "--schedule", "interleaved", "-m", "6"), 3, "rounds of 4"),
        (("show", "-p", "0"), 2, "ranks"),
        (("show", "--forward", "-1"), 2, "forward"),
        (("show", "--forward", "fast"), 2, "fast"),
        (("show", "-o", "waves"), 2, "KEY=VALUE"),
        (("show", "--schedule", "hanayo", "-o", "waves=x"), 2, "waves"),
        (("show", "--svg", "/nowhere/a.svg"), 2, "/nowhere/a.svg"),
        (("show", "--schedule", "1f1b+vocab", "-o", "barriers=7"), 2, "barriers"),
    ],
)
def test_errors_are_one_line_and_a_code(arguments, code, message):
    done = hpctrain(*arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
