"""What the node we stand on has, read from sysfs and /proc, without torch."""

from __future__ import annotations

import os

from hpctrain.machine.machine import Machine


def fit_to_host(machine: Machine) -> Machine:
    """The local machine with this host's counts filled in."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = machine.node.device.model_copy(update={"memory_bytes": memory // cores})
    node = machine.node.model_copy(
        update={
            "devices": cores,
            "device": device,
            "cores": cores,
            "usable_cores": cores,
            "memory_bytes": memory,
        }
    )
    return machine.model_copy(update={"node": node})
