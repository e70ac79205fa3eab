"""Gathering ahead and scattering behind, against sums done by hand."""

from __future__ import annotations

import pytest

from hpctrain.shard_streams import ShardStreams


def test_a_block_is_gathered_while_the_one_before_it_computes():
    streams, now = ShardStreams(0.0), 0.0
    for compute in (5.0, 1.0, 5.0):  # each gathering takes 2
        over = streams.gather(streams.asked(now), 2.0)
        now = streams.use(now, over, 2.0) + compute
    # 2 for the first, nothing behind 5, of the third 1 that the second does not hide.
    assert now == pytest.approx(2.0 + 5.0 + 1.0 + 1.0 + 5.0)


def test_a_share_cannot_hide():
    streams = ShardStreams(0.25)
    over = streams.gather(streams.asked(0.0), 2.0)
    assert streams.use(10.0, over, 2.0) == 10.5
    assert streams.scatter(10.5, 10.5, 4.0) == 11.5


def test_scattering_is_one_after_another_and_waited_for_at_the_end():
    streams = ShardStreams(0.0)
    assert streams.scatter(1.0, 1.0, 3.0) == 1.0
    assert streams.scatter(2.0, 2.0, 3.0) == 2.0  # from 4 to 7
    assert streams.drain(5.0) == 7.0
    assert streams.asked(9.0) == 9.0  # nothing is gathered ahead any more
