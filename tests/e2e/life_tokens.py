"""A small token file of English text."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

from hpctrain.io.corpus import open_sources, tokenize
from hpctrain.io.encoders import ByteEncoder


def make_tokens(folder: Path) -> Path:
    (folder / "text.txt").write_text("".join(pydoc_data.topics.topics.values())[:20_000])
    sources = open_sources([folder / "text.txt"], "text", "text")
    tokenize(sources, folder / "tokens.h5", ByteEncoder())
    return folder / "tokens.h5"
