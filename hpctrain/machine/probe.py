"""What the node we stand on has, read from sysfs and /proc, without torch.

Every function that reads takes the root of the file tree, ``/`` by default.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpctrain.machine.cpuset import format_cpuset, parse_cpuset

_VENDORS = {0x10DE: "nvidia", 0x1002: "amd", 0x8086: "intel"}
_DISPLAY, _ACCELERATOR = 0x03, 0x12
"""PCI base classes of display controllers and of processing accelerators (MI300)."""


@dataclass(frozen=True, slots=True)
class NumaDomain:
    """A NUMA domain: its number, CPUs and memory in bytes (0 where not stated)."""

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU in order of PCI address; ``numa`` is None where the firmware does not say."""

    number: int
    vendor: str
    pci: str
    numa: int | None
    cpus: tuple[int, ...] = ()
    memory_bytes: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class NetworkCard:
    """A network card: ``kind`` is ethernet, infiniband or slingshot, ``rate`` bytes/s one way."""

    name: str
    kind: str
    rate: float | None
    numa: int | None
    pci: str | None
    up: bool


@dataclass(frozen=True, slots=True)
class ProbedNode:
    """One node as its kernel describes it.

    Attributes:
        host: host name.
        cpu_arch, cpu: architecture and model name of the processors.
        online: CPUs (hardware threads) of the node.
        allowed: CPUs that this process may run on.
        threads_per_core: hardware threads of a core.
        numa: NUMA domains that have CPUs, and those that have only memory.
        memory_bytes: host memory.
        gpus: in order of PCI address.
        nics: InfiniBand and Slingshot cards, and Ethernet ones on hardware of their own.
    """

    host: str
    cpu_arch: str
    cpu: str | None
    online: tuple[int, ...]
    allowed: tuple[int, ...]
    threads_per_core: int
    numa: tuple[NumaDomain, ...]
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    nics: tuple[NetworkCard, ...]

    @property
    def cores(self) -> int:
        """Physical cores of the node."""
        return len(self.online) // self.threads_per_core

    @property
    def cpu_domains(self) -> tuple[NumaDomain, ...]:
        """NUMA domains with CPUs."""
        return tuple(domain for domain in self.numa if domain.cpus)

    @property
    def fast_nics(self) -> tuple[NetworkCard, ...]:
        """InfiniBand and Slingshot cards that are up; all that are up where there are none."""
        up = [nic for nic in self.nics if nic.up]
        fast = [nic for nic in up if nic.kind != "ethernet"]
        return tuple(fast or up)

    def numa_of_cpu(self, cpu: int) -> int | None:
        """Number of the NUMA domain of a CPU."""
        for domain in self.numa:
            if cpu in domain.cpus:
                return domain.number
        return None


def probe_node(
    root: Path = Path("/"),
    *,
    allowed: Iterable[int] | None = None,
    host: str | None = None,
    vendor_libraries: bool = True,
) -> ProbedNode:
    """Describe a node.

    Args:
        root: where ``sys`` and ``proc`` lie.
        allowed: CPUs of this process; None asks the kernel.
        host: host name; None asks the kernel.
        vendor_libraries: also ask NVML or AMD SMI where their Python modules are installed.
    """
    online = _cpus(root / "sys/devices/system/cpu/online")
    gpus = _gpus(root)
    if vendor_libraries and gpus:
        gpus = _enrich(gpus, _vendor_facts({gpu.vendor for gpu in gpus}))
    mask = os.sched_getaffinity(0) if allowed is None else allowed
    return ProbedNode(
        host=host or platform.node(),
        cpu_arch=platform.machine(),
        cpu=_cpu_name(root),
        online=online or tuple(range(os.cpu_count() or 1)),
        allowed=tuple(sorted(mask)),
        threads_per_core=_threads_per_core(root, online),
        numa=_numa(root),
        memory_bytes=_memory(root),
        gpus=gpus,
        nics=_nics(root),
    )


# ---- readers -------------------------------------------------------------------------------


def _text(path: Path) -> str | None:
    """First line of a file, or None where there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path, base: int = 10) -> int | None:
    text = _text(path)
    try:
        return int(text or "", base)
    except ValueError:
        return None


def _cpus(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpuset(_text(path) or "")
    except ValueError:
        return ()


def _threads_per_core(root: Path, online: Sequence[int]) -> int:
    counts = [
        len(_cpus(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        for cpu in online[:1]
    ]
    return max([1, *counts])


def _cpu_name(root: Path) -> str | None:
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return None


def _memory(root: Path) -> int:
    match = re.search(r"MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo") or "")
    return int(match[1]) * 1024 if match else 0


def _numa(root: Path) -> tuple[NumaDomain, ...]:
    found = []
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        size = re.search(r"MemTotal:\s*(\d+) kB", _text(path / "meminfo") or "")
        found.append(
            NumaDomain(
                int(path.name.removeprefix("node")),
                _cpus(path / "cpulist"),
                int(size[1]) * 1024 if size else 0,
            )
        )
    return tuple(sorted(found, key=lambda domain: domain.number))


def _device_numa(path: Path) -> int | None:
    number = _number(path / "numa_node")
    return None if number is None or number < 0 else number


def _gpus(root: Path) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    for path in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor = _VENDORS.get(_number(path / "vendor", 16) or 0)
        kind = (_number(path / "class", 16) or 0) >> 16
        if vendor is None or kind not in (_DISPLAY, _ACCELERATOR):
            continue
        if vendor == "intel" and kind == _DISPLAY and _number(path / "boot_vga") == 1:
            continue
        found.append(
            Gpu(
                number=len(found),
                vendor=vendor,
                pci=path.name,
                numa=_device_numa(path),
                cpus=_cpus(path / "local_cpulist"),
                memory_bytes=_number(path / "mem_info_vram_total"),
            )
        )
    return tuple(found)


def _pci(path: Path) -> str | None:
    """PCI address of a class device, from where its ``device`` link leads."""
    try:
        name = (path / "device").resolve(strict=True).name
    except OSError:
        return None
    return name if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", name) else None


def _nics(root: Path) -> tuple[NetworkCard, ...]:
    found: list[NetworkCard] = []
    for path in sorted((root / "sys/class/infiniband").glob("*")):
        ports = sorted((path / "ports").glob("[0-9]*"))
        rates = [re.match(r"([\d.]+) Gb/sec", _text(port / "rate") or "") for port in ports]
        layers = {_text(port / "link_layer") for port in ports}
        states = [_text(port / "state") or "" for port in ports]
        found.append(
            NetworkCard(
                path.name,
                "infiniband" if layers != {"Ethernet"} else "ethernet",
                sum(float(rate[1]) for rate in rates if rate) * 1e9 / 8 or None,
                _device_numa(path / "device"),
                _pci(path),
                any("ACTIVE" in state for state in states),
            )
        )
    slingshot = {_pci(path) for path in (root / "sys/class/cxi").glob("*")} - {None}
    taken = {nic.pci for nic in found if nic.pci is not None}
    for path in sorted((root / "sys/class/net").glob("*")):
        if not (path / "device").exists() or _pci(path) in taken:
            continue
        speed = _number(path / "speed")
        found.append(
            NetworkCard(
                path.name,
                "slingshot" if _pci(path) in slingshot else "ethernet",
                speed * 1e6 / 8 if speed and speed > 0 else None,
                _device_numa(path / "device"),
                _pci(path),
                _text(path / "operstate") == "up",
            )
        )
    return tuple(found)


# ---- vendor libraries ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VendorFact:
    """What NVML or AMD SMI says of one GPU: PCI address, name, memory in bytes."""

    pci: str
    name: str
    memory_bytes: int


def _vendor_facts(vendors: set[str]) -> list[VendorFact]:
    """Facts from whichever library is installed; none where it is absent or fails."""
    found: list[VendorFact] = []
    if "nvidia" in vendors and find_spec("pynvml"):
        found += _ask_nvml()
    if "amd" in vendors and find_spec("amdsmi"):
        found += _ask_amdsmi()
    return found


def _ask_nvml() -> list[VendorFact]:
    pynvml: Any = import_module("pynvml")

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            found.append(
                VendorFact(
                    _as_text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
                    _as_text(name),
                    int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                )
            )
        return found
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _ask_amdsmi() -> list[VendorFact]:
    amdsmi: Any = import_module("amdsmi")

    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException:
        return []
    try:
        return [
            VendorFact(
                amdsmi.amdsmi_get_gpu_device_bdf(handle),
                str(amdsmi.amdsmi_get_gpu_asic_info(handle)["market_name"]),
                int(amdsmi.amdsmi_get_gpu_memory_total(handle, amdsmi.AmdSmiMemoryType.VRAM)),
            )
            for handle in amdsmi.amdsmi_get_processor_handles()
        ]
    except (amdsmi.AmdSmiException, KeyError):
        return []
    finally:
        amdsmi.amdsmi_shut_down()


def _as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _enrich(gpus: tuple[Gpu, ...], known: Iterable[VendorFact]) -> tuple[Gpu, ...]:
    """GPUs with the name and memory that a vendor's library gives for their PCI address."""
    by_address = {_short_address(fact.pci): fact for fact in known}
    found = []
    for gpu in gpus:
        fact = by_address.get(_short_address(gpu.pci))
        found.append(
            gpu
            if fact is None
            else replace(gpu, name=fact.name, memory_bytes=fact.memory_bytes or gpu.memory_bytes)
        )
    return tuple(found)


def _short_address(pci: str) -> str:
    """``00000000:C1:00.0`` and ``0000:c1:00.0`` are one address."""
    domain, _, rest = pci.lower().partition(":")
    return f"{int(domain, 16):x}:{rest}"


# ---- switches ------------------------------------------------------------------------------


def switch_groups_of(addresses: Sequence[str]) -> tuple[int, ...]:
    """Switch group of each node from Slurm's topology addresses.

    Args:
        addresses: ``SLURM_TOPOLOGY_ADDR`` of each node in rank order, for example
            ``core.leaf3.node17``: the switches from the top down, then the node.

    Returns:
        Numbers from 0 in order of first appearance; nodes under one lowest switch share one.
        All zero where Slurm knows no switches.
    """
    parents = [address.rpartition(".")[0] for address in addresses]
    order = {parent: number for number, parent in enumerate(dict.fromkeys(parents))}
    return tuple(order[parent] for parent in parents)


def describe(node: ProbedNode) -> list[str]:
    """The node in a few lines for people."""
    domains = node.cpu_domains
    lines = [
        f"{node.host}: {node.cores} cores ({len(node.online)} CPUs, "
        f"{len(domains) or 1} NUMA domain{'s' if len(domains) > 1 else ''}), "
        f"{node.memory_bytes / 2**30:.0f} GiB; this process may use CPUs "
        f"{format_cpuset(node.allowed)}"
    ]
    for gpu in node.gpus:
        memory = f", {gpu.memory_bytes / 2**30:.0f} GiB" if gpu.memory_bytes else ""
        numa = "unknown" if gpu.numa is None else str(gpu.numa)
        lines.append(
            f"GPU {gpu.number}: {gpu.name or gpu.vendor} at {gpu.pci}, NUMA {numa}{memory}"
        )
    for nic in node.nics:
        rate = f"{nic.rate / 1e9:.1f} GB/s" if nic.rate else "rate unknown"
        numa = "unknown" if nic.numa is None else str(nic.numa)
        lines.append(f"{nic.name}: {nic.kind}, {rate}, NUMA {numa}{'' if nic.up else ', down'}")
    return lines
