"""What a pipeline cannot do is refused before anything is launched, with key and exit code."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from torch import nn

from hpctrain.errors import Exit, HpctrainError
from hpctrain.parallel.pipeline_stages import sequential_stages
from hpctrain.schedule.job import check_pipeline, plan_pipeline, stage_layers
from hpctrain.spec import parse_job, resolve

JOB = """\
model: {layers: 8, hidden: 16, heads: 4, vocab_size: 61}
data: {path: none, sequence_length: 12}
train: {steps: 10, global_batch: 8, micro_batch: 1}
parallel:
  pipeline: 4
"""


@dataclasses.dataclass(frozen=True)
class Site:
    devices_per_node: int | None = 4


def resolved(*overrides: str, text: str = JOB):
    return resolve(parse_job(text, "job.yaml", overrides), Site(), Path("/"))


@pytest.mark.parametrize(
    ("overrides", "code", "says"),
    [
        (["parallel.schedule=zb_v"], Exit.USAGE, "parallel.schedule: no schedule 'zb_v'"),
        (["parallel.schedule=zb_v"], Exit.USAGE, "did you mean 'zb-v'?"),
        (["parallel.schedule=1f1b+vcab"], Exit.USAGE, "did you mean 'vocab'?"),
        (["parallel.schedule.options.unit=2"], Exit.USAGE, "no option 'unit'"),
        (["parallel.schedule=1f1b+fsdp"], Exit.USAGE, "set parallel.sharding"),
        (["model.layers=3"], Exit.IMPOSSIBLE, "4 ranks are 4 stages, but the model has 3 layers"),
        (
            ["parallel.schedule=interleaved", "parallel.chunks=4"],
            Exit.IMPOSSIBLE,
            "4 ranks × 4 chunks are 16 stages, but the model has 8 layers",
        ),
        (["parallel.chunks=2"], Exit.IMPOSSIBLE, "parallel.schedule: schedule 1f1b: one stage"),
        (["parallel.schedule=zb-v", "parallel.chunks=3"], Exit.IMPOSSIBLE, "two chunks a rank"),
        (
            ["parallel.schedule=interleaved", "train.micro_batch=4"],
            Exit.IMPOSSIBLE,
            "found 2 (train.global_batch 8 / parallel.data 1 / train.micro_batch 4)",
        ),
        (
            ["parallel.stage_layers=[2,2,4]"],
            Exit.USAGE,
            "parallel.stage_layers: 4 stages share 8 layers; found 3 numbers with the sum 8",
        ),
        (["parallel.stage_layers=[2,2,2,3]"], Exit.USAGE, "with the sum 9"),
        (["train.loss=my:loss"], Exit.USAGE, "train.loss.module: a loss that calls the whole"),
        (
            ["parallel.pipeline=1", "parallel.offload=0.5"],
            Exit.USAGE,
            "parallel.offload: needs parallel.pipeline above 1",
        ),
    ],
)
def test_refusals(overrides, code, says):
    with pytest.raises(HpctrainError) as caught:
        check_pipeline(resolved(*overrides))
    assert caught.value.exit_code == code
    assert says in str(caught.value)


def test_a_refusal_names_file_line_and_key():
    with pytest.raises(HpctrainError, match=r"job\.yaml:5:3: parallel\.pipeline: 4 ranks are"):
        check_pipeline(resolved("model.layers=3"))


def test_submit_refuses_before_it_launches(tmp_path, monkeypatch, capsys):
    from hpctrain.cli import main

    (tmp_path / "job.yaml").write_text(JOB + "  schedule: zb-w\nranks_per_node: 4\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["submit", "--dry-run", "job.yaml"])
    assert caught.value.code == Exit.USAGE
    assert "parallel.schedule: no schedule 'zb-w'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_micro_batches_are_chosen_for_the_pipeline():
    text = JOB.replace(", micro_batch: 1", "").replace("global_batch: 8", "global_batch: 64")
    assert resolved(text=text).spec.train.micro_batch == 4  # 16 micro-batches of 4 ranks
    assert resolved("train.global_batch=68", text=text).spec.train.micro_batch == 1
    assert resolved("parallel.pipeline=1", text=text).spec.train.micro_batch == 64 // 4
    schedule = plan_pipeline(resolved(text=text).spec)
    assert schedule is not None
    assert (schedule.name, schedule.ranks, schedule.micro_batches) == ("1f1b", 4, 16)


def test_layers_of_the_stages():
    assert stage_layers(resolved().spec, 9, 4) == [
        range(3), range(3, 5), range(5, 7), range(7, 9)
    ]  # fmt: skip
    spec = resolved("parallel.stage_layers=[1,3,3,1]").spec
    assert [len(layers) for layers in stage_layers(spec, 8, 4)] == [1, 3, 3, 1]


def test_users_models():
    spec = resolved("model={module: my:model}", text=JOB.partition("\n")[2]).spec
    schedule = plan_pipeline(spec)
    assert schedule is not None
    with pytest.raises(HpctrainError, match=r"my:model returned a Linear; .* nn\.Sequential only"):
        sequential_stages(spec, nn.Linear(3, 3), schedule, 0)
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), nn.Tanh(), shared)
    with pytest.raises(HpctrainError, match="are one parameter in the stages 0 and 3"):
        sequential_stages(spec, model, schedule, 0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    names = [
        [name for module in sequential_stages(spec, model, schedule, rank).modules
         for name, _ in module.named_parameters()]
        for rank in range(4)
    ]  # fmt: skip
    assert [name for stage in names for name in stage] == [n for n, _ in model.named_parameters()]
    assert [len(stage) for stage in names] == [4, 4, 2, 2]
