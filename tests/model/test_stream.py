"""Pieces of long sequences: the same numbers, and memory that the vocabulary does not set."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hpctrain.errors import ImpossibleError
from hpctrain.model.init import init_parameters
from hpctrain.model.transformer import Transformer, next_token_loss
from hpctrain.spec.transformer import TransformerDims
from hpctrain.testing.parity import _spec

DIMS = TransformerDims(
    layers=2, hidden=16, heads=4, kv_heads=2, ffn_hidden=40, vocab_size=61, max_positions=32
)


def gradients(tokens: int | None, tied: bool) -> tuple[float, dict[str, torch.Tensor]]:
    model = Transformer(TransformerDims(**{**vars_of(DIMS), "tied_embeddings": tied}))
    init_parameters(model, 0)
    model.double()
    drawn = torch.randint(61, (3, 21), generator=torch.Generator().manual_seed(1))
    inputs, targets = drawn[:, :-1], drawn[:, 1:]
    if tokens is None:
        loss = next_token_loss(model(inputs), targets)
    else:
        model.stream(tokens, next_token_loss)
        loss = model(inputs, targets=targets)
    (3 * loss).backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def vars_of(dims):
    return {name: getattr(dims, name) for name in dims.__slots__}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 20, 64])
def test_pieces_give_the_gradients_of_the_whole(tokens, tied):
    loss, found = gradients(tokens, tied)
    right, expected = gradients(None, tied)
    assert loss == pytest.approx(right, rel=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def test_a_second_backward_is_refused():
    model = Transformer(DIMS)
    init_parameters(model, 0)
    model.stream(4, next_token_loss)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    loss = model(tokens, targets=tokens)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()
    with torch.no_grad():
        assert float(model(tokens, targets=tokens)) == pytest.approx(float(loss.detach()))


MEMORY = """
import resource, sys, torch
from hpctrain.model.stream import streamed_loss
from hpctrain.model.transformer import next_token_loss
torch.set_num_threads(1)
length, vocabulary = 131072, 2048
x = torch.randn(1, length, 8, requires_grad=True)
head = torch.nn.Linear(8, vocabulary, bias=False)
targets = torch.randint(vocabulary, (1, length))
streamed_loss(x[:, :1024], head, [head.weight], next_token_loss, targets[:, :1024], 512).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loss = streamed_loss(x, head, [head.weight], next_token_loss, targets, 512)
loss.backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_the_loss_over_128k_tokens_never_holds_the_logits():
    """All logits in float32 were 1 GiB; the pieces have 4 MiB each."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=200
    )
    assert int(done.stdout) < 64 << 20


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.loss=a:b", "takes all logits"),
        ("parallel.overlap=true", "overlap"),
        ("parallel.schedule=1f1b+vocab", "vocab"),
    ],
)
def test_refused_with_a_reason(override, words):
    job = "model: {layers: 2, hidden: 16, heads: 4, vocab_size: 61}\n"
    job += "data: {path: none, sequence_length: 8}\ntrain: {steps: 1, global_batch: 2}\n"
    with pytest.raises(ImpossibleError, match=words):
        _spec(job, 1, ["parallel.stream=4", override])
