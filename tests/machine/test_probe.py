"""Probing: a file tree laid out as sysfs is, and the real node we stand on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest
import yaml

from hpctrain.machine import Machine, get_machine
from hpctrain.machine.compare import (
    compare,
    compare_rank,
    fit_to_host,
    partitions_from_scontrol,
    site_document,
)
from hpctrain.machine.probe import (
    Gpu,
    ProbedNode,
    VendorFact,
    describe,
    probe_node,
    switch_groups_of,
)
from hpctrain.machine.probe import _enrich as enrich
from hpctrain.testing.slurm import SlurmCluster


class Tree:
    """Writes the files that sysfs and /proc would show."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, path: str, text: object) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def cpus(self, cores: int, threads: int, domains: int, gib: int) -> None:
        self.put("sys/devices/system/cpu/online", f"0-{cores * threads - 1}")
        siblings = ",".join(str(t * cores) for t in range(threads))
        self.put("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", siblings)
        each = cores // domains
        for d in range(domains):
            base = f"sys/devices/system/node/node{d}"
            parts = [
                f"{t * cores + d * each}-{t * cores + (d + 1) * each - 1}" for t in range(threads)
            ]
            self.put(f"{base}/cpulist", ",".join(parts))
            self.put(f"{base}/meminfo", f"Node {d} MemTotal: {gib * 2**20 // domains} kB")
        self.put("proc/meminfo", f"MemTotal:       {gib * 2**20} kB\nMemFree: 1 kB")
        self.put("proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 7A53 64-Core Processor")

    def pci(self, address: str, cls: str, vendor: str, numa: int, **files: object) -> None:
        base = f"sys/bus/pci/devices/{address}"
        for name, value in {"class": cls, "vendor": vendor, "numa_node": numa, **files}.items():
            self.put(f"{base}/{name}", value)

    def link(self, path: str, target: str) -> None:
        at = self.root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(self.root / target)


GCDS = {"c1": 3, "c6": 3, "c9": 1, "ce": 1, "d1": 0, "d6": 0, "d9": 2, "de": 2}
"""PCI bus -> NUMA domain of the eight GCDs of a Frontier node, from the site's affinity table."""


@pytest.fixture
def frontier_node(tmp_path: Path) -> Path:
    tree = Tree(tmp_path)
    tree.cpus(64, 2, 4, 512)
    for bus, numa in GCDS.items():
        tree.pci(f"0000:{bus}:00.0", "0x038000", "0x1002", numa, mem_info_vram_total=68702699520)
    tree.pci("0000:02:00.0", "0x030000", "0x1a03", 0)  # the console's graphics, not a GPU
    for number, numa in enumerate((3, 1, 0, 2)):
        address = f"0000:{0xA0 + number:02x}:00.0"
        tree.pci(address, "0x020000", "0x17db", numa)
        tree.put(f"sys/class/net/hsn{number}/speed", 200000)
        tree.put(f"sys/class/net/hsn{number}/operstate", "up")
        tree.link(f"sys/class/net/hsn{number}/device", f"sys/bus/pci/devices/{address}")
        tree.link(f"sys/class/cxi/cxi{number}/device", f"sys/bus/pci/devices/{address}")
    tree.put("sys/class/net/lo/operstate", "unknown")
    return tmp_path


@pytest.fixture
def hgx_node(tmp_path: Path) -> Path:
    tree = Tree(tmp_path)
    tree.cpus(112, 1, 2, 2048)
    for number in range(8):
        address = f"0000:{0x19 + number:02x}:00.0"
        tree.pci(address, "0x030200", "0x10de", number // 4)
        nic = f"0000:{0x80 + number:02x}:00.0"
        tree.pci(nic, "0x020700", "0x15b3", number // 4)
        tree.link(f"sys/class/infiniband/mlx5_{number}/device", f"sys/bus/pci/devices/{nic}")
        port = f"sys/class/infiniband/mlx5_{number}/ports/1"
        tree.put(f"{port}/rate", "400 Gb/sec (4X NDR)")
        tree.put(f"{port}/link_layer", "InfiniBand")
        tree.put(f"{port}/state", "4: ACTIVE" if number != 7 else "1: DOWN")
        tree.put(f"sys/class/net/ib{number}/operstate", "up")
        tree.link(f"sys/class/net/ib{number}/device", f"sys/bus/pci/devices/{nic}")
    return tmp_path


def probe(root: Path, allowed: range | list[int] = range(1)) -> ProbedNode:
    return probe_node(root, allowed=allowed, host="node7", vendor_libraries=False)


# ---- reading -------------------------------------------------------------------------------


def test_a_frontier_node(frontier_node: Path) -> None:
    node = probe(frontier_node, range(1, 8))
    assert (node.cores, node.threads_per_core, len(node.online)) == (64, 2, 128)
    assert node.memory_bytes == 512 * 2**30
    assert [domain.cpus[:2] for domain in node.numa] == [(0, 1), (16, 17), (32, 33), (48, 49)]
    assert node.numa_of_cpu(127) == 3
    assert [(gpu.number, gpu.pci[5:7], gpu.numa) for gpu in node.gpus] == [
        (number, bus, numa) for number, (bus, numa) in enumerate(sorted(GCDS.items()))
    ]
    assert {gpu.vendor for gpu in node.gpus} == {"amd"}
    assert {gpu.memory_bytes for gpu in node.gpus} == {68702699520}
    assert [(nic.name, nic.kind, nic.rate, nic.numa) for nic in node.nics] == [
        ("hsn0", "slingshot", 25e9, 3), ("hsn1", "slingshot", 25e9, 1),
        ("hsn2", "slingshot", 25e9, 0), ("hsn3", "slingshot", 25e9, 2),
    ]  # fmt: skip
    lines = describe(node)
    assert "node7: 64 cores (128 CPUs, 4 NUMA domains), 512 GiB" in lines[0]
    assert "1-7" in lines[0]
    assert len(lines) == 1 + 8 + 4


def test_an_infiniband_node(hgx_node: Path) -> None:
    node = probe(hgx_node)
    assert [gpu.vendor for gpu in node.gpus] == ["nvidia"] * 8
    assert node.gpus[0].memory_bytes is None, "sysfs does not say for this vendor"
    assert [nic.name for nic in node.nics] == [f"mlx5_{n}" for n in range(8)], "ib0 is mlx5_0"
    assert node.nics[0].rate == 50e9
    assert [nic.name for nic in node.fast_nics] == [f"mlx5_{n}" for n in range(7)], "one is down"


def test_vendor_facts_are_matched_by_address() -> None:
    gpus = (Gpu(0, "nvidia", "0000:19:00.0", 0), Gpu(1, "nvidia", "0000:1a:00.0", 0))
    found = enrich(gpus, [VendorFact("00000000:1A:00.0", "H100", 85 * 10**9)])
    assert [(gpu.name, gpu.memory_bytes) for gpu in found] == [(None, None), ("H100", 85 * 10**9)]


def test_an_empty_tree_is_not_an_error(tmp_path: Path) -> None:
    node = probe(tmp_path, [0])
    assert node.gpus == ()
    assert node.nics == ()
    assert node.numa == ()
    assert node.cores >= 1


def test_garbage_in_files_is_not_an_error(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.put("sys/devices/system/cpu/online", "what")
    tree.pci("0000:01:00.0", "0x030200", "0x10de", -1, mem_info_vram_total="n/a")
    tree.pci("0000:02:00.0", "nonsense", "zz", 0)
    tree.put("sys/class/net/eth0/speed", "-1")
    tree.link("sys/class/net/eth0/device", "sys/bus/pci/devices/0000:03:00.0")
    node = probe(tmp_path)
    assert [(gpu.numa, gpu.memory_bytes) for gpu in node.gpus] == [(None, None)]
    assert node.nics == ()


def test_this_node() -> None:
    node = probe_node()
    assert node.host == platform.node()
    assert set(node.allowed) == os.sched_getaffinity(0)
    assert set(node.allowed) <= set(node.online)
    assert node.memory_bytes == pytest.approx(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), rel=0.05
    )


# ---- comparing -----------------------------------------------------------------------------


def test_the_right_node_raises_no_warning(frontier_node: Path) -> None:
    assert compare(get_machine("frontier"), probe(frontier_node)) == []


def test_differences_name_both_sides(frontier_node: Path, hgx_node: Path) -> None:
    """Both trees lie in one directory: a node with 16 GPUs of two vendors and odd memory."""
    warnings = compare(get_machine("frontier"), probe(frontier_node))
    text = "\n".join(warnings)
    assert "node.devices: profile frontier says 8 (high confidence), node7 has 16 GPUs" in text
    assert "node.device.vendor: profile frontier says amd" in text
    assert "node7 has amd and nvidia" in text
    assert "node.cores: profile frontier says 64 (high confidence), node7 has 112 cores" in text
    assert "node.memory_bytes: profile frontier says 512.0 GiB" in text
    assert "affinity.slots.6.numa: profile frontier says 3" in text


def test_a_wrong_map_is_found(hgx_node: Path) -> None:
    """The A100 profile's NUMA map (low confidence) on a node with two domains."""
    warnings = compare(get_machine("dgx-a100"), probe(hgx_node))
    text = "\n".join(warnings)
    assert "affinity.slots.0.numa: profile dgx-a100 says 3 (low confidence), node7 has 0" in text
    assert "node.numa_domains: profile dgx-a100 says 8 (low confidence), node7 has 2" in text
    assert compare(get_machine("dgx-h100"), probe(hgx_node)) == [
        "node.nics: profile dgx-h100 says 8 (medium confidence), node7 has 7 "
        "(mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6)"
    ]


def test_a_missing_card_is_named(frontier_node: Path) -> None:
    (frontier_node / "sys/class/net/hsn2/operstate").write_text("down\n")
    (frontier_node / "sys/class/net/hsn3/speed").write_text("100000\n")
    assert compare(get_machine("frontier"), probe(frontier_node)) == [
        "node.nics: profile frontier says 4 (high confidence), node7 has 3 (hsn0, hsn1, hsn3)",
        "node.nics.3.bandwidth: profile frontier says 25 GB/s (high confidence), "
        "node7 has 12.5 GB/s",
    ]


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (range(1, 8), []),
        ([*range(1, 8), *range(65, 72)], []),
        ([1], ["local rank 0 on node7 may use 1 CPUs (1); profile frontier plans 7 a rank"]),
        (
            range(9, 16),
            ["local rank 0 on node7 may use CPUs 9-15; profile frontier plans 1-7"],
        ),
        (
            range(17, 24),
            [
                "may use CPUs 17-23; profile frontier plans 1-7",
                "runs on NUMA domain 1, its device 4 hangs on 0",
            ],
        ),
    ],
)
def test_a_rank_and_its_plan(frontier_node: Path, allowed: list[int], words: list[str]) -> None:
    warnings = compare_rank(get_machine("frontier"), probe(frontier_node, allowed), 0)
    assert len(warnings) == len(words)
    for warning, expected in zip(warnings, words, strict=True):
        assert expected in warning


# ---- profiles from nodes -------------------------------------------------------------------


def test_local_is_this_host() -> None:
    local = get_machine("local")
    cores = len(os.sched_getaffinity(0))
    if not probe_node().gpus:
        assert local.devices_per_node in (cores, cores // probe_node().threads_per_core)
        assert local.node.device.vendor == "cpu"
    assert local.oversubscribe
    assert local.cores_for(1) == local.devices_per_node
    assert compare(local, probe_node()) == []


def test_local_with_gpus(hgx_node: Path) -> None:
    fitted = fit_to_host(get_machine("local"), probe(hgx_node, range(112)))
    assert fitted.devices_per_node == 8
    assert fitted.node.device.vendor == "nvidia"
    assert [slot.numa for slot in fitted.affinity.slots] == [0] * 4 + [1] * 4


@pytest.mark.parametrize("which", ["frontier_node", "hgx_node"])
def test_a_probed_node_becomes_a_site_file(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    node = probe(request.getfixturevalue(which))
    partitions = partitions_from_scontrol(SCONTROL)
    document = site_document(node, "ours", as_of="2026-09-01", partitions=partitions)
    path = tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    machine = get_machine(path)
    assert isinstance(machine, Machine)
    assert machine.devices_per_node == 8
    assert compare(machine, node) == []
    assert machine.scheduling.default_partition == "debug"
    assert machine.scheduling.longest_walltime(1, "debug") == 3600
    assert [v.text for v in machine.scheduling.check(5, 3600)] == [
        "partition debug: 5 nodes asked, 4 are the most"
    ]
    assert machine.scheduling.check(3, 10**7, "long") == []
    assert machine.link_class(0, machine.devices_per_node) in ("rail", "switch_group")


# Lines of scontrol 22.05 with the fields that matter; test_partitions_of_a_real_slurm reads whole
# ones.
SCONTROL = """\
PartitionName=debug AllowGroups=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE \
MaxNodes=UNLIMITED MaxTime=01:00:00 MinNodes=0 LLN=NO Nodes=ux[1-4] OverSubscribe=NO State=UP \
TotalCPUs=8 TotalNodes=4
PartitionName=long AllowGroups=ALL Default=NO MaxNodes=3 MaxTime=UNLIMITED MinNodes=2 \
Nodes=ux[1-4] OverSubscribe=EXCLUSIVE State=UP TotalCPUs=8 TotalNodes=4
PartitionName=old Default=NO MaxNodes=1 MaxTime=1-00:00:00 MinNodes=0 State=DOWN TotalNodes=1
"""


def test_partitions_from_scontrol() -> None:
    assert partitions_from_scontrol(SCONTROL) == {
        "debug": {"max_walltime": "01:00:00", "max_nodes": 4, "default": True},
        "long": {"max_nodes": 3, "min_nodes": 2, "exclusive": True},
    }
    assert partitions_from_scontrol("") == {}


@pytest.mark.slurm
def test_partitions_of_a_real_slurm(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    listing = subprocess.run(
        ["scontrol", "show", "partition", "--oneliner"],
        env={**os.environ, **slurm_cluster.env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    partitions = partitions_from_scontrol(listing)
    assert partitions["batch"]["default"]
    assert partitions["short"]["max_walltime"] == "00:02:00"
    assert partitions["single"]["max_nodes"] == 1
    document = site_document(probe_node(), "real", as_of="2026-09-01", partitions=partitions)
    path = tmp_path / "real.yaml"
    path.write_text(yaml.safe_dump(document))
    scheduling = get_machine(path).scheduling
    assert scheduling.default_partition == "batch"
    assert scheduling.longest_walltime(1) == 3600
    assert [v.certain for v in scheduling.check(2, 121, "short")] == [True]
    assert scheduling.check(2, 120, "short") == []
    assert len(scheduling.check(2, 60, "single")) == 1


# ---- switches ------------------------------------------------------------------------------


def test_switch_groups_from_slurm() -> None:
    assert switch_groups_of(["c.l1.n1", "c.l2.n2", "c.l1.n3", "d.l1.n4"]) == (0, 1, 0, 2)
    assert switch_groups_of(["n1", "n2"]) == (0, 0)
    assert switch_groups_of([]) == ()
