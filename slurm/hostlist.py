"""Node lists in Slurm's bracket form, read and written by ClusterShell."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpctrain.errors import UsageError


def expand(text: str) -> list[str]:
    """Host names of ``nid[001-004,007],login1`` in the order of the list, each once.

    Raises:
        UsageError: not a node list.
    """
    raise NotImplementedError


def fold(names: Iterable[str]) -> str:
    """The bracket form of host names."""
    raise NotImplementedError
