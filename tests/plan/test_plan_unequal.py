"""Uneven shares: the best deal by brute force, and that unequal machines gain by it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import ImpossibleError
from hpctrain.plan.inputs import Workload
from hpctrain.plan.memory import limit
from hpctrain.plan.platform import CATALOGUE
from hpctrain.plan.shapes import ModelShape
from hpctrain.plan.software import STACKS, calibration
from hpctrain.plan.unequal import Part, plan_mixed, share_micro_batches, share_state


@settings(deadline=None)  # a shared machine stands still now and then
@given(
    seconds=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    data=st.data(),
)
def test_micro_batches_finish_as_early_as_can_be(seconds, data):
    ranks = [data.draw(st.integers(1, 4)) for _ in seconds]
    total = data.draw(st.integers(1, 24))
    times = [float(s) for s in seconds]
    options = [
        counts
        for counts in itertools.product(range(total + 1), repeat=len(ranks))
        if sum(n * r for n, r in zip(counts, ranks, strict=True)) == total
    ]
    if not options:
        with pytest.raises(ImpossibleError):
            share_micro_batches(times, ranks, total)
        return
    found = share_micro_batches(times, ranks, total)
    assert sum(n * r for n, r in zip(found, ranks, strict=True)) == total

    def last(counts):
        return max(n * t for n, t in zip(counts, times, strict=True))

    assert last(found) == min(last(o) for o in options)


def test_twice_as_fast_takes_twice_as_much():
    assert share_micro_batches([1.0, 2.0], [4, 4], 24) == [4, 2]


def test_state_goes_where_there_is_room():
    """Ranks with three times the room hold three times the state, and all are equally full."""
    shares = share_state(40.0, [30.0, 10.0], [1, 2])
    assert shares == pytest.approx([0.6, 0.2])
    assert shares[0] * 1 + shares[1] * 2 == pytest.approx(1.0)
    with pytest.raises(ImpossibleError, match="room"):
        share_state(51.0, [30.0, 10.0], [1, 2])


def workload(name, batch=384):
    model = ModelShape(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn_hidden=14336,
        vocab=128256,
        gated=True,
        tied=False,
        bias=False,
        layernorm=False,
    )
    platform = CATALOGUE[name]
    return Workload(
        model=model,
        sequence=4096,
        global_batch=batch,
        dtype="bf16",
        platform=platform,
        stack=STACKS["hpctrain"],
        values=calibration(platform.family, "hpctrain").values,
    )


def test_a_job_on_two_kinds_of_devices():
    parts = [Part("fast", workload("H100"), 16), Part("slow", workload("A100-80G"), 16)]
    found = plan_mixed(parts)
    fast, slow = found.shares
    assert found.gain is not None and found.gain > 1.2, "the slow half would set the pace"
    per_rank = [found.micro_batch * s.micro_batches for s in found.shares]
    ranks = 16 // found.tensor
    if found.way == "data":
        assert ranks * sum(per_rank) == 384
        assert fast.micro_batches > slow.micro_batches
        assert ranks * (fast.state + slow.state) == pytest.approx(1.0)
    for share in found.shares:
        assert share.memory <= limit(share.part.work) * (1 + 1e-9)
        assert share.seconds <= found.seconds * (1 + 1e-9)


def test_equal_devices_gain_nothing():
    parts = [Part("a", workload("H100"), 8), Part("b", workload("H100"), 8)]
    found = plan_mixed(parts)
    first, second = found.shares
    assert first.micro_batches == second.micro_batches
    assert first.state == pytest.approx(second.state)


def test_stages_get_blocks_by_speed():
    """Four pipeline ranks, half of them faster, hold blocks accordingly."""
    from hpctrain.plan.unequal import _pipeline

    parts = [Part("fast", workload("H100", 64), 16), Part("slow", workload("A100-80G", 64), 16)]
    found = _pipeline(parts, 8, 1)
    fast, slow = found.shares
    assert sum(fast.layers) + sum(slow.layers) == 32
    assert min(fast.layers) > max(slow.layers)
    speeds = sum(fast.layers) / sum(slow.layers)
    busy = fast.seconds / slow.seconds
    assert speeds > 1.3 and 0.7 < busy < 1.4, "both kinds are busy about as long"


def test_what_fits_nowhere_is_refused():
    small = workload("V100-16G")
    with pytest.raises(ImpossibleError, match="no uneven plan fits"):
        plan_mixed([Part("a", small, 2), Part("b", small, 2)])
