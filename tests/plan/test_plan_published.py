"""Shapes of the published models, as presets and as the planner counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.machine import get_machine
from hpctrain.plan.plan import make_plan
from hpctrain.plan.shapes import ModelShape
from hpctrain.spec import parse_job, resolve
from hpctrain.spec.presets import PRESETS

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


@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.startswith("gpt-")])
def test_parameters_are_those_of_the_published_models(preset):
    """The planner's own shape counts what the transformer's dimensions count."""
    site = get_machine("dgx-a100")
    text = JOB.replace("gpt-22b", preset).replace("2048", "1024")
    dims = resolve(parse_job(text), site, Path("/")).spec.model.transformer()
    assert ModelShape.of(dims).parameters == dims.parameters


def test_more_tensor_ranks_hold_less_and_more_pipeline_ranks_idle_more():
    two, eight = planned("parallel.tensor=2"), planned("parallel.tensor=8")
    assert eight.used < two.used
    shallow = planned("parallel.tensor=8", "parallel.pipeline=2")
    deep = planned("parallel.tensor=8", "parallel.pipeline=8")
    assert deep.step.split["pipeline bubble"] > shallow.step.split["pipeline bubble"]
