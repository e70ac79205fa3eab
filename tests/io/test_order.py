"""The order of samples: a permutation an epoch, without memory, the same for every split."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.io.order import SampleOrder

orders = st.builds(
    SampleOrder,
    st.integers(1, 700),
    seed=st.integers(0, 2**64 - 1),
    block=st.integers(1, 80),
)


@given(orders, st.integers(0, 2**33))
@settings(deadline=None)
def test_each_epoch_is_a_permutation(order: SampleOrder, epoch: int) -> None:
    found = order.indices(epoch * order.n_samples, order.n_samples)
    assert sorted(found.tolist()) == list(range(order.n_samples))


@given(orders, st.integers(0, 3000), st.integers(0, 500), st.data())
@settings(max_examples=30, deadline=None)
def test_any_split_gives_the_same_sequence(
    order: SampleOrder, start: int, count: int, data: st.DataObject
) -> None:
    """Steps, ranks and micro-batches only cut the sequence; none of them changes it."""
    whole = order.indices(start, count)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=6)))
    parts = [
        SampleOrder(order.n_samples, seed=order.seed, block=order.block).indices(start + a, b - a)
        for a, b in zip([0, *cuts], [*cuts, count], strict=True)
    ]
    assert np.concatenate(parts).tolist() == whole.tolist()


@given(orders)
@settings(max_examples=50, deadline=None)
def test_blocks_stay_together(order: SampleOrder) -> None:
    """An epoch goes through each block of the file once, without coming back to it."""
    blocks = (order.indices(0, order.n_samples) // order.block).tolist()
    visits = [
        block for block, before in zip(blocks, [None, *blocks], strict=False) if block != before
    ]
    assert len(visits) == len(set(visits))


def test_order_is_part_of_the_format() -> None:
    """Worked out by the rule in docs/data.md with plain Python integers, below."""
    for n_samples, seed, block in ((1000, 7, 64), (10, 0, 3), (1, 5, 1), (130, 2**64 - 1, 64)):
        order = SampleOrder(n_samples, seed=seed, block=block)
        for epoch in (0, 3):
            found = order.indices(epoch * n_samples, n_samples).tolist()
            assert found == _by_the_rule(n_samples, seed, block, epoch)


def _mix(word: int) -> int:
    z = (word + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def _walk(value: int, size: int, key: int) -> int:
    half = next(h for h in range(1, 40) if 4**h >= size)
    while True:
        left, right = value >> half, value % 2**half
        for number in range(8):
            word = _mix(((right ^ number << 56) + key) % 2**64)
            left, right = right, left ^ word % 2**half
        value = (left << half) + right
        if value < size:
            return value


def _by_the_rule(n_samples: int, seed: int, block: int, epoch: int) -> list[int]:
    block = min(block, n_samples)
    count = -(-n_samples // block)
    key = _mix(_mix(seed) ^ epoch)
    order = []
    for slot in range(count):
        chosen = _walk(slot, count, _mix(key ^ 1))
        size = min(block, n_samples - chosen * block)
        inner_key = _mix(chosen ^ _mix(key ^ 2))
        order += [chosen * block + _walk(i, size, inner_key) for i in range(size)]
    return order


def test_published_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 1234567 (Vigna's reference program)."""
    from hpctrain.io import order

    state = 1234567
    found = []
    for _ in range(3):
        found.append(order._mix(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    words = order._mix_words(np.array([1234567], np.uint64))
    assert words.tolist() == found[:1]


def test_every_permutation_is_about_as_likely() -> None:
    """All 24 orders of four blocks over 2,400 seeds: chi-square, 23 degrees, p = 1e-4."""
    seen = Counter(
        tuple(SampleOrder(4, seed=seed, block=1).indices(0, 4).tolist()) for seed in range(2_400)
    )
    expected = 2_400 / 24
    assert len(seen) == 24
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 56


def test_epochs_differ() -> None:
    order = SampleOrder(1000, seed=1, block=10)
    first, second = order.indices(0, 1000), order.indices(1000, 1000)
    # Two random permutations agree in about one place.
    assert np.count_nonzero(first == second) < 20


def test_cost_does_not_grow_with_the_data() -> None:
    order = SampleOrder(10**15, seed=0, block=64)
    begin = time.perf_counter()
    found = order.indices(10**18 + 12345, 4096)
    assert time.perf_counter() - begin < 1
    assert len(set(found.tolist())) == 4096
    assert found.min() >= 0 and found.max() < 10**15


@pytest.mark.parametrize(("n_samples", "block"), [(0, 1), (1, 0)])
def test_nothing_to_order(n_samples: int, block: int) -> None:
    with pytest.raises(ValueError, match="both at least 1"):
        SampleOrder(n_samples, seed=0, block=block)
