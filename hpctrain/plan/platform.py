"""What a job runs on, as the planner sees it: one accelerator, its links and its share of cards.

Peaks and bandwidths are the vendors' dense figures. ``Platform.of_machine`` reads them from a
machine file; ``published_platform`` names the ones that published measurements speak of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hpctrain.errors import ImpossibleError

GB = 1e9
GIB = 2**30
TERA = 1e12


@dataclass(frozen=True, slots=True)
class Platform:
    """One kind of accelerator in its node and network.

    Attributes:
        name: what it is called.
        family: calibration family, for example ``A100``; platforms of a family share fitted
            numbers.
        peak: dense FLOP/s by type (``bf16``, ``fp16``, ``fp8``, ``fp32``).
        memory_bytes: memory of one device.
        memory_bandwidth: bytes/s of it.
        units: streaming multiprocessors or compute units that share one matrix product.
        node_devices: devices of a node.
        domain_devices: devices that reach each other over the fast links (a node, or a rack).
        link_bandwidth: bytes/s one way that a device sends to its domain, all peers together.
        peer_bandwidth: bytes/s one way to one peer; equal to ``link_bandwidth`` behind a switch.
        package_devices, package_bandwidth: devices of one package and their link, one way.
        nic_bandwidth: bytes/s one way into the network, a device's share of its node's cards.
        card_bandwidth: bytes/s of one card: what a device gets while others of its node are
            silent; its share where less.
        known: the accelerator is in the catalogue; otherwise its figures are guesses.
    """

    name: str
    family: str
    peak: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    units: int
    node_devices: int
    domain_devices: int
    link_bandwidth: float
    peer_bandwidth: float
    nic_bandwidth: float
    package_devices: int = 1
    package_bandwidth: float = 0.0
    card_bandwidth: float = 0.0
    known: bool = True

    def peak_flops(self, dtype: str) -> float:
        """Dense FLOP/s of products in ``dtype``; in half precision where it has no such type."""
        if dtype in self.peak:
            return self.peak[dtype]
        half = self.peak.get("bf16") or self.peak.get("fp16")
        if half is None:
            return max(self.peak.values())
        return half if dtype in ("bf16", "fp16", "fp8") else half / 2

    def domain_bandwidth(self, ranks: int) -> float:
        """Bytes/s one way a device can send inside a group of ``ranks`` of its domain."""
        if ranks <= self.package_devices and self.package_bandwidth:
            return self.package_bandwidth
        return min(self.link_bandwidth, self.peer_bandwidth * max(1, ranks - 1))

    def network_bandwidth(self, active: int) -> float:
        """Bytes/s one way into the network of a device, with ``active`` of its node sending."""
        together = self.nic_bandwidth * self.node_devices / max(1, min(active, self.node_devices))
        return max(self.nic_bandwidth, min(self.card_bandwidth, together))

    def in_node(self, node_devices: int, nic_per_node: float | None = None) -> Platform:
        """The same accelerator in a node of another size, with ``nic_per_node`` bytes/s in all."""
        domain = max(node_devices, self.domain_devices if self.domain_devices > 8 else 0)
        per_node = self.nic_bandwidth * self.node_devices if nic_per_node is None else nic_per_node
        usual = max(self.card_bandwidth, self.nic_bandwidth)
        return replace(
            self,
            node_devices=node_devices,
            domain_devices=domain,
            nic_bandwidth=per_node / node_devices,
            card_bandwidth=min(usual, per_node),
        )


def _device(
    family: str,
    half: float,
    memory: float,
    bandwidth: float,
    units: int,
    link: float,
    nic: float,
    *,
    fp8: float | None = None,
    node: int = 8,
    domain: int | None = None,
    peer: float | None = None,
    package: tuple[int, float] = (1, 0.0),
    fp32: float | None = None,
) -> Platform:
    """TFLOP/s, GiB as drivers report it, TB/s, GB/s a device; ``nic`` GB/s a device."""
    peak = {"bf16": half * TERA, "fp16": half * TERA}
    if fp8:
        peak["fp8"] = fp8 * TERA
    if fp32:
        peak["fp32"] = fp32 * TERA
    return Platform(
        name=family,
        family=family,
        peak=MappingProxyType(peak),
        memory_bytes=memory * GIB,
        memory_bandwidth=bandwidth * TERA,
        units=units,
        node_devices=node,
        domain_devices=domain or node,
        link_bandwidth=link * GB,
        peer_bandwidth=(peer or link) * GB,
        nic_bandwidth=nic * GB,
        package_devices=package[0],
        package_bandwidth=package[1] * GB,
    )


# Vendors' data sheets; network cards as the usual node of each has them.
_A100 = _device("A100", 312, 79.2, 2.0, 108, 300, 25, fp32=156)
_H100 = _device("H100", 989, 79.4, 3.35, 132, 450, 50, fp8=1979, fp32=495)
_B200 = _device("B200", 2250, 179, 8.0, 148, 900, 50, fp8=4500, fp32=1125)
_V100 = _device("V100", 125, 31.7, 0.9, 80, 150, 12.5, fp32=15.7)

CATALOGUE: Mapping[str, Platform] = MappingProxyType(
    {
        "A100-80G": replace(_A100, name="A100-80G"),
        "A100-40G": replace(
            _A100, name="A100-40G", memory_bytes=39.4 * GIB, memory_bandwidth=1.555 * TERA
        ),
        "A100-PCIE": replace(
            _A100,
            name="A100-PCIE",
            memory_bandwidth=1.935 * TERA,
            link_bandwidth=25 * GB,
            peer_bandwidth=25 * GB,
        ),
        "A800": replace(_A100, name="A800", link_bandwidth=200 * GB, peer_bandwidth=200 * GB),
        "H100": replace(_H100, name="H100"),
        "H100-PCIE": replace(
            _H100,
            name="H100-PCIE",
            peak=MappingProxyType({"bf16": 756 * TERA, "fp16": 756 * TERA, "fp8": 1513 * TERA}),
            memory_bandwidth=2.0 * TERA,
            link_bandwidth=50 * GB,
            peer_bandwidth=50 * GB,
            units=114,
        ),
        "H800": replace(_H100, name="H800", link_bandwidth=200 * GB, peer_bandwidth=200 * GB),
        "H200": replace(_H100, name="H200", memory_bytes=140 * GIB, memory_bandwidth=4.8 * TERA),
        "H20": replace(
            _H100,
            name="H20",
            peak=MappingProxyType({"bf16": 148 * TERA, "fp16": 148 * TERA, "fp8": 296 * TERA}),
            memory_bytes=95 * GIB,
            memory_bandwidth=4.0 * TERA,
            units=78,
        ),
        "GH200": replace(
            _H100,
            name="GH200",
            memory_bytes=95 * GIB,
            memory_bandwidth=4.0 * TERA,
            node_devices=4,
            domain_devices=4,
            nic_bandwidth=25 * GB,
        ),
        "B200": replace(_B200, name="B200"),
        "B300": replace(_B200, name="B300", memory_bytes=268 * GIB, nic_bandwidth=100 * GB),
        "GB200": replace(
            _B200,
            name="GB200",
            peak=MappingProxyType({"bf16": 2450 * TERA, "fp16": 2450 * TERA, "fp8": 4900 * TERA}),
            memory_bytes=185 * GIB,
            node_devices=4,
            domain_devices=72,
        ),
        "GB300": replace(
            _B200,
            name="GB300",
            peak=MappingProxyType({"bf16": 2450 * TERA, "fp16": 2450 * TERA, "fp8": 4900 * TERA}),
            memory_bytes=275 * GIB,
            node_devices=4,
            domain_devices=72,
            nic_bandwidth=100 * GB,
        ),
        "V100-32G": replace(_V100, name="V100-32G"),
        "V100-16G": replace(_V100, name="V100-16G", memory_bytes=15.75 * GIB),
        "MI250X": _device(
            "MI250X", 191.5, 63.9, 1.638, 110, 150, 12.5, peer=50, package=(2, 200.0), fp32=47.9
        ),
        "MI300X": _device("MI300X", 1307, 192, 5.3, 304, 448, 50, fp8=2615, peer=64, fp32=163),
        "MI300A": _device(
            "MI300X", 981, 128, 5.3, 228, 384, 25, fp8=1961, node=4, peer=128, fp32=123
        ),
        "MI325X": _device("MI300X", 1307, 256, 6.0, 304, 448, 50, fp8=2615, peer=64, fp32=163),
        "MI355X": _device("MI300X", 2517, 288, 8.0, 256, 537, 50, fp8=5033, peer=76.8, fp32=157),
        "PVC": _device("PVC", 419, 64, 1.64, 448, 80, 16.6, node=12, peer=15, fp32=22.9),
    }
)
"""Accelerators by name, in the node they usually come in."""

_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"gb300", "GB300"),
    (r"gb200", "GB200"),
    (r"gh200", "GH200"),
    (r"b300", "B300"),
    (r"b200|b100", "B200"),
    (r"h200", "H200"),
    (r"h800", "H800"),
    (r"h100.*pci", "H100-PCIE"),
    (r"h100", "H100"),
    (r"h20\b", "H20"),
    (r"a800", "A800"),
    (r"a100.*pci", "A100-PCIE"),
    (r"a100.*40", "A100-40G"),
    (r"a100", "A100-80G"),
    (r"v100.*16", "V100-16G"),
    (r"v100", "V100-32G"),
    (r"mi3[05]5x?", "MI355X"),
    (r"mi325", "MI325X"),
    (r"mi300a", "MI300A"),
    (r"mi300", "MI300X"),
    (r"mi250|mi210|frontier|lumi", "MI250X"),
    (r"ponte|pvc|max ?1550", "PVC"),
)


def find_accelerator(name: str) -> str | None:
    """Catalogue name of an accelerator as people write it; None where there is no such thing."""
    text = name.lower().replace("_", "-")
    for known in CATALOGUE:
        if known.lower() == text:
            return known
    for pattern, known in _PATTERNS:
        if re.search(pattern, text):
            return known
    return None


def accelerator(name: str) -> Platform:
    """The catalogued accelerator of that name.

    Raises:
        ImpossibleError: no such accelerator; the known ones are listed.
    """
    found = find_accelerator(name)
    if found is None:
        raise ImpossibleError(
            f"no accelerator {name!r} in the planner's catalogue",
            hint=f"known: {', '.join(CATALOGUE)}",
        )
    return CATALOGUE[found]
