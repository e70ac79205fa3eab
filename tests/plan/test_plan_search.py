"""The search against brute force, and its speed on a trillion parameters."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest

from hpctrain.errors import ImpossibleError
from hpctrain.layout import DEFAULT_ORDER, ParallelLayout, divisors
from hpctrain.plan.inputs import Strategy, Workload
from hpctrain.plan.memory import limit
from hpctrain.plan.plan import fits_on
from hpctrain.plan.platform import CATALOGUE
from hpctrain.plan.search import search
from hpctrain.plan.shapes import ModelShape
from hpctrain.plan.software import STACKS, calibration
from hpctrain.plan.space import MATERIALISED, STATES, Space
from hpctrain.plan.steptime import StepModel


def workload(model, accelerator="A100-80G", stack="megatron-2021", batch=64, sequence=2048):
    platform = CATALOGUE[accelerator]
    return Workload(
        model=model,
        sequence=sequence,
        global_batch=batch,
        dtype="bf16",
        platform=platform,
        stack=STACKS[stack],
        values=calibration(platform.family, stack).values,
    )


def gpt(layers, hidden, heads):
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden=4 * hidden,
        vocab=51200,
        positions=2048,
    )


TRILLION = gpt(128, 25600, 160)
MEDIUM = gpt(24, 4096, 32)


def brute_force(work, devices):
    """Every valid layout of the one order, tried one by one with nothing shared between them."""
    model, room = StepModel(work), limit(work)
    found = {}
    for tp, cp, pp in itertools.product(divisors(devices), repeat=3):
        if devices % (tp * cp * pp) or work.model.heads % tp or work.model.ffn_hidden % tp:
            continue
        if pp > work.model.layers or (cp > 1 and work.sequence % (2 * cp)):
            continue
        dp = devices // (tp * cp * pp)
        if work.global_batch % dp:
            continue
        share = work.global_batch // dp
        for micro, again, split in itertools.product(
            divisors(share), ("none", "full"), (True, False)
        ):
            if split and (tp == 1 or work.sequence % (tp * cp)):
                continue
            m = share // micro
            layers = work.model.layers
            schedules = [("1f1b", 1)]
            if pp > 1 and m % pp == 0:
                schedules += [
                    ("interleaved", v)
                    for v in range(2, layers // pp + 1)
                    if layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0
                ]
            for (schedule, v), (name, states) in itertools.product(schedules, STATES):
                for shard in divisors(dp) if name != "none" else (1,):
                    if name != "none" and shard == 1 and (cp == 1 or (name == "zero1" and dp > 1)):
                        continue
                    layout = ParallelLayout(
                        tp=tp, cp=cp, pp=pp, dp_replicate=dp // shard, dp_shard=shard
                    )
                    plan = Strategy(layout, micro, v, schedule, states, again, split)
                    memory = max(stage.total for stage in model.memory(plan))
                    if memory <= room:
                        found[plan] = model.step(plan).seconds
    return found


def test_finds_what_brute_force_finds():
    work = workload(MEDIUM, batch=16)
    space = Space(
        schedules=("1f1b", "interleaved"), recompute=("none", "full"), orders=(DEFAULT_ORDER,)
    )
    expected = brute_force(work, 16)
    found = search(work, 16, space, keep=len(expected) + 10)
    assert found.scored == len(expected) > 500
    got = {c.strategy: c.seconds for c in found.best}
    assert got.keys() == expected.keys()
    assert got == pytest.approx(expected)
    seconds = [c.seconds for c in found.best]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("work", "devices"),
    [
        (workload(MEDIUM, "H100", "hpctrain", 512), 64),
        (
            workload(
                replace(MEDIUM, experts=8, topk=2, ffn_hidden=2048, gated=True),
                "H100",
                "megatron-core-2024",
                32,
            ),
            16,
        ),
    ],
)
def test_scores_are_those_of_single_plans(work, devices):
    found = search(work, devices, keep=400)
    model = StepModel(work)
    for candidate in random.Random(0).sample(found.best, 100) + found.front:
        assert candidate.seconds == pytest.approx(model.step(candidate.strategy).seconds)
        memory = max(stage.total for stage in model.memory(candidate.strategy))
        assert candidate.memory == pytest.approx(memory)
    if work.model.experts:
        assert {c.strategy.layout.ep for c in found.best} > {1}
        assert {c.strategy.layout.etp for c in found.best} > {1}
    for a, b in itertools.combinations(found.front, 2):
        assert not (a.seconds <= b.seconds and a.memory <= b.memory)


def test_a_trillion_parameters_on_3072_devices_in_five_seconds():
    """Every valid layout, on one core. The bound is of CPU time, twice what is asked for, since
    shared machines differ; benchmarks/planner_search.py prints the time itself."""
    work = workload(TRILLION, batch=3072)
    began = time.process_time()
    found = search(work, 3072)
    assert time.process_time() - began < 10
    assert found.scored > 100_000
    # PTD-P trained it with tensor 8 inside nodes and pipeline between them
    assert found.best[0].strategy.layout.tp == 8
    assert found.best[0].strategy.layout.pp > 1


def test_too_large_a_model_says_how_far_it_is():
    with pytest.raises(ImpossibleError, match="no layout of 8 devices fits") as caught:
        search(workload(TRILLION, batch=64), 8)
    assert "GiB" in caught.value.message
    assert "devices" in (caught.value.hint or "")


def test_nothing_that_divides_names_the_nearest():
    odd = replace(MEDIUM, heads=32)
    with pytest.raises(ImpossibleError, match="divides 32 heads") as caught:
        search(workload(odd, batch=7), 64, Space(tensor=(1,), pipeline=(1,), context=(1,)))
    assert "7 devices" in (caught.value.hint or "")


def test_front_over_device_counts():
    """Twice the devices are faster; no member of the front is beaten in all three."""
    work = workload(MEDIUM, batch=64)
    space = Space(context=(1,), schedules=("1f1b",), orders=(DEFAULT_ORDER,))
    front = fits_on(work, (8, 16, 32), space)
    fastest = {n: min(c.seconds for c in front if c.devices == n) for n in (8, 16, 32)}
    assert fastest[8] > fastest[16] > fastest[32]
    for a, b in itertools.permutations(front, 2):
        beaten = a.seconds <= b.seconds and a.memory <= b.memory and a.devices <= b.devices
        assert not beaten or (a.seconds, a.memory, a.devices) == (b.seconds, b.memory, b.devices)


def test_materialised_parameters_are_gathered_once():
    states = dict(STATES)
    assert states["zero2"] == MATERIALISED
    work = workload(MEDIUM, "H100", "pytorch-2024", 64)
    model = StepModel(work)
    times = {}
    for name in ("zero2", "zero3"):
        plan = Strategy(ParallelLayout(dp_shard=64), 1, states=states[name], order=DEFAULT_ORDER)
        times[name] = model.state(plan, 24).gathering
    # gathered once and scattered, against gathered twice and scattered
    gather, scatter = times["zero3"] - times["zero2"], 2 * times["zero2"] - times["zero3"]
    assert gather > 0 and scatter > 0
