"""Pictures: the text as a person would draw it, SVG and trace as their readers need them."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hpctrain.schedule import (
    Costs,
    draw_json,
    draw_svg,
    draw_text,
    draw_trace,
    make,
    names,
    simulate,
)

SVG = "{http://www.w3.org/2000/svg}"
METHODS = [name for name in names() if name != "auto"]


def timeline(name: str, p: int = 4, m: int = 8, costs: Costs | None = None, **options):
    return simulate(make(name, ranks=p, micro_batches=m, **options), costs or Costs())


def test_1f1b_as_in_the_textbook():
    text = draw_text(timeline("1f1b", p=2, m=3))
    assert text.splitlines() == [
        "1f1b: 2 ranks, 1 chunk each, 3 micro-batches; makespan 12, bubble 25.0 %, "
        "peak activations 1 to 2",
        "rank 0 F0 F1 ......B0--- F2 B1--- ...B2---",
        "rank 1 ...F0 B0--- F1 B1--- F2 B2--- ......",
        "       F forward, B backward, . idle",
    ]


def test_a_v_shows_the_second_chunk_in_small_letters():
    text = draw_text(timeline("zb-v", p=2, m=3))
    assert (
        text.splitlines()[1] == "rank 0 F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 ..."
    )


def test_a_narrow_terminal_gets_letters_only():
    lines = draw_text(timeline("1f1b"), width=60).splitlines()
    assert all(len(line) <= 60 for line in lines[1:5])
    assert "FFFF" in lines[1].replace(" ", "")


def test_a_pipeline_too_long_for_the_terminal_still_fits():
    lines = draw_text(timeline("1f1b", p=8, m=256), width=80).splitlines()
    assert all(len(line) <= 80 for line in lines[1:9])


def test_colours_are_escape_codes_that_leave_the_text():
    plain = draw_text(timeline("zb-h1"))
    coloured = draw_text(timeline("zb-h1"), colour=True)
    assert "\x1b[" not in plain
    assert coloured.count("\x1b[0m") == 4 * 8 * 3


@pytest.mark.parametrize("name", [*METHODS, "1f1b+vocab", "bfs+fsdp", "gpipe+offload", "auto"])
def test_every_schedule_can_be_drawn(name):
    for p, m in ((2, 2), (4, 8)):
        drawn = timeline(name, p, m, Costs(transfer=0.3, gather=0.5, offload=0.2))
        assert draw_text(drawn)
        ET.fromstring(draw_svg(drawn))
        json.dumps(draw_trace(drawn), allow_nan=False)
        json.dumps(draw_json(drawn), allow_nan=False)


def test_svg_has_a_bar_for_every_pass_to_scale():
    drawn = timeline("1f1b", p=2, m=3)
    root = ET.fromstring(draw_svg(drawn))
    bars = [
        r
        for r in root.iter(f"{SVG}rect")
        if r.get("class") in ("F0", "B0") and "rx" not in r.attrib
    ]
    in_rows = [r for r in bars if float(r.get("height")) > 20]
    assert len(in_rows) == 2 * 3 * 2
    widths = {r.get("class"): float(r.get("width")) + 1 for r in in_rows}
    assert widths["B0"] == pytest.approx(2 * widths["F0"], rel=0.01)
    style = root.find(f"{SVG}style").text
    assert "prefers-color-scheme:dark" in style
    title = root.find(f"{SVG}title").text
    assert "bubble 25.0 %" in title


def test_svg_stays_readable_for_a_long_step():
    root = ET.fromstring(draw_svg(timeline("1f1b", p=8, m=128)))
    assert float(root.get("width")) <= 1500


def test_trace_has_passes_messages_and_memory():
    drawn = timeline("1f1b", p=2, m=3)
    events = draw_trace(drawn, microseconds=1e6)["traceEvents"]
    passes = [e for e in events if e["ph"] == "X" and e["cat"] in "FB"]
    assert len(passes) == 12
    first_backward = min((e for e in passes if e["cat"] == "B"), key=lambda e: e["ts"])
    assert (first_backward["ts"], first_backward["dur"], first_backward["tid"]) == (2e6, 2e6, 1)
    starts, ends = ([e for e in events if e["ph"] == phase] for phase in "sf")
    assert len(starts) == len(ends) == 6  # three activations there, three gradients back
    assert {e["id"] for e in starts} == {e["id"] for e in ends}
    held = [e["args"]["held"] for e in events if e["ph"] == "C" and e["name"].endswith("rank 0")]
    assert max(held) == 2
    assert held[-1] == 0


def test_trace_puts_collectives_beside_their_rank():
    drawn = timeline("bfs+fsdp", p=2, m=2, costs=Costs(gather=0.5))
    events = draw_trace(drawn)["traceEvents"]
    gathers = [e for e in events if e["ph"] == "X" and e["cat"] == "GATHER"]
    assert {e["tid"] for e in gathers} == {2, 3}
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {0: "rank 0", 1: "rank 1", 2: "rank 0 beside", 3: "rank 1 beside"}


def test_json_holds_bubble_and_peaks():
    data = draw_json(timeline("zb-v"))
    assert data["bubble_fraction"] == pytest.approx(3 / 51)
    assert data["peak_activations"] == [4, 4, 4, 4]
    assert data["schedule"] == "zb-v"
    assert data["routes"] == [[0, 1, 2, 3, 3, 2, 1, 0]]


def test_pictures_and_tables_of_the_documentation_are_up_to_date():
    script = Path(__file__).parents[2] / "benchmarks" / "draw_schedules.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_text_picture_of_the_documentation_is_real():
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
    assert draw_text(timeline("1f1b")) in page
