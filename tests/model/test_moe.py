"""Mixtures of experts against published sizes, numbers by hand and code written apart from them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from hpctrain.model import moe_experts
from hpctrain.model.init import init_parameters
from hpctrain.model.moe import MixtureOfExperts, Router
from hpctrain.model.moe_experts import grouped_linear
from hpctrain.model.moe_routing import (
    balance_loss,
    capacity_of,
    choose,
    loads_of,
    within_capacity,
    z_loss,
)
from hpctrain.model.transformer import Transformer, next_token_loss
from hpctrain.parallel.expert import take_loads
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.presets import PRESETS
from hpctrain.spec.transformer import MoeDims, TransformerDims
from hpctrain.train.agreement import agree_on_loads

DIMS = TransformerDims(
    layers=3,
    hidden=16,
    heads=2,
    kv_heads=2,
    ffn_hidden=24,
    vocab_size=31,
    max_positions=12,
    activation="swiglu",
    bias=False,
    init_std=0.3,
    moe=MoeDims(experts=6, top_k=2, hidden=10, shared=2, dense_layers=1),
)


def moe_dims(**changes) -> TransformerDims:
    assert DIMS.moe is not None
    return dataclasses.replace(DIMS, moe=dataclasses.replace(DIMS.moe, **changes))


def built(dims: TransformerDims, dtype: torch.dtype = torch.float64) -> Transformer:
    model = Transformer(dims)
    init_parameters(model, 0)
    return model.to(dtype)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# num_parameters of the released weights (Hugging Face model cards; the index files' total_size is
# twice that, in bf16).
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_630_071_296),
        ("deepseek-moe-16b", 16_375_728_128),
    ],
)
def test_parameter_count_of_published_models(name: str, count: int) -> None:
    dims = ModelSpec(**PRESETS[name][1]).transformer()
    assert sum(p.numel() for p in Transformer(dims, device="meta").parameters()) == count
    assert dims.parameters == count


def test_formula_counts_the_model_and_only_visited_experts_cost_flops() -> None:
    model = Transformer(DIMS, device="meta")
    assert sum(p.numel() for p in model.parameters()) == DIMS.parameters
    assert sum(p.numel() for p in model.layers["0"].parameters()) == DIMS.dense_layer_parameters
    assert sum(p.numel() for p in model.layers["2"].parameters()) == DIMS.layer_parameters
    # Mixtral 8x7B: 12.9 of 46.7 billion parameters are active (Jiang et al. 2024).
    dims = ModelSpec(**PRESETS["mixtral-8x7b"][1]).transformer()
    active = dims.model_flops_per_token(0) / 6 + dims.embedding_parameters
    assert active == pytest.approx(12.9e9, rel=0.005)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"router": "sigmoid", "scale": 2.5},
        {"normalize": False, "top_k": 3, "shared": 0},
        {"capacity": 0.7},
        {"groups": 3, "top_groups": 2},
    ],
    ids=lambda c: " ".join(map(str, c.items())) or "softmax",
)
def test_forward_equals_one_token_at_a_time(changes) -> None:
    dims = moe_dims(**changes)
    layer = built(dims).layers["1"].ffn
    assert isinstance(layer, MixtureOfExperts)
    x = numbers(2, 12, 16)
    w = dict(layer.named_parameters())
    moe = dims.moe
    assert moe is not None

    def network(row: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        g = gate @ row
        return down @ (g / (1 + (-g).exp()) * (up @ row))

    expected = torch.zeros_like(x)
    for b in range(2):
        chosen: list[list[tuple[float, int]]] = []
        for row in x[b]:
            logits = (w["router.weight"].detach() @ row).tolist()
            if moe.router == "softmax":
                total = sum(math.exp(v) for v in logits)
                scores = [math.exp(v) / total for v in logits]
            else:
                scores = [1 / (1 + math.exp(-v)) for v in logits]
            allowed = range(6)
            if moe.groups > 1:
                value = [sum(sorted(scores[2 * g : 2 * g + 2])[-2:]) for g in range(3)]
                best = sorted(range(3), key=lambda g: -value[g])[:2]
                allowed = [e for e in range(6) if e // 2 in best]
            top = sorted(allowed, key=lambda e: (-scores[e], e))[: moe.top_k]
            norm = sum(scores[e] for e in top) if moe.normalize else 1.0
            chosen.append([(moe.scale * scores[e] / norm, e) for e in top])
        taken = [0] * 6
        limit = math.ceil(0.7 * 12 * moe.top_k / 6) if moe.capacity else 10**9
        for choice in range(moe.top_k):
            for s, row in enumerate(x[b]):
                weight, e = chosen[s][choice]
                taken[e] += 1
                if taken[e] <= limit:
                    parts = (w[f"experts.{m}.weight"][e] for m in ("gate", "up", "down"))
                    expected[b, s] += weight * network(row, *parts)
        if moe.capacity:
            assert max(taken) > limit, "nothing was dropped"
        if moe.shared:
            for s, row in enumerate(x[b]):
                parts = (w[f"shared.{m}.weight"] for m in ("gate", "up", "down"))
                expected[b, s] += network(row, *parts)
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-12)


def test_gradients_of_a_layer() -> None:
    layer = built(moe_dims(z_loss=0.1)).layers["1"].ffn.eval()
    x = numbers(1, 4, 16).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach().requires_grad_() for p in layer.parameters()]

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *values), fast_mode=True)


def test_of_equal_experts_the_first_is_chosen() -> None:
    moe = MoeDims(experts=5, top_k=3, hidden=4)
    scores = torch.tensor([[0.2] * 5, [0.1, 0.3, 0.3, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1, 0.6]])
    assert choose(scores, moe).tolist() == [[0, 1, 2], [1, 2, 0], [4, 0, 1]]
    bias = torch.tensor([0.0, 0.0, 0.0, 0.25, 0.0])
    assert choose(scores, moe, bias).tolist() == [[3, 0, 1], [3, 1, 2], [4, 3, 0]]


def test_a_full_expert_takes_first_choices_and_early_tokens_first() -> None:
    moe = MoeDims(experts=2, top_k=2, hidden=4, capacity=0.5)
    assert capacity_of(4, moe) == 2
    experts = torch.tensor([[[0, 1], [0, 1], [0, 1], [1, 0]], [[0, 1], [1, 0], [0, 1], [1, 0]]])
    expected = [[[0, 1], [0, -1], [-1, -1], [1, -1]], [[0, -1], [1, -1], [0, -1], [1, -1]]]
    assert within_capacity(experts, moe).tolist() == expected


def test_losses_by_hand() -> None:
    moe = MoeDims(experts=4, top_k=1, hidden=4)
    even = torch.full((1, 8, 4), 0.25)
    loads = loads_of(torch.arange(8).remainder(4).view(1, 8, 1), 4)
    assert float(balance_loss(even, loads, 8, moe)) == pytest.approx(1.0)
    # Everything on one expert with score 0.7: E · 1 · 0.7.
    skewed = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(1, 8, 4)
    loads = loads_of(torch.zeros(1, 8, 1, dtype=torch.int64), 4)
    assert float(balance_loss(skewed, loads, 8, moe)) == pytest.approx(2.8)
    # Equal logits of 1: log(4e)².
    assert float(z_loss(torch.ones(3, 8, 4), 8)) == pytest.approx((1 + math.log(4)) ** 2)


@pytest.mark.parametrize("again", [False, True])
def test_losses_enter_backward_once(again: bool) -> None:
    """The gradient is that of cross entropy plus the losses, recomputed or not."""
    dims = moe_dims(balance=0.5, z_loss=0.25, shared=0)
    model = built(dims)
    tokens = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(1))
    seen: list[tuple[Tensor, Tensor]] = []

    def note(module: Router, inputs: tuple[Tensor], _output) -> None:
        logits = inputs[0] @ module.weight.T
        experts = choose(logits.softmax(-1), module.moe)
        extra = 0.5 * balance_loss(logits.softmax(-1), loads_of(experts, 6), 12, module.moe)
        seen.append((extra + 0.25 * z_loss(logits, 12), loads_of(experts, 6).sum(0)))

    for block in model.layers.values():
        if isinstance(block.ffn, MixtureOfExperts):
            block.ffn.router.register_forward_hook(note)
    model.eval()  # the losses of training are off; here they are added by hand
    loss = next_token_loss(model(tokens), tokens) + sum(extra for extra, _ in seen)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    loads = [load for _, load in seen]
    model.train()
    if again:
        for block in model.layers.values():
            forward = block.forward
            block.forward = lambda *args, forward=forward: torch.utils.checkpoint.checkpoint(
                forward, *args, use_reentrant=False
            )
    next_token_loss(model(tokens), tokens).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)
    routers = [m for m in model.modules() if isinstance(m, Router)]
    assert [r.load.tolist() for r in routers] == [load.tolist() for load in loads]
    assert [r.dropped.item() for r in routers] == [0 for _ in loads]


def test_what_routers_saw_is_told_in_numbers_of_a_hand() -> None:
    """Two layers of four experts, one dense between: loads 6 2 0 0 and 2 2 2 2, one dropped."""
    seen = torch.tensor([[6, 2, 0, 0, 1], [0, 0, 0, 0, 0], [2, 2, 2, 2, 0]])

    class Alone:
        size = 1

    assert agree_on_loads(Alone, seen) == {"busiest": 3.0, "idle": 0.5, "dropped": 1 / 16}
    assert agree_on_loads(Alone, torch.zeros(2, 5, dtype=torch.int64)) == {}


def test_dropped_choices_are_counted() -> None:
    dims = moe_dims(capacity=0.5, shared=0)
    model = built(dims)
    tokens = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(1))
    dropped = []
    for block in model.layers.values():
        if isinstance(block.ffn, MixtureOfExperts):
            block.ffn.router.register_forward_hook(
                lambda _module, _inputs, output: dropped.append(int((output.experts < 0).sum()))
            )
    next_token_loss(model(tokens), tokens).backward()
    seen = take_loads([model], dims)
    layers = [row for row in seen.tolist() if sum(row)]
    assert [row[-1] for row in layers] == dropped
    assert min(dropped) > 0
    assert [sum(row[:-1]) for row in layers] == [2 * 12 * dims.moe.top_k] * len(dropped)
    assert not take_loads([model], dims).any()  # forgotten


def test_one_kernel_for_all_experts_gives_what_the_loop_gives(monkeypatch) -> None:
    """On a GPU bf16 goes through grouped_mm; here in fp32 on the CPU, which it takes as well."""
    counts = [3, 0, 5, 1]
    x, weight, grad = numbers(9, 8).float(), numbers(4, 12, 8, seed=1).float(), numbers(9, 12)

    def run() -> list[Tensor]:
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = grouped_linear(a, b, counts)
        y.backward(grad.float())
        return [y.detach(), a.grad, b.grad]

    loop = run()
    monkeypatch.setattr(moe_experts, "_by_library", lambda *_: True)
    for ours, theirs in zip(run(), loop, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_no_rows_and_all_rows_on_one_expert() -> None:
    x = numbers(6, 16).requires_grad_()
    layer = built(moe_dims(shared=0)).layers["1"].ffn
    for counts in ([6, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 6]):
        layer.zero_grad()
        layer.experts(x, counts).sum().backward()
        gradient = layer.experts.up.weight.grad.abs().sum((1, 2))
        assert [bool(g) for g in gradient] == [bool(c) for c in counts]
    assert layer.experts(x[:0], [0] * 6).shape == (0, 16)
    assert layer(numbers(0, 12, 16)).shape == (0, 12, 16)
