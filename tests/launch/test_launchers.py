"""Command tokens of the launchers, and what decides them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch_helpers import HOSTILE_ENV, site, spec_of

from hpctrain.errors import UsageError
from hpctrain.launchers import (
    LocalLauncher,
    MpiexecLauncher,
    SrunLauncher,
    check_job_env,
    mpich_wheel,
    rank_program,
    without_leaks,
)
from hpctrain.launchers.environment import _BASH_OWN
from hpctrain.launchers.local_run import rank_environment
from hpctrain.launchers.srun import split_option
from hpctrain.machine import get_machine
from hpctrain.rundir import RunDir
from hpctrain.testing.ranks import environment

PROGRAM = ["/venv/bin/hpctrain", "run", "/runs/a b"]


def test_local_starts_all_ranks_of_all_planned_nodes_here() -> None:
    spec = spec_of(get_machine("local"), nodes=3, ranks_per_node=2)
    assert LocalLauncher("/v/mpiexec").command(spec, PROGRAM) == [
        "/v/mpiexec", "-n", "6", *PROGRAM,
    ]  # fmt: skip
    one = spec_of(get_machine("local"), ranks_per_node=1)
    assert LocalLauncher(None).command(one, PROGRAM) == PROGRAM


def test_local_finds_the_mpiexec_beside_this_python_then_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LocalLauncher.find({}).mpiexec == str(Path(sys.executable).parent / "mpiexec")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    site_mpi = tmp_path / "site/mpiexec"
    site_mpi.parent.mkdir()
    site_mpi.touch(0o755)
    assert LocalLauncher.find({"PATH": str(site_mpi.parent)}).mpiexec == str(site_mpi)
    assert LocalLauncher.find({}).mpiexec is None


def test_no_mpiexec_is_refused_with_both_ways_out() -> None:
    spec = spec_of(get_machine("local"), ranks_per_node=2)
    with pytest.raises(UsageError) as error:
        LocalLauncher(None).command(spec, PROGRAM)
    assert "no mpiexec found to start 2 ranks" in str(error.value)
    assert "pip install 'hpctrain[local]'" in str(error.value)
    assert "site's MPI module" in str(error.value)


def test_site_mpiexec_takes_its_own_options() -> None:
    spec = spec_of(site(), nodes=2)
    tokens = MpiexecLauncher(Path("/opt/mpi/mpiexec"), ["-ppn", "4"]).command(spec, PROGRAM)
    assert tokens == ["/opt/mpi/mpiexec", "-n", "8", "-ppn", "4", *PROGRAM]


def test_srun_says_everything_twice_that_it_would_not_inherit() -> None:
    spec = spec_of(site(), nodes=2, slurm={"srun_options": ["--cpu-bind=cores", "-m block:x y"]})
    launcher = SrunLauncher(site(), mpich_wheel=True)
    assert launcher.command(spec, PROGRAM) == [
        "srun", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=8",
        "--distribution=block", "--mpi=pmix", "--kill-on-bad-exit=1", "--export=ALL",
        "--gpus-per-task=1", "--network=a b", "--cpu-bind=cores", "-m", "block:x y", *PROGRAM,
    ]  # fmt: skip
    assert all(option.why and option.source for option in launcher.options(spec))


@pytest.mark.parametrize(
    ("job", "machine", "wheel", "expected"),
    [
        ("cray_shasta", "pmix", True, ["--mpi=cray_shasta"]),
        (None, "pmix", True, ["--mpi=pmix"]),
        (None, None, True, ["--mpi=pmi2"]),
        (None, None, False, []),
    ],
)
def test_mpi_type_job_before_machine_before_wheel(
    job: str | None, machine: str | None, wheel: bool, expected: list[str]
) -> None:
    where = site()
    where = where.model_copy(update={"launch": where.launch.model_copy(update={"mpi": machine})})
    spec = spec_of(where, slurm={"mpi": job})
    tokens = SrunLauncher(where, mpich_wheel=wheel).command(spec, PROGRAM)
    assert [token for token in tokens if token.startswith("--mpi")] == expected


def test_mpich_wheel_is_told_as_mpi4py_itself_finds_it() -> None:
    code = "from mpi4py import MPI; print(MPI.Get_library_version())"
    quiet = {"env": environment(), "capture_output": True, "text": True, "timeout": 60}
    said = subprocess.run([sys.executable, "-c", code], check=True, **quiet).stdout
    maps = "print([l.split()[-1] for l in open('/proc/self/maps') if 'libmpi.so' in l][0])"
    loaded = subprocess.run([sys.executable, "-c", f"{code}; {maps}"], **quiet).stdout.split()[-1]
    in_environment = Path(loaded).is_relative_to(Path(sys.prefix).resolve())
    assert mpich_wheel({}) == ("MPICH" in said and in_environment)
    assert not mpich_wheel({"MPI4PY_LIBMPI": "/opt/cray/libmpi.so.12"})
    assert mpich_wheel({"MPI4PY_LIBMPI": loaded})


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("--gres=gpu:4", ("--gres=gpu:4",)),
        ("--comment=a b  c", ("--comment=a b  c",)),
        ("-C gpu&hbm", ("-C", "gpu&hbm")),
        ("--exclusive", ("--exclusive",)),
        ("--switches 1@10", ("--switches", "1@10")),
    ],
)
def test_options_of_the_job_file_become_tokens(text: str, tokens: tuple[str, ...]) -> None:
    assert split_option(text) == tokens


def test_rank_program_is_the_installed_hpctrain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "r")
    program = rank_program(run)
    assert program == [str(Path(sys.executable).parent / "hpctrain"), "run", str(run.root)]
    said = subprocess.run([program[0], "--help"], capture_output=True, text=True, timeout=60)
    assert "Usage: hpctrain" in said.stdout
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match="does not exist"):
        rank_program(run)


def test_leaks_of_other_launchers_are_dropped_and_the_configuration_kept() -> None:
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "MPICH_ASYNC": "1", "HOME": "/h"}
    names = (
        "SLURM_JOB_ID SLURM_CPU_BIND SLURM_NTASKS PMI_RANK PMI_FD PMIX_RANK PMIX_SERVER_URI4 "
        "OMPI_COMM_WORLD_RANK HYDRA_HOST_FILE MPI_LOCALRANKID SRUN_DEBUG PALS_RANKID"
    )
    leaks = dict.fromkeys(names.split(), "1")
    assert without_leaks(kept | leaks) == kept


def test_ranks_get_deadline_threads_and_the_jobs_own_values() -> None:
    machine = get_machine("local")
    caller = {"PATH": "/bin", "SLURM_NTASKS": "9", "HPCTRAIN_DEADLINE": "1", "A": "caller"}
    spec = spec_of(
        machine, ranks_per_node=840, slurm={"time": "1h", "margin": 100}, env={"A": "job"}
    )
    found = rank_environment(spec, caller, 1000.5)
    assert found == {
        "PATH": "/bin", "A": "job", "HYDRA_LAUNCHER": "fork", "OMP_NUM_THREADS": "1",
        "HPCTRAIN_DEADLINE": "4500", "UCX_NET_DEVICES": "lo",
    }  # fmt: skip
    chosen = caller | {"UCX_NET_DEVICES": "mlx5_0:1"}
    assert rank_environment(spec, chosen, 0.0)["UCX_NET_DEVICES"] == "mlx5_0:1"
    free = spec_of(machine, ranks_per_node=1, env={"OMP_NUM_THREADS": "3"})
    found = rank_environment(free, caller | {"OMP_NUM_THREADS": "7"}, 0.0)
    assert found["OMP_NUM_THREADS"] == "3"
    assert "HPCTRAIN_DEADLINE" not in found
    check_job_env(HOSTILE_ENV)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"UID": "0"}, "env.UID: bash sets UID itself"),
        ({"A": "x" * 131072}, "env.A: 131074 bytes; Linux passes at most 131071"),
        ({"A": "ab\ud800"}, "env.A: character 3 is half of a surrogate pair"),
        ({"A": "a\x00"}, "env.A: a NUL byte"),
    ],
)
def test_values_that_cannot_reach_a_rank_are_refused(env: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words.split(";")[0]):
        check_job_env(env)


def test_longest_value_that_is_let_through_is_the_longest_that_linux_passes() -> None:
    longest = "x" * (131071 - len("A="))
    check_job_env({"A": longest})
    done = subprocess.run(
        ["/usr/bin/env"], env={"A": longest}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"A={longest}\n"
    with pytest.raises(OSError, match="too long"):
        subprocess.run(["/usr/bin/env"], env={"A": longest + "x"}, check=False)


def test_names_that_bash_keeps_are_those_that_it_does_not_pass_on() -> None:
    listed = subprocess.run(
        ["/bin/bash", "-c", "compgen -v"], capture_output=True, text=True, check=True
    ).stdout.split()
    lost = set()
    for name in {*listed, *_BASH_OWN, "HOME", "PATH", "IFS", "PS4", "TMOUT", "REPLY"}:
        done = subprocess.run(
            ["/bin/bash", "-c", f"export {name}='1 x'\nexec /usr/bin/env -0"],
            capture_output=True,
        )
        if f"{name}=1 x".encode() not in done.stdout.split(b"\0"):
            lost.add(name)
    assert lost <= _BASH_OWN
