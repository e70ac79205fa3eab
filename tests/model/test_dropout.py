"""Dropout: its rate, and masks that no split of the work changes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpctrain.model.dropout import Dropout, dropout_keys
from hpctrain.model.init import init_parameters
from hpctrain.model.transformer import Transformer
from hpctrain.spec.transformer import TransformerDims

DIMS = TransformerDims(
    layers=2, hidden=24, heads=2, kv_heads=2, ffn_hidden=48, vocab_size=50, max_positions=16,
    dropout=0.2,
)  # fmt: skip


def keys(samples: int, seed: int = 1, step: int = 1) -> Tensor:
    return dropout_keys(seed, step, torch.arange(samples))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_rate_and_mean(p: float) -> None:
    layer = Dropout(p, "here")
    x = torch.ones(16, 64, 256)
    y = layer(x, keys(16), torch.arange(64)).double()
    count = x.numel()
    dropped = float((y == 0).double().mean())
    assert dropped == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / count) + 2**-17)
    assert float(y.mean()) == pytest.approx(1, abs=5 * math.sqrt(p / (1 - p) / count))
    assert y.unique().numel() == 2


def test_rate_is_even_along_every_dimension_and_lane() -> None:
    keep = Dropout(0.25, "here").keep_mask(torch.Size((64, 64, 64)), keys(64), torch.arange(64))
    error = 5.5 * math.sqrt(0.25 * 0.75 / 64**2)
    for dimensions in ((1, 2), (0, 2), (0, 1)):
        rates = keep.double().mean(dimensions)
        assert float((rates - 0.75).abs().max()) < error


def test_masks_of_sites_steps_seeds_samples_and_positions_are_independent() -> None:
    def mask(site: str = "a", seed: int = 1, step: int = 1, first: int = 0, at: int = 0) -> Tensor:
        layer = Dropout(0.5, site)
        rows = dropout_keys(seed, step, torch.arange(first, first + 8))
        return layer.keep_mask(torch.Size((8, 32, 64)), rows, torch.arange(at, at + 32))

    base = mask()
    for other in (mask("b"), mask(seed=2), mask(step=2), mask(first=8), mask(at=32)):
        agreement = float((base == other).double().mean())
        assert agreement == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(base.numel()))
    assert torch.equal(base[1:], mask(first=1)[:-1])
    assert torch.equal(base[:, 3:], mask(at=3)[:, :-3])


def test_rows_split_between_ranks_and_micro_batches_keep_their_masks() -> None:
    layer = Dropout(0.3, "here")
    x, all_keys, positions = torch.randn(4, 10, 30), keys(4), torch.arange(10)
    whole = layer(x, all_keys, positions)
    halves = [layer(x[rows], all_keys[rows], positions) for rows in (slice(0, 2), slice(2, 4))]
    assert torch.equal(torch.cat(halves), whole)
    strided = [layer(x[rank::2], all_keys[rank::2], positions) for rank in range(2)]
    assert torch.equal(torch.stack(strided, 1).flatten(0, 1), whole)
    # and a sequence cut in two, as sequence parallelism does
    ends = [layer(x[:, part], all_keys, positions[part]) for part in (slice(0, 3), slice(3, 10))]
    assert torch.equal(torch.cat(ends, 1), whole)


@pytest.mark.parametrize("shape", [(5,), (3, 7, 2), (4, 4), (1,)])
def test_any_shape_of_a_users_own_model(shape: tuple[int, ...]) -> None:
    layer = Dropout(0.4, "conv")
    x = torch.ones(200, *shape)
    y = layer(x, keys(200))
    assert y.shape == x.shape
    rate = float((y == 0).double().mean())
    assert rate == pytest.approx(0.4, abs=5 * math.sqrt(0.24 / x.numel()) + 2**-17)
    assert torch.equal(layer(x[50:], keys(200)[50:]), y[50:])


def test_evaluation_and_zero_are_the_identity() -> None:
    x = torch.randn(2, 3)
    assert Dropout(0.5, "a").eval()(x, None) is x
    assert Dropout(0.0, "a")(x, None) is x


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="needs the keys"):
        Dropout(0.5, "a")(torch.ones(2, 3), None)
    with pytest.raises(ValueError, match="below 1"):
        Dropout(1.0, "a")


def test_dtype_stays() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert Dropout(0.1, "a")(torch.ones(2, 8, dtype=dtype), keys(2)).dtype is dtype


def test_gradient_passes_where_the_value_passed() -> None:
    x = torch.randn(2, 64, requires_grad=True)
    y = Dropout(0.5, "a")(x, keys(2))
    y.sum().backward()
    assert torch.equal(x.grad, (y != 0) * 2.0)


def test_stages_with_dropout_are_the_whole_model() -> None:
    def stage(**held: object) -> Transformer:
        model = Transformer(DIMS, **held)  # type: ignore[arg-type]
        init_parameters(model, 0)
        return model

    tokens = torch.arange(30).view(2, 15)
    whole = stage()(tokens, keys(2))
    x = stage(layers=range(1), has_head=False)(tokens, keys(2))
    assert torch.equal(stage(layers=range(1, 2), has_embedding=False)(x, keys(2)), whole)
    assert not torch.equal(stage().eval()(tokens), whole)


def test_recompute_meets_the_same_masks() -> None:
    model = Transformer(DIMS)
    init_parameters(model, 0)
    tokens = torch.arange(30).view(2, 15)
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        torch.manual_seed(int(recompute))
        if recompute:
            logits = checkpoint(model, tokens, keys(2), use_reentrant=False)
        else:
            logits = model(tokens, keys(2))
        logits.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_model_without_dropout_needs_no_keys() -> None:
    model = Transformer(dataclasses.replace(DIMS, dropout=0.0))
    init_parameters(model, 0)
    tokens = torch.arange(30).view(2, 15)
    assert torch.equal(model(tokens), model(tokens, keys(2)))
