"""The halves of a group that spans nodes: its members on this node, and across the nodes.

::

             node 0          node 1
    rail 0   rank 0  <────>  rank 4      across: ranks with the same place on their node
    rail 1   rank 1  <────>  rank 5
    rail 2   rank 2  <────>  rank 6      inside: the members of one node
    rail 3   rank 3  <────>  rank 7

Where nodes hold different numbers of members there are no rails; across then joins the first
member of each node, the leaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from hpctrain.runtime.communicators import Communicator, Communicators


@dataclass(frozen=True, eq=False)
class Levels:
    """A group seen as nodes × members a node.

    Attributes:
        counts: members on each node, nodes in the order in which they first appear.
        node, local: of this rank: number of its node, and its place among the members there.
        positions: places in the group of the members, node after node.
        inside: process group of the members on this node, in their order in the group.
        across: process group of this rank's rail, or of the leaders (this rank alone where it
            is none).
        backend: name of the backend that moves tensors of the group's device.
    """

    counts: tuple[int, ...]
    node: int
    local: int
    positions: tuple[int, ...]
    inside: dist.ProcessGroup
    across: dist.ProcessGroup
    backend: str

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.counts)

    @property
    def even(self) -> bool:
        """Whether every node holds as many members as any other."""
        return len(set(self.counts)) == 1

    @property
    def per_node(self) -> int:
        """Members a node, where that is one number."""
        assert self.even, "nodes hold different numbers of members"
        return self.counts[0]

    @property
    def size(self) -> int:
        """Number of members."""
        return sum(self.counts)

    def place_of(self, position: int) -> tuple[int, int]:
        """Node and local place of the member at ``position`` of the group."""
        at = self.positions.index(position)
        for node, count in enumerate(self.counts):
            if at < count:
                return node, at
            at -= count
        raise AssertionError("positions and counts agree")

    def position_of(self, node: int, local: int) -> int:
        """Position in the group of a member by node and local place."""
        return self.positions[sum(self.counts[:node]) + local]

    def by_node(self, device: torch.device) -> torch.Tensor:
        """Positions ordered by (node, local); shape (size,)."""
        return torch.tensor(self.positions, device=device)

    def by_local(self, device: torch.device) -> torch.Tensor:
        """Positions ordered by (local, node), where nodes are even; shape (size,)."""
        return self.by_node(device).view(self.nodes, self.per_node).t().reshape(-1)


def by_node(row: Sequence[int], nodes: Sequence[int]) -> list[list[int]]:
    """Members of a group node by node, nodes in the order in which they first appear.

    Args:
        row: global ranks of the group.
        nodes: node number of each global rank.
    """
    found: dict[int, list[int]] = {}
    for rank in row:
        found.setdefault(nodes[rank], []).append(rank)
    return list(found.values())


def has_levels(parts: Sequence[Sequence[int]]) -> bool:
    """Whether two levels differ from one: several nodes, one of which holds several members."""
    return len(parts) > 1 and max(map(len, parts)) > 1


def build_levels(
    communicators: Communicators, communicator: Communicator, rows: Sequence[Sequence[int]]
) -> Levels | None:
    """Make the halves of all groups of an axis; every rank of the job comes here together.

    Returns:
        This rank's, or None where its group has no two levels.
    """
    inside: list[list[int]] = []
    across: list[list[int]] = []
    for row in rows:
        parts = by_node(row, communicators.nodes)
        if not has_levels(parts):
            continue
        inside += parts
        even = len({len(part) for part in parts}) == 1
        rails = len(parts[0]) if even else 1
        across += [[part[rail] for part in parts] for rail in range(rails)]
    if not inside:
        return None
    near = communicators.make_groups(f"{communicator.name}/inside", inside)
    far = communicators.make_groups(f"{communicator.name}/across", across)
    parts = by_node(communicator.ranks, communicators.nodes)
    if not has_levels(parts):
        return None
    own = communicator.ranks[communicator.place]
    node = next(number for number, part in enumerate(parts) if own in part)
    return Levels(
        counts=tuple(map(len, parts)),
        node=node,
        local=parts[node].index(own),
        positions=tuple(communicator.ranks.index(rank) for part in parts for rank in part),
        inside=near,
        across=far,
        backend=dist.get_backend(near)
        if communicator.device.type == "cpu"
        else near._get_backend(communicator.device).name(),
    )
