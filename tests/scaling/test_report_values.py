"""Reports of synthetic runs give exactly what their closed forms say."""

from __future__ import annotations

import math

import pytest
from scaling_synthetic import BATCH, SEQUENCE, write_run, write_sweep

from hpctrain.errors import UsageError
from hpctrain.records import EventRecord
from hpctrain.runtime.energy import EnergyMeter
from hpctrain.scaling.analysis import analyse
from hpctrain.scaling.collect import collect
from hpctrain.scaling.stats import Estimate, rank_sum, t_quantile, welch

STRONG = "job: job.yaml\nkind: strong\naxes: {ranks_per_node: [1, 2, 4]}\n"
WEAK = STRONG.replace("strong", "weak")


def report(root, **options):
    found = collect([root])
    return analyse(found, warm_up=5, **options)


def rows(root, **options):
    return report(root, **options).series[0].rows


def test_perfect_strong_scaling_is_exactly_one(tmp_path):
    root = write_sweep(tmp_path, STRONG, {n: [[8.0 / n] * 10] for n in (1, 2, 4)})
    found = rows(root)
    assert [row.efficiency.value for row in found] == [1.0, 1.0, 1.0]
    assert [row.speedup.value for row in found] == [1.0, 2.0, 4.0]
    assert [row.tokens.value for row in found] == [SEQUENCE * BATCH * n / 8.0 for n in (1, 2, 4)]
    assert not any(row.flags for row in found)


def test_eighty_percent_strong_and_weak(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "w").mkdir()
    root = write_sweep(tmp_path / "s", STRONG, {1: [[8.0] * 9], 2: [[5.0] * 9], 4: [[2.5] * 9]})
    assert [row.efficiency.value for row in rows(root)] == pytest.approx([1, 0.8, 0.8], rel=1e-12)
    root = write_sweep(tmp_path / "w", WEAK, {1: [[8.0] * 9], 2: [[10.0] * 9], 4: [[10.0] * 9]})
    found = rows(root)
    assert [row.efficiency.value for row in found] == pytest.approx([1, 0.8, 0.8], rel=1e-12)
    assert [row.speedup.value for row in found] == pytest.approx([1, 1.6, 3.2], rel=1e-12)


def test_more_than_one_is_flagged_and_explained(tmp_path):
    root = write_sweep(tmp_path, STRONG, {1: [[8.0] * 9], 2: [[3.0] * 9], 4: [[2.0] * 9]})
    found = rows(root)
    assert found[1].efficiency.value == pytest.approx(4 / 3)
    (flag,) = found[1].flags
    # micro_batch: auto gives a rank its whole share, 32 samples on one rank and 16 on two.
    assert flag.startswith("133.3 % is more than 100 %: train.micro_batch is 16, the baseline's 32")
    assert not found[2].flags


def test_a_missing_baseline_is_said_and_replaced(tmp_path):
    root = write_sweep(tmp_path, STRONG, {1: [[]], 2: [[4.0] * 9], 4: [[2.5] * 9]})
    (series,) = report(root).series
    assert series.baseline.ranks == 2
    assert "ranks_per_node=1 (1 devices) is missing" in series.note
    assert "ranks_per_node=2 (2 devices)" in series.note
    assert series.rows[2].efficiency.value == pytest.approx(0.8)
    assert series.rows[0].efficiency is None
    with pytest.raises(UsageError, match=r"ranks_per_node=1 was not measured.*node lost"):
        report(root, baseline={"ranks_per_node": "1"})
    with pytest.raises(UsageError, match="no point has ranks_per_node=3"):
        report(root, baseline={"ranks_per_node": "3"})


def test_failed_missing_and_impossible_points_are_shown(tmp_path):
    text = STRONG + "repeats: 2\n"
    root = write_sweep(
        tmp_path, text, {1: [[8.0] * 9], 2: [[4.0] * 9, []], 4: "memory: 90 GiB of 64 GiB"}
    )
    one, two, four = rows(root)
    assert one.flags == ["1 run is missing"]
    assert len(two.flags) == 1
    assert two.flags[0].endswith("is failed: node lost")
    assert two.step.count == 1  # the good repeat counts all the same
    assert four.flags == ["cannot run: memory: 90 GiB of 64 GiB"]
    assert four.step is None


def test_two_repeats_give_students_interval(tmp_path):
    root = write_sweep(
        tmp_path, STRONG + "repeats: 2\n",
        {1: [[8.0] * 9, [8.0 * 1.1] * 9], 2: [[4.0] * 9, [4.4] * 9], 4: [[2.0] * 9, [2.2] * 9]},
    )  # fmt: skip
    first = rows(root)[0]
    assert first.step.value == pytest.approx(8.4)  # median of 8.0 and 8.8
    # s of (ln 8, ln 8.8) is ln 1.1 / √2; t(0.975, 1) = 12.7062 (any table)
    width = math.exp(12.7062 * math.log(1.1) / math.sqrt(2) / math.sqrt(2))
    assert first.step.high == pytest.approx(8.4 * width, rel=1e-4)
    assert first.step.low == pytest.approx(8.4 / width, rel=1e-4)
    efficiency = rows(root)[1].efficiency
    assert efficiency.value == pytest.approx(1.0)
    # two means of two: variances add, Welch's degrees are 2, t(0.975, 2) = 4.30265
    width = math.exp(4.30265 * math.log(1.1) / math.sqrt(2))
    assert efficiency.high == pytest.approx(width, rel=1e-4)


def test_a_cold_step_ten_times_slower_does_not_count(tmp_path):
    cold = {n: [[80.0 / n] + [8.0 / n] * 9] for n in (1, 2, 4)}
    root = write_sweep(tmp_path, STRONG, cold)
    assert [row.efficiency.value for row in rows(root)] == [1.0, 1.0, 1.0]
    assert [row.step.value for row in rows(root)] == [8.0, 4.0, 2.0]
    # and with fewer steps than the rule wants, half of them are left
    short = write_run(tmp_path / "short", [], [80.0, 8.0, 8.0])
    found = collect([short.root]).points[0].runs[0]
    assert [record.step for record in found.steady] == [3]


def test_mixed_hardware_is_refused_unless_asked_for(tmp_path):
    write_run(tmp_path / "runs", ["ranks_per_node=1"], [8.0] * 9)
    other = {"machine": "frontier", "device": "AMD Instinct MI250X, one GCD"}
    write_run(tmp_path / "runs", ["ranks_per_node=2"], [4.0] * 9, hardware=other)
    with pytest.raises(UsageError, match=r"CPU, local, one kind: run-.*MI250X, one GCD, frontier"):
        report(tmp_path / "runs")
    mixed = report(tmp_path / "runs", mixed=True)
    assert len(mixed.hardware) == 2
    assert [row.efficiency.value for row in mixed.rows] == [1.0, 1.0]


def test_plain_runs_are_grouped_by_what_differs(tmp_path):
    for ranks, seconds in ((1, 8.0), (2, 4.0), (2, 4.4)):
        write_run(tmp_path, [f"ranks_per_node={ranks}", "train.micro_batch=8"], [seconds] * 9)
    found = collect([tmp_path])
    assert found.kind == "strong"
    assert [(p.ranks, len(p.runs)) for p in found.points] == [(1, 1), (2, 2)]
    assert [p.settings for p in found.points] == [{"ranks_per_node": "1"}, {"ranks_per_node": "2"}]


def test_model_flops_and_the_split_of_a_step(tmp_path):
    comm = {
        "tp": {"calls": 1, "bytes": 1, "seconds": 0.5},
        "pp": {"calls": 1, "bytes": 1, "seconds": 0.25},
        "dp_shard": {"calls": 1, "bytes": 1, "seconds": 1.0},
        "mpi:world": {"calls": 1, "bytes": 1, "seconds": 9.0},
    }
    run = write_run(tmp_path, [], [4.0] * 9, comm=comm, data_seconds=0.125)
    row = analyse(collect([run.root]), warm_up=5).rows[0]
    assert row.split == pytest.approx(
        {"compute": 2.125, "tensor": 0.5, "pipeline": 0.25, "data-parallel": 1.0,
         "data loading": 0.125}
    )  # fmt: skip
    assert sum(row.split.values()) == pytest.approx(4.0)
    # 2 blocks of 12·h² weights, an output layer of h·V; attention 12·l·h·s
    weights = 2 * 12 * 64**2 + 64 * 256
    per_token = 6 * weights + 12 * 2 * 64 * SEQUENCE
    assert row.model_flops == pytest.approx(per_token * BATCH * SEQUENCE / 4.0, rel=1e-12)
    assert row.hardware_flops == row.model_flops
    run = write_run(tmp_path / "again", ["parallel.recompute=block"], [4.0] * 9)
    row = analyse(collect([run.root]), warm_up=5).rows[0]
    again = 8 * 2 * 12 * 64**2 + 6 * 64 * 256 + 16 * 2 * 64 * SEQUENCE  # forward twice: 8 for 6
    assert row.hardware_flops == pytest.approx(again * BATCH * SEQUENCE / 4.0, rel=1e-12)


def test_weak_scaling_of_a_grown_model_counts_flops(tmp_path):
    text = WEAK + "grow: layers\n"
    (tmp_path / "x").mkdir()
    root = write_sweep(tmp_path / "x", text, {n: [[8.0] * 9] for n in (1, 2, 4)})
    # the synthetic points grow the batch, so that FLOPs grow as the tokens do
    assert [row.efficiency.value for row in rows(root)] == pytest.approx([1.0, 1.0, 1.0])


def test_statistics_against_tables():
    # t: Abramowitz and Stegun, table 26.10
    for degrees, value in ((1, 12.7062), (4, 2.77645), (30, 2.04227), (1e6, 1.95996)):
        assert t_quantile(0.975, degrees) == pytest.approx(value, rel=1e-5)
    # equal variances and means 0 and 1 in logarithms: t = 1 / sqrt(2/3·…) worked out by hand
    a = [math.exp(x) for x in (-1, 0, 1)]
    b = [math.exp(x) for x in (2, 3, 4)]
    # t = 3 / sqrt(1/3 + 1/3) = 3.674, 4 degrees: p = 0.0213 (any t table)
    assert welch(a, b) == pytest.approx(0.0213, abs=2e-4)
    assert welch([1.0], b) is None
    assert welch([2.0, 2.0], [2.0, 2.0]) == 1.0
    assert welch([2.0, 2.0], [3.0, 3.0]) == 0.0
    # U = 0 of 5 and 5: z = (12.5 - 0.5) / sqrt(25·11/12) = 2.507, p = 0.0122
    assert rank_sum([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(0.0122, abs=2e-4)
    assert rank_sum([1, 1, 1, 1], [1, 1, 1, 1]) == 1.0
    with pytest.raises(ValueError, match="positive"):
        Estimate.of([0.0])


def test_energy_is_read_where_a_node_offers_it(tmp_path):
    assert EnergyMeter(tmp_path).joules() is None
    folder = tmp_path / "rapl/class/powercap/intel-rapl:0"
    folder.mkdir(parents=True)
    (folder / "max_energy_range_uj").write_text("1000000000")
    (folder / "energy_uj").write_text("999000000")
    meter = EnergyMeter(tmp_path / "rapl")
    (folder / "energy_uj").write_text("2000000")  # wrapped around: 1 J to the end, 2 J on
    assert meter.joules() == pytest.approx(3.0)
    cray = tmp_path / "cray/cray/pm_counters"
    cray.mkdir(parents=True)
    (cray / "energy").write_text("1500 J 1700000000 us\n")
    meter = EnergyMeter(tmp_path / "cray")
    (cray / "energy").write_text("4500 J 1700000009 us\n")
    assert meter.joules() == 3000.0
    assert meter.source == "cray pm_counters"


def test_energy_a_token(tmp_path):
    run = write_run(tmp_path, [], [8.0] * 10)
    run.add_event(EventRecord("energy", 2000.0, "", 0, {"joules": 81920.0}))
    row = analyse(collect([run.root]), warm_up=5).rows[0]
    assert row.joules_per_token == 81920 / (10 * BATCH * SEQUENCE)
