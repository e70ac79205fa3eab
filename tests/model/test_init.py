"""Initial weights: published rule, and the same numbers however the model is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hpctrain.model.init import draw, init_parameters
from hpctrain.model.rng import bits, normal, stream_key
from hpctrain.model.transformer import Transformer
from hpctrain.spec.transformer import TransformerDims

DIMS = TransformerDims(
    layers=8, hidden=128, heads=4, kv_heads=2, ffn_hidden=300, vocab_size=512, max_positions=64
)


def test_bits_are_the_published_generator() -> None:
    # First outputs of SplitMix64 seeded with 1234567 (the reference implementation's, as listed
    # by Rosetta Code, "Pseudo-random numbers/Splitmix64").
    expected = [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
        4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert bits(1234567, torch.arange(1, 6)).numpy().view(np.uint64).tolist() == expected


def test_keys_tell_names_and_numbers_apart() -> None:
    keys = [
        stream_key("init", 1, "a"), stream_key("init", 11, "a"), stream_key("init", "1", "a"),
        stream_key("init", 1, "b"), stream_key("init1", "a"), stream_key("init", 1),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_normal_numbers_are_normal() -> None:
    count = 1_000_000
    x = normal(5, (1000, 1000), 1.0).double().flatten()
    # Moments of N(0, 1): each within five of its standard errors.
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert float(x.pow(power).mean()) == pytest.approx(
            moment, abs=5 * math.sqrt(variance / count)
        )
    # Kolmogorov-Smirnov: below the critical value at the 1e-6 level, sqrt(-ln(1e-6/2)/2/n).
    cdf = torch.special.ndtr(x.sort().values)
    steps = torch.arange(1, count + 1) / count
    distance = float((cdf - steps).abs().max())
    assert distance < math.sqrt(-math.log(0.5e-6) / 2 / count)
    # Neighbours along both dimensions are uncorrelated.
    grid = x.view(1000, 1000)
    assert abs(float((grid[:, 1:] * grid[:, :-1]).mean())) < 5e-3
    assert abs(float((grid[1:] * grid[:-1]).mean())) < 5e-3


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((7, 1003), (slice(2, 5), slice(17, 1001))),
        ((1003, 7), (slice(501, 1003), slice(0, 7))),
        ((3000, 400), (slice(1999, 3000), slice(133, 266))),
        ((5, 6, 7), (slice(1, 4), slice(2, 6), slice(3, 4))),
        ((9,), (slice(3, 8),)),
        ((9, 4), (slice(9, 9), slice(0, 4))),
    ],
)
def test_part_of_a_draw_equals_the_same_part_of_the_whole(
    shape: tuple[int, ...], window: tuple[slice, ...]
) -> None:
    whole = normal(3, shape, 0.02)
    part = normal(3, shape, 0.02, window)
    assert torch.equal(part, whole[window])


def test_number_of_threads_does_not_enter() -> None:
    before = torch.get_num_threads()
    drawn = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        drawn.append(normal(3, (701, 1003), 0.02))
    torch.set_num_threads(before)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


def test_scalar_draw() -> None:
    assert normal(3, (), 1.0).shape == ()


def test_standard_deviations_by_name() -> None:
    model = Transformer(DIMS)
    init_parameters(model, 3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            # sqrt(2 · 8 layers) = 4 for the two projections into the residual stream.
            residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
            std = 0.02 / 4 if residual else 0.02
            error = 5 * std / math.sqrt(2 * parameter.numel())
            assert float(parameter.detach().std()) == pytest.approx(std, abs=error), name
            assert abs(float(parameter.detach().mean())) < 5 * std / math.sqrt(parameter.numel()), (
                name
            )


def test_every_parameter_is_drawn_apart() -> None:
    model = Transformer(DIMS)
    init_parameters(model, 3)
    heads = [
        tuple(p.flatten()[:4].tolist()) for p in model.parameters() if p.ndim == 2
    ]  # fmt: skip
    assert len(set(heads)) == len(heads)
    other = Transformer(DIMS)
    init_parameters(other, 4)
    weight = model.layers["0"].ffn.up.weight
    assert not torch.equal(weight, other.layers["0"].ffn.up.weight)


def test_init_takes_nothing_from_and_leaves_nothing_in_torch_state() -> None:
    model, again = Transformer(DIMS), Transformer(DIMS)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    init_parameters(model, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    init_parameters(again, 3)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_sharded_parameters_take_their_slice() -> None:
    """Columns on one rank of three, as a row-parallel linear holds them."""
    whole = Transformer(DIMS)
    init_parameters(whole, 3)
    part = Transformer(DIMS)
    down = part.layers["5"].ffn.down
    down.weight = torch.nn.Parameter(torch.empty(128, 100))
    shards = {id(down.weight): ((slice(0, 128), slice(100, 200)), (128, 300))}

    def local(parameter: torch.Tensor) -> tuple[torch.Tensor, object, object]:
        window, shape = shards.get(id(parameter), (None, parameter.shape))
        return parameter, window, shape

    init_parameters(part, 3, local)  # type: ignore[arg-type]
    assert torch.equal(down.weight, whole.layers["5"].ffn.down.weight[:, 100:200])
    assert torch.equal(part.layers["5"].ffn.up.weight, whole.layers["5"].ffn.up.weight)


def test_draw_by_name_is_what_init_uses() -> None:
    model = Transformer(DIMS)
    init_parameters(model, 9)
    name = "layers.2.attention.output.weight"
    drawn = draw(name, (128, 128), DIMS, 9)
    assert torch.equal(drawn, dict(model.named_parameters())[name])
