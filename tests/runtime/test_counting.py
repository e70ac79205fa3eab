"""Counters equal closed forms, whoever started the operation."""

from __future__ import annotations

import time

import pytest

from hpctrain.runtime.counting import Counter, volume_of

LINEAR = 4 * (30 * 20 + 20)  # bytes of the parameters in fp32
SECOND = 4 * (20 * 10 + 10)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("what", "rows"),
    [
        ("all_reduce", {"dp_shard.all_reduce": [1, 40, 40.0]}),
        ("functional", {"dp_shard.all_reduce": [1, 40, 40.0]}),
        ("inference", {"dp_shard.broadcast": [1, 40, 20.0]}),
        (
            "dtensor",
            {"dp_shard.all_reduce": [1, 40, 40.0], "dp_shard.all_gather": [1, 40, 40.0]},
        ),
        ("no_sync", {}),
        ("ddp", {"dp_shard.all_reduce": [1, LINEAR, float(LINEAR)]}),
        # Gathered for forward and again for backward, but for the last unit, which is there.
        (
            "fsdp",
            {
                "dp_shard.all_gather": [
                    4, LINEAR + SECOND, float(LINEAR + SECOND)
                ],
                "dp_shard.reduce_scatter": [
                    2, LINEAR + SECOND, (LINEAR + SECOND) / 2
                ],
            },
        ),
        ("group of a user", {"other.all_reduce": [1, 40, 40.0]}),
        ("closed", {}),
    ],
)  # fmt: skip
def test_calls_bytes_and_volume(counted, what, rows):
    for rank in counted:
        assert rank[what] == rows


@pytest.mark.mpi
def test_what_stays_here_is_not_moved(counted):
    # Six numbers: four for rank 0, two for rank 1.
    assert counted[0]["uneven all_to_all"] == {"dp_shard.all_to_all": [1, 24, 8.0]}
    assert counted[1]["uneven all_to_all"] == {"dp_shard.all_to_all": [1, 24, 16.0]}


@pytest.mark.mpi
def test_a_message_counts_on_its_sender(counted):
    assert counted[0]["message"] == {"dp_shard.send": [1, 40, 40.0]}
    assert counted[1]["message"] == {}


@pytest.mark.mpi
def test_mpi_counts_under_control(counted):
    for rank in counted:
        assert rank["mpi"] == {
            "control.barrier": [1, 0, 0.0],
            "control.broadcast": [2, 24, 12.0],
            "control.all_reduce": [1, 40, 40.0],
        }
        assert 0 < rank["mpi seconds"]["control"] < 30


@pytest.mark.mpi
def test_seconds_are_those_in_which_anything_was_under_way(counted):
    for rank in counted:
        assert rank["at once"] == {"dp_shard.all_reduce": [8, 8 * 2**20, 8.0 * 2**20]}
        busy, elapsed = rank["at once seconds"]["dp_shard"], rank["at once elapsed"]
        assert 0 < busy <= elapsed * 1.05 + 0.005
        for what in ("all_reduce", "functional", "ddp", "fsdp"):
            assert rank[f"{what} seconds"]["dp_shard"] > 0


@pytest.mark.mpi
def test_gradients_in_two_levels(four):
    parameters = 8 * 4 * (64 * 64 + 64)
    for rank in (one["gradients"] for one in four):
        assert rank["ddp changed"] is rank["fsdp changed"] is True
        assert rank["ddp"] < 1e-15 * max(1, rank["size"])
        assert rank["fsdp"] < 1e-15 * max(1, rank["size"])
        counted = rank["ddp counted"]
        assert counted["dp_replicate.all_reduce"] == [3, 3 * parameters]
        # Out and back inside the node; half of the message is for each rail.
        assert counted["dp_replicate/inside.all_to_all"] == [3, 3 * parameters]
        assert counted["dp_replicate/across.all_reduce"] == [3, 3 * parameters // 2]
        assert counted["dp_replicate/inside.all_gather"] == [3, 3 * parameters // 2]
        assert rank["ddp small changed"] is True
        assert rank["ddp small"] < 1e-15 * max(1, rank["size"])
        assert rank["ddp small counted"] == ["dp_replicate"]
        assert rank["ddp flat changed"] is False
        assert rank["fsdp counted"] == ["dp_shard", "dp_shard/across", "dp_shard/inside"]


@pytest.mark.parametrize(
    ("operation", "volume"),
    [
        ("all_reduce", 2 * 3 / 4 * 1000),
        ("reduce_scatter", 3 / 4 * 1000),
        ("all_to_all", 3 / 4 * 1000),
        ("all_gather", 3 * 1000),
        ("broadcast", 3 / 4 * 1000),
        ("send", 1000),
    ],
)
def test_volumes_of_four_ranks(operation, volume):
    assert volume_of(operation, 1000, 4) == volume


def test_take_starts_again_and_overlapping_operations_count_their_time_once():
    counter = Counter()
    counter.add("tp", "all_reduce", 10, 5.0)
    counter.add("tp", "send", 1, 1.0)
    began = time.perf_counter()
    with counter.during("tp"), counter.during("tp"), counter.during("pp"):
        time.sleep(0.02)
    elapsed = time.perf_counter() - began
    found = counter.take()
    assert found["tp"]["calls"] == 2
    assert found["tp"]["bytes"] == 11
    assert found["tp"]["volume"] == 6.0
    assert 0.02 <= found["tp"]["seconds"] <= elapsed
    assert found["pp"]["calls"] == 0
    assert counter.take() == {}
    with counter.during("tp"):
        assert counter.take() == {}, "time counts when it ends"
    assert counter.read()["tp"]["seconds"] > 0


@pytest.mark.mpi
def test_many_operations_without_a_step_are_added_up_all_the_same(counted):
    for rank in counted:
        assert rank["many"] == {"dp_shard.all_reduce": [9000, 9000 * 4, 9000 * 4.0]}
        assert rank["many notes"] <= 8192
