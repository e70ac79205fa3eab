"""The planner against published numbers and closed forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.machine import get_machine
from hpctrain.plan.plan import make_plan
from hpctrain.plan.shapes import ModelShape
from hpctrain.spec import parse_job, resolve
from hpctrain.spec.presets import PRESETS

ROOT = Path(__file__).parents[2]
JOB = """\
machine: dgx-a100
nodes: 8
model: gpt-22b
data: {path: t.h5, sequence_length: 2048}
train: {steps: 100, global_batch: 64, micro_batch: 1, precision: bf16}
"""


def planned(*overrides: str, machine: str = "dgx-a100", **options):
    site = get_machine(machine)
    job = parse_job(JOB, overrides=(f"machine={machine}", *overrides))
    return make_plan(resolve(job, site, Path("/")).spec, site, alternatives=0, **options)


@pytest.fixture(scope="module")
def accuracy():
    command = [sys.executable, str(ROOT / "benchmarks" / "planner_accuracy.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_step_times_of_all_published_dense_rows(accuracy):
    assert accuracy["rows_used"] + accuracy["rows_not_modelled"] == 525
    assert accuracy["rows_not_modelled"] <= 5
    assert accuracy["dense"]["mean_abs_error"] <= 0.10
    assert accuracy["dense"]["median_abs_error"] <= 0.07


def test_out_of_memory_of_published_rows(accuracy):
    assert accuracy["oom_accuracy"] >= 0.95
    assert accuracy["oom_missed"] <= 0.05


@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.startswith("gpt-")])
def test_parameters_are_those_of_the_published_models(preset):
    """The planner's own shape counts what the transformer's dimensions count."""
    site = get_machine("dgx-a100")
    text = JOB.replace("gpt-22b", preset).replace("2048", "1024")
    dims = resolve(parse_job(text), site, Path("/")).spec.model.transformer()
    assert ModelShape.of(dims).parameters == dims.parameters


def test_one_layers_flops_by_hand():
    """h = 6144, s = 2048, V = 51200, l = 48: 72·l·h²·(1 + s/6h + V/12lh) a token."""
    site = get_machine("dgx-a100")
    dims = resolve(parse_job(JOB), site, Path("/")).spec.model.transformer()
    h, s, v, n = 6144, 2048, 51200, 48
    by_hand = 72 * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))
    assert ModelShape.of(dims).model_flops_per_token(s) == pytest.approx(by_hand, rel=1e-12)


def test_zero3_holds_an_eighth_on_eight_ranks():
    """ZeRO (Rajbhandari et al. 2020): stage 3 over N ranks divides all states by N."""
    small = ("nodes=1", "model=gpt2-1.5b", "data.sequence_length=1024", "train.global_batch=8")
    whole, shards = planned(*small), planned(*small, "parallel.sharding=zero3")

    def states(plan):
        stage = plan.memory[0]
        return stage.parameters + stage.gradients + stage.optimizer

    # 16 bytes a parameter in both: fp32 weights or a half-precision copy with its master.
    assert states(whole) / states(shards) == pytest.approx(8.0, rel=0.15)


def test_more_tensor_ranks_hold_less_and_more_pipeline_ranks_idle_more():
    two, eight = planned("parallel.tensor=2"), planned("parallel.tensor=8")
    assert eight.used < two.used
    shallow = planned("parallel.tensor=8", "parallel.pipeline=2")
    deep = planned("parallel.tensor=8", "parallel.pipeline=8")
    assert deep.step.seconds > shallow.step.seconds * 0.9


def run_plan(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.yaml").write_text(text)
    command = [sys.executable, "-m", "hpctrain", "plan", "job.yaml", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_command_says_what_fits_and_what_is_better(tmp_path):
    done = run_plan(tmp_path, JOB, "--set", "parallel.tensor=8")
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout
    assert "better" in done.stdout
    answer = json.loads(run_plan(tmp_path, JOB, "--set", "parallel.tensor=8", "--json").stdout)
    assert answer["schema_version"] == 1


def test_what_does_not_fit_leaves_with_3(tmp_path):
    done = run_plan(tmp_path, JOB, "--set", "model=gpt-1t", "--set", "nodes=1")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_an_unknown_machine_lists_the_known(tmp_path):
    done = run_plan(tmp_path, JOB, "--set", "machine=frontear")
    assert done.returncode in (2, 3)
    assert "frontier" in done.stderr


def test_planning_starts_without_the_heavy_libraries(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    code = (
        "import sys\nfrom hpctrain.cli import main\n"
        "try:\n    main(['plan', 'job.yaml', '--no-search', '--set', 'parallel.tensor=8'])\n"
        "except SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'mpi4py', 'h5py') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
