"""What docs/machines.md and docs/placement.md print is what the code says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from hpctrain.machine import get_machine, machine_names

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_of_machines() -> None:
    text = (DOCS / "machines.md").read_text()
    for name in machine_names():
        machine = get_machine(name)
        local = machine.kind == "local"
        cells = (
            f"`{name}`",
            machine.title,
            "host" if local else machine.devices_per_node,
            "host" if local else machine.cores_per_rank,
            machine.node.confidence,
            machine.affinity.confidence,
            machine.rendering.confidence,
            machine.scheduling.confidence,
            machine.storage.confidence,
            len(machine.low_confidence()),
        )
        assert f"| {' | '.join(str(cell) for cell in cells)} |" in text


@pytest.mark.parametrize("page", ["machines.md", "placement.md"])
def test_examples_run(page: str) -> None:
    """Lines after >>> are run in order; what they print stands below them."""
    text = (DOCS / page).read_text()
    blocks = re.findall(r"```python\n(>>> .*?)```", text, re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        source, expected = [], []
        for line in block.splitlines():
            if line.startswith((">>> ", "... ")):
                source.append(line[4:])
            else:
                expected.append(line)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("\n".join(source), names)
        assert printed.getvalue().splitlines() == expected


def test_every_block_of_a_file_is_described() -> None:
    text = (DOCS / "machines.md").read_text()
    for block in ("node", "network", "links", "affinity", "launch", "environment", "scheduling",
                  "storage", "containers"):  # fmt: skip
        assert f"| `{block}` |" in text
