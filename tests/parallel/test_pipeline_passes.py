"""Parts of the executor in one process: split backward, what it frees, offloading, emulation."""

from __future__ import annotations

import time
import weakref

import pytest
import torch
from torch import nn

from hpctrain.model.init import init_parameters
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.emulate import Passes, emulate
from hpctrain.parallel.offload import Shelf
from hpctrain.parallel.pipeline_stages import borrow
from hpctrain.parallel.recompute import recompute
from hpctrain.parallel.split_backward import SplitLinear, WeightGrads, split_linears
from hpctrain.spec.transformer import TransformerDims

DIMS = TransformerDims(
    layers=2, hidden=16, heads=4, kv_heads=2, ffn_hidden=64, vocab_size=31, max_positions=12,
    position="learned", norm="layernorm", activation="gelu", tied_embeddings=True, bias=True,
    dropout=0.0, norm_eps=1e-5, rope_theta=1e4, init_std=0.02,
)  # fmt: skip


def stage(seed: int = 0, **options) -> Transformer:
    module = Transformer(DIMS, has_embedding=False, has_head=False, **options)
    init_parameters(module, seed)
    return module


def inputs() -> torch.Tensor:
    return torch.randn(3, 12, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("kept", ["none", "block", "full"])
@pytest.mark.parametrize("autocast", [False, True])
def test_two_halves_make_the_whole_backward(kept, autocast):
    whole, split = stage(), stage()
    store = WeightGrads()
    split_linears(split, store)
    recompute(split, kept)
    x, same_x = inputs(), inputs()
    weight = torch.randn(3, 12, 16)
    for _ in range(2):  # the second adds to the first
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, same_y = whole(x), split(same_x)
        assert torch.equal(y, same_y)
        y.backward(weight)
        with store.defer("cell"):
            same_y.backward(weight)
        store.run("cell")
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if not autocast else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(same_x.grad, x.grad, **tolerance)
    torch.testing.assert_close(gradients(split), gradients(whole), **tolerance)


def test_the_first_half_leaves_the_weights_of_linears_alone():
    module, store = stage(), WeightGrads()
    split_linears(module, store)
    y = module(inputs())
    with store.defer(0):
        y.sum().backward()
    linears = [m for m in module.modules() if isinstance(m, SplitLinear)]
    assert len(linears) == len(store) == 2 * 6
    assert all(m.weight.grad is None and m.bias.grad is None for m in linears)
    assert module.layers["0"].attention_norm.weight.grad is not None
    store.run(0)
    assert all(m.weight.grad is not None and m.bias.grad is not None for m in linears)
    assert len(store) == 0


def test_without_deferring_a_split_linear_is_a_linear():
    split, plain = nn.Linear(5, 7), nn.Linear(5, 7)
    plain.load_state_dict(split.state_dict())
    split_linears(nn.ModuleList([split]), WeightGrads())
    x = torch.randn(4, 5)
    for layer in (split, plain):
        layer(x).square().sum().backward()
    torch.testing.assert_close(split.weight.grad, plain.weight.grad)
    torch.testing.assert_close(split.bias.grad, plain.bias.grad)


def test_each_half_frees_what_the_method_says():
    """Zero Bubble, section 3.2: after B (here I) only the inputs of linears and the gradients of
    their outputs are held, after W nothing is."""
    module, store = stage(), WeightGrads()
    split_linears(module, store)
    block = module.layers["0"]
    held: dict[str, weakref.ref] = {}

    def watch(name: str, tensor: torch.Tensor) -> None:
        held[name] = weakref.ref(tensor.untyped_storage())

    block.ffn.down.register_forward_hook(lambda m, args, y: watch("input of down", args[0]))
    block.ffn.up.register_forward_hook(lambda m, args, y: watch("output of up", y))
    block.attention.core.register_forward_hook(lambda m, args, y: watch("queries", args[0]))
    block.ffn_norm.register_forward_hook(lambda m, args, y: watch("input of norm", args[0]))
    y = module(inputs())

    def alive() -> set[str]:
        return {name for name, ref in held.items() if ref() is not None}

    # GELU keeps the output of up, attention its queries, the norm its input.
    assert alive() == {"input of down", "output of up", "queries", "input of norm"}
    with store.defer(0):
        y.sum().backward()
    del y
    assert alive() == {"input of down"}
    store.run(0)
    assert alive() == set()


def test_offloaded_activations_leave_and_come_back():
    whole, moved = stage(), stage()
    x, same_x = inputs(), inputs()
    whole(x).sum().backward()
    shelf = Shelf()
    with shelf.saving():
        y = moved(same_x)
    held = shelf.nbytes
    parameters = sum(p.nbytes for p in moved.parameters())
    # At least 13 tensors of the residual stream's size a layer; never the parameters.
    assert 2 * 13 * same_x.nbytes < held < 2 * 13 * same_x.nbytes + parameters
    shelf.offload()
    assert shelf.nbytes == 0
    with pytest.raises(AssertionError, match="in host memory"):
        y.sum().backward(retain_graph=True)
    shelf.reload()
    assert shelf.nbytes == held
    shelf.wait()
    moved.zero_grad()
    same_x.grad = None
    y.sum().backward()
    torch.testing.assert_close(same_x.grad, x.grad)
    torch.testing.assert_close(gradients(moved), gradients(whole))


def test_emulated_layers_sleep_in_every_pass():
    seconds, layers = 0.05, 2
    for split in (False, True):
        module, store = stage(), WeightGrads()
        if split:
            split_linears(module, store)
        emulate(module, Passes(seconds, seconds, seconds), store if split else None)
        began = time.perf_counter()
        y = module(inputs())
        forward = time.perf_counter()
        if split:
            with store.defer(0):
                y.sum().backward()
            first = time.perf_counter()
            store.run(0)
            found = [forward - began, first - forward, time.perf_counter() - first]
            expected = [layers * seconds] * 3
        else:
            y.sum().backward()
            found = [forward - began, time.perf_counter() - forward]
            expected = [layers * seconds, 2 * layers * seconds]
        for number in range(1, len(found) + 1):
            # What one pass is late by makes the next one shorter; a busy machine takes longer.
            measured, right = sum(found[:number]), sum(expected[:number])
            assert 0.9 * right <= measured < right + 2.0


def test_a_borrowed_weight_is_the_lenders():
    """Its gradients add up with the lender's own, and a replaced weight is seen."""
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    borrow(head, embedding)
    assert list(head.parameters()) == []
    x = torch.randn(2, 4)
    torch.testing.assert_close(head(x), x @ embedding.weight.T)
    head(x).sum().backward()
    torch.testing.assert_close(embedding.weight.grad, x.sum(0).expand(7, 4))
    embedding.weight = nn.Parameter(torch.ones(7, 4))
    torch.testing.assert_close(head(x), x @ torch.ones(4, 7))
