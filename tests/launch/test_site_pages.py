"""docs/sites is what its script writes from the machines' files today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hpctrain.machine import machine_names

DOCS = Path(__file__).parents[2] / "docs"


def test_pages_of_machines_are_in_step() -> None:
    found = importlib.util.spec_from_file_location("make_site_pages", DOCS / "make_site_pages.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    pages = module.pages()
    assert set(pages) == {f"{name}.md" for name in machine_names() if name != "local"} | {
        "README.md"
    }
    for name, text in pages.items():
        there = (DOCS / "sites" / name).read_text(encoding="utf-8")
        assert there == text, f"{name}: run python docs/make_site_pages.py"
