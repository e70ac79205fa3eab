"""The house holds: layers import downhill, the wheel is whole, types and style are clean."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TOP_LEVEL = ("io", "launchers", "slurm")


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def packages_on_disk() -> set[str]:
    found = set()
    for folder in ("hpctrain", *TOP_LEVEL):
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.add(".".join(parts if parts[0] == "hpctrain" else ("hpctrain", *parts)))
    # hpctrain/io and its sisters are links to the top-level folders: one package, found twice.
    return found


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "tree"
    # A copy, so that no build/ folder of ours or of an earlier run can leak into the wheel.
    tracked = run("git", "ls-files", "-co", "--exclude-standard").stdout.splitlines()
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    done = run(BIN / "pip", "wheel", "-q", "--no-deps", "-w", folder, ".", cwd=source)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_imports_run_downhill():
    done = run(BIN / "lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout
    assert re.search(r"Contracts: \d+ kept, 0 broken", done.stdout)


def test_style():
    for command in (["check", "."], ["format", "--check", "."]):
        done = run(BIN / "ruff", *command)
        assert done.returncode == 0, done.stdout


def test_types(tmp_path):
    # From the root mypy would take our io/ for the standard library's.
    (tmp_path / "hpctrain").symlink_to(ROOT / "hpctrain")
    command = (BIN / "mypy", "--config-file", ROOT / "pyproject.toml", "-p", "hpctrain")
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout


def test_every_package_and_data_file_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    shipped = {str(Path(n).parent).replace("/", ".") for n in names if n.endswith("__init__.py")}
    assert shipped == packages_on_disk()
    for folder in ("hpctrain", *TOP_LEVEL):
        inside = "" if folder == "hpctrain" else "hpctrain/"
        for path in (ROOT / folder).rglob("*"):
            linked = any(parent.is_symlink() for parent in (path, *path.parents))
            if path.is_file() and not linked and path.suffix in {".py", ".yaml", ".j2", ".typed"}:
                assert f"{inside}{path.relative_to(ROOT)}" in names


def test_the_wheel_works_in_a_clean_environment_from_another_directory(wheel, tmp_path):
    done = run(sys.executable, "-m", "venv", tmp_path / "env")
    assert done.returncode == 0, done.stderr
    bin_ = tmp_path / "env" / "bin"
    done = run(bin_ / "pip", "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The dependencies of this environment, without the .pth file of the editable install.
    libraries = sysconfig.get_path("purelib")
    program = bin_ / "hpctrain"
    where = run(
        bin_ / "python", "-c", "import hpctrain.io.checkpoint as m; print(m.__file__)",
        cwd=tmp_path, PYTHONPATH=libraries,
    )  # fmt: skip
    assert where.stdout.startswith(str(tmp_path / "env")), where.stderr
    assert run(program, "init", "job.yaml", cwd=tmp_path, PYTHONPATH=libraries).returncode == 0
    command = (program, "submit", "--dry-run", "job.yaml")
    done = run(*command, cwd=tmp_path, PYTHONPATH=libraries)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["env", "job.yaml"]


def test_the_project_speaks_of_the_project_alone():
    words = r"/root/|\bissue #?[0-9]+|pypi\.org|npmjs"
    done = run("git", "grep", "-nIE", words, "--", ".", ":!tests/house/test_house.py", ":!LICENSE")
    assert done.stdout == ""


def test_nothing_is_left_half_done():
    words = r"assert True\b|pytest\.skip\(\)|NotImplementedError|\bTODO\b|\bFIXME\b|\bXXX\b"
    done = run("git", "grep", "-nE", words, "--", "*.py", ":!tests/house/test_house.py")
    assert done.stdout == ""
