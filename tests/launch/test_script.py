"""The batch script as text: golden files, bash's own opinion, hostile input byte for byte."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_helpers import GOLDEN, HOSTILE_ENV, golden_scripts, script_of, site, spec_of

from hpctrain.errors import UsageError
from hpctrain.launchers import SrunLauncher
from hpctrain.launchers.environment import _BASH_OWN
from hpctrain.machine import get_machine, machine_names
from hpctrain.rundir import RunDir
from hpctrain.slurm import script_lines
from hpctrain.slurm.quoting import bash_expanding, bash_quote, log_pattern, sbatch_quote

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=60)
NASTY = st.text(st.sampled_from("a'\"\\$`\n\r\t !#%&*;|<>(){}[]~^=,é\x01\x7f\x1b"), max_size=30)
VALUES = st.one_of(TEXT, NASTY)
NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,10}", fullmatch=True).filter(
    lambda name: name not in _BASH_OWN
)


def bash(script: str, *arguments: str, env: dict[str, str] | None = None) -> bytes:
    done = subprocess.run(
        ["/bin/bash", *arguments],
        input=script.encode("utf-8", "surrogateescape"),
        capture_output=True,
        env=env or {},
        timeout=30,
    )
    assert done.returncode == 0, (done.stderr, script)
    assert done.stderr == b"", script
    return done.stdout


def sections(script: str) -> tuple[list[str], str]:
    """The #SBATCH lines and the rest."""
    lines = script.split("\n")
    assert lines[0] == "#!/bin/bash"
    count = 1
    while lines[count].startswith("#SBATCH "):
        count += 1
    return lines[1:count], "\n".join(lines[count:])


@pytest.mark.parametrize("name", ["plain.sbatch", "everything.sbatch"])
def test_script_is_the_golden_one(name: str) -> None:
    """After a wanted change: python tests/launch/launch_helpers.py, and read the difference."""
    assert golden_scripts()[name] == (GOLDEN / name).read_text(encoding="utf-8")


def test_same_arguments_give_the_same_bytes() -> None:
    assert golden_scripts() == golden_scripts()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    done = subprocess.run(
        ["shellcheck", *sorted(map(str, GOLDEN.glob("*.sbatch")))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.parametrize("nodes", [1, 2, 92])
@pytest.mark.parametrize("name", machine_names())
def test_script_of_every_site_is_bash(name: str, nodes: int) -> None:
    machine = get_machine(name)
    spec = spec_of(machine, nodes=nodes, train={"steps": 1, "global_batch": 92 * 2 * 840})
    text = script_of(spec, machine)
    bash(text, "-n")
    assert f"#SBATCH --nodes={nodes}\n" in text


def test_every_line_says_why_and_from_where_and_is_in_the_script() -> None:
    machine = site()
    spec = spec_of(machine, slurm={"time": "1h", "modules": ["a"]}, env={"A": "b c"})
    run = RunDir(Path("/runs/r-1"))
    program = ["/opt/venv/bin/hpctrain", "run", str(run.root)]
    lines = script_lines(spec, run, program, SrunLauncher(machine, mpich_wheel=False))
    text = script_of(spec, machine, run, program)
    assert all(line.why and line.source and line.text in text for line in lines)
    by_text = {line.text: line for line in lines}
    assert by_text["#SBATCH --time=0-01:00:00"].source == "slurm.time"
    assert by_text["#SBATCH --partition=batch"].source == "limits of the tests"
    assert by_text["export NCCL_PROTO='^LL128'"].why == "literal"
    assert by_text["--mpi=pmix"].source == "launch of the tests"
    assert by_text["export A='b c'"].source == "env.A"
    sbatch, _ = sections(text)
    assert sbatch == [line.text for line in lines if line.part == "sbatch"]


def test_jobs_values_come_after_the_machines() -> None:
    machine = site()
    text = script_of(spec_of(machine, env={"NCCL_PROTO": "LL"}), machine)
    assert text.index("export NCCL_PROTO='^LL128'") < text.index("export NCCL_PROTO=LL\n")
    assert text.index("export OMP_NUM_THREADS=8") < text.index("export NCCL_PROTO='^LL128'")


def test_low_confidence_options_are_left_out() -> None:
    assert "--license" not in script_of(spec_of(site()), site())


@settings(max_examples=150, deadline=None)
@given(env=st.dictionaries(NAMES, VALUES, max_size=6))
def test_exports_reach_a_program_byte_for_byte(env: dict[str, str]) -> None:
    machine = site()
    launcher = SrunLauncher(machine, mpich_wheel=False)
    run = RunDir(Path("/runs/r"))
    lines = script_lines(spec_of(machine, env=env), run, ["p"], launcher)
    exports = [line.text for line in lines if line.part == "job"]
    assert all("\n" not in text and "\r" not in text for text in exports)
    told = bash("\n".join([*exports, "exec /usr/bin/env -0"]))
    found = dict(item.partition(b"=")[::2] for item in told.split(b"\0"))
    assert {name: found.get(name.encode()) for name in env} == {
        name: value.encode() for name, value in env.items()
    }


@settings(max_examples=100, deadline=None)
@given(values=st.lists(VALUES, min_size=1, max_size=8))
def test_bash_reads_a_quoted_word_as_the_word(values: list[str]) -> None:
    words = " ".join(bash_quote(value) for value in values)
    assert "\n" not in words
    assert bash(f"printf '%s\\0' {words}\n").split(b"\0")[:-1] == [v.encode() for v in values]


def test_bytes_that_are_not_utf8_are_kept() -> None:
    path = b"/runs/\xff\xfe x".decode("utf-8", "surrogateescape")
    assert bash(f"printf %s {bash_quote(path)}\n") == b"/runs/\xff\xfe x"


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(NASTY, min_size=1, max_size=4))
def test_only_braced_names_are_expanded(parts: list[str]) -> None:
    text = "${WHAT}".join(part for part in parts)
    if any(ord(c) < 32 or c == "\x7f" for c in text):
        with pytest.raises(ValueError, match="control characters"):
            bash_expanding(text)
        return
    told = bash(f"printf %s {bash_expanding(text)}\n", env={"WHAT": "a b  *"})
    assert told == text.replace("${WHAT}", "a b  *").encode()


@settings(max_examples=100, deadline=None)
@given(name=NASTY, folder=NASTY, value=VALUES, comment=NASTY, module=NASTY, option=NASTY)
def test_hostile_text_anywhere_is_refused_or_one_word(
    name: str, folder: str, value: str, comment: str, module: str, option: str
) -> None:
    machine = site()
    run = RunDir(Path("/runs") / ("r" + folder.replace("/", "")))
    one_line = not any(c in comment + module + option for c in "\r\n")
    if not one_line or "\n" in name or "\r" in name:
        return  # the job file refuses these
    spec = spec_of(
        machine,
        name=name,
        env={"A": value},
        slurm={
            "comment": comment,
            "modules": [module],
            "sbatch_options": [f"--prefer={option}"],
            "srun_options": [f"--prolog={option}"],
        },
    )
    program = ["/opt/hpctrain", "run", str(run.root)]
    if "\n" in folder or "\r" in folder:
        with pytest.raises(UsageError, match="a line break cannot be part of a line for sbatch"):
            script_of(spec, machine, run, program)
        return
    text = script_of(spec, machine, run, program)
    bash(text, "-n")
    options, body = sections(text)
    assert not any(line.startswith("#SBATCH") for line in body.split("\n"))
    assert all(line.isprintable() or not line.isascii() or "\x01" in line or "\t" in line
               or "\x7f" in line or "\x1b" in line for line in options)  # fmt: skip
    # The command of the ranks, as bash splits it.
    start = text.index('exec "$setsid" "$srun"')
    command = text[start : text.index("\n) &")].replace("exec", "printf '%s\\0'", 1)
    words = bash(command, env={"setsid": "setsid", "srun": "srun"}).split(b"\0")[:-1]
    assert words[-3:] == [b"/opt/hpctrain", b"run", str(run.root).encode()]
    assert f"--prolog={option}".encode() in words


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--time=1:00:00", "write it as slurm.time"),
        ("-t 10", "write it as slurm.time"),
        ("--nodes=3", "write it as nodes"),
        ("-o x.log", "it cannot be changed"),
        ("--array=1-4", "it cannot be changed"),
        ("--mem=4G", "write it as slurm.memory"),
    ],
)
def test_options_that_the_script_sets_itself_are_refused(option: str, instead: str) -> None:
    spec = spec_of(site(), slurm={"sbatch_options": ["--nice=1", option]})
    with pytest.raises(UsageError) as error:
        script_of(spec, site())
    assert error.value.message.startswith("slurm.sbatch_options.1: ")
    assert instead in (error.value.hint or "")


def test_text_without_bytes_and_margins_above_sbatchs_are_refused() -> None:
    machine = site()
    with pytest.raises(UsageError, match="has no bytes"):
        script_of(spec_of(machine, slurm={"modules": ["a\ud800"]}), machine)
    with pytest.raises(UsageError, match=r"slurm\.margin: 65536 s; sbatch"):
        script_of(spec_of(machine, slurm={"margin": 65536}), machine)
    assert "--signal=B:USR1@65535" in script_of(spec_of(machine, slurm={"margin": 65535}), machine)


@pytest.mark.parametrize(
    ("token", "line"),
    [
        ("--nodes=2", "--nodes=2"),
        ("--comment=a b", '--comment="a b"'),
        ('--comment="#\\', '--comment="\\"#\\\\"'),
        ("a b", '"a b"'),
        ("a=b c", '"a=b c"'),
        ("", '""'),
    ],
)
def test_tokens_of_sbatch_lines(token: str, line: str) -> None:
    assert sbatch_quote(token, "x") == line


def test_log_names_are_taken_as_they_are() -> None:
    assert log_pattern("/a/%j.log") == "/a/%%j.log"
    assert log_pattern("/a\\b/%j.log") == "/a\\\\b/%j.log"


@pytest.mark.parametrize(
    ("slurm", "end", "expected"),
    [
        ({"time": "1h", "margin": "90.5s"}, None, lambda now: now + 3600 - 91),
        ({"time": "1h", "margin": 60}, "5000", lambda now: 4940),
        ({"margin": 60}, "5000", lambda now: 4940),
        ({"margin": 60}, None, lambda now: None),
    ],
)
def test_deadline_is_the_end_of_the_job_minus_the_margin(
    slurm: dict[str, Any], end: str | None, expected: Any
) -> None:
    text = script_of(spec_of(site(), slurm=slurm), site())
    body = text[text.index("export OMP_NUM_THREADS") : text.index("state=")]
    env = {"PATH": "/usr/bin:/bin"} | ({} if end is None else {"SLURM_JOB_END_TIME": end})
    told = bash(f"{body}\necho ${{HPCTRAIN_DEADLINE-none}}; date +%s\n", env=env).split()
    wanted = expected(int(told[1]))
    if wanted is None:
        assert told[0] == b"none"
    else:
        assert abs(int(told[0]) - wanted) <= 1


def test_module_that_does_not_load_ends_the_job_before_the_ranks() -> None:
    text = script_of(spec_of(site(), slurm={"modules": ["odd $name"]}), site())
    loads = text[text.index("if ! command -v module") : text.index("export OMP_NUM_THREADS")]
    fake = 'module() { printf "%s|" "$@"; [ "$2" != "odd \\$name" ]; }\n'
    done = subprocess.run(
        ["/bin/bash"], input=fake + loads + "echo reached\n", capture_output=True, text=True
    )
    assert done.returncode == 3
    assert done.stdout == "load|gcc/13|load|my mpi/4.1|load|odd $name|"
    assert done.stderr == "hpctrain: module load odd $name failed\n"


def test_hostile_values_of_public_reports_are_in_the_golden_script() -> None:
    text = (GOLDEN / "everything.sbatch").read_text(encoding="utf-8")
    for name in HOSTILE_ENV:
        assert text.count(f"  export {name}=") == 1
