"""Records and the run directory: read as any other program would read them."""

from __future__ import annotations

import json
import math

import pytest

from hpctrain.errors import UsageError
from hpctrain.records import EventRecord, StateRecord, StepRecord, append_line
from hpctrain.rundir import RunDir, safe_name


def a_step(step: int, loss: float = 2.5) -> StepRecord:
    return StepRecord(step, 1.7e9 + step, loss, 1e-3, 0.5, step * 100, 0.25, 400.0)


@pytest.fixture
def run(tmp_path):
    made = RunDir.create("my run/π", tmp_path / "runs")
    made.job.write_text("name: x\n")
    made.provenance.write_text("{}")
    return made


def test_a_step_is_one_json_line_that_any_reader_takes(run):
    append_line(run.metrics, a_step(1))
    append_line(run.metrics, a_step(2, math.nan))
    lines = run.metrics.read_text().splitlines()
    first = json.loads(lines[0])
    assert (first["step"], first["loss"], first["tokens"]) == (1, 2.5, 100)
    assert json.loads(lines[1], parse_constant=pytest.fail)["loss"] is None
    assert [record.step for record in run.read_steps()] == [1, 2]


def test_a_torn_last_line_is_left_out(run):
    append_line(run.metrics, a_step(1))
    with run.metrics.open("a") as stream:
        stream.write('{"step": 2, "lo')
    assert [record.step for record in run.read_steps()] == [1]
    last = run.last_step()
    assert last is not None
    assert last.step == 1


def test_fields_of_a_newer_version_are_ignored(run):
    state = StateRecord("running", 3, 10, 1.0, 2).to_dict() | {"new_field": [1]}
    run.state.write_text(json.dumps(state))
    found = run.read_state()
    assert found is not None
    assert found.step == 3


def test_last_step_reads_the_end_of_a_long_file(run):
    for step in range(1, 1001):
        append_line(run.metrics, a_step(step))
    last = run.last_step()
    assert last is not None
    assert last.step == 1000


def test_runs_are_found_by_path_id_start_and_age(tmp_path, run):
    parent = tmp_path / "runs"
    assert run.id.startswith("my-run")
    assert RunDir.find(str(run.root), parent) == run
    assert RunDir.find(run.id, parent) == run
    assert RunDir.find(run.id[:10], parent) == run
    assert RunDir.find(None, parent) == run
    with pytest.raises(UsageError, match="no run 'zzz'"):
        RunDir.find("zzz", parent)
    with pytest.raises(UsageError, match="no runs in"):
        RunDir.find(None, tmp_path / "nothing")
    other = RunDir.create("my run/π", parent)
    other.job.write_text("name: x\n")
    other.provenance.write_text("{}")
    assert other != run
    with pytest.raises(UsageError, match="start of 2 runs"):
        RunDir.find("my-run", parent)


@pytest.mark.parametrize("name", ["../../etc", "a/b", "$(id)", "", "..", "x" * 500, "new\nline"])
def test_names_are_safe_in_paths(tmp_path, name):
    made = RunDir.create(name, tmp_path)
    assert made.root.parent == tmp_path
    assert safe_name(name)
    assert len(safe_name(name)) <= 64


def test_events_keep_their_order(run):
    for number in range(5):
        run.add_event(EventRecord("warning", float(number), f"event {number}"))
    assert [event.message for event in run.read_events()] == [f"event {n}" for n in range(5)]
