"""Names, options, and clear refusals of what a method does not allow."""

from __future__ import annotations

import pytest

from hpctrain.errors import Exit, ImpossibleError, UsageError
from hpctrain.schedule import METHODS, TRANSFORMS, describe, make, names

ASKED_FOR = [
    *("gpipe", "1f1b", "interleaved", "bfs", "layered"),
    *("zb-h1", "zb-h2", "zb-v", "v-half", "v-min"),
    *("hanayo", "bitpipe", "zeropp", "auto"),
]


def test_all_methods_are_there():
    assert set(ASKED_FOR) == set(names())
    assert set(TRANSFORMS) == {"2bp", "vocab", "offload", "fsdp"}


@pytest.mark.parametrize("name", ASKED_FOR)
def test_every_method_says_what_it_is_and_where_it_is_from(name):
    line = describe(name)
    assert "\n" not in line
    assert METHODS[name].source in line
    assert "20" in METHODS[name].source  # a year


def test_a_name_with_transforms():
    schedule = make("interleaved+fsdp+2bp", ranks=2, micro_batches=4)
    assert schedule.name == "interleaved+2bp+fsdp"  # in the order in which they are applied
    assert "two stages" in describe("interleaved+2bp")
    assert make("2bp", ranks=2, micro_batches=4) == make("1f1b+2bp", ranks=2, micro_batches=4)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("zbv", "zb-v"), ("1F1B", "1f1b"), ("interleave", "interleaved"), ("nothing", "known: gpipe")],
)
def test_an_unknown_name_gets_a_suggestion(name, hint):
    with pytest.raises(UsageError) as caught:
        make(name, ranks=2, micro_batches=2)
    assert name in caught.value.message
    assert hint in (caught.value.hint or "")
    assert caught.value.exit_code is Exit.USAGE


def test_an_unknown_transform_or_option_gets_a_suggestion():
    with pytest.raises(UsageError, match="transform '2pb'"):
        make("gpipe+2pb", ranks=2, micro_batches=2)
    with pytest.raises(UsageError, match="'units'") as caught:
        make("zeropp", ranks=2, micro_batches=2, units=2)
    assert "did you mean 'unit'?" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="no option 'limit'"):
        make("1f1b", ranks=2, micro_batches=2, limit=3)


@pytest.mark.parametrize("key", ["ranks", "micro_batches", "chunks"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_counts_are_whole_numbers_from_one(key, value):
    shape = {"ranks": 2, "micro_batches": 2, "chunks": 1, key: value}
    with pytest.raises(UsageError, match=key):
        make("1f1b", **shape)


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "message"),
    [
        ("gpipe", 2, 2, 4, "chunks is 1, found 2"),
        ("1f1b", 2, 2, 4, "chunks is 1, found 2"),
        ("zb-h1", 2, 2, 4, "chunks is 1, found 2"),
        ("zb-h2", 2, 2, 4, "chunks is 1, found 2"),
        ("interleaved", 4, 1, 8, "at least 2 chunks"),
        ("interleaved", 4, 2, 6, "rounds of 4 .*, found 6"),
        ("zb-v", 4, 3, 8, "two chunks a rank, found 3"),
        ("v-half", 4, 1, 8, "two chunks a rank, found 1"),
        ("v-min", 4, 4, 8, "two chunks a rank, found 4"),
        ("hanayo", 4, 3, 8, "twice the waves, found 3"),
        ("bitpipe", 3, 2, 8, "even number of ranks, found 3"),
        ("bitpipe", 4, 2, 7, "even number, found 7"),
        ("bitpipe", 4, 1, 8, "even number of chunks, found 1"),
        ("auto", 4, 3, 8, "1 .* or even"),
    ],
)
def test_refusals_say_what_would_be_right(name, p, v, m, message):
    with pytest.raises(ImpossibleError, match=message) as caught:
        make(name, ranks=p, chunks=v, micro_batches=m)
    assert caught.value.message.startswith(f"schedule {name}: ")
    assert caught.value.exit_code is Exit.IMPOSSIBLE


def test_options_of_methods():
    assert make("hanayo", ranks=4, micro_batches=4, waves=2).chunks == 4
    assert dict(make("zeropp", ranks=4, micro_batches=8, unit=2).options) == {"unit": 2}
    with pytest.raises(ImpossibleError, match="unit is 1 to 8"):
        make("zeropp", ranks=4, micro_batches=8, unit=9)


def test_where_the_stages_lie():
    assert make("interleaved", ranks=3, chunks=2, micro_batches=3).stages.routes == (
        (0, 1, 2, 0, 1, 2),
    )
    assert make("hanayo", ranks=3, chunks=4, micro_batches=3).stages.routes == (
        (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0),
    )
    bitpipe = make("bitpipe", ranks=2, chunks=2, micro_batches=2)
    assert bitpipe.stages.routes == ((0, 1, 1, 0), (1, 0, 0, 1))
    assert bitpipe.stages.held[0] == ((0, 0), (0, 3), (1, 1), (1, 2))
    assert bitpipe.rank_of(0, micro_batch=0) == 0
    assert bitpipe.rank_of(0, micro_batch=1) == 1
    assert bitpipe.stages.chunk_of[1][2] == 3
