"""Machines: hardware, links, affinity, launch options, limits and storage, as data."""

from __future__ import annotations

from hpctrain.machine.blocks import Block, Confidence, Doubt, Fact, Provenance, When
from hpctrain.machine.catalogue import get_machine, load_site, machine_names
from hpctrain.machine.cpuset import cpu_mask, format_cpuset, parse_cpuset
from hpctrain.machine.hardware import (
    Affinity,
    Device,
    LinkClass,
    LinkKind,
    Links,
    Network,
    Nic,
    NodeTopology,
    Slot,
)
from hpctrain.machine.launch import Environment, EnvVar, Launch, Option
from hpctrain.machine.machine import Machine
from hpctrain.machine.scheduling import Limits, Scheduling, Violation, WalltimeBin
from hpctrain.machine.storage import Area, Containers, NodeLocal, Storage, StripeRule

__all__ = [
    "Affinity",
    "Area",
    "Block",
    "Confidence",
    "Containers",
    "Device",
    "Doubt",
    "EnvVar",
    "Environment",
    "Fact",
    "Launch",
    "Limits",
    "LinkClass",
    "LinkKind",
    "Links",
    "Machine",
    "Network",
    "Nic",
    "NodeLocal",
    "NodeTopology",
    "Option",
    "Provenance",
    "Scheduling",
    "Slot",
    "Storage",
    "StripeRule",
    "Violation",
    "WalltimeBin",
    "When",
    "cpu_mask",
    "format_cpuset",
    "get_machine",
    "load_site",
    "machine_names",
    "parse_cpuset",
]
