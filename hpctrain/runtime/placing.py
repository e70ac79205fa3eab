"""Which rank gets which coordinates: the one answer for ranks, ``topo`` and planning.

Torch-free, and a pure function of its arguments: every rank that calls it with the same job,
machine and switch groups gets the same grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.fabric import Fabric, Traffic
from hpctrain.placement import Placement, place
from hpctrain.spec.resolve import layout_of

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.spec import JobSpec


def placement_of(
    spec: JobSpec,
    machine: Machine,
    *,
    groups: Sequence[int] | None = None,
    traffic: Sequence[Traffic] = (),
) -> Placement:
    """The placement of a resolved job; its ``grid`` is what :func:`bootstrap` takes.

    Args:
        spec: resolved job.
        machine: that it runs on.
        groups: switch group of each node (``switch_groups_of`` of Slurm's topology addresses);
            None: by the size of a group, as if nodes were consecutive.
        traffic: what a step moves; without it the default placement is returned.
    """
    assert isinstance(spec.ranks_per_node, int), "a resolved job"
    fabric = Fabric.of(machine, spec.nodes, spec.ranks_per_node, groups=groups)
    return place(layout_of(spec), fabric, traffic)
