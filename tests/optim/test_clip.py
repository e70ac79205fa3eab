"""Clipping against torch's on one rank, and against one rank on sharded gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.optim.clip import clip_by_global_norm, global_norm
from hpctrain.testing.ranks import run_ranks


def parameters(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in ((30, 40), (40,), (7, 3, 2), ()):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
        found.append(parameter)
    found.insert(2, nn.Parameter(torch.zeros(5)))  # took no part in the loss
    return found


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_rank_equals_torch(scale: float, dtype: torch.dtype) -> None:
    ours, theirs = parameters(scale, dtype), parameters(scale, dtype)
    norm = clip_by_global_norm(ours, 1.0)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_by_hand() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, 1))
    a.grad, b.grad = torch.tensor([2.0, 3.0]), torch.tensor([[6.0]])
    assert float(clip_by_global_norm([a, b], 3.5)) == 7.0  # 4 + 9 + 36 = 49
    assert a.grad.tolist() == pytest.approx([1.0, 1.5], rel=1e-6)
    assert b.grad.item() == pytest.approx(3.0, rel=1e-6)
    assert float(global_norm([a, b])) == pytest.approx(3.5, rel=1e-6)


def test_norm_of_bf16_gradients_is_taken_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    value = float(torch.tensor(0.01).bfloat16())
    norm = global_norm([parameter])
    assert norm.dtype is torch.float32
    assert float(norm) == pytest.approx(100 * value, rel=1e-5)


def test_mixed_types_of_gradients() -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16)
    assert float(clip_by_global_norm([a, b], 1.0)) == 5.0


def test_no_gradient_at_all() -> None:
    assert float(clip_by_global_norm([nn.Parameter(torch.zeros(3))], 1.0)) == 0.0
    assert float(clip_by_global_norm([], 1.0)) == 0.0


def test_a_norm_that_is_not_finite_is_seen() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, math.inf])
    assert math.isinf(float(clip_by_global_norm([parameter], 1.0)))


def test_groups_are_reduced_over_the_axes_that_shard_them() -> None:
    """Two ranks in one process: what each holds, and a reduce that knows the other's part."""
    whole = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0]), torch.tensor([6.0, 7.0])]
    kept = [nn.Parameter(torch.zeros(n)) for n in (2, 1, 1)]
    for parameter, gradient in zip(kept, (whole[0][:2], whole[1], whole[2][:1]), strict=True):
        parameter.grad = gradient.clone()
    asked = []

    def reduce(squares: torch.Tensor, over: tuple[str, ...]) -> torch.Tensor:
        asked.append((float(squares), over))
        return squares + {("tp",): 9.0 + 16.0, ("pp",): 49.0}[over]

    sharding = {id(kept[0].grad): ("tp",), id(kept[1].grad): (), id(kept[2].grad): ("pp",)}
    norm = global_norm(kept, reduce=reduce, sharding=lambda gradient: sharding[id(gradient)])
    assert float(norm) == pytest.approx(math.sqrt(140.0))
    assert asked == [(36.0, ("pp",)), (5.0, ("tp",))]


def clip_on_ranks(store: str, kind: str) -> dict[str, Any]:
    """Norm and clipped gradients of the same model on one rank and spread over all."""
    import torch.distributed as dist
    from mpi4py import MPI
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def gradients() -> None:
        (model(x).square().sum() * 50).backward()

    def reduce(squares: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        assert axes == ("shard",)
        dist.all_reduce(squares, group=mesh["shard"].get_group())
        return squares

    world = MPI.COMM_WORLD
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    x = torch.randn(4, 5).double()
    gradients()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    clipped = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
    if kind == "fsdp2":  # 7 rows and 3 rows on two ranks: uneven
        fully_shard(model, mesh=mesh)
        gradients()
        held = list(model.parameters())
    else:  # as tensor parallelism leaves them: sharded, replicated and plain ones
        gradients()
        held = []
        for name, parameter in model.named_parameters():
            if not name.startswith("1."):
                where = [Replicate() if name == "2.bias" else Shard(0)]
                gradient = distribute_tensor(parameter.grad, mesh, where)
                parameter = nn.Parameter(distribute_tensor(parameter.detach(), mesh, where))
                parameter.grad = gradient
            held.append(parameter)
    norm = float(clip_by_global_norm(held, 1.0, reduce=reduce))
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in held]
    worst = max(float((a - b).abs().max()) for a, b in zip(whole, clipped, strict=True))
    dist.barrier()  # a rank that leaves early takes the connections of the other with it
    dist.destroy_process_group()
    return {"norm": norm, "expected": expected, "worst": worst}


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["fsdp2", "tensor"])
def test_sharded_gradients_clip_as_one_rank_does(tmp_path: Path, kind: str) -> None:
    for found in run_ranks(2, clip_on_ranks, str(tmp_path / "store"), kind, timeout=100):
        assert found["expected"] > 10
        assert found["norm"] == pytest.approx(found["expected"], rel=1e-12)
        assert found["worst"] < 1e-12


def test_a_sharded_gradient_needs_a_reduce() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(ValueError, match="sharded over dp_shard"):
        global_norm([parameter], sharding=lambda _: ("dp_shard",))
