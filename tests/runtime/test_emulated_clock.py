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


def test_a_clock_that_was_held_up_does_not_sleep_but_says_the_same(monkeypatch):
    clock = EmulatedClock()
    time.sleep(0.1)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    clock.spend(0.05)
    assert (clock.now, slept) == (0.05, [])
    clock.anchor()  # from here on as if it had kept up
    clock.spend(5.0)
    assert len(slept) == 1
    assert 4.0 < slept[0] <= 5.0


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


def fail_beside() -> str:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    from hpctrain.runtime.emulated_links import EmulatedLinks

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    table = {
        "links": {}, "near": [0, 0], "far": [0, 0], "messages": [1, 1], "tied": 0,
        "ranks_per_node": 1, "gathered": [], "scattered": [], "unhidden": 0, "buckets": 1,
    }  # fmt: skip
    links = EmulatedLinks(table, 0, MPI.COMM_WORLD)
    tensor = torch.ones(2)

    def note(began: float, ended: float) -> None:
        raise ValueError("lost")

    boxed = links.later(
        "dp", "all_reduce", 8, dist.group.WORLD, None,
        lambda: dist.all_reduce(tensor, async_op=True).boxed(), note,
    )  # fmt: skip
    try:
        dist.Work.unbox(boxed).wait()
    except Exception as error:
        return str(error)
    finally:
        links.close()
    return "nothing"


def test_what_fails_beside_a_rank_comes_to_who_waits_for_it():
    assert run_ranks(1, fail_beside, timeout=60) == ["lost"]
