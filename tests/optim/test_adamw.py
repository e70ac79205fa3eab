"""AdamW by hand, its groups, and its step on a mixture of sharded and plain parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.optim.adamw import build_optimizer
from hpctrain.spec.training import TrainSpec
from hpctrain.testing.ranks import run_ranks


def train(**more: Any) -> TrainSpec:
    return TrainSpec.model_validate({"steps": 10, "global_batch": 1, **more})


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(5, 4),
            "conv": nn.Conv2d(2, 3, 3),
            "linear": nn.Linear(4, 4),
            "norm": nn.LayerNorm(4),
            "frozen": nn.Linear(2, 2).requires_grad_(False),
        }
    )
    optimizer = build_optimizer(model.parameters(), train(weight_decay=0.3))
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    names = {name: decay.get(id(p)) for name, p in model.named_parameters()}
    assert names == {
        "embedding.weight": 0.3, "conv.weight": 0.3, "linear.weight": 0.3,
        "conv.bias": 0.0, "linear.bias": 0.0, "norm.weight": 0.0, "norm.bias": 0.0,
        "frozen.weight": None, "frozen.bias": None,
    }  # fmt: skip
    assert len(optimizer.param_groups) == 2


def test_two_steps_of_algorithm_2_by_hand() -> None:
    """One weight of 1 with gradients 0.5 and −0.25; lr 0.1, betas 0.9 and 0.99, decay 0.2."""
    model = nn.Linear(1, 1, bias=False).double()
    spec = train(lr=0.1, weight_decay=0.2, betas=[0.9, 0.99], eps=1e-8)
    optimizer = build_optimizer(model.parameters(), spec)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model.weight.grad = torch.full((1, 1), 0.5).double()
    optimizer.step()
    # m = 0.05 / 0.1, v = 0.0025 / 0.01: m / sqrt(v) = 1. 1 − 0.1·0.2·1 − 0.1·1 = 0.88
    assert model.weight.item() == pytest.approx(0.88, abs=1e-8)
    model.weight.grad = torch.full((1, 1), -0.25).double()
    optimizer.step()
    # m = 0.9·0.05 − 0.025 = 0.02, over 1 − 0.81 = 0.19; v = 0.99·0.0025 + 0.01·0.0625 = 0.0031,
    # over 1 − 0.9801 = 0.0199
    expected = 0.88 * (1 - 0.02) - 0.1 * (0.02 / 0.19) / (0.0031 / 0.0199) ** 0.5
    assert model.weight.item() == pytest.approx(expected, abs=1e-8)


def test_same_bits_on_every_run() -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(33, 57), nn.Linear(57, 9))
        optimizer = build_optimizer(model.parameters(), train())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 33)).square().mean().backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def step_on_ranks(store: str) -> dict[str, Any]:
    """Sharded, replicated and plain parameters, as tensor parallelism leaves them."""
    import torch.distributed as dist
    from mpi4py import MPI
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    world = MPI.COMM_WORLD
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size
    )
    cube = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "shard"))
    worst = 0.0
    models = []
    for spread in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).double()
        gradients = [torch.randn_like(p) for p in model.parameters()]
        if spread:
            for name, mesh, where in (
                ("0.weight", cube["tp"], [Shard(0)]),
                ("0.bias", cube["tp"], [Replicate()]),
                ("2.weight", cube, [Shard(1), Shard(0)]),
            ):
                module = model.get_submodule(name.split(".")[0])
                kind = name.split(".")[1]
                whole = getattr(module, kind).detach()
                setattr(module, kind, nn.Parameter(distribute_tensor(whole, mesh, where)))
        optimizer = build_optimizer(model.parameters(), train(lr=0.1))
        for _ in range(3):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                if hasattr(parameter, "placements"):
                    gradient = distribute_tensor(
                        gradient, parameter.device_mesh, parameter.placements
                    )
                parameter.grad = gradient
            optimizer.step()
        models.append(model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        whole = b.full_tensor() if hasattr(b, "full_tensor") else b
        worst = max(worst, float((a - whole).detach().abs().max()))
    dist.barrier()  # a rank that leaves early takes the connections of the other with it
    dist.destroy_process_group()
    return {"worst": worst, "groups": len(optimizer.param_groups)}


@pytest.mark.mpi
def test_fused_step_with_sharded_and_plain_parameters(tmp_path: Path) -> None:
    for found in run_ranks(2, step_on_ranks, str(tmp_path / "store"), timeout=100):
        assert found["worst"] < 1e-14
        assert found["groups"] == 4
