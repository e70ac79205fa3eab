"""Sweep files: what is understood, what is refused and how, and what becomes of each point."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from scaling_synthetic import JOB

from hpctrain.cli.sweep_start import Shop
from hpctrain.errors import SpecError, UsageError
from hpctrain.scaling.conditions import Condition
from hpctrain.scaling.points import expand
from hpctrain.scaling.sweepfile import parse_sweep


@pytest.fixture
def points(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)

    def make(text: str):
        sweep = parse_sweep("job: job.yaml\n" + text, tmp_path / "sweep.yaml")
        shop = Shop(sweep.job, tmp_path)
        shop.ignore_limits()
        return expand(sweep, shop)

    return make


def faults(text: str) -> list[str]:
    with pytest.raises(SpecError) as raised:
        parse_sweep(text, Path("s.yaml"))
    return [str(problem) for problem in raised.value.problems]


def test_crossed_and_zipped_axes(points):
    found = points(
        "axes: {ranks_per_node: [1, 2]}\n"
        "zip: [{train.global_batch: [8, 16, 32], train.lr: [1e-3, 2e-3, 4e-3]}]\n"
        "set: {train.steps: 5}\n"
    )
    assert len(found) == 6
    assert found[4].title == "ranks_per_node=2 train.global_batch=16 train.lr=2e-3"
    spec = found[4].prepared.job.spec
    assert (spec.train.lr, spec.train.global_batch, spec.train.steps) == (2e-3, 16, 5)
    assert [point.ranks for point in found] == [1, 1, 1, 2, 2, 2]


def test_values_that_go_together_may_repeat_but_not_together(points):
    found = points("zip: [{nodes: [1, 1, 2], ranks_per_node: [1, 2, 2]}]\n")
    assert [point.ranks for point in found] == [1, 2, 4]
    (fault,) = faults("job: j\nzip: [{nodes: [1, 2, 1], a: [7, 8, 7]}]\n")
    assert fault.endswith("zip[0]: nodes=1 a=7 stands twice; repeats: N runs a point several times")


def test_weak_scaling_grows_batch_layers_or_width(points):
    text = "kind: weak\naxes: {ranks_per_node: [1, 2, 4]}\n"
    assert [p.prepared.job.spec.train.global_batch for p in points(text)] == [32, 64, 128]
    assert [p.prepared.job.spec.model.layers for p in points(text + "grow: layers\n")] == [2, 4, 8]
    # 64·√2 = 90.5, the nearest multiple of 4 heads is 92 (90.5 / 4 = 22.6)
    widths = [p.prepared.job.spec.model.hidden for p in points(text + "grow: hidden\n")]
    assert widths == [64, 92, 128]


def test_points_that_cannot_run_say_why(points):
    found = points("axes: {ranks_per_node: [1, 3], parallel.tensor: [1, 2], model.heads: [4, 5]}\n")
    reasons = {point.title: point.reason for point in found}
    assert reasons["ranks_per_node=1 parallel.tensor=1 model.heads=4"] == ""
    assert (
        "does not divide into 5 heads"
        in reasons["ranks_per_node=1 parallel.tensor=1 model.heads=5"]
    )
    assert (
        "2 does not divide the job's 1 ranks"
        in reasons["ranks_per_node=1 parallel.tensor=2 model.heads=4"]
    )
    assert (
        "32 samples do not divide over 3"
        in reasons["ranks_per_node=3 parallel.tensor=1 model.heads=4"]
    )


def test_memory_by_the_planner_refuses_a_point(points):
    found = points(
        "set: {machine: dgx-a100, ranks_per_node: auto}\n"
        "axes: {model: [gpt2-124m, gpt-175b]}\n"
    )  # fmt: skip
    assert found[0].reason == ""
    assert found[1].reason.startswith("memory: stage 0 needs")
    assert found[0].ranks == 8


def test_conditions_choose_points(points):
    text = "axes: {ranks_per_node: [1, 2, 4], parallel.tensor: [1, 2, 4]}\n"
    kept = points(
        text + "when: [parallel.tensor <= ranks, not (ranks == 4 and parallel.tensor == 1)]\n"
    )
    assert [(p.ranks, p.prepared.job.spec.parallel.tensor) for p in kept] == [
        (1, 1), (2, 1), (2, 2), (4, 2), (4, 4),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no combination meets"):
        points(text + "when: ranks > 100\n")
    with pytest.raises(SpecError, match=r"no key train\.nothing"):
        points(text + "when: train.nothing > 1\n")
    with pytest.raises(SpecError, match=r"cannot compare train\.micro_batch = 'auto'"):
        points(text + "when: train.micro_batch > 1\n")


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "a.b()", "x if y else z", "[i for i in a]", "a ** 9", "f'{a}'", ")"],
)
def test_conditions_run_no_code(text):
    with pytest.raises(ValueError, match=r"found|not understood"):
        Condition.parse(text)


def test_every_fault_of_a_file_is_named_with_its_place():
    found = faults(
        "job: j.yaml\nkind: strng\nrepeat: 2\naxes:\n  nodes: 4\n  train.lr: [1e-3, 1e-3]\n"
        "zip: [{a: [1], b: [1, 2]}]\nmax_queued: 0\nwhen: a(\n"
    )
    assert found == [
        "s.yaml:2:1: kind: found 'strng'; strong or weak or grid belongs here; did you mean "
        "strong?",
        "s.yaml:3:1: repeat: unknown key; did you mean repeats?",
        "s.yaml:5:3: axes.nodes: found 4; a list of values belongs here",
        "s.yaml:6:3: axes.train.lr: 1e-3 stands twice; repeats: N runs a point several times",
        "s.yaml:7:7: zip[0]: values that go together must be as many: a has 1, b has 2",
        "s.yaml:8:1: max_queued: found 0; a whole number of at least 1 belongs here",
        "s.yaml:9:1: when: found 'a('; write a comparison such as parallel.tensor <= "
        "ranks_per_node",
    ]
    assert faults("[]")[0].endswith("a sweep file is a mapping of keys")
    assert "axes is missing" in faults("job: j.yaml\n")[0]
    assert "given twice" in faults("job: j\naxes: {nodes: [1]}\nset: {nodes: 2}\n")[0]


def test_values_that_no_point_could_take_are_faults_of_the_file(points):
    with pytest.raises(SpecError) as raised:
        points("axes: {nodes: [1, x], train.learning: [1]}\n")
    said = [str(problem) for problem in raised.value.problems]
    assert said[0].endswith("sweep.yaml:2:19: nodes: 'x' is not a count; write 1000, 1e9, 2.5M "
                            "or 1.3B")  # fmt: skip
    assert "train.learning: unknown key" in said[1]
    with pytest.raises(UsageError, match="baseline: no point has nodes=7"):
        points("axes: {nodes: [1, 2]}\nbaseline: {nodes: 7}\n")


def test_a_thousand_points_in_seconds(points):
    began = time.process_time()
    found = points(
        "axes:\n  ranks_per_node: [1, 2, 4, 8, 16]\n  parallel.tensor: [1, 2]\n"
        "  train.global_batch: [16, 32, 48, 64, 80, 96, 112, 128, 144, 160]\n"
        "  train.seed: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n"
    )
    assert len(found) == 1000
    assert time.process_time() - began < 5.0
