"""Simulated bubbles and peaks equal what the papers state.

F = I = W = 1, B = 2, transfers cost nothing. ``idle_over_ideal`` is bubble time over the time of
a rank's own work; the papers' other definition, over the longest span of a rank, is
``overlapped_bubble_fraction``. Where a formula holds for some m only, the domain stands with it.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.schedule import Timeline, make, simulate

ranks = st.integers(1, 16)
micro_batches = st.integers(1, 64)
chunks = st.integers(2, 4)
each = settings(max_examples=60, deadline=None)


def run(name: str, p: int, m: int, v: int | None = None, **options) -> Timeline:
    return simulate(make(name, ranks=p, chunks=v, micro_batches=m, transfers=False, **options))


def idle_over_ideal(timeline: Timeline) -> float:
    ideal = sum(timeline.busy) / len(timeline.busy)
    assert ideal == pytest.approx(3 * timeline.schedule.micro_batches)
    return timeline.makespan / ideal - 1


def fraction(idle: Fraction) -> float:
    """1 - busy / makespan from idle over ideal time."""
    return float(idle / (1 + idle))


@each
@given(ranks, micro_batches)
def test_gpipe_and_1f1b(p, m):
    # GPipe section 2.3; PTD-P section 2.2.1: t_pb / t_id = (p - 1) / m, for any m
    gpipe, one = run("gpipe", p, m), run("1f1b", p, m)
    for timeline in (gpipe, one):
        assert idle_over_ideal(timeline) == pytest.approx((p - 1) / m)
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert gpipe.peak_activations == (m,) * p
    assert one.peak_activations == tuple(min(p - i, m) for i in range(p))


@each
@given(ranks, st.integers(1, 8), chunks)
def test_interleaved(p, rounds, v):
    # PTD-P section 2.2.2: (p - 1) / (v m), for m a multiple of p
    m = p * rounds
    timeline = run("interleaved", p, m, v)
    assert idle_over_ideal(timeline) == pytest.approx((p - 1) / (v * m))
    # Korthikanti et al. 2022, section 4.2.3: 1 + (p - 1) / (p v) times 1F1B's
    published = p * (1 + Fraction(p - 1, p * v))
    assert max(timeline.peak_activations) == pytest.approx(float(min(published, m)))


@each
@given(ranks, micro_batches, st.integers(1, 4), st.sampled_from(["bfs", "layered"]))
def test_breadth_first(p, m, v, name):
    # Lamy-Poirier 2022: the looped pipeline's bubble, (p - 1) / (v m); a loop must not wait for
    # its own head, so m >= p
    timeline = run(name, p, m, v)
    if m >= p or v == 1:
        assert idle_over_ideal(timeline) == pytest.approx((p - 1) / (v * m))
    assert max(timeline.peak_activations) == pytest.approx(m)


@each
@given(ranks, micro_batches)
def test_zb_h1(p, m):
    # Zero Bubble table 1: bubble size (p - 1)(T_F + T_B - T_W), activations p M_B
    timeline = run("zb-h1", p, m)
    if m >= p:
        assert timeline.makespan - 3 * m == pytest.approx(p - 1)
        assert timeline.peak_activations == (p,) * p
        assert timeline.overlapped_bubble_fraction == pytest.approx((p - 1) / (3 * m + p - 1))
    assert max(timeline.peak_activations) <= min(p, m)


@each
@given(ranks, micro_batches)
def test_zb_h2(p, m):
    # Zero Bubble table 1: bubble size (p - 1)(T_F + T_B - 2 T_W) = 0 on every rank, activations
    # (2 p - 1) M_B; there are enough micro-batches from m = 2 p - 1 on
    timeline = run("zb-h2", p, m)
    if m >= 2 * p - 1:
        assert timeline.rank_spans == pytest.approx((3 * m,) * p)
        assert timeline.overlapped_bubble_fraction == pytest.approx(0)
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (3 * m + p - 1))
        assert timeline.peak_activations == (2 * p - 1,) * p
    assert max(timeline.peak_activations) <= min(2 * p - 1, m)


@each
@given(ranks, micro_batches)
def test_zb_v(p, m):
    # Zero Bubble section 6: 1F1B's memory; (p - 1) / (p - 1 + 6 m) of the time from the first
    # start to the last end (m >= p), none on any rank's own span (m >= 2 p - 1)
    timeline = run("zb-v", p, m)
    if m >= p:
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (p - 1 + 6 * m))
        assert max(timeline.peak_activations) == p
    if m >= 2 * p - 1:
        assert timeline.rank_spans == pytest.approx((3 * m,) * p)
        assert timeline.peak_activations == (p,) * p
    assert max(timeline.peak_activations) <= min(p, m)


def test_zb_v_is_at_most_a_third_of_1f1b_at_4_ranks_and_8_micro_batches():
    assert run("zb-v", 4, 8).bubble_fraction <= run("1f1b", 4, 8).bubble_fraction / 3


@each
@given(st.integers(2, 16), micro_batches)
def test_v_half_and_v_min(p, m):
    # Controllable Memory: (p + 2) // 2 and (p + 4) // 3 micro-batches; bubbles of about
    # p / (2 m) and 2 p / (3 m) of the ideal time (both for m >= p)
    for name, peak, bubble in (
        ("v-half", (p + 2) // 2, Fraction(p, 2 * m)),
        ("v-min", (p + 4) // 3, Fraction(2 * p, 3 * m)),
    ):
        timeline = run(name, p, m)
        assert max(timeline.peak_activations) <= min(peak, m)
        if m >= p:
            assert max(timeline.peak_activations) == peak
            assert float(bubble) - 1 / m <= idle_over_ideal(timeline) <= float(bubble)


@pytest.mark.parametrize("p", [8, 16, 32, 64])
def test_peaks_go_to_the_published_ratios(p):
    one = max(run("1f1b", p, 2 * p).peak_activations)
    for name, ratio in (("zb-h2", 2), ("zb-v", 1), ("v-half", 1 / 2), ("v-min", 1 / 3)):
        found = max(run(name, p, 2 * p).peak_activations) / one
        assert found == pytest.approx(ratio, abs=1.4 / p), name


@each
@given(st.integers(1, 16), micro_batches)
def test_one_wave_of_hanayo(p, m):
    # A wave on p ranks is one half of a bidirectional pipeline on 2 p, whose bubble is
    # (D - 2) / (3 N / 2) of the ideal time for N micro-batches in units of D (Chimera, table 2,
    # B = 2 F): with D = 2 p and N = 2 m, 2 (p - 1) / (3 m). Drawn for m = p.
    timeline = run("hanayo", p, m)
    if m == p:
        assert idle_over_ideal(timeline) == pytest.approx(2 * (p - 1) / (3 * m))
        assert max(timeline.peak_activations) == p
    if m >= p:
        assert idle_over_ideal(timeline) <= 2 * (p - 1) / (3 * m) + 1e-9
    # no order of a wave does better: rank p - 1 starts p - 1 forwards late and has p - 1
    # backwards after it. Reached as soon as there are enough micro-batches.
    least = (p - 1) / (2 * m)
    assert idle_over_ideal(timeline) >= least - 1e-9
    if m >= 2 * p - 1:
        assert idle_over_ideal(timeline) == pytest.approx(least)
    assert max(timeline.peak_activations) <= min(1.5 * p, m)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 12), st.integers(1, 48), st.integers(2, 3))
def test_more_waves_of_hanayo(p, m, waves):
    # Hanayo: w waves divide the bubble by w. Our rule comes within 10 % of that at m = p.
    timeline = run("hanayo", p, m, waves=waves)
    if m == p:
        one_wave = 2 * (p - 1) / (3 * m)
        assert idle_over_ideal(timeline) <= 1.1 * one_wave / waves + 1e-9
    assert idle_over_ideal(timeline) >= (p - 1) / (2 * waves * m) - 1e-9
    assert max(timeline.peak_activations) <= min(1.5 * p, m) + 1e-9


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 4, 6, 8, 12, 16]), st.integers(1, 32))
def test_bitpipe(p, half):
    # BitPipe: bubble fraction (D - 2) / (3 N + D - 2) as units of N = D follow one another,
    # (D - 2) / (4 N + D - 2) with the next unit's forwards run early: the least there can be
    m = 2 * half
    timeline = run("bitpipe", p, m)
    least, units = Fraction(p - 2, 4 * m), Fraction(p - 2, 3 * m)
    assert timeline.bubble_fraction >= fraction(least) - 1e-9
    if m == p:
        assert idle_over_ideal(timeline) <= 1.1 * float(units) + 1e-9
    if m == p and p <= 6:
        assert timeline.bubble_fraction == pytest.approx(fraction(units))
    assert max(timeline.peak_activations) <= min(1.5 * p, m)


def test_bitpipe_beats_the_interleaved_pipeline():
    for p in (4, 8, 16):
        for m in (p, 2 * p, 4 * p):
            bitpipe, interleaved = run("bitpipe", p, m), run("interleaved", p, m)
            assert bitpipe.makespan < interleaved.makespan


@each
@given(ranks, micro_batches, chunks)
def test_zeropp(p, m, v):
    # filling p - 1 ranks with a chunk's F, and with its I, is all that is left of the bubble:
    # W fills the rest. Two scheduling units are held at most.
    timeline = run("zeropp", p, m, v)
    if m % p == 0:
        assert idle_over_ideal(timeline) == pytest.approx(2 * (p - 1) / (3 * v * m))
    assert max(timeline.peak_activations) <= min(2 * p, m) + 1e-9


@each
@given(ranks, micro_batches)
def test_2bp(p, m):
    # 2BP table 1 (its N is our p = m; 1F1B-2 has m = 2 p): GPipe 2 (N - 1) / (2 (N - 1) + 3 N),
    # 1F1B-1 (N - 1) / (N - 1 + 3 N), 1F1B-2 (N - 1) / (N - 1 + 6 N)
    gpipe = run("gpipe+2bp", p, m)
    assert gpipe.bubble_fraction == pytest.approx(2 * (p - 1) / (2 * (p - 1) + 3 * m))
    one = run("1f1b+2bp", p, m)
    if m >= p:
        assert one.bubble_fraction == pytest.approx((p - 1) / (p - 1 + 3 * m))
    assert max(gpipe.peak_activations) == m
    assert max(one.peak_activations) <= m


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "gpipe"])
@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 4, None), (4, 8, None), (5, 17, None), (8, 24, None)]
)
def test_the_claim_carried_by_a_schedule_is_the_tested_one(name, p, m, v):
    timeline = run(name, p, m, v)
    claim = timeline.schedule.claim
    assert claim.bubble_fraction == pytest.approx(timeline.bubble_fraction)
    assert claim.peak_activations == pytest.approx(max(timeline.peak_activations))
