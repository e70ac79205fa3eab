"""The program as a whole: help, unknown commands, exit codes, what is imported, interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hpctrain import cli
from hpctrain.errors import CheckpointError, Exit, Problem, SchedulerError, SpecError

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
HEAVY = ("torch", "mpi4py", "h5py", "numpy")


def hpctrain(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HPCTRAIN, *arguments], capture_output=True, text=True, timeout=120, cwd=cwd, check=False
    )


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_short_help_in_the_table_is_that_of_the_command(name: str) -> None:
    command = import_module(f"hpctrain.cli.{name}").command
    assert isinstance(command, click.Command)
    assert command.get_short_help_str(limit=200) == cli.COMMANDS[name]


def test_help_lists_every_command_and_imports_none_of_them() -> None:
    script = (
        "import sys\n"
        "sys.argv = ['hpctrain', '--help']\n"
        "from hpctrain.cli import main\n"
        "try:\n    main()\nexcept SystemExit as error:\n    assert error.code == 0\n"
        "print([m for m in sys.modules if m.startswith('hpctrain.cli.') or m.split('.')[0] in "
        "('pydantic', 'yaml', 'rich', 'jinja2', 'torch', 'mpi4py', 'h5py', 'numpy')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    *help_lines, imported = done.stdout.splitlines()
    assert imported == "[]"
    listed = [line.split()[0] for line in help_lines if line.startswith("  ") and line.split()]
    assert [name for name in listed if name in cli.COMMANDS][-len(cli.COMMANDS) :] == list(
        cli.COMMANDS
    )


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help_that_loads_nothing_heavy(name: str) -> None:
    script = (
        "import sys\n"
        f"sys.argv = ['hpctrain', {name!r}, '--help']\n"
        "from hpctrain.cli import main\n"
        "try:\n    main()\nexcept SystemExit as error:\n    assert error.code == 0\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stdout.startswith("Usage: ")


def test_version_and_python_dash_m() -> None:
    from hpctrain import __version__

    done = hpctrain("--version")
    assert (done.returncode, done.stdout) == (0, f"hpctrain {__version__}\n")
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "-V"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"hpctrain {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "meant"), [("sumbit", "submit"), ("stauts", "status"), ("log", "logs")]
)
def test_an_unknown_command_names_the_nearest(typed: str, meant: str) -> None:
    done = hpctrain(typed)
    assert done.returncode == Exit.USAGE
    assert done.stdout == ""
    assert f"no command '{typed}'; did you mean {meant}?" in done.stderr


def test_a_wrong_option_is_a_usage_error_that_says_where_help_is() -> None:
    done = hpctrain("submit", "--frobnicate")
    assert done.returncode == Exit.USAGE
    assert "hpctrain: error: " in done.stderr
    assert "hpctrain submit --help" in done.stderr
    assert "Traceback" not in done.stderr


def _fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> click.testing.Result:
    def callback(markdown: bool) -> None:
        raise error

    monkeypatch.setattr(import_module("hpctrain.cli.schema").command, "callback", callback)
    return CliRunner().invoke(cli.main, ["schema"])


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (SchedulerError("sbatch says no", hint="ask"), 4, "error: sbatch says no\n  ask\n"),
        (CheckpointError("bad"), 5, "error: bad\n"),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: /x: Permission denied\n"),
        (OSError(28, "No space left on device", "/y"), 2, "error: /y: No space left on device\n"),
        (KeyboardInterrupt(), 130, "hpctrain: interrupted\n"),
    ],
)
def test_errors_become_messages_and_codes(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = _fail_with(error, monkeypatch)
    assert result.exit_code == code
    assert result.stderr.endswith(said)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_all_problems_of_a_job_come_first_each_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [Problem("a", "bad", "job.yaml", 3, 1), Problem("b.c", "worse", "job.yaml", 7, 5)]
    result = _fail_with(SpecError(problems), monkeypatch)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "job.yaml:3:1: a: bad",
        "job.yaml:7:5: b.c: worse",
        "hpctrain: error: 2 faults in the job; nothing was started",
    ]


def test_a_fault_of_ours_shows_its_traceback_and_where_to_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = _fail_with(ZeroDivisionError("division by zero"), monkeypatch)
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert "please report it" in result.stderr.splitlines()[-1]


def test_a_closed_pipe_ends_quietly() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{HPCTRAIN} schema --markdown | head -1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "# The job file\n"
    assert done.stderr == ""


def test_ctrl_c_ends_with_130_and_one_line(tmp_path: Path) -> None:
    # status --watch of a run that never starts waits until it is interrupted.
    run = tmp_path / "runs" / "x-20260101-000000-abcd"
    run.mkdir(parents=True)
    (run / "job.yaml").write_text("{}\n")
    (run / "provenance.json").write_text(json.dumps({"steps": 3}))
    process = subprocess.Popen(
        [HPCTRAIN, "status", "--watch"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A shell without job control starts what it puts into the background with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("created")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.strip() == "hpctrain: interrupted"


def test_run_ids_complete_in_the_shell(tmp_path: Path) -> None:
    for name in ("a-20260101-000000-abcd", "b-20260102-000000-abcd"):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "job.yaml").write_text("{}\n")
        (run / "provenance.json").write_text("{}")
    environment = {
        **os.environ, "_HPCTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": "hpctrain status ",
        "COMP_CWORD": "2",
    }  # fmt: skip
    done = subprocess.run(
        [HPCTRAIN], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.stdout.split() == [
        "plain,b-20260102-000000-abcd",
        "plain,a-20260101-000000-abcd",
    ]
    environment["COMP_WORDS"], environment["COMP_CWORD"] = "hpctrain re", "1"
    done = subprocess.run(
        [HPCTRAIN], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["plain,resume", "plain,report"]
