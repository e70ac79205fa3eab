"""Job files mutated at random: a message and a code, never a traceback, nothing created."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.cli import main

JOB: dict[str, Any] = {
    "name": "tiny",
    "machine": "local",
    "nodes": 2,
    "ranks_per_node": 2,
    "model": {"layers": 2, "hidden": 32, "heads": 2, "vocab_size": 256, "activation": "swiglu"},
    "parallel": {"data": "auto", "sharding": "zero3"},
    "data": {"path": "tokens.h5", "sequence_length": 32},
    "train": {
        "steps": 20,
        "global_batch": 8,
        "lr": 1e-3,
        "betas": [0.9, 0.95],
        "schedule": {"kind": "wsd", "warmup_steps": 2},
    },
    "checkpoint": {"every": 10, "keep": 2},
    "slurm": {
        "time": "1h30m",
        "margin": "3m",
        "memory": "4GiB",
        "constraint": "gpu&hbm",
        "comment": "a comment",
        "mail_user": "me@site.org",
        "modules": ["PrgEnv-gnu", "rocm/6.2"],
        "mpi": "pmi2",
        "sbatch_options": ["--hint=nomultithread"],
        "srun_options": ["--cpu-bind=cores"],
    },
    "env": {"A": "1,2", "B": "x y"},
}
TEXT = yaml.safe_dump(JOB)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = Path.cwd()
    directory = tmp_path_factory.mktemp("fuzz")
    os.chdir(directory)
    yield directory
    os.chdir(before)


def submit(here: Path, text: bytes, *more: str) -> None:
    (here / "job.yaml").write_bytes(text)
    result = CliRunner().invoke(main, ["submit", "job.yaml", "--dry-run", *more])
    assert result.exit_code in (0, 2, 3), result.output
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in here.iterdir()) == ["job.yaml"]
    if result.exit_code == 0:
        assert result.stdout.startswith("#!/bin/bash\n")
    else:
        assert result.stdout == ""
        assert result.stderr.strip().splitlines()[-1]
        assert "hpctrain: error: " in result.stderr


def fuzz(count: int) -> Any:
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@fuzz(150)
@given(data=st.data())
def test_flipped_and_inserted_bytes(here: Path, data: st.DataObject) -> None:
    text = bytearray(TEXT.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(text) - 1))
        if data.draw(st.booleans()):
            text[where] = data.draw(st.integers(0, 255))
        else:
            text[where:where] = data.draw(st.binary(min_size=1, max_size=6))
    submit(here, bytes(text))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-(10**300), 10**300),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["1e999", "-1", "0", "1:30", "1e-400", "9" * 50, "auto", "no", "~", "%s%d", "../../x",
         "${HOME}", "a:b", "gpt2-124m", "\x00", "\udcff", "é" * 70, "x" * 5000, "1e9", "12:00:00"]
    ),
)  # fmt: skip
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def _paths(tree: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in tree.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += _paths(value, (*prefix, key))
    return found


def _changed(path: tuple[str, ...], change: Any) -> dict[str, Any]:
    import copy

    tree = copy.deepcopy(JOB)
    parent = tree
    for part in path[:-1]:
        parent = parent[part]
    change(parent, path[-1])
    return tree


def _dump(tree: Any) -> bytes:
    text: str = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
    return text.encode("utf-8", "surrogatepass")


@fuzz(200)
@given(path=st.sampled_from(_paths(JOB)), value=TREES)
def test_values_of_another_kind(here: Path, path: tuple[str, ...], value: Any) -> None:
    submit(here, _dump(_changed(path, lambda parent, key: parent.update({key: value}))))


@fuzz(60)
@given(path=st.sampled_from(_paths(JOB)), name=st.text(max_size=12))
def test_renamed_keys(here: Path, path: tuple[str, ...], name: str) -> None:
    submit(here, _dump(_changed(path, lambda parent, key: parent.update({name: parent.pop(key)}))))


@fuzz(40)
@given(path=st.sampled_from(_paths(JOB)))
def test_removed_keys(here: Path, path: tuple[str, ...]) -> None:
    submit(here, _dump(_changed(path, lambda parent, key: parent.pop(key))))


@fuzz(80)
@given(path=st.sampled_from(_paths(JOB)), value=st.one_of(SCALARS.map(str), st.text(max_size=30)))
def test_overrides(here: Path, path: tuple[str, ...], value: str) -> None:
    submit(here, TEXT.encode(), "--set", f"{'.'.join(path)}={value}")
    submit(here, TEXT.encode(), "--set", value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"just words",
        b"\xff\xfe",
        b"%YAML 9.9\n---\n",
        b"a: &a [*a, *a]",
        b"--- {}\n--- {}\n",
        b"[" * 2000,
        b"{a: " * 2000 + b"1" + b"}" * 2000,
        b"train: {steps: !!python/object/apply:os.system ['true']}",
        b"? [a, b]\n: 1\n",
        TEXT.encode().replace(b"nodes: 2", b"nodes: 2\nnodes: 3"),
        TEXT.encode().replace(b"nodes: 2", b"nodes: " + b"9" * 30),
        TEXT.encode().replace(b"steps: 20", b"steps: 1e18"),
        b'name: "\\ud800"\n' + TEXT.encode().replace(b"name: tiny\n", b""),
        b'env: {A: "\\ud800"}\n' + TEXT.encode().partition(b"env:")[2].partition(b"\n")[2],
    ],
)
def test_texts_that_once_broke_a_reader(here: Path, text: bytes) -> None:
    submit(here, text)


@pytest.mark.parametrize(
    "override", ["train.lr=" + "9" * 400, "slurm.margin=" + "9" * 400, "slurm.margin=1e400"]
)
def test_numbers_beyond_floating_point(here: Path, override: str) -> None:
    submit(here, TEXT.encode(), "--set", override)
