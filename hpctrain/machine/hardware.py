"""Nodes, devices, network cards and links of a machine, and where each rank of a node sits."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from hpctrain.machine.blocks import Block, Bytes, Part, Rate
from hpctrain.machine.cpuset import parse_cpuset

PositiveInt = Annotated[int, Field(ge=1)]


def _cpu_list(text: str) -> str:
    parse_cpuset(text)
    return text


CpuList = Annotated[str, AfterValidator(_cpu_list)]
"""A Linux cpu list, ``1-7`` or ``0-15,64-79``."""


class LinkKind(StrEnum):
    """Classes of links between two ranks, nearest first."""

    DEVICE = "device"
    """Both ranks on one device."""
    PACKAGE = "package"
    """Two devices of one package (the two dies of an MI250X)."""
    NODE = "node"
    """Two packages of one node."""
    RAIL = "rail"
    """Two nodes of a switch group, network cards of the same number."""
    SWITCH_GROUP = "switch_group"
    """Two nodes of a switch group, network cards of different numbers."""
    GLOBAL = "global"
    """Two switch groups."""


class Device(Part):
    """One accelerator as Slurm and the framework count it (an MI250X counts as two).

    Attributes:
        name: what the vendor calls it.
        vendor: who makes it; ``cpu`` where ranks compute on cores.
        memory_bytes: size of its own memory.
        memory_bandwidth: bytes/s of that memory.
        peak_flops: dense FLOP/s by type (``bf16``, ``fp16``, ``fp8``, ``fp32``, ``fp64``).
        arch: compiler target (``gfx90a``, ``sm_90``).
    """

    name: str
    vendor: Literal["amd", "nvidia", "intel", "cpu"]
    memory_bytes: Bytes | None = None
    memory_bandwidth: Rate | None = None
    peak_flops: dict[str, float | None] = Field(default_factory=dict)
    arch: str | None = None


class Nic(Part):
    """A network card (one port) of a node.

    Attributes:
        name: interface or adapter as the node names it; None where not known.
        bandwidth: bytes/s one way.
        devices: devices that are nearest to it.
        numa: NUMA domain it hangs on.
        rail: number of the plane or leaf that cards of the same number share across nodes.
    """

    name: str | None = None
    bandwidth: Rate | None = None
    devices: tuple[int, ...] = ()
    numa: int | None = None
    rail: int = 0


class NodeTopology(Block):
    """What is inside a node.

    Attributes:
        devices: devices of a node; None only in the description of the local machine before
            it was fitted to the host.
        device: the kind of device; all of a node are alike.
        packages: device numbers that share a package; empty: every device is its own.
        cpu: the processors, in words.
        cpu_arch: what binaries have to be built for.
        cores: physical cores; usable_cores: those that jobs get.
        threads_per_core: hardware threads of a core.
        memory_bytes: host memory; requestable_memory: the most that a job may ask for.
        numa_domains: NUMA domains with cores.
        nics: network cards that carry job traffic.
    """

    devices: PositiveInt | None
    device: Device
    packages: tuple[tuple[int, ...], ...] = ()
    cpu: str | None = None
    cpu_arch: Literal["x86_64", "aarch64"] = "x86_64"
    cores: PositiveInt | None = None
    usable_cores: PositiveInt | None = None
    threads_per_core: PositiveInt = 1
    memory_bytes: Bytes | None = None
    requestable_memory: Bytes | None = None
    numa_domains: PositiveInt | None = None
    nics: tuple[Nic, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> NodeTopology:
        known = range(self.devices) if self.devices is not None else None
        if self.packages and known is not None:
            named = sorted(device for package in self.packages for device in package)
            if named != list(known):
                raise ValueError(
                    f"packages name the devices {named}, the node has 0 to {len(known) - 1}: "
                    "each device lies in exactly one package"
                )
        for nic in self.nics:
            if known is not None and any(device not in known for device in nic.devices):
                raise ValueError(
                    f"nic {nic.name or nic.rail} names the devices {list(nic.devices)}, the node "
                    f"has 0 to {len(known) - 1}"
                )
        if self.cores and self.usable_cores and self.usable_cores > self.cores:
            raise ValueError(f"usable_cores {self.usable_cores} is more than cores {self.cores}")
        return self

    def package_of(self, device: int) -> int:
        """Number of the package that holds ``device``."""
        for number, package in enumerate(self.packages):
            if device in package:
                return number
        return device

    def nic_of(self, device: int) -> int | None:
        """Index of the card nearest to ``device``; cards without a list share devices evenly."""
        if not self.nics:
            return None
        for index, nic in enumerate(self.nics):
            if device in nic.devices:
                return index
        return device * len(self.nics) // max(self.devices or 1, 1) % len(self.nics)

    @property
    def injection_bandwidth(self) -> float | None:
        """Bytes/s one way into the network, all cards together; None where a card's is unknown."""
        rates = [nic.bandwidth for nic in self.nics]
        if not rates or any(rate is None for rate in rates):
            return None
        return sum(rate for rate in rates if rate is not None)


class LinkClass(Block):
    """Speed between two devices over one class of link.

    Attributes:
        bandwidth: bytes/s one way between two devices alone; None where unknown.
        aggregate: bytes/s one way that a device can send to all its peers of this class
            together; None: not stated, then no more than ``bandwidth`` is counted on.
        latency: seconds for a small message, one way; None where unknown.
    """

    bandwidth: Rate | None = None
    aggregate: Rate | None = None
    latency: Annotated[float, Field(ge=0)] | None = None


class Links(Part):
    """The link classes of a machine; a class it has not is None."""

    package: LinkClass | None = None
    node: LinkClass | None = None
    rail: LinkClass | None = None
    switch_group: LinkClass | None = None
    global_: LinkClass | None = Field(default=None, alias="global")

    def get(self, kind: LinkKind) -> LinkClass | None:
        """The class of that kind as the file states it."""
        if kind is LinkKind.DEVICE:
            return None
        name = "global_" if kind is LinkKind.GLOBAL else kind.value
        found = getattr(self, name)
        assert found is None or isinstance(found, LinkClass)
        return found


class Network(Block):
    """The network between nodes.

    Attributes:
        fabric: name and generation.
        shape: how switches are arranged.
        nodes: nodes of this kind in the machine.
        nodes_per_group: nodes of one switch group (dragonfly group, cell, scalable unit).
        rail_only: cards of different numbers reach each other only through a node
            (rail-only networks); traffic between them then takes a hop inside a node as well.
        socket_interfaces: interfaces for rendezvous and host-side sockets.
        host_suffix: text appended to a host name to reach its fast interface.
    """

    fabric: str
    shape: Literal["dragonfly", "dragonfly+", "fat-tree", "rail", "host"] | None = None
    nodes: PositiveInt | None = None
    nodes_per_group: PositiveInt | None = None
    rail_only: bool = False
    socket_interfaces: tuple[str, ...] = ()
    host_suffix: str = ""


class Slot(Part):
    """What one local rank of a full node gets.

    Attributes:
        cores: physical cores.
        device: device number as the whole node counts it.
        numa: NUMA domain that the device hangs on, which the cores need not share.
    """

    cores: CpuList | None = None
    device: int
    numa: int | None = None


class Affinity(Block):
    """Local rank -> cores and device, with the options that the launch block renders.

    Attributes:
        slots: in local-rank order.
        visible: ``own``: the launcher shows each rank only its device, which is then number 0;
            ``all``: every rank sees all devices and takes ``slots[local_rank].device``.
        cpus_per_task: what ``--cpus-per-task`` gets for a full node, in the units the site
            counts (hardware threads on some).
        threads_per_rank: physical cores a rank owns, for OMP_NUM_THREADS.
    """

    slots: tuple[Slot, ...] = ()
    visible: Literal["own", "all"]
    cpus_per_task: PositiveInt | None = None
    threads_per_rank: PositiveInt | None = None

    def device_index(self, local_rank: int) -> int:
        """Index of a rank's device among those that the rank sees."""
        if self.visible == "own":
            return 0
        if not self.slots:
            return local_rank
        return self.slots[local_rank % len(self.slots)].device
