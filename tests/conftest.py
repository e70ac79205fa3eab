"""Folders whose files take minutes come first, so that no process is left alone with one."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FIRST = ("parallel", "faults", "io", "e2e", "train", "plan", "scaling")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=place)
