"""Node lists in Slurm's bracket form, read and written by ClusterShell."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from ClusterShell.NodeSet import NodeSet

_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_ITEM = rf"(?:[A-Za-z0-9_.-]|{_RANGES})+"
_LIST = re.compile(rf"{_ITEM}(?:,{_ITEM})*")
_MOST = 1_000_000


def expand(text: str) -> list[str]:
    """Host names of ``nid[001-004,007],login1``, each once, sorted as numbers.

    Stricter than ClusterShell, which also knows groups, steps and set operators that Slurm
    does not.

    Raises:
        UsageError: not a node list, or one of more than a million hosts.
    """
    return [str(name) for name in _node_set(text)]


def count(text: str) -> int:
    """Number of hosts of a node list; raises as expand."""
    return len(_node_set(text))


def fold(names: Iterable[str]) -> str:
    """The bracket form of host names.

    Raises:
        UsageError: a name that is none.
    """
    return str(_node_set(",".join(names)))


def _node_set(text: str) -> NodeSet:
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    if not _LIST.fullmatch(text):
        raise UsageError(
            f"{text!r} is not a node list; one looks like nid[001-004,007],login1",
        )
    if max(_size(item) for item in re.split(r",(?![^\[]*\])", text)) > _MOST:
        raise UsageError(f"{text!r} is a list of too many hosts: {_MOST} are the most")
    try:
        return NodeSet(text, resolver=RESOLVER_NOGROUP)
    except NodeSetException as error:
        raise UsageError(f"{text!r} is not a node list: {error}") from None


def _size(item: str) -> int:
    """Hosts of one item of a list, without expanding it."""
    size = 1
    for ranges in re.findall(r"\[([^\]]*)\]", item):
        pairs = [one.partition("-") for one in ranges.split(",")]
        size *= sum(max(1, int(high or low) - int(low) + 1) for low, _, high in pairs)
    return size
