"""From a job file to a module: ours, and users' own, with errors that name the entry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.errors import Exit, UsageError
from hpctrain.model.build import build_model, call_user, user_function
from hpctrain.model.transformer import Transformer
from hpctrain.spec.job import JobSpec

OWN = """
import torch
from torch import nn

LIMIT = 3
MIXER = nn.Linear(1, 1)

def mlp(width, depth=2):
    layers = [nn.Linear(8, width), nn.ReLU()] * depth
    return nn.Sequential(*layers[:2], nn.Linear(width, 4))

def numbers():
    return [1, 2, 3]

def broken(width):
    raise RuntimeError(f"no {width} today")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of the user's, importable for the length of a test."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(OWN)
    (package / "needs.py").write_text("import surely_not_installed_anywhere\n")
    (package / "raises.py").write_text("1 / 0\n")
    (package / "syntax.py").write_text("def build(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def job(**model: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "model": model,
            "data": {"path": "tokens.h5", "sequence_length": 16},
            "train": {"steps": 1, "global_batch": 1, "seed": 5},
        }
    )


SHAPE = {"layers": 2, "hidden": 16, "heads": 2, "vocab_size": 64, "max_positions": 16}


def test_dimensions_give_an_initialised_transformer() -> None:
    model, again = build_model(job(**SHAPE)), build_model(job(**SHAPE))
    assert isinstance(model, Transformer)
    assert sum(p.numel() for p in model.parameters()) == model.dims.parameters
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert a.dtype is torch.float32 and not a.is_meta and torch.equal(a, b)
    assert model(torch.arange(16).view(1, 16)).shape == (1, 16, 64)


def test_users_own_model_is_the_same_on_every_rank(own: str) -> None:
    spec = job(module=f"{own}.model:mlp", args={"width": 12})
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = build_model(spec)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = build_model(spec)
    assert model[0].out_features == 12
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    other = build_model(
        spec.model_copy(update={"train": spec.train.model_copy(update={"seed": 6})})
    )
    assert not torch.equal(model[0].weight, other[0].weight)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("nowhere_at_all.model:build", "no module named 'nowhere_at_all'"),
        ("{own}.absent:build", "no module named '{own}.absent'"),
        ("{own}.model:absent", "{own}.model has nothing named 'absent'"),
        ("{own}.model:LIMIT", "{own}.model has a int named 'LIMIT'"),
        ("{own}.needs:build", "importing {own}.needs failed: No module named 'surely_not"),
        ("{own}.raises:build", "importing {own}.raises failed: ZeroDivisionError"),
        ("{own}.syntax:build", "importing {own}.syntax failed: SyntaxError"),
    ],
)
def test_what_cannot_be_imported(own: str, entry: str, expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        user_function(entry.format(own=own), "model.module")
    assert raised.value.message.startswith("model.module: ")
    assert expected.format(own=own) in raised.value.message
    assert raised.value.exit_code == Exit.USAGE


def test_what_the_function_did_wrong(own: str) -> None:
    with pytest.raises(UsageError, match=r"returned list; a torch\.nn\.Module belongs here"):
        build_model(job(module=f"{own}.model:numbers"))
    with pytest.raises(UsageError, match=r"broken\(width=7\) raised RuntimeError: no 7") as raised:
        build_model(job(module=f"{own}.model:broken", args={"width": 7}))
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(UsageError, match="unexpected keyword argument 'height'"):
        call_user(f"{own}.model:mlp", {"height": 7}, "model.module")
