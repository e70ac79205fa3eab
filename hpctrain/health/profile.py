"""The machine that a job was rendered for against the nodes that its ranks find themselves on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.machine import get_machine
from hpctrain.machine.compare import compare, compare_rank
from hpctrain.machine.probe import probe_node

if TYPE_CHECKING:
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec

_HOST = "\0"


def differences(spec: JobSpec, context: RankContext) -> list[str]:
    """Where profile and nodes differ: each difference once, naming both sides and who has it.

    Every rank looks at its own cores and device, the first one of each node at the whole node.
    Collective; the answer is on rank 0, the others get an empty list.
    """
    if spec.emulated:
        return []  # nobody expects its nodes here
    machine = get_machine(spec.machine_name)
    mine: list[str] = []
    if machine.kind != "local":
        node = probe_node()
        mine = compare_rank(machine, node, context.local_rank, context.local_size)
        if context.local_rank == 0:
            mine += compare(machine, node)
        mine = [text.replace(node.host, _HOST) for text in mine]
    parts = context.comm.gather((context.host, mine))
    return merge(parts) if context.is_first else []


def merge(parts: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """What several nodes say alike is said once; pure.

    Args:
        parts: (host, texts with a NUL in the place of the host).
    """
    hosts: dict[str, list[str]] = {}
    for host, texts in parts:
        for text in texts:
            named = hosts.setdefault(text, [])
            if host not in named:
                named.append(host)
    found = []
    for text, named in hosts.items():
        who = named[0] if len(named) == 1 else f"{named[0]} and {len(named) - 1} more nodes"
        found.append(text.replace(_HOST, who))
    return found
