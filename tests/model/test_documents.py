"""Packed documents: each as if it were alone."""

from __future__ import annotations

import dataclasses

import h5py
import numpy as np
import pytest
import torch

from hpctrain.errors import ImpossibleError, SpecError, UsageError
from hpctrain.io.corpus import open_sources, tokenize
from hpctrain.io.encoders import ByteEncoder
from hpctrain.io.tokens import TokenFile
from hpctrain.model.init import init_parameters
from hpctrain.model.transformer import Transformer
from hpctrain.spec.transformer import TransformerDims
from hpctrain.testing.parity import _spec
from hpctrain.train.sequences import cut

DIMS = TransformerDims(
    layers=2, hidden=16, heads=4, kv_heads=2, ffn_hidden=40, vocab_size=61, max_positions=32
)
ROTARY = dataclasses.replace(DIMS, position="rotary", norm="rmsnorm", bias=False)


@pytest.mark.parametrize("dims", [DIMS, ROTARY], ids=["learned", "rotary"])
def test_a_packed_document_is_as_if_alone(dims):
    """Logits and gradients of a row of documents against each document run by itself."""
    model = Transformer(dims)
    init_parameters(model, 0)
    model.double()
    tokens = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))
    documents = [[(0, 7), (7, 8), (8, 20)], [(0, 20)]]
    starts = torch.zeros(2, 20, dtype=torch.int64)
    for row, listed in zip(starts, documents, strict=True):
        for first, stop in listed:
            row[first:stop] = first
    weights = torch.randn(2, 20, 61, dtype=torch.float64)
    packed = model(tokens, starts=starts)
    (packed * weights).sum().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for sample, listed in enumerate(documents):
        for first, stop in listed:
            alone = model(tokens[sample : sample + 1, first:stop])
            torch.testing.assert_close(alone[0], packed[sample, first:stop])
            (alone[0] * weights[sample, first:stop]).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad)


@pytest.fixture
def token_file(tmp_path):
    """Documents of 5, 1, 9 and 6 bytes, each with an end token."""
    lines = ["abcde", "f", "ghijklmno", "pqrstu"]
    (tmp_path / "d.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    tokenize(open_sources([tmp_path / "d.jsonl"], "auto", "text"), tmp_path / "d.h5", ByteEncoder())
    return tmp_path / "d.h5"


def test_token_files_say_where_documents_begin(token_file):
    with h5py.File(token_file) as file:
        begins = file["documents"][:-1].tolist()
    assert begins == [0, 6, 8, 18]
    found = TokenFile(token_file, 8).document_starts([1, 0])
    # sample 1 is tokens 8 to 15, all of the third document; sample 0 has all of two
    assert found.tolist() == [[0] * 8, [0, 0, 0, 0, 0, 0, 6, 6]]
    assert TokenFile(token_file, 5).document_starts([3]).tolist() == [[0, 0, 0, 3, 3]]


def test_a_file_without_documents_is_refused(tmp_path):
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["tokens"] = np.zeros(40, np.uint8)
        file["tokens"].attrs["vocab_size"] = 256
    with pytest.raises(UsageError, match="where documents begin"):
        TokenFile(tmp_path / "t.h5", 8).document_starts([0])


def test_documents_of_what_is_not_known_are_refused():
    train = "train: {steps: 1, global_batch: 2}\n"
    own = "model: {module: 'a:b'}\ndata: {path: x, sequence_length: 8, documents: separate}\n"
    with pytest.raises(ImpossibleError, match="a model of your own"):
        _spec(own + train, 1, [])
    data = own.replace("path: x", "module: 'a:b'")
    with pytest.raises(SpecError, match="needs a token file"):
        _spec(data + train, 1, [])


def test_documents_become_sequences():
    """Of 7, 1, 2 and 9 tokens, at most 4 inputs each: 6 inputs are two sequences, 0 none."""
    firsts, lengths = cut(np.cumsum([0, 7, 1, 2, 9]), 4)
    assert firsts.tolist() == [0, 4, 8, 10, 14]
    assert lengths.tolist() == [4, 2, 1, 4, 4]
