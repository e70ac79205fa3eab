"""Node lists against Slurm's own tool."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.errors import UsageError
from hpctrain.slurm.hostlist import count, expand, fold
from hpctrain.testing.slurm import SlurmCluster

PREFIX = st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z-]", fullmatch=True)


@st.composite
def host_names(draw: st.DrawFn) -> list[str]:
    """Names of a few families with numbers of one width or of their natural one."""
    names: set[str] = set()
    for prefix in draw(st.lists(PREFIX, min_size=1, max_size=3, unique=True)):
        width = draw(st.sampled_from([0, 3, 5]))
        numbers = draw(st.lists(st.integers(0, 120), min_size=1, max_size=12))
        names |= {f"{prefix}{number:0{width}d}" for number in numbers}
    return sorted(names)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(names=host_names())
def test_round_trip_with_scontrol(slurm_cluster: SlurmCluster, names: list[str]) -> None:
    """What we fold Slurm expands to the same hosts, and what Slurm folds we expand to them."""
    told = slurm_cluster.run("scontrol", "show", "hostnames", fold(names)).stdout.split()
    assert sorted(told) == names
    theirs = slurm_cluster.run("scontrol", "show", "hostlist", ",".join(names)).stdout.strip()
    assert sorted(expand(theirs)) == names
    assert count(theirs) == len(names)


def test_lists_as_slurm_prints_them() -> None:
    assert expand("nid[001-003,007],login1") == ["login1", "nid001", "nid002", "nid003", "nid007"]
    assert expand("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]
    assert expand("node[9-11]") == ["node9", "node10", "node11"]
    assert fold(["nid002", "nid001", "nid004"]) == "nid[001-002,004]"


@pytest.mark.parametrize(
    "text",
    ["", "(null)", "node[1-2", "node[5-3]", "node[1-]", "a b", "a,,b", "@group", "a!b", "a[1-9/2]",
     "a;reboot", "a[1-9]&b[2]", "a\n", "[]", "a[x]"],
)  # fmt: skip
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a node list"):
        expand(text)


def test_huge_lists_are_refused_without_being_expanded() -> None:
    with pytest.raises(UsageError, match="are the most"):
        expand("n[0-99999]m[0-99999]")
