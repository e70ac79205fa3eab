"""Parts of the command line by themselves: checks of the doctor, provenance, metrics, output."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli import COMMANDS, checks, main, metrics, output, provenance, text
from hpctrain.cli.view import look
from hpctrain.records import StepRecord, append_line
from hpctrain.rundir import RunDir

REPOSITORY = Path(__file__).parents[2]

# ---- doctor -------------------------------------------------------------------------------

# Printed by `srun --mpi=list` of Slurm 22.05.8 (Debian 12).
LISTED = """\
MPI plugin types are...
\tpmix
\tcray_shasta
\tpmi2
\tnone
specific pmix plugin versions available: pmix_v4
"""


def test_pmi_types_of_a_real_listing() -> None:
    assert checks.pmi_types(LISTED) == ["pmix", "cray_shasta", "pmi2"]
    assert checks.pmi_types("srun: MPI types are...\nsrun: pmi2\nsrun: none\n") == ["pmi2"]


@pytest.mark.parametrize(
    ("family", "version", "types", "verdict", "says"),
    [
        ("MPICH", "MPICH Version: 5.0.2", ["pmix", "pmi2"], "ok", "slurm.mpi: pmi2"),
        ("MPICH", "MPI VERSION : CRAY MPICH 8.1", ["cray_shasta", "pmi2"], "ok", "cray_shasta"),
        ("Open MPI", "Open MPI v5.0.6", ["pmi2", "pmix"], "ok", "slurm.mpi: pmix"),
        ("Open MPI", "Open MPI v5.0.6", ["pmi2"], "warning", "none of them fits Open MPI"),
        ("MPICH", "MPICH Version: 5.0.2", ["pmix"], "warning", "none of them fits MPICH"),
    ],
)
def test_pmi_type_that_fits_the_library(
    family: str, version: str, types: list[str], verdict: str, says: str
) -> None:
    found = checks.pmi_finding(checks.Mpi(family=family, version=version), types)
    assert found.verdict == verdict
    assert says in found.found
    assert (found.advice == "") == (verdict == "ok")


def test_the_mpi_that_ranks_load_is_found_in_a_process_of_its_own() -> None:
    found = checks.load_mpi()
    if found.error:
        pytest.skip(f"no MPI library here: {found.error}")
    said = subprocess.run(
        [sys.executable, "-c", "import mpi4py; mpi4py.rc.initialize = False\n"
         "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert found.version.split() == said.strip("\x00\n").split()
    assert Path(found.library).exists()


def test_gpus_are_counted_on_the_pci_bus(tmp_path: Path) -> None:
    devices = {
        "0000:01:00.0": ("0x030200", "0x10de"),  # NVIDIA, 3D controller
        "0000:02:00.0": ("0x030200", "0x10de"),
        "0000:03:00.0": ("0x120000", "0x1002"),  # AMD, processing accelerator
        "0000:04:00.0": ("0x030000", "0x8086"),  # an Intel display is no accelerator
        "0000:05:00.0": ("0x020000", "0x10de"),  # a network card
    }
    for name, (kind, vendor) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "class").write_text(f"{kind}\n")
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
    assert checks.gpu_vendors(tmp_path) == {"NVIDIA": 2, "AMD": 1}
    assert checks.gpu_vendors(tmp_path / "absent") == {}


def test_file_system_type_is_that_of_the_longest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "30 21 0:40 / /lustre rw shared:1 - lustre server:/fs rw\n"
        "31 30 0:41 / /lustre/my\\040home rw - nfs4 server:/home rw\n"
    )
    for path, kind in (
        ("/etc", "ext4"), ("/lustre/x", "lustre"), ("/lustre/my home/y", "nfs4"),
        ("/lustrex", "ext4"),
    ):  # fmt: skip
        assert checks.file_system_type(Path(path), mounts) == kind


def test_doctor_lines_are_ok_or_say_what_to_do() -> None:
    answer = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert answer["schema_version"] == 1
    topics = {one["topic"] for one in answer["findings"]}
    assert {"hpctrain", "torch", "MPI library", "mpiexec", "Slurm", "GPUs", "HDF5", "cores",
            "working directory", "temporary files"} <= topics  # fmt: skip
    for one in answer["findings"]:
        assert one["verdict"] == "ok" or one["advice"]
    assert sum(answer["counts"].values()) == len(answer["findings"])


# ---- provenance ---------------------------------------------------------------------------


def test_the_commit_is_gits_own(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            cwd=tmp_path, check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip

    assert provenance.git_commit(tmp_path) is None
    git("init", "-q", "-b", "trunk")
    git("commit", "-q", "--allow-empty", "-m", "x")
    head = git("rev-parse", "HEAD")
    (tmp_path / "below").mkdir()
    expected = {"root": str(tmp_path), "commit": head, "branch": "trunk"}
    assert provenance.git_commit(tmp_path / "below") == expected
    git("pack-refs", "--all")
    assert provenance.git_commit(tmp_path) == expected
    git("worktree", "add", "-q", "-b", "other", "tree")
    tree = provenance.git_commit(tmp_path / "tree")
    assert tree == {"root": str(tmp_path / "tree"), "commit": head, "branch": "other"}
    git("checkout", "-q", "--detach")
    assert provenance.git_commit(tmp_path) == expected | {"branch": ""}


def test_only_harmless_values_of_the_environment_are_kept() -> None:
    given = {
        "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "PATH": "/bin", "HOME": "/home/me",
        "AWS_SECRET_ACCESS_KEY": "s3cret", "HF_TOKEN": "t", "SLURM_JWT": "j", "OMP_API_KEY": "k",
        "PASSWORD": "p", "WHATEVER": "x",
    }  # fmt: skip
    kept = provenance.environment(given)
    assert set(kept) == set(given)
    assert {name for name, value in kept.items() if value is not None} == {
        "OMP_NUM_THREADS", "NCCL_DEBUG", "PATH",
    }  # fmt: skip


# ---- metrics ------------------------------------------------------------------------------


def record(step: int, **more: float) -> StepRecord:
    values = {"time": 100.0 + step, "step_seconds": 1.0, "tokens_per_second": 10.0, "loss": 1.0}
    return StepRecord(step=step, lr=0.1, grad_norm=1.0, tokens=step, **(values | more))  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create("x", tmp_path)


def test_repeated_steps_count_once_and_the_last_time() -> None:
    records = [record(s, loss=1.0) for s in (1, 2, 3, 4)] + [record(s, loss=2.0) for s in (3, 5)]
    found = metrics.effective(records)
    assert [(r.step, r.loss) for r in found] == [(1, 1.0), (2, 1.0), (3, 2.0), (5, 2.0)]


def test_recent_leaves_out_a_torn_line_and_what_is_not_a_record(run: RunDir) -> None:
    for step in range(1, 4):
        append_line(run.metrics, record(step))
    with run.metrics.open("ab") as stream:
        stream.write(b'[]\n{"step": "no other field"}\n\xff\n{"step": 4, "lo')
    assert [r.step for r in metrics.recent(run)] == [1, 2, 3]
    assert metrics.recent(RunDir(run.root / "absent")) == []


def test_recent_reads_the_end_of_a_long_file(run: RunDir) -> None:
    for step in range(1, 1001):
        append_line(run.metrics, record(step))
    assert [r.step for r in metrics.recent(run)] == list(range(951, 1001))


def test_pace_is_the_median_speed_and_the_clock_between_steps() -> None:
    # A checkpoint makes one step last eleven seconds by the clock: 20 seconds for ten steps.
    records = [record(s, time=float(s if s < 6 else s + 10)) for s in range(1, 12)]
    pace = metrics.Pace(21, records)
    assert pace.seconds_left == pytest.approx(10 * 20 / 10)
    assert pace.tokens_per_second == 10.0
    assert metrics.Pace(21).seconds_left is None
    assert metrics.Pace(21, [record(1, step_seconds=3.0)]).seconds_left == 60.0


# ---- output -------------------------------------------------------------------------------


def test_json_answers_have_a_version_and_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_json({"a": math.nan, "b": [math.inf, 1.5], "c": "é"})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"schema_version": 1, "a": None, "b": [None, 1.5], "c": "é"}
    assert "é" in printed


def test_a_table_off_the_terminal_is_plain_and_never_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.table(("name", "n"), [("x" * 300, "5"), ("[red]y", "10")], right=(1,))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["x" * 300, "5"]
    assert lines[2].split() == ["[red]y", "10"]
    assert lines[1].endswith(" 5")
    assert lines[2].endswith("10")


def test_commands_to_try_next_work_from_where_the_person_is(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run.job.write_text("{}\n")
    run.provenance.write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert text.next_commands(look(run))[0] == f"hpctrain status {run.root}"
    (tmp_path / "runs").mkdir()
    moved = RunDir(run.root.rename(tmp_path / "runs" / run.id))
    assert text.next_commands(look(moved))[0] == f"hpctrain status {run.id}"


# ---- documentation ------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_page_of_a_command_has_its_present_help(name: str) -> None:
    page = (REPOSITORY / "docs" / "commands" / f"{name}.md").read_text()
    printed = subprocess.run(
        [Path(sys.executable).parent / "hpctrain", name, "--help"],
        capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80"},
    ).stdout  # fmt: skip
    assert printed.strip() in page, "run: python docs/make_command_pages.py"
    assert page.count("```") % 2 == 0


def test_exit_codes_page_names_every_code() -> None:
    from hpctrain.errors import Exit

    page = (REPOSITORY / "docs" / "exit-codes.md").read_text()
    rows = [row.split("|")[1].strip() for row in page.splitlines() if row.startswith("|")]
    assert {int(row) for row in rows if row.isdigit()} == {*map(int, Exit), 1, 130}
