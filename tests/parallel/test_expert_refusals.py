"""What experts cannot be or do is refused before anything is launched, with key and exit code."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpctrain.errors import Exit, HpctrainError
from hpctrain.spec import parse_job, resolve
from hpctrain.spec.resolve import check, layout_of

JOB = """\
model:
  layers: 2
  hidden: 16
  heads: 4
  vocab_size: 61
  moe: {experts: 6, top_k: 2, hidden: 24}
data: {path: none, sequence_length: 12}
train: {steps: 10, global_batch: 8}
parallel:
  tensor: 2
  expert: 2
"""


@dataclasses.dataclass(frozen=True)
class Site:
    devices_per_node: int | None = 8


def resolved(*overrides: str, text: str = JOB):
    job = resolve(parse_job(text, "job.yaml", overrides), Site(), Path("/"))
    check(job)
    return job


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("model.moe.top_k=7", Exit.USAGE, "top_k 7 is more than all 6 experts"),
        ("model.moe.groups=4", Exit.USAGE, "6 experts do not divide into 4 groups"),
        ("model.moe={experts: 6, groups: 6, top_groups: 1}", Exit.USAGE, "more than 1 groups of 1"),
        ("model.moe.capacity=0", Exit.USAGE, "a factor above 0, or null for dropless"),
        ("model.moe.router=softmx", Exit.USAGE, "did you mean softmax?"),
        ("model.moe.expert=4", Exit.USAGE, "unknown key; did you mean experts?"),
        ("model.moe.dense_layers=2", Exit.USAGE, "dense_layers 2 leaves none of 2 layers"),
        ("parallel.expert=3", Exit.IMPOSSIBLE, "nearest possible: ep 2 or 4 with etp 1"),
        ("parallel.expert=8", Exit.IMPOSSIBLE, "parallel.expert: 8 ranks cannot share 6 experts"),
        ("model.moe.experts=0", Exit.IMPOSSIBLE, "found 2, but the model has no experts"),
        ("parallel.overlap=true", Exit.IMPOSSIBLE, "blocks with dense feed-forward networks"),
        ("parallel.dispatch=slices", Exit.USAGE, "did you mean slice?"),
        ("parallel.dispatch={kind: slice, chunks: 2}", Exit.IMPOSSIBLE, "set it to 1"),
        ("parallel.dispatch={copies: 1, chunks: 2}", Exit.IMPOSSIBLE, "expert_tensor 1"),
    ],
)
def test_refusals(override, code, says):
    with pytest.raises(HpctrainError) as caught:
        resolved(override)
    assert says in str(caught.value)
    assert caught.value.exit_code == code


def test_by_index_needs_the_tensor_group():
    with pytest.raises(HpctrainError, match="as many expert as tensor ranks, above 1"):
        resolved("parallel.expert=4", "parallel.dispatch=slice")
    with pytest.raises(HpctrainError, match="slice needs expert_tensor 1; found 2"):
        resolved("parallel.expert_tensor=2", "parallel.dispatch=slice")


def test_a_refusal_names_file_line_and_key():
    with pytest.raises(HpctrainError, match=r"job\.yaml:11:3: parallel\.expert: found 2, but"):
        resolved("model.moe.experts=0")


def test_defaults_are_worked_out():
    job = resolved("model.moe={experts: 6}", "parallel.expert_tensor=2")
    assert job.spec.model.moe.hidden == 64  # model.ffn_hidden, 4 · 16
    layout = layout_of(job.spec)
    assert (layout.dp, layout.ep, layout.etp, layout.edp) == (4, 2, 2, 2)


def test_a_preset_with_experts_can_be_changed_key_by_key():
    text = JOB.replace(JOB[JOB.index("model:") : JOB.index("data:")], "model: mixtral-8x7b\n")
    job = resolved("model.moe.capacity=1.25", text=text)
    moe = job.spec.model.moe
    assert (moe.experts, moe.top_k, moe.hidden, moe.capacity) == (8, 2, 14336, 1.25)
    assert job.source("model.moe.experts").where.startswith("mixtral-8x7b (shape of Mixtral")
