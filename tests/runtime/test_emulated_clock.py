"""Clocks of emulated ranks: what they tell each other, and that they sleep."""

from __future__ import annotations

import time

import pytest

from hpctrain.runtime.emulated_clock import Board, EmulatedClock
from hpctrain.testing.ranks import run_ranks


def test_a_clock_goes_by_what_was_spent_and_sleeps_for_it():
    clock, began = EmulatedClock(), time.perf_counter()
    clock.spend(0.05)
    clock.reach(0.02)  # it is later already
    assert clock.now == 0.05
    clock.reach(0.1)
    assert clock.now == 0.1
    assert time.perf_counter() - began >= 0.1


def test_a_clock_that_was_held_up_does_not_sleep_but_says_the_same():
    clock = EmulatedClock()
    time.sleep(0.1)
    began = time.perf_counter()
    clock.spend(0.05)
    assert time.perf_counter() - began < 0.05
    assert clock.now == 0.05
    clock.anchor()  # from here on as if it had kept up
    began = time.perf_counter()
    clock.spend(0.05)
    assert time.perf_counter() - began >= 0.049


def tell_each_other() -> list[float]:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    board = Board(comm)
    found = []
    for number in range(1, 400):  # more than are kept: those of the past give way
        board.tell("group", 10.0 * number + comm.rank)
        found.append(board.latest("group", range(comm.size), number))
        comm.Barrier()
    board.tell(f"to {1 - comm.rank}", 0.5 + comm.rank)
    comm.Barrier()
    found.append(board.latest(f"to {comm.rank}", [1 - comm.rank], 1))
    assert board.read("nobody's", 1 - comm.rank, 1) is None
    with pytest.raises(RuntimeError, match="messages ahead"):
        board.read("group", 1 - comm.rank, 1)
    comm.Barrier()
    board.close()
    return found


def test_ranks_read_what_others_have_told():
    for rank, found in enumerate(run_ranks(2, tell_each_other)):
        assert found[:-1] == [10.0 * number + 1 for number in range(1, 400)]
        assert found[-1] == 0.5 + (1 - rank)
