"""Shipped site files: they load, say where they come from, and hold the documented facts."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hpctrain.errors import Exit, UsageError
from hpctrain.machine import (
    Block,
    LinkKind,
    Machine,
    cpu_mask,
    get_machine,
    machine_names,
    parse_cpuset,
)
from hpctrain.machine.blocks import Part

HOURS = 3600
REQUIRED = (
    "alps", "dgx-a100", "dgx-h100", "frontier", "juwels-booster", "leonardo", "local", "lumi-g",
    "marenostrum5", "perlmutter",
)  # fmt: skip


def blocks_of(part: Part) -> list[Block]:
    found = [part] if isinstance(part, Block) else []
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, Part):
            found += blocks_of(value)
    return found


# ---- every file ----------------------------------------------------------------------------


def test_the_promised_machines_are_there() -> None:
    assert set(REQUIRED) <= set(machine_names())


@pytest.mark.parametrize("name", machine_names())
def test_every_block_says_where_it_comes_from(name: str) -> None:
    machine = get_machine(name)
    assert machine.name == name
    blocks = blocks_of(machine)
    assert len(blocks) >= 7
    for block in blocks:
        assert len(block.source) > 3
        assert block.confidence in ("high", "medium", "low")
    facts = machine.facts()
    assert all(fact.provenance.source for fact in facts)
    assert len({fact.path for fact in facts}) == len(facts)


@pytest.mark.parametrize("name", machine_names())
def test_every_doubt_is_about_something(name: str) -> None:
    """A doubt whose path matches nothing is a misspelt one."""
    for block in blocks_of(get_machine(name)):
        document = block.model_dump(by_alias=True, exclude={"doubts"})
        for path in block.doubts:
            at = [document]
            for step in path.split("."):
                at = [
                    inner
                    for value in at
                    for inner in (
                        list(value)
                        if step == "*" and isinstance(value, (list, tuple))
                        else [value[int(step)]]
                        if isinstance(value, (list, tuple)) and int(step) < len(value)
                        else [value[step]]
                        if isinstance(value, dict) and step in value
                        else []
                    )
                ]
            assert at, f"{name}: {type(block).__name__}.doubts: {path} is nowhere"


@pytest.mark.parametrize("name", machine_names())
def test_low_confidence_is_listed_and_not_rendered(name: str) -> None:
    machine = get_machine(name)
    low = {fact.path for fact in machine.low_confidence()}
    assert low == {f.path for f in machine.facts() if f.provenance.confidence == "low"}
    for nodes in (1, 2, 128):
        rendered = [
            *machine.environment(nodes),
            *machine.srun_options(nodes),
            *machine.sbatch_options(nodes),
        ]
        for one in rendered:
            assert one.confidence != "low"
            assert one.source
            assert one.why
        names = [variable.name for variable in machine.environment(nodes)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("name", machine_names())
def test_slots_fit_the_node(name: str) -> None:
    machine = get_machine(name)
    count = machine.devices_per_node
    assert sorted(machine.slot_devices()) == list(range(count))
    assert machine.cores_per_rank >= 1
    assert machine.cores_for(2 * count) <= machine.cores_per_rank
    cores = [
        core for slot in machine.affinity.slots if slot.cores for core in parse_cpuset(slot.cores)
    ]
    assert len(cores) == len(set(cores)), "two ranks share a core"
    if cores:
        assert machine.node.cores is not None
        assert max(cores) < machine.node.cores
    for slot in machine.affinity.slots:
        if slot.cores is not None and machine.affinity.threads_per_rank is not None:
            assert len(parse_cpuset(slot.cores)) == machine.affinity.threads_per_rank


@pytest.mark.parametrize("name", machine_names())
def test_files_hold_no_yaml_1_1_traps(name: str) -> None:
    """Read by plain PyYAML, which counts 12:00:00 in base 60, a file means the same."""
    path = Path(sys.modules[Machine.__module__].__file__ or "").parent / "sites" / f"{name}.yaml"
    document = yaml.safe_load(path.read_text())
    for limits in document.get("scheduling", {}).get("partitions", {}).values():
        assert isinstance(limits.get("max_walltime", ""), str)


def test_a_machine_loads_without_heavy_modules() -> None:
    code = (
        "import sys\n"
        "from hpctrain.machine import get_machine\n"
        "for name in ('frontier', 'local'): get_machine(name)\n"
        "assert not {'numpy', 'torch', 'mpi4py', 'h5py'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("frontier", "frontier"), ("Frontier", "frontier"), ("lumi", "lumi-g"),
        ("lumi_g", "lumi-g"), ("juwels", "juwels-booster"), ("clariden", "alps"),
        ("daint", "alps-daint"), ("mn5", "marenostrum5"), ("perlmutter-gpu", "perlmutter"),
    ],
)  # fmt: skip
def test_names_and_aliases(asked: str, name: str) -> None:
    assert get_machine(asked).name == name


def test_an_alias_means_one_machine() -> None:
    named = list(
        itertools.chain.from_iterable(
            (name, *get_machine(name).aliases) for name in machine_names()
        )
    )
    assert len(named) == len(set(named))


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageError) as caught:
        get_machine("fronteer")
    assert caught.value.exit_code == Exit.USAGE
    assert "did you mean frontier?" in caught.value.message
    assert all(name in caught.value.message for name in machine_names())
    with pytest.raises(UsageError, match=r"'xyzzy' is not known\. Known: alps,"):
        get_machine("xyzzy")


# ---- documented facts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "hours"),
    [(1, 2), (91, 2), (92, 6), (183, 6), (184, 12), (1882, 12), (5645, 12), (9472, 12)],
)
def test_frontier_walltime_bins(nodes: int, hours: int) -> None:
    scheduling = get_machine("frontier").scheduling
    assert scheduling.longest_walltime(nodes) == hours * HOURS
    assert scheduling.check(nodes, hours * HOURS) == []
    (violation,) = scheduling.check(nodes, hours * HOURS + 60)
    assert violation.certain
    assert "docs.olcf.ornl.gov" in violation.source
    assert f"0-{hours:02d}:00:00 is the longest on {nodes} node" in violation.text


def test_frontier_limits_name_what_would_be_right() -> None:
    scheduling = get_machine("frontier").scheduling
    (too_long,) = scheduling.check(50, 6 * HOURS)
    assert "jobs of 92 nodes and more may" in too_long.text
    (too_many,) = scheduling.check(9473)
    assert "9473 nodes asked, 9472 are the most" in too_many.text
    assert scheduling.check(64, 24 * HOURS, "extended") == []
    assert len(scheduling.check(65, 25 * HOURS, "extended")) == 2
    (debug,) = scheduling.check(100, 3 * HOURS, qos="debug")
    assert debug.text.startswith("qos debug: walltime 0-03:00:00 asked")
    (queued,) = scheduling.check(1, HOURS, queued_jobs=101)
    assert "101 jobs in the queue" in queued.text
    assert scheduling.check(1, HOURS, queued_jobs=100) == []
    (account,) = scheduling.check(1, HOURS, account="")
    assert "account" in account.text


def test_limits_of_partition_and_qos_hold_together() -> None:
    scheduling = get_machine("frontier").scheduling
    assert scheduling.longest_walltime(100) == 6 * HOURS
    assert scheduling.longest_walltime(100, qos="debug") == 2 * HOURS
    assert scheduling.longest_walltime(100, qos="of another site") == 6 * HOURS


def test_unknown_partitions_are_a_warning() -> None:
    (violation,) = get_machine("frontier").scheduling.check(10, 99 * HOURS, "new-partition")
    assert not violation.certain
    assert "batch, extended" in violation.text


def test_low_confidence_limits_never_refuse() -> None:
    violations = get_machine("perlmutter").scheduling.check(9, HOURS, qos="debug")
    assert [v.certain for v in violations] == [False, False]


@pytest.mark.parametrize(
    ("qos", "nodes", "hours", "ok"),
    [
        (None, 64, 24, True), (None, 65, 1, False), ("boost_qos_bprod", 64, 1, False),
        ("boost_qos_bprod", 65, 24, True), ("boost_qos_bprod", 257, 1, False),
        ("boost_qos_dbg", 2, 0.5, True), ("boost_qos_dbg", 3, 0.5, False),
        ("boost_qos_lprod", 3, 96, True), ("boost_qos_lprod", 3, 97, False),
    ],
)  # fmt: skip
def test_leonardo_qos(qos: str | None, nodes: int, hours: float, ok: bool) -> None:
    scheduling = get_machine("leonardo").scheduling
    assert (scheduling.check(nodes, int(hours * HOURS), qos=qos) == []) is ok


@pytest.mark.parametrize(("nodes", "minutes"), [(1, 90), (2, 45), (3, 30), (4, 22.5)])
def test_alps_debug_is_counted_in_node_minutes(nodes: int, minutes: float) -> None:
    scheduling = get_machine("alps").scheduling
    assert scheduling.check(nodes, int(minutes * 60), "debug") == []
    assert len(scheduling.check(nodes, int(minutes * 60) + 1, "debug")) == 1
    daint = get_machine("alps-daint").scheduling
    assert daint.longest_walltime(nodes, "debug") == 1800
    assert daint.longest_walltime(1) == 24 * HOURS
    assert scheduling.longest_walltime(1) == 12 * HOURS


def test_lumi_and_marenostrum_limits() -> None:
    lumi = get_machine("lumi-g").scheduling
    assert lumi.check(1024, 48 * HOURS) == []
    assert len(lumi.check(1025, 49 * HOURS)) == 2
    assert lumi.check(4, 72 * HOURS, "small-g") == []
    (many,) = lumi.check(1, HOURS, "dev-g", queued_jobs=3)
    assert "2 are allowed" in many.text
    mn5 = get_machine("marenostrum5").scheduling
    assert mn5.check(100, 72 * HOURS, qos="acc_ehpc") == []
    assert len(mn5.check(101, HOURS, qos="acc_ehpc")) == 1
    assert len(mn5.check(9, HOURS, qos="acc_debug")) == 1


def environment(name: str, nodes: int) -> dict[str, str]:
    return {variable.name: variable.value for variable in get_machine(name).environment(nodes)}


def test_frontier_network_differs_on_one_node() -> None:
    assert environment("frontier", 1)["NCCL_NET"] == "Socket"
    assert environment("frontier", 2)["NCCL_NET"] == "OFI"
    for nodes in (1, 2, 92):
        variables = environment("frontier", nodes)
        assert variables["FI_MR_CACHE_MONITOR"] != "memhooks"
        assert variables["NCCL_SOCKET_IFNAME"] == "hsn0,hsn1,hsn2,hsn3"


@pytest.mark.parametrize("name", machine_names())
@pytest.mark.parametrize("nodes", [1, 2, 92])
def test_alt_read_comes_with_its_network_option(name: str, nodes: int) -> None:
    """HPE requires --network=disable_rdzv_get wherever FI_CXI_RDZV_PROTO=alt_read is set."""
    machine = get_machine(name)
    flagged = [
        any(option.tokens == ("--network=disable_rdzv_get",) for option in options)
        for options in (machine.srun_options(nodes), machine.sbatch_options(nodes))
    ]
    alt_read = environment(name, nodes).get("FI_CXI_RDZV_PROTO") == "alt_read"
    assert flagged == [alt_read, alt_read]
    assert not (alt_read and nodes == 1), "not on one node"


def test_hostile_values_are_kept_whole() -> None:
    assert environment("alps", 2)["NCCL_NET"] == "AWS Libfabric"
    assert environment("alps", 2)["NCCL_PROTO"] == "^LL128"
    constraint = get_machine("perlmutter-80g").sbatch_options(1)[0]
    assert constraint.tokens == ("-C", "gpu&hbm80g")
    expanding = [v for v in get_machine("lumi-g").environment(1) if v.expand]
    assert all("${" in variable.value for variable in expanding)
    assert not any(
        "$" in v.value and not v.expand
        for n in machine_names()
        for v in get_machine(n).environment(2)
    )


def test_lumi_masks_are_the_slots() -> None:
    machine = get_machine("lumi-g")
    (bind,) = [o.tokens[0] for o in machine.srun_options(2) if "cpu-bind" in o.tokens[0]]
    masks = bind.removeprefix("--cpu-bind=mask_cpu:").split(",")
    assert masks == [cpu_mask(parse_cpuset(slot.cores or "")) for slot in machine.affinity.slots]


def test_frontier_node() -> None:
    machine = get_machine("frontier")
    assert machine.devices_per_node == 8
    assert machine.cores_per_rank == 7
    assert machine.node.device.memory_bytes == 64 * 2**30
    assert machine.node.injection_bandwidth == 4 * 25e9
    assert machine.slot_devices() == (4, 5, 2, 3, 6, 7, 0, 1)
    assert machine.affinity.device_index(3) == 0, "each rank sees only its own device"
    assert machine.mpi is None
    assert machine.fact("node.device.peak_flops.bf16").provenance.confidence == "low"
    assert machine.fact("node.device.peak_flops.fp64").provenance.confidence == "high"
    stripe = machine.storage.stripe_for
    assert stripe(100 * 2**30) is None
    rules = [stripe(size * 2**40) for size in (1, 8, 100)]
    assert [rule.count for rule in rules if rule] == [16, 64, 128]


def test_device_numbers_where_all_are_visible() -> None:
    assert [get_machine("perlmutter").affinity.device_index(r) for r in range(4)] == [3, 2, 1, 0]
    assert [get_machine("lumi-g").affinity.device_index(r) for r in range(8)] == list(range(8))


# ---- links ---------------------------------------------------------------------------------


def test_links_between_ranks_of_frontier() -> None:
    machine = get_machine("frontier")
    # Slots 0 and 1 are GCDs 4 and 5, one module; slot 2 is on another module and card.
    assert machine.link_class(0, 1) is LinkKind.PACKAGE
    assert machine.link_class(0, 2) is LinkKind.NODE
    assert machine.link_class(0, 8) is LinkKind.RAIL
    assert machine.link_class(1, 8) is LinkKind.RAIL
    assert machine.link_class(0, 10) is LinkKind.SWITCH_GROUP
    assert machine.link_class(0, 8, groups=[0, 1]) is LinkKind.GLOBAL
    assert machine.bandwidth(0, 1) == 200e9
    assert machine.bandwidth(0, 2) == 50e9
    assert machine.bandwidth(0, 8) == 25e9
    assert machine.link(LinkKind.GLOBAL).confidence == "low"


def test_groups_of_switches_by_size() -> None:
    machine = get_machine("juwels-booster")
    assert machine.switch_groups(97)[46:50] == (0, 0, 1, 1)
    assert machine.link_class(47 * 4, 48 * 4) is LinkKind.GLOBAL
    assert machine.link_class(0, 4) is LinkKind.RAIL
    assert get_machine("frontier").switch_groups(3) == (0, 0, 0), "size of a group not stated"


def test_ranks_that_share_a_device() -> None:
    local = get_machine("local")
    many = 4 * local.devices_per_node
    assert local.link_class(0, 1, many) is LinkKind.DEVICE
    local.check_ranks_per_node(many)


def test_unknown_speeds_stay_unknown() -> None:
    machine = get_machine("marenostrum5")
    assert machine.bandwidth(0, 1) is None
    assert machine.node.device.peak_flops["bf16"] is None
    assert get_machine("leonardo").node.device.peak_flops["bf16"] is None
