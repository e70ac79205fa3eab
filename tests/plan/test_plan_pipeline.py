"""Closed forms of pipelines against the simulator, and blocks dealt to stages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.plan.pipeline import FORMS, form_of
from hpctrain.plan.steptime import deal
from hpctrain.schedule import Costs, make, simulate

TIMES = ((1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (1.0, 2.4, 0.8))


@pytest.mark.parametrize("name", FORMS)
def test_closed_forms_are_the_simulators_makespan_and_memory(name):
    form = FORMS[name]
    chunks = (2, 4) if form.chunked else (1,)
    for (f, i, w), p, m, v in itertools.product(TIMES, (2, 4, 8), (8, 16, 24), chunks):
        if form.rounds and m % p:
            continue
        table = make(name, ranks=p, micro_batches=m, chunks=v, transfers=False)
        timeline = simulate(table, Costs(forward=f, input_grad=i, weight_grad=w))
        assert timeline.makespan == pytest.approx(
            m * (f + i + w) + (p - 1) * form.bubble(f, i, w, v)
        ), (p, m, v)
        held = [form.held(rank, p, v, m) for rank in range(p)]
        assert timeline.peak_activations == pytest.approx(held), (p, m, v)


def test_published_bubbles():
    """GPipe, 1F1B (p-1)/m; interleaved (p-1)/(v·m) (Narayanan et al. 2021); ZB-H1 (p-1)/(3m)
    (Qi et al. 2023) of the ideal time."""
    p, m, v = 8, 32, 4
    ideal = 3.0 * m
    for name, chunks, share in (
        ("gpipe", 1, (p - 1) / m),
        ("1f1b", 1, (p - 1) / m),
        ("interleaved", v, (p - 1) / (v * m)),
        ("zb-h1", 1, (p - 1) / (3 * m)),
    ):
        bubble = (p - 1) * FORMS[name].bubble(1.0, 1.0, 1.0, chunks)
        assert bubble / ideal == pytest.approx(share), name


def test_interleaving_holds_more():
    """1 + (p-1)/(p·v) times as much on the first stage (Korthikanti et al. 2022, section 4.2.3)."""
    p, v = 8, 3
    held = FORMS["interleaved"].held(0, p, v, 64)
    assert held == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_names():
    assert form_of("interleaved-1f1b", 2).name == "interleaved"
    assert form_of("", 1).name == "1f1b"
    assert form_of("1f1b", 4).name == "interleaved"


@settings(deadline=None)  # a shared machine stands still now and then
@given(
    layers=st.integers(1, 130),
    pp=st.integers(1, 24),
    virtual=st.integers(1, 4),
    balanced=st.booleans(),
    even=st.booleans(),
    ends=st.floats(0, 5),
)
def test_all_blocks_are_dealt(layers, pp, virtual, balanced, even, ends):
    if layers < pp:
        return
    runs = deal(layers, pp, virtual, balanced, ends, even)
    assert sum(blocks * count for blocks, count in runs) == layers
    assert sum(count for _, count in runs) == pp
    if pp > 1:
        assert runs[0][1] == runs[-1][1] == 1, "the ends are runs of their own"


@settings(deadline=None)  # a shared machine stands still now and then
@given(layers=st.integers(2, 60), pp=st.integers(2, 10), ends=st.floats(0, 4))
def test_balanced_deals_are_the_best(layers, pp, ends):
    """No way to deal blocks makes the slowest stage faster (all ways, by the last one's share)."""
    if layers < pp:
        return
    runs = deal(layers, pp, 1, True, ends)
    stages = [blocks for blocks, count in runs for _ in range(count)]
    slowest = max(max(stages[:-1]), stages[-1] + ends)
    for last in range(layers + 1):
        others = -(-(layers - last) // (pp - 1))
        assert slowest <= max(others, last + ends) + 1e-9


def test_embedding_and_output_layer_take_a_layers_place():
    """405B: 126 layers on 8 stages of 8 chunks are 128 places."""
    assert deal(126, 8, 8, False, 1.0) == ((15, 1), (16, 6), (15, 1))
    assert deal(96, 8, 3, False, 1.0) == ((12, 1), (12, 6), (12, 1))
    assert deal(10, 4, 1, False, 0.0, True) == ((3, 1), (3, 1), (2, 1), (2, 1))
