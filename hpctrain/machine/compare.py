"""A machine profile against the node it is used on, and a profile made from a node."""

from __future__ import annotations

import re
from typing import Any, Literal, cast

from hpctrain.machine.cpuset import format_cpuset, parse_cpuset
from hpctrain.machine.hardware import Device, Slot
from hpctrain.machine.machine import Machine
from hpctrain.machine.probe import ProbedNode, probe_node

_MEMORY_TOLERANCE = 0.10
"""Firmware, the kernel and ECC keep a part of what is built in."""
_RATE_TOLERANCE = 0.05


def compare(profile: Machine, node: ProbedNode) -> list[str]:
    """Where a profile and a whole node differ; each warning names both sides.

    Call it where the process sees the whole node (one rank of a node is enough). What either
    side does not know is not compared.
    """
    if profile.kind == "local":
        return []
    said = _Sides(profile, node)
    said.differ("node.devices", profile.node.devices, len(node.gpus), "GPUs")
    vendors = sorted({gpu.vendor for gpu in node.gpus})
    if vendors and vendors != [profile.node.device.vendor]:
        said.differ("node.device.vendor", profile.node.device.vendor, " and ".join(vendors), "GPUs")
    sizes = [gpu.memory_bytes for gpu in node.gpus if gpu.memory_bytes]
    if sizes:
        said.differ_much("node.device.memory_bytes", profile.node.device.memory_bytes, min(sizes))
    said.differ("node.cpu_arch", profile.node.cpu_arch, node.cpu_arch)
    # Cores that a site reserves may be hidden from jobs altogether.
    if node.cores != profile.node.usable_cores:
        said.differ("node.cores", profile.node.cores, node.cores, "cores")
    if node.cpu_domains:
        said.differ("node.numa_domains", profile.node.numa_domains, len(node.cpu_domains))
    if node.memory_bytes:
        said.differ_much("node.memory_bytes", profile.node.memory_bytes, node.memory_bytes)
    for index, slot in enumerate(profile.affinity.slots):
        if slot.device < len(node.gpus):
            said.differ(
                f"affinity.slots.{index}.numa",
                slot.numa,
                node.gpus[slot.device].numa,
                f"as the NUMA domain of GPU {slot.device}",
            )
    _compare_nics(said)
    return said.warnings


def compare_rank(
    profile: Machine, node: ProbedNode, local_rank: int, ranks_per_node: int | None = None
) -> list[str]:
    """Where one rank's own cores and device differ from what the profile plans for it.

    Args:
        profile: the machine the job was rendered for.
        node: probed by that rank, after it was bound.
        local_rank: number of the rank on its node.
        ranks_per_node: None: one a device.
    """
    warnings = []
    planned = profile.cores_for(ranks_per_node or profile.devices_per_node)
    threads = len(node.allowed)
    who = f"local rank {local_rank} on {node.host}"
    if profile.kind != "local" and threads < planned:
        warnings.append(
            f"{who} may use {threads} CPUs ({format_cpuset(node.allowed)}); profile "
            f"{profile.name} plans {planned} a rank (affinity.cpus_per_task)"
        )
    slots = profile.affinity.slots
    if local_rank >= len(slots) or (ranks_per_node or len(slots)) > len(slots):
        return warnings
    slot = slots[local_rank]
    as_planned = False
    if slot.cores is not None:
        as_planned = set(node.allowed) <= _with_siblings(slot.cores, node)
        if not as_planned and threads < len(node.online):
            warnings.append(
                f"{who} may use CPUs {format_cpuset(node.allowed)}; profile {profile.name} plans "
                f"{slot.cores} (affinity.slots.{local_rank}.cores)"
            )
    if as_planned:
        return warnings
    domains = {node.numa_of_cpu(cpu) for cpu in node.allowed} - {None}
    if slot.device < len(node.gpus) and len(domains) == 1:
        near = node.gpus[slot.device].numa
        if near is not None and near not in domains:
            warnings.append(
                f"{who} runs on NUMA domain {domains.pop()}, its device {slot.device} hangs on "
                f"{near} (profile {profile.name}, affinity.slots.{local_rank})"
            )
    return warnings


def _with_siblings(cores: str, node: ProbedNode) -> set[int]:
    """CPUs of the cores and, where threads are numbered after all cores, of their siblings."""
    cpus = parse_cpuset(cores)
    step = node.cores
    return {cpu + step * thread for cpu in cpus for thread in range(node.threads_per_core)}


class _Sides:
    """Collects warnings that name both sides and the confidence of the profile's."""

    def __init__(self, profile: Machine, node: ProbedNode) -> None:
        self.profile = profile
        self.node = node
        self.warnings: list[str] = []

    def differ(self, path: str, stated: Any, found: Any, what: str = "") -> None:
        if stated is None or found is None or stated == found:
            return
        self.warnings.append(
            f"{path}: profile {self.profile.name} says {stated} "
            f"({self._confidence(path)}), {self.node.host} has {found}"
            f"{' ' + what if what else ''}"
        )

    def differ_much(self, path: str, stated: int | None, found: int) -> None:
        """For sizes in bytes, where a tenth does not matter."""
        if stated is None or abs(found - stated) <= _MEMORY_TOLERANCE * stated:
            return
        gib = 2**30
        self.differ(path, f"{stated / gib:.1f} GiB", f"{found / gib:.1f} GiB")

    def _confidence(self, path: str) -> str:
        for fact in self.profile.facts():
            if fact.path == path or fact.path.startswith(path + "."):
                return f"{fact.provenance.confidence} confidence"
        return "a default"


def _compare_nics(said: _Sides) -> None:
    stated, found = said.profile.node.nics, said.node.fast_nics
    if not stated or not found:
        return
    said.differ("node.nics", len(stated), len(found), f"({', '.join(n.name for n in found)})")
    here = {nic.name: nic for nic in said.node.nics}
    missing = [nic.name for nic in stated if nic.name is not None and nic.name not in here]
    if missing:
        said.differ("node.nics", ", ".join(missing), "none of these names")
    for index, nic in enumerate(stated):
        same = None if nic.name is None else here.get(nic.name)
        if same is None:
            continue
        path = f"node.nics.{index}"
        if nic.bandwidth and same.rate and abs(same.rate / nic.bandwidth - 1) > _RATE_TOLERANCE:
            said.differ(
                f"{path}.bandwidth", f"{nic.bandwidth / 1e9:g} GB/s", f"{same.rate / 1e9:g} GB/s"
            )
        said.differ(f"{path}.numa", nic.numa, same.numa)


# ---- profiles from nodes -------------------------------------------------------------------


def fit_to_host(machine: Machine, node: ProbedNode | None = None) -> Machine:
    """The local machine with a host's counts filled in; None probes the one we stand on.

    With GPUs a device is a GPU; without, a device is a core, with its share of the memory.
    """
    host = node or probe_node()
    cores = max(1, len(host.allowed) // host.threads_per_core)
    if host.gpus:
        first = host.gpus[0]
        count = len(host.gpus)
        device = Device(
            name=first.name or f"{first.vendor} GPU",
            vendor=cast(Literal["amd", "nvidia", "intel"], first.vendor),
            memory_bytes=first.memory_bytes,
        )
        slots = tuple(Slot(device=gpu.number, numa=gpu.numa) for gpu in host.gpus)
    else:
        count = cores
        device = machine.node.device.model_copy(
            update={"memory_bytes": host.memory_bytes // count or None}
        )
        slots = ()
    topology = machine.node.model_copy(
        update={
            "devices": count,
            "device": device,
            "cpu": host.cpu,
            "cpu_arch": host.cpu_arch,
            "cores": cores,
            "usable_cores": cores,
            "threads_per_core": host.threads_per_core,
            "memory_bytes": host.memory_bytes or None,
            "numa_domains": len(host.cpu_domains) or None,
        }
    )
    affinity = machine.affinity.model_copy(update={"slots": slots})
    return machine.model_copy(update={"node": topology, "affinity": affinity})


def site_document(
    node: ProbedNode, name: str, *, as_of: str, partitions: dict[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """A site file of the node as plain data, to be written as YAML and completed by hand.

    What a probe cannot see (peak rates, links inside the node, limits beyond the scheduler's)
    is left out or null.

    Args:
        node: a whole compute node, probed on it.
        name: name of the new machine.
        as_of: date of the probe, ``YYYY-MM-DD``.
        partitions: from partitions_from_scontrol.
    """
    about = {"source": f"probe of {node.host}", "as_of": as_of, "confidence": "high"}
    open_question = {"source": "not known to the probe", "confidence": "low"}
    cores = node.cores
    count = len(node.gpus) or cores
    first = node.gpus[0] if node.gpus else None
    default = next((k for k, v in (partitions or {}).items() if v.get("default")), None)
    limits = {
        k: {key: value for key, value in v.items() if key != "default"}
        for k, v in (partitions or {}).items()
    }
    nics = [
        {
            "name": nic.name,
            "bandwidth": nic.rate,
            "numa": nic.numa,
            "rail": index,
            "devices": [
                gpu.number for gpu in node.gpus if gpu.numa is not None and gpu.numa == nic.numa
            ],
        }
        for index, nic in enumerate(node.fast_nics)
    ]
    return {
        "name": name,
        "title": f"{name}, probed on {node.host}",
        "kind": "site",
        "node": {
            **about,
            "devices": count,
            "device": {
                "name": (first.name or f"{first.vendor} GPU") if first else "CPU",
                "vendor": first.vendor if first else "cpu",
                "memory_bytes": first.memory_bytes if first else node.memory_bytes // count,
                "peak_flops": {"bf16": None},
            },
            "cpu": node.cpu,
            "cpu_arch": node.cpu_arch,
            "cores": cores,
            "threads_per_core": node.threads_per_core,
            "memory_bytes": node.memory_bytes,
            "numa_domains": len(node.cpu_domains) or None,
            "nics": nics,
        },
        "network": {**open_question, "fabric": "unknown"},
        "links": {"node": {**open_question, "bandwidth": None, "latency": None}},
        "affinity": {
            **about,
            "visible": "all",
            "cpus_per_task": max(1, cores // count),
            "threads_per_rank": max(1, cores // count),
            "slots": [{"device": gpu.number, "numa": gpu.numa} for gpu in node.gpus],
        },
        "launch": {**open_question, "mpi": None, "srun": [], "sbatch": []},
        "environment": {**open_question, "variables": []},
        "scheduling": {
            "source": "scontrol show partition" if partitions else "not known to the probe",
            "as_of": as_of,
            "confidence": "high" if partitions else "low",
            "default_partition": default,
            "partitions": limits,
        },
        "storage": dict(open_question),
    }


def partitions_from_scontrol(text: str) -> dict[str, dict[str, Any]]:
    """Limits by partition from ``scontrol show partition --oneliner``.

    Returns:
        For each partition the keys of a site file's ``partitions`` entry, and ``default`` where
        it is the scheduler's default.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(\S+?)=(\S*)", line))
        name = fields.get("PartitionName")
        if name is None or fields.get("State", "UP") != "UP":
            continue
        entry: dict[str, Any] = {}
        if fields.get("MaxTime", "UNLIMITED") not in ("UNLIMITED", "INFINITE"):
            entry["max_walltime"] = fields["MaxTime"]
        if fields.get("MaxNodes", "").isdigit():
            entry["max_nodes"] = int(fields["MaxNodes"])
        elif fields.get("TotalNodes", "").isdigit():
            entry["max_nodes"] = int(fields["TotalNodes"])
        if fields.get("MinNodes", "").isdigit() and int(fields["MinNodes"]) > 1:
            entry["min_nodes"] = int(fields["MinNodes"])
        if fields.get("OverSubscribe") == "EXCLUSIVE":
            entry["exclusive"] = True
        if fields.get("Default") == "YES":
            entry["default"] = True
        found[name] = entry
    return found
