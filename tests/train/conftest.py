"""A small token file of English text, and a job that trains on it."""

from __future__ import annotations

import pydoc_data.topics

import pytest

from hpctrain.io.corpus import open_sources, tokenize
from hpctrain.io.encoders import ByteEncoder

JOB = """\
name: parity
model:
  layers: 2
  hidden: 32
  heads: 4
  kv_heads: 2
  vocab_size: 256
  position: rotary
  norm: rmsnorm
  activation: swiglu
  bias: false
  dropout: 0.1
data: {path: tokens.h5, sequence_length: 32, shuffle_block: 4}
train:
  steps: 20
  global_batch: 8
  micro_batch: 1
  lr: 1e-2
  schedule: {kind: cosine, warmup_steps: 5}
checkpoint: {every: 1000}
"""


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    text = folder / "text.txt"
    text.write_text("".join(pydoc_data.topics.topics.values())[:40_000])
    tokenize(open_sources([text], "text", "text"), folder / "tokens.h5", ByteEncoder())
    return folder / "tokens.h5"


@pytest.fixture
def folder(tmp_path, tokens):
    (tmp_path / "tokens.h5").symlink_to(tokens)
    return tmp_path


@pytest.fixture
def job():
    return JOB
