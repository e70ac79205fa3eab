"""Parameter counts of published models to the unit, and FLOP conventions by hand."""

from __future__ import annotations

import pytest

from hpctrain.plan.shapes import ModelShape
from hpctrain.spec import parse_job
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.presets import PRESETS
from hpctrain.spec.resolve import resolve


def llama(layers, hidden, heads, kv, ffn, vocab, **more):
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        head_dim=hidden // heads,
        ffn_hidden=ffn,
        vocab=vocab,
        gated=True,
        tied=False,
        bias=False,
        layernorm=False,
        **more,
    )


def gpt(layers, hidden, heads, vocab=51200, positions=2048):
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden=4 * hidden,
        vocab=vocab,
        positions=positions,
    )


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (gpt(12, 768, 12, 50257, 1024), 124_439_808),  # GPT-2, its released weights
        (gpt(48, 1600, 25, 50257, 1024), 1_557_611_200),  # GPT-2 XL
        (llama(32, 4096, 32, 32, 11008, 32000), 6_738_415_616),  # Llama 2 7B
        (llama(80, 8192, 64, 8, 28672, 32000), 68_976_648_192),  # Llama 2 70B
        (llama(32, 4096, 32, 8, 14336, 128256), 8_030_261_248),  # Llama 3 8B
        (llama(80, 8192, 64, 8, 28672, 128256), 70_553_706_496),  # Llama 3 70B
        (llama(126, 16384, 128, 8, 53248, 128256), 405_853_388_800),  # Llama 3.1 405B
        # Mixtral 8x7B: 46.7B, of which 12.9B work on a token
        (llama(32, 4096, 32, 8, 14336, 32000, experts=8, topk=2), 46_702_792_704),
    ],
)
def test_parameters_of_published_models(shape, count):
    assert shape.parameters == count


def test_active_weights_of_mixtral():
    """12.9B parameters a token (Jiang et al. 2024, section 2), the embedding's look-up aside."""
    shape = llama(32, 4096, 32, 8, 14336, 32000, experts=8, topk=2)
    active = shape.matmul_weights + shape.vocab * shape.hidden
    assert active == pytest.approx(12.88e9, rel=0.001)


def test_shape_of_a_preset():
    job = parse_job(
        "model: {preset: llama-8b}\ndata: {path: x, sequence_length: 64}\n"
        "train: {steps: 1, global_batch: 1}\n"
    )

    class Site:
        devices_per_node = 1

    from pathlib import Path

    spec = resolve(job, Site(), Path("/")).spec
    assert ModelShape.of(spec.model.transformer()).parameters == 8_030_261_248
    assert spec.model.transformer().parameters == 8_030_261_248


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-moe-16b"])
def test_shape_of_a_preset_with_experts_counts_what_the_model_has(name):
    dims = ModelSpec(**PRESETS[name][1]).transformer()
    shape = ModelShape.of(dims)
    assert shape.parameters == dims.parameters
    assert shape.model_flops_per_token(2048) == dims.model_flops_per_token(2048)


def test_biases_of_a_model_with_experts_are_not_the_experts():
    dims = ModelSpec(
        layers=3,
        hidden=16,
        heads=2,
        vocab_size=31,
        max_positions=8,
        moe={"experts": 4, "hidden": 24, "shared": 1, "dense_layers": 1},
    ).transformer()
    assert ModelShape.of(dims).parameters == dims.parameters


def test_flops_of_one_layer_by_hand():
    """h = 8, one head of 8, f = 32, s = 4: every product of one token, forward."""
    shape = gpt(1, 8, 1, vocab=16)
    s = 4
    forward = 2 * (8 * 24 + 8 * 8 + 8 * 32 + 32 * 8)  # qkv, output, up, down
    forward += 2 * (s * 8 + s * 8)  # scores and values over all s keys
    forward += 2 * 8 * 16  # output layer
    assert shape.model_flops_per_token(s) == 3 * forward
    layers_again = forward - 2 * 8 * 16
    assert shape.hardware_flops_per_token(s) == 3 * forward + layers_again


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(24, 2304, 24), (96, 12288, 96)])
def test_flops_of_megatron_formulas(layers, hidden, heads):
    """Narayanan et al. 2021, equation 3, and its form without recomputation."""
    shape, s, v = gpt(layers, hidden, heads), 2048, 51200
    hardware = 96 * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    model = 72 * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (12 * layers * hidden))
    assert shape.hardware_flops_per_token(s) * s == pytest.approx(hardware, rel=1e-12)
    assert shape.model_flops_per_token(s) * s == pytest.approx(model, rel=1e-12)


def test_causal_convention_counts_half_of_attention():
    """0.93 of the full count at 8,192 tokens and 0.965 at 4,096, for a 70B model."""
    shape = llama(80, 8192, 64, 8, 28672, 128256)
    for sequence, share in ((8192, 0.93), (4096, 0.965)):
        found = shape.causal_flops_per_token(sequence) / shape.model_flops_per_token(sequence)
        assert found == pytest.approx(share, abs=0.005)
