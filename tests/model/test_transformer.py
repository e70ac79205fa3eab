"""The transformer against published sizes and an implementation written apart from it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.model.dropout import dropout_keys
from hpctrain.model.init import init_parameters
from hpctrain.model.transformer import Attention, Block, Transformer, next_token_loss, rotate
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.presets import PRESETS
from hpctrain.spec.transformer import TransformerDims

SMALL = TransformerDims(
    layers=3, hidden=32, heads=4, kv_heads=4, ffn_hidden=80, vocab_size=61, max_positions=24
)
LLAMA = dataclasses.replace(
    SMALL,
    kv_heads=2,
    position="rotary",
    norm="rmsnorm",
    activation="swiglu",
    tied_embeddings=False,
    bias=False,
)


def preset(name: str) -> TransformerDims:
    return ModelSpec(**PRESETS[name][1]).transformer()


def built(dims: TransformerDims, seed: int = 0, **stage: Any) -> Transformer:
    """A model in float64 whose biases and gains are not 0 and 1, so that they count."""
    model = Transformer(dims, **stage)
    init_parameters(model, seed)
    model.double()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).double()
    return model


def some_tokens(dims: TransformerDims, batch: int = 3, length: int = 20) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(dims.vocab_size, (batch, length), generator=generator)


# Counts of the published checkpoints (GPT-2: Hugging Face gpt2, gpt2-medium, -large, -xl; Llama
# 3 and 3.2: num_parameters of the released weights).
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-355m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
    ],
)
def test_parameter_count_of_published_models(name: str, count: int) -> None:
    dims = preset(name)
    model = Transformer(dims, device="meta")
    assert sum(p.numel() for p in model.parameters()) == count
    assert dims.parameters == count


@pytest.mark.parametrize("dims", [SMALL, LLAMA, dataclasses.replace(SMALL, tied_embeddings=False)])
def test_parameter_formula_of_the_dims_counts_the_model(dims: TransformerDims) -> None:
    model = Transformer(dims, device="meta")
    assert sum(p.numel() for p in model.parameters()) == dims.parameters
    block = model.layers["0"]
    assert sum(p.numel() for p in block.parameters()) == dims.layer_parameters


def test_parameter_names() -> None:
    names = {name for name, _ in Transformer(SMALL, device="meta").named_parameters()}
    linears = ("attention.query", "attention.key", "attention.value", "attention.output")
    linears += ("ffn.up", "ffn.down", "attention_norm", "ffn_norm")
    expected = {"embedding.tokens.weight", "embedding.positions.weight"}
    expected |= {"norm.weight", "norm.bias"}
    for index in range(3):
        for linear in linears:
            expected |= {f"layers.{index}.{linear}.weight", f"layers.{index}.{linear}.bias"}
    assert names == expected

    names = {name for name, _ in Transformer(LLAMA, device="meta").named_parameters()}
    assert "layers.2.ffn.gate.weight" in names and "head.weight" in names
    assert not any(name.endswith("bias") or "positions" in name for name in names)


def reference_logits(w: dict[str, Tensor], dims: TransformerDims, tokens: Tensor) -> Tensor:
    """The model once more, one sample and one head at a time, from plain matrix products."""

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(x: Tensor, name: str) -> Tensor:
        if dims.norm == "rmsnorm":
            scale = (x.pow(2).sum(-1, keepdim=True) / dims.hidden + dims.norm_eps).sqrt()
            return x / scale * w[f"{name}.weight"]
        mean = x.sum(-1, keepdim=True) / dims.hidden
        variance = (x - mean).pow(2).sum(-1, keepdim=True) / dims.hidden
        y = (x - mean) / (variance + dims.norm_eps).sqrt()
        return y * w[f"{name}.weight"] + w[f"{name}.bias"]

    def turned(x: Tensor) -> Tensor:
        """Rotary embedding as complex numbers: channel i and i + D/2 are one of them."""
        half = dims.head_dim // 2
        z = torch.complex(x[:, :half], x[:, half:])
        frequency = dims.rope_theta ** (-2 * torch.arange(half).double() / dims.head_dim)
        angle = torch.arange(len(x)).double()[:, None] * frequency
        z = z * torch.complex(angle.cos(), angle.sin())
        return torch.cat((z.real, z.imag), dim=1)

    samples = []
    for sample in tokens:
        x = w["embedding.tokens.weight"][sample]
        if dims.position == "learned":
            x = x + w["embedding.positions.weight"][: len(sample)]
        for index in range(dims.layers):
            at = f"layers.{index}."
            y = norm(x, at + "attention_norm")
            q, k, v = (linear(y, f"{at}attention.{part}") for part in ("query", "key", "value"))
            heads = []
            for head in range(dims.heads):
                shared = head // (dims.heads // dims.kv_heads)
                mine = slice(head * dims.head_dim, (head + 1) * dims.head_dim)
                theirs = slice(shared * dims.head_dim, (shared + 1) * dims.head_dim)
                query, key = q[:, mine], k[:, theirs]
                if dims.position == "rotary":
                    query, key = turned(query), turned(key)
                scores = query @ key.T / math.sqrt(dims.head_dim)
                future = torch.ones_like(scores).triu(1).bool()
                weights = scores.masked_fill(future, -math.inf).exp()
                heads.append(weights / weights.sum(1, keepdim=True) @ v[:, theirs])
            x = x + linear(torch.cat(heads, 1), at + "attention.output")
            y = norm(x, at + "ffn_norm")
            u = linear(y, at + "ffn.up")
            if dims.activation == "swiglu":
                gate = linear(y, at + "ffn.gate")
                u = gate / (1 + (-gate).exp()) * u
            else:
                u = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
            x = x + linear(u, at + "ffn.down")
        head = "embedding.tokens" if dims.tied_embeddings else "head"
        samples.append(norm(x, "norm") @ w[f"{head}.weight"].T)
    return torch.stack(samples)


@pytest.mark.parametrize(
    "dims",
    [
        SMALL,
        LLAMA,
        dataclasses.replace(SMALL, position="none", kv_heads=1),
        dataclasses.replace(LLAMA, tied_embeddings=True, rope_theta=500.0),
    ],
    ids=["gpt2", "llama", "no-positions-mqa", "llama-tied"],
)
def test_forward_equals_reference(dims: TransformerDims) -> None:
    # Larger weights than at initialisation: attention and the non-linearity must matter.
    model = built(dataclasses.replace(dims, init_std=0.3)).eval()
    tokens = some_tokens(dims)
    expected = reference_logits(dict(model.named_parameters()), model.dims, tokens)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-10, atol=1e-10)
    assert expected.std() > 0.3


def test_rotary_by_hand() -> None:
    # Position 3, head of two channels: one pair, turned by 3 rad whatever theta is.
    turned = rotate(torch.tensor([1.0, 2.0]).double().view(1, 1, 1, 2), torch.tensor([3]), 10.0)
    c, s = math.cos(3), math.sin(3)
    assert turned.flatten().tolist() == pytest.approx([c - 2 * s, 2 * c + s], abs=1e-12)
    # Four channels: the second pair turns by 3 / theta^(1/2).
    x = torch.tensor([0.0, 1.0, 0.0, 0.0]).double().view(1, 1, 1, 4)
    turned = rotate(x, torch.tensor([3]), 100.0)
    expected = [0, math.cos(0.3), 0, math.sin(0.3)]
    assert turned.flatten().tolist() == pytest.approx(expected, abs=1e-12)


def test_rotary_scores_depend_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator).double()

    def score(at_q: int, at_k: int) -> float:
        turned = rotate(q, torch.tensor([at_q]), 1e4) * rotate(k, torch.tensor([at_k]), 1e4)
        return float(turned.sum())

    assert score(9, 2) == pytest.approx(score(107, 100), abs=1e-10)
    assert abs(score(9, 2) - score(9, 3)) > 1e-3


def test_grouped_heads_equal_repeated_key_value_heads() -> None:
    grouped = Attention(LLAMA).double()
    full = Attention(dataclasses.replace(LLAMA, kv_heads=4)).double()
    weights = {name: value.clone() for name, value in grouped.state_dict().items()}
    for part in ("key", "value"):
        heads = weights[f"{part}.weight"].view(2, 8, 32)
        weights[f"{part}.weight"] = heads.repeat_interleave(2, 0).reshape(32, 32)
    full.load_state_dict(weights)
    x, positions = torch.randn(2, 9, 32).double(), torch.arange(9)
    torch.testing.assert_close(grouped(x, positions), full(x, positions), rtol=1e-12, atol=1e-12)


def test_no_position_sees_a_later_token() -> None:
    model = built(SMALL).eval()
    tokens = some_tokens(SMALL)
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % SMALL.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("dims", [SMALL, LLAMA], ids=["gpt2-tied", "llama"])
def test_stages_in_a_row_are_the_whole_model(dims: TransformerDims) -> None:
    whole = built(dims)
    stages = [
        built(dims, layers=range(1), has_head=False),
        built(dims, layers=range(1, 3), has_embedding=False, has_head=False),
        built(dims, layers=range(0), has_embedding=False),
    ]
    names = dict(whole.named_parameters())
    held = []
    for stage in stages:
        for name, parameter in stage.named_parameters():
            name = stage.logical_names.get(name, name)
            assert torch.equal(parameter, names[name]), name
            held.append(name)
    assert set(held) == set(names)
    assert len(held) == len(names) + dims.tied_embeddings

    tokens = some_tokens(dims)
    x = tokens
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(tokens))


def test_stage_parts() -> None:
    model = Transformer(SMALL, layers=range(1, 2), has_embedding=False, has_head=False)
    assert list(model.layers) == ["1"] and isinstance(model.layers["1"], Block)
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"layers"}
    with pytest.raises(ValueError, match="of a model of 3"):
        Transformer(SMALL, layers=range(2, 4), device="meta")


def test_tied_weight_stays_one_parameter() -> None:
    model = Transformer(SMALL, device="meta")
    model.to_empty(device="cpu")
    init_parameters(model, 0)
    model.double()
    assert model.head is not None and model.embedding is not None
    assert model.head.weight is model.embedding.tokens.weight
    next_token_loss(model(some_tokens(SMALL)), some_tokens(SMALL)).backward()
    assert model.head.weight.grad is model.embedding.tokens.weight.grad


def test_loss_is_log_vocabulary_for_equal_logits_and_known_by_hand() -> None:
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    assert float(next_token_loss(torch.zeros(2, 3, 5), targets)) == pytest.approx(math.log(5))
    logits = torch.tensor([[[0.0, math.log(3.0)]]])  # probabilities 1/4, 3/4
    assert float(next_token_loss(logits, torch.tensor([[0]]))) == pytest.approx(math.log(4))


def test_loss_of_bf16_logits_is_float32() -> None:
    logits = torch.randn(2, 8, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.randint(300, (2, 8), generator=torch.Generator().manual_seed(1))
    loss = next_token_loss(logits, targets)
    assert loss.dtype is torch.float32
    rows = logits.double().flatten(0, 1)
    picked = rows[torch.arange(16), targets.flatten()]
    expected = (rows.exp().sum(1).log() - picked).mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_fresh_model_predicts_nothing() -> None:
    dims = dataclasses.replace(SMALL, vocab_size=256, layers=2)
    model = Transformer(dims)
    init_parameters(model, 0)
    tokens = some_tokens(dims, batch=8)
    loss = next_token_loss(model(tokens), tokens.roll(-1, 1)).detach()
    assert float(loss) == pytest.approx(math.log(256), abs=0.05)


@pytest.mark.parametrize("dims", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_flops_per_token_against_torch_counter(dims: TransformerDims) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = built(dims)
    tokens = some_tokens(dims, batch=2, length=20)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        next_token_loss(model(tokens), tokens).backward()
    assert counter.get_total_flops() == dims.model_flops_per_token(20) * 2 * 20


@pytest.mark.parametrize("dims", [SMALL, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("how", ["autocast", "parameters"])
def test_bf16_is_close_to_float32(dims: TransformerDims, how: str) -> None:
    dims = dataclasses.replace(dims, dropout=0.1)
    tokens, keys = some_tokens(dims), dropout_keys(0, 1, torch.arange(3))
    losses, gradients = [], []
    for kind in (torch.float32, torch.bfloat16):
        model = Transformer(dims)
        init_parameters(model, 0)
        if how == "parameters":
            model.to(kind)
        with torch.autocast("cpu", kind, enabled=how == "autocast" and kind is torch.bfloat16):
            loss = next_token_loss(model(tokens, keys), tokens.roll(-1, 1))
        loss.backward()
        assert loss.dtype is torch.float32
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0)
    assert float(cosine) > 0.999
