"""Every layout of up to eight ranks against one rank; every schedule with several micro-batches.

All of them take about half an hour on two cores (``make whole``); the suite runs a few that others
have not.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpctrain.schedule import names
from hpctrain.testing.parity import check_parity

pytestmark = pytest.mark.mpi

# Epsilon: where a gradient is zero but for rounding, AdamW would make a full step of the rounding.
JOB = """\
model: {layers: 9, hidden: 32, heads: 8, kv_heads: 2, vocab_size: 61, dropout: 0.1}
data: {path: none, sequence_length: 24}
train: {steps: 10, global_batch: 8, micro_batch: 1, lr: 3e-3, eps: 1e-6}
"""
BATCH = {1: 8, 2: 8, 3: 12, 4: 8, 5: 10, 6: 12, 7: 14, 8: 8}
"""Samples a step by data-parallel ranks: 9 layers, 8 heads and 61 tokens do not divide evenly, but
samples have to."""


def shardings(data: int) -> Iterator[str]:
    yield ""
    if data == 1:
        return
    for kind in ("zero1", "zero2", "zero3"):
        yield f" parallel.sharding={kind}"
        if kind != "zero1" and data % 2 == 0 and data > 2:
            yield f" parallel.sharding={kind} parallel.shard=2"


def layouts(ranks: int) -> list[str]:
    """Every (tensor, pipeline, chunks, data, sharding) of ``ranks`` ranks."""
    found = []
    for tensor in (t for t in range(1, ranks + 1) if ranks % t == 0):
        rest = ranks // tensor
        for pipeline in (p for p in range(1, rest + 1) if rest % p == 0):
            data = rest // pipeline
            text = f"parallel.tensor={tensor} parallel.pipeline={pipeline} parallel.data={data}"
            text += f" train.global_batch={BATCH[data]}"
            if 24 % tensor:
                text += " parallel.sequence=false"
            chunked = ("", " parallel.schedule=interleaved parallel.chunks=2")
            # Interleaving wants a multiple of the stages of micro-batches, two chunks layers.
            whole = pipeline > 1 and 2 * pipeline <= 9 and BATCH[data] // data % pipeline == 0
            for chunks in chunked if whole else chunked[:1]:
                found += [text + chunks + kind for kind in shardings(data)]
    return found


def schedules(pipeline: int) -> list[str]:
    """Every schedule with as many, twice and three times as many micro-batches as stages."""
    return [
        f"parallel.pipeline={pipeline} parallel.schedule={name} train.global_batch={m}"
        for name in names()
        for m in (pipeline, 2 * pipeline, 3 * pipeline)
    ]


def assert_parity(ranks: int, cases: list[str], learns: float, steps: int = 10) -> None:
    reports = check_parity(
        ranks, JOB, *(case.split() for case in cases), steps=steps, learns=learns, timeout=1700
    )
    limits = {"loss": 1e-5, "norm": 1e-4, "gradient": 1e-4}
    worse = [
        f"{report['layout']}: {key} {report[key]:.2g} ({report['worst']})"
        for report in reports
        for key, limit in limits.items()
        if not report[key] < limit
    ]
    assert len(reports) == len(cases)
    assert not worse, "\n".join(worse)


def test_a_sample_of_eight_ranks():
    cases = layouts(8)[3::9][:5]
    assert_parity(8, cases, steps=4, learns=0.03)


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_layout(ranks):
    assert_parity(ranks, layouts(ranks), learns=0.1)


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pipeline", [2, 4])
def test_every_schedule(pipeline):
    assert_parity(pipeline, schedules(pipeline), learns=0.05)
