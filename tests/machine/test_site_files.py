"""A user's own site file: what it may say, and what is said about its faults."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.errors import UsageError
from hpctrain.machine import get_machine, machine_names
from hpctrain.machine.catalogue import SITES

MINIMAL = """
name: mine
title: my cluster
node: {source: me, confidence: high, devices: 2, device: {name: G, vendor: nvidia}}
network: {source: me, confidence: high, fabric: ethernet}
affinity: {source: me, confidence: high, visible: all}
launch: {source: me, confidence: high}
environment: {source: me, confidence: high}
scheduling: {source: me, confidence: high}
storage: {source: me, confidence: high}
"""


def write(directory: Path, text: str, name: str = "mine.yaml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def fault(directory: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        get_machine(write(directory, text))
    return caught.value.message


def test_a_minimal_file(tmp_path: Path) -> None:
    machine = get_machine(str(write(tmp_path, MINIMAL)))
    assert machine.name == "mine"
    assert machine.devices_per_node == 2
    assert machine.slot_devices() == (0, 1)
    assert machine.environment(3) == []
    assert machine.scheduling.check(10_000, 10**9) == []
    assert machine.bandwidth(0, 2) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("devices: 2", "devices: 0", "mine.yaml:4: node.devices: "),
        ("devices: 2", "devises: 2", "node.devises: no such key; did you mean devices?"),
        ("devices: 2,", "", "node.devices: is missing"),
        ("vendor: nvidia", "vendor: acme", "node.device.vendor: "),
        ("visible: all", "visible: some", "mine.yaml:6: affinity.visible: "),
        ("source: me, confidence: high, visible", "confidence: high, visible",
         "affinity.source: is missing"),
        ("confidence: high, fabric", "confidence: sure, fabric", "network.confidence: "),
        ("title: my cluster", "title: [1]", "mine.yaml:3: title: "),
        ("name: mine", "name: My Cluster", "mine.yaml:2: name: "),
        ("storage: {", "storage: {checkpoint_area: fast, ", "'fast' is not among"),
        ("visible: all", "visible: all, slots: [{device: 2}]",
         "affinity.slots.0.device is 2, the node has devices 0 to 1"),
        ("visible: all", "visible: all, slots: [{device: 0}, {device: 0}]",
         "give one device to two ranks"),
        ("visible: all", "visible: all, slots: [{device: 0, cores: 7-3}]", "runs backwards"),
        ("devices: 2", "devices: 2, packages: [[0, 1, 2]]", "each device lies in exactly one"),
        ("devices: 2", "devices: 2, nics: [{devices: [5]}]", "names the devices [5]"),
        ("devices: 2", "devices: 2, cores: 8, usable_cores: 9", "usable_cores 9 is more than"),
        ("scheduling: {", "scheduling: {partitions: {a: {max_walltime: 43200}}, ",
         'a walltime is text such as "12:00:00"'),
        ("scheduling: {", "scheduling: {partitions: {a: {max_walltime: 1:30}}, ", "ambiguous"),
        ("scheduling: {", "scheduling: {default_partition: b, partitions: {a: {}}, ",
         "default_partition 'b' is not among a"),
        ("environment: {", "environment: {variables: [{name: A, value: x}], ",
         "environment.variables.0.why: is missing"),
        ("environment: {", "environment: {variables: [{name: A-B, value: x, why: y}], ",
         "environment.variables.0.name: "),
        ("environment: {", "environment: {variables: [{name: A, value: x, why: y}, "
         "{name: A, value: z, why: y, when: {min_nodes: 4}}], ",
         "A has two values for the same node count ('x' and 'z')"),
        ("launch: {", "launch: {srun: [{option: exclusive, why: y}], ", "launch.srun.0.option: "),
        ("name: mine", "name: mine\nname: yours", "mine.yaml:3:1: the key 'name' is given twice"),
        ("name: mine", "name: [mine", "mine.yaml:"),
    ],
)  # fmt: skip
def test_faults_name_file_line_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MINIMAL
    found = fault(tmp_path, MINIMAL.replace(old, new, 1))
    assert message in found
    assert str(tmp_path / "mine.yaml") in found


def test_bins_must_not_overlap(tmp_path: Path) -> None:
    text = MINIMAL.replace(
        "scheduling: {",
        "scheduling: {partitions: {a: {bins: [{min_nodes: 1, max_nodes: 4, max_walltime: 1h}, "
        "{min_nodes: 4, max_nodes: 9, max_walltime: 2h}]}}, ",
    )
    assert "walltime bins overlap: 1-4 and 4-9 nodes" in fault(tmp_path, text)


def test_all_faults_at_once(tmp_path: Path) -> None:
    text = MINIMAL.replace("devices: 2", "devices: -1").replace("visible: all", "visible: no")
    found = fault(tmp_path, text).splitlines()
    assert len(found) == 2
    assert "found 'no'" in found[1], "YAML 1.2: no is text, not false"


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        get_machine(tmp_path / "absent.yaml")
    with pytest.raises(UsageError, match="a mapping was expected, found a list"):
        get_machine(write(tmp_path, "- 1"))
    with pytest.raises(UsageError, match="a mapping was expected, found nothing"):
        get_machine(write(tmp_path, ""))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        get_machine(tmp_path / "bytes.yaml")
    with pytest.raises(UsageError, match="could not determine a constructor"):
        get_machine(write(tmp_path, "name: !!python/object/apply:os.system [ls]"))


def test_a_file_may_start_from_another(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
base: frontier
name: our-frontier
title: with our partitions
scheduling:
  source: scontrol show partition
  as_of: "2026-09-01"
  confidence: high
  partitions: {batch: {max_walltime: "01:00:00"}, ours: {max_nodes: 4}}
""",
    )
    machine = get_machine(path)
    assert machine.name == "our-frontier"
    assert machine.aliases == ()
    assert machine.node == get_machine("frontier").node
    limits = machine.scheduling.partitions
    assert set(limits) == {"batch", "ours", "extended"}
    assert limits["batch"].longest_walltime(100) == 3600, "the base's bins hold as well"
    assert machine.scheduling.provenance().source == "scontrol show partition"


def test_the_most_specific_doubt_holds(tmp_path: Path) -> None:
    text = MINIMAL.replace(
        "devices: 2, device: {name: G, vendor: nvidia}",
        "devices: 2, device: {name: G, vendor: nvidia, peak_flops: {bf16: 1e12, fp8: 2e12}}, "
        "doubts: {device: {confidence: medium}, device.peak_flops.fp8: {confidence: low, "
        "source: a friend, as_of: '2026'}}",
    )
    machine = get_machine(write(tmp_path, text))
    said = {fact.path: str(fact.provenance) for fact in machine.facts()}
    assert said["node.devices"] == "me (high confidence)"
    assert said["node.device.peak_flops.bf16"] == "me (medium confidence)"
    assert said["node.device.peak_flops.fp8"] == "a friend, 2026 (low confidence)"
    assert [fact.path for fact in machine.low_confidence()] == ["node.device.peak_flops.fp8"]


def test_low_confidence_is_rendered_only_when_asked_for(tmp_path: Path) -> None:
    text = MINIMAL.replace(
        "environment: {",
        "environment: {variables: [{name: SURE, value: a, why: y}, {name: MAYBE, value: b, "
        "why: y, confidence: low}, {name: HEARD, value: c, why: y}], doubts: {variables.2: "
        "{confidence: low, source: rumour}}, ",
    ).replace("launch: {", "launch: {srun: [{option: --maybe=1, why: y, confidence: low}], ")
    machine = get_machine(write(tmp_path, text))
    assert [v.name for v in machine.environment(1)] == ["SURE"]
    asked = machine.environment(1, include_low=True)
    assert [(v.name, v.confidence, v.source) for v in asked] == [
        ("SURE", "high", "me"), ("MAYBE", "low", "me"), ("HEARD", "low", "rumour"),
    ]  # fmt: skip
    assert machine.srun_options(1) == []
    assert [o.tokens for o in machine.srun_options(1, include_low=True)] == [("--maybe=1",)]


def test_changes_need_a_source(tmp_path: Path) -> None:
    text = "base: frontier\nname: a\nscheduling: {max_queued_jobs: 5}\n"
    assert "scheduling: changes values of a block of its base without saying" in fault(
        tmp_path, text
    )


def test_bases_that_lead_nowhere(tmp_path: Path) -> None:
    assert "neither a known machine nor a file" in fault(tmp_path, "base: frontyard\nname: a\n")
    assert "leads back" in fault(tmp_path, "base: mine.yaml\nname: a\n")
    write(tmp_path, "base: mine.yaml\nname: b\n", "other.yaml")
    assert "leads back" in fault(tmp_path, "base: other.yaml\nname: a\n")
    assert "a machine's name or a path was expected" in fault(tmp_path, "base: [1]\n")


def test_sizes_and_times_survive_a_round_trip(tmp_path: Path) -> None:
    for name in machine_names():
        machine = get_machine(name)
        document = machine.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if machine.kind == "local":
            continue
        path = write(tmp_path, yaml.safe_dump(document, sort_keys=False), f"{name}.yaml")
        assert get_machine(path) == machine


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=4), st.just([]), st.just({}),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_files_never_end_in_a_traceback(data: st.DataObject, tmp_path: Path) -> None:
    name = data.draw(st.sampled_from(("frontier", "leonardo", "dgx-a100")))
    document: Any = yaml.load((SITES / f"{name}.yaml").read_text(), yaml.CSafeLoader)
    document = copy.deepcopy(document)  # anchors make parts of it shared
    for _ in range(data.draw(st.integers(1, 3))):
        at = document
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
                at = at[key]
                continue
            action = data.draw(st.sampled_from(("replace", "delete", "rename")))
            if action == "replace":
                at[key] = data.draw(JUNK)
            elif action == "delete":
                del at[key]
            elif isinstance(at, dict):
                at[f"{key}x"] = at.pop(key)
            break
    path = tmp_path / "mutated.yaml"
    path.write_text(yaml.dump(document, Dumper=yaml.CSafeDumper, allow_unicode=True))
    faults = ""
    try:
        machine = get_machine(path)
        machine.environment(2)
        machine.scheduling.check(2, 3600)
        machine.low_confidence()
    except UsageError as error:
        faults = error.message
    assert not faults or str(path) in faults
