"""Environments of jobs: what must not leak into them, and what a job may set."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.errors import UsageError

_LEAKS = ("SLURM_", "SRUN_", "PMI", "OMPI_COMM_WORLD_", "OMPI_MCA_ess", "HYDRA_", "HYDI_",
          "MPI_LOCAL", "MPIEXEC_", "PALS_", "PRTE_", "FLUX_")  # fmt: skip
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})

_BASH_OWN = frozenset(
    {
        "_", "BASHOPTS", "BASHPID", "BASH_ALIASES", "BASH_ARGC", "BASH_ARGV", "BASH_CMDS",
        "BASH_COMMAND", "BASH_LINENO", "BASH_SOURCE", "BASH_SUBSHELL", "BASH_VERSINFO", "DIRSTACK",
        "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "HISTCMD", "LINENO",
        "OPTIND", "PIPESTATUS", "PPID", "RANDOM", "SECONDS", "SHELLOPTS", "SHLVL", "SRANDOM", "UID",
    }
)  # fmt: skip
_LONGEST = 128 * 1024 - 1
"""Bytes of NAME=value that Linux passes to a program (MAX_ARG_STRLEN, its NUL left out)."""


def without_leaks(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a surrounding job, step or MPI left in it.

    Slurm takes options from SLURM_* variables, and an MPI library that finds the PMI variables
    of another launcher joins that one's world. Where Slurm's configuration lies is kept.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not name.startswith(_LEAKS)
    }


def check_job_env(env: Mapping[str, str]) -> None:
    """Refuse variables that cannot reach a rank byte for byte.

    Raises:
        UsageError: a name that bash keeps for itself, or a value that is too long or not text.
    """
    for name, value in env.items():
        if name in _BASH_OWN:
            raise UsageError(
                f"env.{name}: bash sets {name} itself and passes nothing else on",
                hint="choose another name",
            )
        try:
            size = len(f"{name}={value}".encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError as error:
            raise UsageError(
                f"env.{name}: character {error.start - len(name)} is half of a surrogate pair "
                "and has no bytes"
            ) from None
        if "\x00" in value:
            raise UsageError(f"env.{name}: a NUL byte cannot be part of an environment variable")
        if size > _LONGEST:
            raise UsageError(
                f"env.{name}: {size} bytes; Linux passes at most {_LONGEST} in one variable",
                hint="put it into a file and pass its path",
            )
