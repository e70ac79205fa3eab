"""What a run was made from: kept in ``provenance.json`` of its directory."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain import __version__
from hpctrain.records import SCHEMA_VERSION

if TYPE_CHECKING:
    from hpctrain.cli.prepare import Prepared
    from hpctrain.spec import Job

# Settings that change how fast or whether a run works; all other values are left out.
_SHOWN = re.compile(
    r"(OMP|MKL|OPENBLAS|KMP|NCCL|RCCL|GLOO|TORCH|PYTORCH|CUDA|ROCR|HIP|HSA|ZE|FI|UCX|MPI|MPI4PY|"
    r"MPICH|OMPI|PMI|PMIX|SLURM|SBATCH|HPCTRAIN|HDF5|PYTHON|LC)_?[A-Z0-9_]*|"
    r"PATH|LD_LIBRARY_PATH|LD_PRELOAD|LOADEDMODULES|MODULEPATH|VIRTUAL_ENV|CONDA_PREFIX|LANG|TZ"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|API|KEY|JWT", re.IGNORECASE)


def describe(job: Job, argv: Sequence[str], directory: Path) -> dict[str, Any]:
    """The document of a new run.

    ``import_paths`` are where the ranks look for the modules that the job names;
    ``job_text``, ``overrides`` and ``directory`` are enough to make the job again.
    """
    folder = Path(job.file).absolute().parent
    return {
        "schema_version": SCHEMA_VERSION,
        "created": time.time(),
        "steps": job.spec.train.steps,
        "job_file": str(Path(job.file).absolute()),
        "job_text": job.text,
        "overrides": list(job.overrides),
        "directory": str(directory),
        "import_paths": list(dict.fromkeys([str(directory), str(folder)])),
        "sources": {
            key: {"kind": source.kind, "where": source.where}
            for key, source in job.sources.items()
            if key
        },
        "resumes": [],
        "caller": caller(argv),
    }


def hardware(prepared: Prepared) -> dict[str, Any]:
    """What a run runs on, as far as it is known where it is submitted."""
    node, spec = prepared.machine.node, prepared.job.spec
    return {
        "machine": prepared.machine.name,
        "device": node.device.name,
        "cpu": node.cpu,
        "emulated": prepared.machine.name if spec.emulated else "",
    }


def caller(argv: Sequence[str]) -> dict[str, Any]:
    """Who ran which code where."""
    return {
        "hpctrain": __version__,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "argv": list(argv),
        "user": _user(),
        "host": socket.gethostname(),
        "git": git_commit(Path.cwd()),
        "environment": environment(os.environ),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str | None]:
    """Names of all variables; values only of those that matter to a run and hold no secret."""
    return {
        name: value if _SHOWN.fullmatch(name) and not _SECRET.search(name) else None
        for name, value in sorted(variables.items())
    }


def git_commit(directory: Path) -> dict[str, str] | None:
    """Commit and branch checked out around a directory, read from files; None outside of one."""
    for folder in (directory, *directory.parents):
        git = folder / ".git"
        try:
            if git.is_file():  # a worktree or submodule: "gitdir: PATH"
                git = (folder / git.read_text().partition(":")[2].strip()).resolve()
            head = (git / "HEAD").read_text().strip()
        except OSError:
            continue
        if not head.startswith("ref: "):
            return {"root": str(folder), "commit": head, "branch": ""}
        name = head.removeprefix("ref: ")
        found = _ref(git, name)
        branch = name.removeprefix("refs/heads/")
        return {"root": str(folder), "commit": found, "branch": branch}
    return None


def _ref(git: Path, name: str) -> str:
    """Commit of a reference, loose or packed; empty for a branch without one."""
    try:
        common = (git / (git / "commondir").read_text().strip()).resolve()
    except OSError:
        common = git
    for folder in (git, common):
        try:
            return (folder / name).read_text().strip()
        except OSError:
            continue
    try:
        lines = (common / "packed-refs").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in some containers
        return str(os.getuid())
