"""RankContext: who this rank is and whom it talks to; passed to whoever needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from hpctrain.layout import RankGrid
    from hpctrain.runtime.communicators import Communicators
    from hpctrain.runtime.environment import RankEnvironment


@dataclass(frozen=True)
class RankContext:
    """One rank of a running job.

    Attributes:
        rank: global rank (MPI's).
        world_size: ranks of the job.
        node: number of this rank's node, in the order of each node's lowest rank.
        nodes: number of nodes.
        local_rank: position among the ranks of this node.
        local_size: ranks on this node.
        host: name of the node.
        device: the device this rank owns.
        comm: MPI communicator of all ranks, the control plane (its own duplicate).
        grid: rank <-> coordinates on every axis.
        mesh: torch DeviceMesh over ``grid``'s rank array, the data plane.
        environment: what launcher and scheduler said.
        communicators: process groups and MPI communicators by axis, and what they count.
    """

    rank: int
    world_size: int
    node: int
    nodes: int
    local_rank: int
    local_size: int
    host: str
    device: torch.device
    comm: Any
    grid: RankGrid
    mesh: DeviceMesh
    environment: RankEnvironment
    communicators: Communicators

    @property
    def is_first(self) -> bool:
        """Rank 0 keeps the run's records."""
        return self.rank == 0

    def size(self, axis: str) -> int:
        """Degree of an axis or alias (``dp``)."""
        return self.grid.layout.size(axis)

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis; ``dp`` counts replicate x shard."""
        at = self.grid.coordinates(self.rank)
        if axis == "dp":
            return at["dp_replicate"] * self.grid.layout.dp_shard + at["dp_shard"]
        return at[axis]
