"""The file as other programs see it: plain h5py, the manifest's JSON, raw bytes."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xxhash
from checkpoint_rank_programs import numbers, part, whole

from hpctrain.errors import CheckpointError
from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.comm import SoloCommunicator
from hpctrain.io.shards import Box, TensorShard, coverage


def bfloat16(values: list[float]) -> np.ndarray:
    """Raw bits by the definition: the upper half of a float32, for values that are exact."""
    bits = [struct.unpack("<I", struct.pack("<f", value))[0] for value in values]
    assert all(word & 0xFFFF == 0 for word in bits)
    return np.array([word >> 16 for word in bits], np.uint16)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[CheckpointStore, Path]:
    store = CheckpointStore(tmp_path / "checkpoints", SoloCommunicator())
    shards = [
        whole("model/layers.0.weight", numbers([6, 10])),
        whole("model/half", bfloat16([1.0, -2.5, 1.5 * 2.0**127, 0.0]), "bfloat16"),
        whole("model/eighth", np.arange(256, dtype=np.uint8), "float8_e4m3fn"),
        whole("model/flags", np.array([True, False, True]), "bool"),
        whole("model/none", np.zeros((0, 4), np.float32)),
        whole("optimizer/step/layers.0.weight", np.array(3.0, np.float32)),
        whole("optimizer/exp_avg/layers.0.weight", numbers([2100, 2001], 5)),
    ]
    scalars = {"step": 12, "tokens": 4096, "job": "tēst", "schedule": {"kind": "cosine"}}
    store.save(12, shards, scalars=scalars, per_rank={"torch": np.arange(5056) % 251})
    return store, tmp_path / "checkpoints" / "step00000012"


def test_plain_h5py_reads_every_number(saved: tuple[CheckpointStore, Path]) -> None:
    with h5py.File(saved[1] / "tensors.h5") as file:
        assert np.array_equal(file["model/layers.0.weight"][...], numbers([6, 10]))
        assert np.array_equal(file["optimizer/exp_avg/layers.0.weight"], numbers([2100, 2001], 5))
        assert file["optimizer/step/layers.0.weight"][()] == 3.0
        assert file["model/none"].shape == (0, 4)
        assert file["model/flags"][...].tolist() == [True, False, True]
        assert file["model/eighth"][...].tolist() == list(range(256))
        assert file["model/eighth"].attrs["torch_dtype"] == "float8_e4m3fn"
        scalars = json.loads(file["hpctrain/scalars"][()])
        assert (scalars["step"], scalars["job"]) == (12, "tēst")
        assert scalars["schedule"] == {"kind": "cosine"}
        assert np.array_equal(file["hpctrain/rank_state/torch"][0], np.arange(5056) % 251)
        assert dict(file.attrs) == {
            "format": "hpctrain-checkpoint", "format_version": 1, "world_size": 1,
        }  # fmt: skip


def test_h5dump_prints_the_numbers(saved: tuple[CheckpointStore, Path]) -> None:
    """HDF5's own tool, of whatever version it is: headers, bfloat16, strings."""
    if shutil.which("h5dump") is None:
        pytest.skip("SKIPPED: h5dump is not installed (Debian: hdf5-tools)")
    path = saved[1] / "tensors.h5"

    def dumped(*options: str) -> str:
        command = ["h5dump", "-w", "100", *options, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    half = dumped("-d", "/model/half")
    assert "DATASPACE  SIMPLE { ( 4 ) / ( 4 ) }" in half
    assert "1, -2.5, 2.55212e+38, 0" in half
    assert '"bfloat16"' in half
    rows = dumped("-d", "/model/layers.0.weight", "-s", "5,7", "-c", "1,3", "-y")
    assert "57, 58, 59" in rows
    assert "H5T_IEEE_F32LE" in rows
    assert '"{"step": 12, "tokens": 4096,' in dumped("-d", "/hpctrain/scalars")
    listed = dumped("-n")
    for name in ("model/layers.0.weight", "optimizer/step/layers.0.weight", "hpctrain/scalars"):
        assert f"dataset    /{name}\n" in listed


def test_bfloat16_reads_as_the_float32_it_stands_for(saved: tuple[CheckpointStore, Path]) -> None:
    with h5py.File(saved[1] / "tensors.h5") as file:
        half = file["model/half"]
        assert half.dtype == np.float32
        assert half[...].tolist() == [1.0, -2.5, 1.5 * 2.0**127, 0.0]
        assert half.id.get_type().get_size() == 2
        assert half.attrs["torch_dtype"] == "bfloat16"


def test_reader_gives_raw_bits_scalars_and_rank_state(saved: tuple[CheckpointStore, Path]) -> None:
    with saved[0].open(12) as reader:
        assert reader.scalars["tokens"] == reader.manifest.tokens == 4096
        assert reader.tensors()["model/half"] == ((4,), "bfloat16")
        assert (
            reader.read("model/half", (1,), (2,)).tolist()
            == bfloat16([-2.5, 1.5 * 2.0**127]).tolist()
        )
        assert reader.read("model/flags", (0,), (3,)).tolist() == [True, False, True]
        assert reader.read("model/none", (0, 0), (0, 4)).shape == (0, 4)
        assert reader.read("optimizer/step/layers.0.weight", (), ()) == 3.0
        state = reader.rank_state(0)
        assert state is not None and np.array_equal(state["torch"], np.arange(5056) % 251)
        assert reader.rank_state(1) is None


def test_manifest_alone_is_enough_for_another_reader(saved: tuple[CheckpointStore, Path]) -> None:
    """docs/checkpoint-format.md, read by twenty lines that know nothing of hpctrain."""
    folder = saved[1]
    text = (folder / "manifest.json").read_bytes()
    seal = (folder / "manifest.json.xxh3").read_text()
    assert seal == f"XXH3 (manifest.json) = {xxhash.xxh3_64_hexdigest(text)}\n"
    manifest = json.loads(text)
    assert (manifest["step"], manifest["world_size"]) == (12, 1)
    assert 1.7e12 < manifest["sequence"] < time.time() * 1e3 + 1
    data = (folder / "tensors.h5").read_bytes()
    assert manifest["files"][0]["bytes"] == len(data)
    itemsize = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "bool": 1, "int64": 8}
    under_checksum = np.zeros(len(data), np.int64)
    for tensor in manifest["tensors"].values():
        size = itemsize[tensor["torch_dtype"]]
        for extent in tensor["extents"]:
            assert "strides" not in extent  # one rank wrote all: every extent is dense
            count = int(np.prod(extent["shape"])) * size
            raw = data[extent["start"] : extent["start"] + count]
            assert xxhash.xxh3_64_hexdigest(raw) == extent["xxh3"]
            under_checksum[extent["start"] : extent["start"] + count] += 1
    assert under_checksum.max() == 1
    rest = np.frombuffer(data, np.uint8)[under_checksum == 0].tobytes()
    assert xxhash.xxh3_64_hexdigest(rest) == manifest["files"][0]["structure_xxh3"]
    wide = manifest["tensors"]["optimizer/exp_avg/layers.0.weight"]["extents"]
    # 16 MiB hold 2095 rows of 2001 float32: 2095 * 2001 * 4 <= 2^24 < 2096 * 2001 * 4.
    assert [extent["shape"] for extent in wide] == [[2096, 2001], [4, 2001]]


def programs_of_the_page() -> dict[str, Any]:
    """The reader and the writer that stand in docs/checkpoint-format.md."""
    page = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {}
    for block in blocks:
        if "\ndef " in block:
            exec(block, found)
    return found


def test_the_pages_reader_reads_what_we_write(saved: tuple[CheckpointStore, Path]) -> None:
    page = programs_of_the_page()
    page["DTYPES"]["float8_e4m3fn"] = "u1"
    found = page["read"](saved[1])
    assert np.array_equal(found["optimizer/exp_avg/layers.0.weight"], numbers([2100, 2001], 5))
    assert found["model/half"].tolist() == bfloat16([1.0, -2.5, 1.5 * 2.0**127, 0.0]).tolist()
    assert found["hpctrain/rank_state/torch"].shape == (1, 5056)
    data = bytearray((saved[1] / "tensors.h5").read_bytes())
    data[-5000] ^= 1
    (saved[1] / "tensors.h5").write_bytes(data)
    with pytest.raises(AssertionError, match="damaged"):
        page["read"](saved[1])


def test_we_read_what_the_pages_writer_writes(tmp_path: Path) -> None:
    tensors = {"model/w": numbers([5, 7]), "model/count": np.array([3, 2**40])}
    programs_of_the_page()["write"](tmp_path, 30, 4, tensors, {"tokens": 5})
    store = CheckpointStore(tmp_path, SoloCommunicator())
    assert store.latest_good() == (30, [])
    with store.open(30) as reader:
        assert reader.scalars == {"tokens": 5, "step": 30}
        assert reader.tensors()["model/count"] == ((2,), "int64")
        assert np.array_equal(reader.read("model/w", (1, 2), (3, 4)), numbers([5, 7])[1:4, 2:6])
    # The next of ours is the newer one.
    store.save(20, [whole("model/w", numbers([5, 7]))], scalars={}, per_rank={})
    assert store.latest_good() == (20, [])


def test_latest_names_the_newest(saved: tuple[CheckpointStore, Path]) -> None:
    assert (saved[1].parent / "latest").read_text() == "step00000012\n"


def test_replaced_step_and_retention_follow_the_commits_not_the_numbers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, SoloCommunicator(), keep=2)

    def save(step: int, value: float) -> None:
        array = np.full(3, value, np.float32)
        store.save(step, [whole("model/w", array)], scalars={}, per_rank={})

    for step in (10, 20, 30):
        save(step, step)
    assert store.steps() == [20, 30]
    # Training went back to 20: what it writes from now on is the newest.
    save(25, 25)
    assert store.steps() == [25, 30]
    assert store.latest_good() == (25, [])
    save(30, 31)
    assert store.steps() == [25, 30]
    assert store.latest_good() == (30, [])
    with store.open(30) as reader:
        assert reader.read("model/w", (0,), (3,)).tolist() == [31, 31, 31]
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step00000025", "step00000030"}


def test_mutating_after_save_does_not_reach_the_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, SoloCommunicator())
    array = numbers([1000])
    store.save(1, [whole("model/w", array)], scalars={}, per_rank={})
    array += 1
    with store.open(1) as reader:
        assert np.array_equal(reader.read("model/w", (0,), (1000,)), numbers([1000]))


def test_strided_arrays_are_written_by_value(tmp_path: Path) -> None:
    full = numbers([50, 40])
    store = CheckpointStore(tmp_path, SoloCommunicator())
    store.save(1, [whole("model/t", full.T)], scalars={}, per_rank={})
    with h5py.File(tmp_path / "step00000001" / "tensors.h5") as file:
        assert np.array_equal(file["model/t"][...], full.T)


def test_reader_names_what_does_not_fit(saved: tuple[CheckpointStore, Path]) -> None:
    with saved[0].open(12) as reader:
        with pytest.raises(
            CheckpointError, match=r"'model/layers.0.wieght'; did you mean 'model/l"
        ):
            reader.read("model/layers.0.wieght", (0, 0), (1, 1))
        for offsets, shape in (((0,), (6,)), ((0, 0), (7, 10)), ((-1, 0), (1, 1))):
            with pytest.raises(CheckpointError, match=r"has shape \(6, 10\)"):
                reader.read("model/layers.0.weight", offsets, shape)
        reader.check({"model/half": ((4,), "bfloat16")})
        with pytest.raises(CheckpointError) as caught:
            reader.check({"model/half": ((5,), "bfloat16"), "model/other": ((1,), "float32")})
        assert "has bfloat16 [4], the model wants bfloat16 [5]" in caught.value.message
        assert "there is no tensor 'model/other'" in caught.value.message
    with pytest.raises(CheckpointError, match="no checkpoint of step 13"):
        saved[0].open(13)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model//w", (3,), (0,), np.zeros(3, np.float32), "float32"), "cannot name a tensor"),
        (("hpctrain/w", (3,), (0,), np.zeros(3, np.float32), "float32"), "cannot name a tensor"),
        (("model/w", (3,), (1,), np.zeros(3, np.float32), "float32"), "lies outside"),
        (("model/w", (3, 1), (0,), np.zeros(3, np.float32), "float32"), "number of dimensions"),
        (("model/w", (3,), (0,), np.zeros(3, np.float32), "bfloat16"), "arrives as numpy uint16"),
        (("model/w", (3,), (0,), np.zeros(3, np.float32), "quint4x2"), "is none of"),
    ],
)
def test_impossible_shards_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorShard(*arguments)


@pytest.mark.parametrize(
    ("shape", "boxes", "fault"),
    [
        ((6, 4), [((0, 0), (2, 4)), ((2, 0), (4, 4)), ((6, 0), (0, 4))], None),
        ((6, 4), [((0, 0), (6, 1)), ((0, 1), (6, 3))], None),
        ((6, 4), [((0, 0), (2, 4)), ((3, 0), (3, 4))], "4 of 24 elements are given by no rank"),
        ((6, 4), [((0, 0), (4, 4)), ((3, 0), (3, 4))], "[3:4, 0:4] is given more than once"),
        ((6, 4), [((0, 0), (6, 3)), ((2, 2), (4, 2))], "[2:6, 2:3] is given more than once"),
        ((), [((), ())], None),
        ((), [((), ()), ((), ())], "[] is given more than once"),
        ((), [], "1 of 1 elements are given by no rank"),
        ((0, 3), [], None),
    ],
)
def test_coverage(shape: Any, boxes: Any, fault: str | None) -> None:
    assert coverage(shape, [Box(*box) for box in boxes]) == fault


def test_shards_of_one_rank_may_tile_in_any_way(tmp_path: Path) -> None:
    """Blocks of a grid, handed in by one rank, come out as one tensor."""
    full = numbers([9, 11])
    shards = []
    for rows in ((0, 4), (4, 9)):
        for columns in ((0, 3), (3, 4), (4, 11)):
            block = full[slice(*rows), slice(*columns)]
            start = (rows[0], columns[0])
            shards.append(TensorShard("model/w", full.shape, start, block, "float32"))
    store = CheckpointStore(tmp_path, SoloCommunicator())
    store.save(1, shards, scalars={}, per_rank={})
    assert store.verify(1) == []
    with h5py.File(tmp_path / "step00000001" / "tensors.h5") as file:
        assert np.array_equal(file["model/w"][...], full)
    extra = part("model/w", full, 0, 3, 4)
    with pytest.raises(CheckpointError, match="given more than once"):
        store.save(2, [*shards, extra], scalars={}, per_rank={})
