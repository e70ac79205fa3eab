"""The batch script as text: golden files, bash's own opinion, hostile input byte for byte."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_helpers import (
    GOLDEN,
    HOSTILE_ENV,
    golden_scripts,
    script_of,
    site,
    site_scripts,
    spec_of,
)

from hpctrain.errors import ImpossibleError, UsageError
from hpctrain.launchers import SrunLauncher
from hpctrain.launchers.environment import _BASH_OWN
from hpctrain.machine import get_machine
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


@pytest.mark.parametrize("name", sorted(golden_scripts()))
def test_script_is_the_golden_one(name: str) -> None:
    """After a wanted change: python tests/launch/launch_helpers.py, and read the difference."""
    assert golden_scripts()[name] == (GOLDEN / name).read_text(encoding="utf-8")


def test_same_arguments_give_the_same_bytes() -> None:
    assert golden_scripts() == golden_scripts()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    done = subprocess.run(
        ["shellcheck", *sorted(map(str, GOLDEN.rglob("*.sbatch")))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == ""
    assert done.returncode == 0


def test_scripts_of_all_sites_are_the_golden_ones() -> None:
    """13 machines at 1, 2 and 92 nodes, whole; see test_script_is_the_golden_one."""
    scripts = site_scripts()
    there = {str(path.relative_to(GOLDEN)) for path in (GOLDEN / "sites").glob("*.sbatch")}
    assert there == set(scripts)
    for name, text in scripts.items():
        assert text == (GOLDEN / name).read_text(encoding="utf-8"), name
        bash(text, "-n")


def test_frontier_by_number_of_nodes() -> None:
    one, two = (site_scripts()[f"sites/frontier-{nodes}.sbatch"] for nodes in (1, 2))
    assert "export NCCL_NET=Socket\n" in one
    assert "export NCCL_NET=OFI\n" in two
    assert "disable_rdzv_get" not in one
    assert "FI_CXI_RDZV_PROTO" not in one
    assert "export FI_CXI_RDZV_PROTO=alt_read\n" in two
    assert two.count("--network=disable_rdzv_get") == 2  # sbatch and srun


def test_alps_has_a_blank_in_a_value() -> None:
    assert "export NCCL_NET='AWS Libfabric'\n" in site_scripts()["sites/alps-2.sbatch"]


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
    command = text[start : text.index("\n}\nstatus=75")].replace("exec", "printf '%s\\0'", 1)
    words = bash(command, env={"setsid": "setsid", "srun": "srun"}).split(b"\0")[:-1]
    assert words[-3:] == [b"/opt/hpctrain", b"run", str(run.root).encode()]
    assert f"--prolog={option}".encode() in words


def ranks_command(text: str) -> list[bytes]:
    """The command of the ranks, as bash splits it."""
    start = text.index('exec "$setsid" "$srun"')
    command = text[start : text.index("\n}\nstatus=75")].replace("exec", "printf '%s\\0'", 1)
    env = {"setsid": "setsid", "srun": "srun", "nodes": "3", "unpacked": "/u p"}
    return bash(command, env=env).split(b"\0")[:-1]


@settings(max_examples=20, deadline=None)
@given(image=NASTY, archive=NASTY, bind=NASTY)
def test_hostile_images_and_archives_stay_one_word(image: str, archive: str, bind: str) -> None:
    machine = site()
    if any(c in image + archive + bind for c in "\r\n"):
        return
    for runtime in ("apptainer", "pyxis", "podman-hpc"):
        container = {"image": f"i{image}", "runtime": runtime, "binds": [f"/b{bind}"]}
        spec = spec_of(machine, container=container)
        if "," in bind or ":" in bind:
            with pytest.raises(UsageError, match=r"container\.binds\.0"):
                script_of(spec, machine)
            continue
        text = script_of(spec, machine)
        bash(text, "-n")
        words = ranks_command(text)
        joined = [word for word in words if f"i{image}".encode() in word]
        assert joined, words
        assert any(f"/b{bind}:/b{bind}".encode() in word for word in words)
        assert words[-3:] == [b"hpctrain", b"run", b"/runs/r-1"]
    text = script_of(
        spec_of(machine, python_env={"archive": f"/a{archive}", "path": "/tmp/${USER}"}), machine
    )
    bash(text, "-n")
    told = bash(
        next(x for x in text.split("\n") if x.strip().startswith("archive="))
        + '\nprintf %s "$archive"'
    )
    assert told == f"/a{archive}".encode()
    assert ranks_command(text)[-4:] == [
        b"/u p/bin/python", b"/u p/bin/hpctrain", b"run", b"/runs/r-1",
    ]  # fmt: skip


def test_what_no_machine_says_is_refused() -> None:
    machine = site()
    with pytest.raises(ImpossibleError, match=r"container\.runtime: machine testsite does not say"):
        script_of(spec_of(machine, container="x.sif"), machine)
    perlmutter = get_machine("perlmutter")
    with pytest.raises(ImpossibleError, match="starts images with shifter, which is not rendered"):
        script_of(spec_of(perlmutter, container="x"), perlmutter)
    with pytest.raises(UsageError, match="ranks run from one of the two"):
        script_of(
            spec_of(machine, container={"image": "x", "runtime": "pyxis"}, python_env="/a.tgz"),
            machine,
        )


def test_a_range_of_nodes_leaves_the_number_to_the_job() -> None:
    text = script_of(spec_of(site(), slurm={"nodes": "2-5"}), site())
    assert "#SBATCH --nodes=2-5\n" in text
    words = ranks_command(text)
    assert b"--nodes=3" in words
    assert b"--ntasks=12" in words  # 4 a node on this site
    # Tasks in sbatch would bind the job to the number of nodes of its last start.
    options, _ = sections(text)
    assert not [line for line in options if "ntasks" in line or "cpus-per-task" in line]
    assert "#SBATCH --mincpus=32" in options
    alps = get_machine("alps")
    asked = {"account": "a", "time": "1h", "nodes": "2-5"}
    options, body = sections(script_of(spec_of(alps, slurm=asked), alps))
    assert "#SBATCH --gpus-per-node=4" in options
    assert "--gpus-per-task=1 \\" in body


def test_without_restarts_slurm_is_told_so() -> None:
    assert "#SBATCH --requeue\n" in script_of(spec_of(site()), site())
    for slurm in ({"max_restarts": 0}, {"requeue": False}):
        assert "#SBATCH --no-requeue\n" in script_of(spec_of(site(), slurm=slurm), site())


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--time=1:00:00", "write it as slurm.time"),
        ("-t 10", "write it as slurm.time"),
        ("--nodes=3", "write it as nodes"),
        ("-o x.log", "it cannot be changed"),
        ("--array=1-4", "it cannot be changed"),
        ("--mem=4G", "write it as slurm.memory"),
        ("--requeue", "write it as slurm.requeue"),
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
    body = text[text.index("export OMP_NUM_THREADS") : text.index("setsid=")]
    env = {"PATH": "/usr/bin:/bin"} | ({} if end is None else {"SLURM_JOB_END_TIME": end})
    told = bash(f"{body}\necho ${{HPCTRAIN_DEADLINE-none}}; date +%s\n", env=env).split()
    wanted = expected(int(told[1]))
    if wanted is None:
        assert told[0] == b"none"
    else:
        assert abs(int(told[0]) - wanted) <= 1


def test_ranks_that_do_not_stop_are_ended_before_the_walltime_is(tmp_path: Path) -> None:
    """By SIGTERM to srun and then by SIGKILL, early enough for the hook to have the run go on."""
    for name, lines in {
        "srun": 'case "$*" in *mkdir*) exit;; esac\ntrap "" USR1 TERM\nwhile :; do sleep 0.1; done',
        "hook": f'if [ $1 = begin ]; then echo 1; else echo "$*" >{tmp_path}/said; fi',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"time": "1h", "margin": 10}  # of which two seconds are kept for the hook
    text = script_of(spec_of(site(), slurm=slurm), site(), hook=(str(tmp_path / "hook"),))
    body = text[text.index("export OMP_NUM_THREADS") :]
    began = time.time()
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_END_TIME": str(int(began) + 5),
    }  # fmt: skip
    subprocess.run(
        ["/bin/bash", "-c", body], env=env, stdout=subprocess.DEVNULL, check=True, timeout=60
    )
    assert (tmp_path / "said").read_text() == "end /runs/r-1 --code 137 --late\n"
    assert time.time() - began > 2


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
