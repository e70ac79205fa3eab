"""Work beside a rank's own: in order, without gradients, with an emulated time of its own."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from hpctrain.runtime.counting import Counter
from hpctrain.runtime.emulated_clock import EmulatedClock
from hpctrain.runtime.lane import Lane


def test_tasks_run_in_order_on_a_thread_of_their_own():
    lane = Lane(torch.device("cpu"), Counter())
    gate, seen = threading.Event(), []
    weight = torch.ones(2, requires_grad=True)

    def first() -> torch.Tensor:
        gate.wait(10)
        seen.append("first")
        return weight * 2

    one, two = lane.run(first), lane.run(lambda: seen.append("second"))
    assert seen == []  # nobody waited here
    gate.set()
    two.wait()
    assert seen == ["first", "second"]
    assert not one.wait().requires_grad


def test_what_a_task_raises_comes_to_who_waits():
    lane = Lane(torch.device("cpu"), Counter())
    handle = lane.run(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        handle.wait()


def test_a_task_takes_emulated_time_beside_the_passes():
    counter, clock = Counter(), EmulatedClock()
    counter.links = SimpleNamespace(clock=clock)
    lane = Lane(torch.device("cpu"), counter)
    clock.spend(0.01)
    handle = lane.run(lambda: clock.spend(0.04))  # from 0.01 to 0.05
    clock.spend(0.02)
    assert clock.now == pytest.approx(0.03)
    handle.wait()
    assert clock.now == pytest.approx(0.05)
    late = lane.run(lambda: clock.spend(0.01))
    clock.spend(0.03)  # hides all of it
    late.wait()
    assert clock.now == pytest.approx(0.08)
