"""Linear attention against its recurrence, written out token by token."""

from __future__ import annotations

import pytest
import torch

from hpctrain.errors import SpecError
from hpctrain.model.init import init_parameters
from hpctrain.model.linear_attention import CHUNK, LinearAttention
from hpctrain.model.transformer import Transformer, next_token_loss
from hpctrain.spec.transformer import TransformerDims
from hpctrain.testing.parity import _spec


def recurrence(q, k, v, heads):
    """(B, N, S, D) by M ← λM + φ(k)vᵀ, y = φ(q)ᵀM over its root mean square."""
    out = torch.zeros_like(q)
    for n in range(q.shape[1]):
        rate = torch.exp(torch.tensor(-(2.0 ** (-8.0 * (n + 1) / heads)), dtype=q.dtype))
        state = torch.zeros(q.shape[0], q.shape[3], q.shape[3], dtype=q.dtype)
        kv = n * k.shape[1] // q.shape[1]
        for t in range(q.shape[2]):
            key = torch.nn.functional.elu(k[:, kv, t]) + 1
            state = rate * state + key.unsqueeze(-1) * v[:, kv, t].unsqueeze(1)
            y = ((torch.nn.functional.elu(q[:, n, t]) + 1).unsqueeze(1) @ state).squeeze(1)
            out[:, n, t] = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return out


@pytest.mark.parametrize("length", [1, 5, CHUNK, 2 * CHUNK + 3])
def test_chunks_give_what_the_recurrence_gives(length):
    torch.manual_seed(0)
    q = torch.randn(2, 4, length, 6, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, length, 6, dtype=torch.float64)
    torch.testing.assert_close(LinearAttention(4, 1e-5)(q, k, v), recurrence(q, k, v, 4))


def test_a_model_with_it_learns():
    dims = TransformerDims(
        layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=64, vocab_size=17, max_positions=96,
        attention="linear", position="none",
    )  # fmt: skip
    model = Transformer(dims)
    init_parameters(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn = torch.randint(17, (8, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 8)
    losses = []
    for _ in range(60):
        loss = next_token_loss(model(drawn[:, :-1]), drawn[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    # What follows is what followed 12 tokens ago; only memory can know it.
    assert losses[-1] < 0.4 * losses[0]


def test_work_does_not_grow_with_the_square():
    dims = TransformerDims(layers=2, hidden=32, heads=4, kv_heads=4, ffn_hidden=64, vocab_size=17,
                           max_positions=1, attention="linear")  # fmt: skip
    assert dims.model_flops_per_token(1 << 20) == dims.model_flops_per_token(1)


def test_rotary_positions_are_refused():
    job = "model: {layers: 1, hidden: 8, heads: 2, vocab_size: 9, attention: linear, "
    job += "position: rotary}\ndata: {path: x, sequence_length: 8}\n"
    with pytest.raises(SpecError, match="learned or none"):
        _spec(job + "train: {steps: 1, global_batch: 1}\n", 1, [])
