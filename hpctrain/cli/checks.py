"""What ``hpctrain doctor`` looks at, each finding with what to do about it.

Nothing is imported into this process to be looked at: MPI and HDF5 are loaded by a short
Python of their own, since a library that does not fit the machine may take the process with it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from hpctrain.units import format_bytes

Verdict = Literal["ok", "warning", "missing"]
_SECONDS = 30.0
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor.

    Attributes:
        topic: what was looked at.
        verdict: ok; warning (works, but); missing (a job that needs it cannot run).
        found: what is there.
        advice: what to do; empty where nothing is to be done.
    """

    topic: str
    verdict: Verdict
    found: str
    advice: str = ""


def findings() -> Iterator[Finding]:
    """All findings, in the order in which they matter."""
    mpi = load_mpi()
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python, _torch, lambda: _mpi(mpi), lambda: _mpiexec(mpi), lambda: _slurm(mpi), _gpus,
        _hdf5, _cores, _limits, _file_systems, _extras,
    )  # fmt: skip
    for check in checks:
        yield from check()


# ---- software -----------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    from hpctrain import __version__

    where = "in a virtual environment" if sys.prefix != sys.base_prefix else "of the system"
    python = f"Python {platform.python_version()} {where} ({sys.prefix})"
    yield Finding("hpctrain", "ok", f"{__version__}, {python}")


def _torch() -> Iterator[Finding]:
    version = _version("torch")
    if version is None:
        yield Finding("torch", "missing", "not installed", "pip install torch")
        return
    gpus = gpu_vendors()
    if gpus and version.endswith("+cpu"):
        yield Finding(
            "torch", "warning", f"{version}, which uses no GPU",
            f"install the build for {' and '.join(sorted(gpus))}: https://pytorch.org/get-started",
        )  # fmt: skip
        return
    yield Finding("torch", "ok", version)


@dataclass(frozen=True, slots=True)
class Mpi:
    """The MPI library that mpi4py loads.

    Attributes:
        family: ``MPICH``, ``Open MPI`` or another first word of its version; empty if none.
        version: first line of what it says about itself.
        library: path of the shared library.
        abi: which mpi4py extension was loaded (``mpich``, ``openmpi`` or ``native``).
        error: why none could be loaded.
    """

    family: str = ""
    version: str = ""
    library: str = ""
    abi: str = ""
    error: str = ""


_LOAD_MPI = """
import json, re
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
libraries = sorted(path for path in maps if re.search(r"/libmpi(_\\w+)?\\.so", path))
print(json.dumps([MPI.Get_library_version(), libraries, MPI.__file__]))
"""


def load_mpi() -> Mpi:
    """Load MPI as a rank would, in a process of its own, without initialising it."""
    done = _python_says(_LOAD_MPI)
    if isinstance(done, str):
        return Mpi(error=done)
    version, libraries, extension = done
    first = " ".join(version.splitlines()[0].split()).strip("\x00")
    family = "Open MPI" if "Open MPI" in first else "MPICH" if "MPICH" in version else first
    name = Path(extension).name.split(".")
    abi = name[1] if name[1] in ("mpich", "openmpi", "mpiabi") else "native"
    return Mpi(family, first, libraries[0] if libraries else "", abi)


def _mpi(mpi: Mpi) -> Iterator[Finding]:
    if mpi.error:
        yield Finding(
            "MPI library", "missing", mpi.error,
            "on a cluster load the site's MPI module; elsewhere pip install 'hpctrain[local]'",
        )  # fmt: skip
        return
    where = f", {mpi.library}" if mpi.library else ""
    mpi4py = _version("mpi4py")
    yield Finding("MPI library", "ok", f"{mpi.version}{where} (mpi4py {mpi4py}, {mpi.abi} ABI)")


def mpiexec_path() -> str | None:
    """The mpiexec beside this Python, else the first one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _mpiexec(mpi: Mpi) -> Iterator[Finding]:
    path = mpiexec_path()
    if path is None:
        yield Finding(
            "mpiexec", "warning", "none beside this Python nor on PATH",
            "needed by the local launcher only: pip install 'hpctrain[local]'",
        )  # fmt: skip
        return
    text = _run([path, "--version"])[1]
    family = "MPICH" if "HYDRA" in text else "Open MPI" if "Open MPI" in text else ""
    if family and mpi.family and family != mpi.family:
        yield Finding(
            "mpiexec", "warning", f"{path} is of {family}, the library is {mpi.family}",
            f"every rank would be 0 of 1: put the mpiexec of {mpi.family} first on PATH",
        )  # fmt: skip
        return
    yield Finding("mpiexec", "ok", f"{path}{f' ({family})' if family else ''}")


def _slurm(mpi: Mpi) -> Iterator[Finding]:
    from hpctrain.errors import SchedulerError
    from hpctrain.slurm.client import SlurmClient

    client = SlurmClient(os.environ)
    why = client.why_unavailable()
    if why is not None:
        yield Finding("Slurm", "ok", f"none answers ({why}): runs are started on this machine")
        return
    version = _first(_run(["srun", "--version"])[1])
    try:
        partitions, cluster = client.partitions(), client.cluster()
    except SchedulerError as error:
        yield Finding("Slurm", "warning", f"{version}: {error.message}", error.hint or "")
        return
    names = ", ".join(one.name + ("*" if one.default else "") for one in partitions)
    yield Finding("Slurm", "ok", f"{version}, cluster {cluster}, partitions {names}")
    for warning in client.overriding():
        yield Finding("Slurm", "warning", warning, "unset it before you submit")
    yield pmi_finding(mpi, pmi_types(_run(["srun", "--mpi=list"])[1]))


def pmi_types(text: str) -> list[str]:
    """Types that ``srun --mpi=list`` names: one a line, then versions of pmix."""
    types = text.partition("specific")[0].splitlines()
    return [
        word for line in types if (word := line.strip().removeprefix("srun: "))
        and word != "none" and " " not in word
    ]  # fmt: skip


def pmi_finding(mpi: Mpi, types: list[str]) -> Finding:
    """Whether srun speaks a PMI that the MPI library understands."""
    listed = ", ".join(types)
    by_family: dict[str, tuple[str, ...]] = {"MPICH": ("pmi2",), "Open MPI": ("pmix",)}
    wanted = by_family.get(mpi.family, ())
    if "cray" in mpi.version.lower():
        wanted = ("cray_shasta", "pmi2")
    fitting = [one for name in wanted for one in types if one == name]
    if not wanted or not types:
        return Finding("srun --mpi", "ok", listed or "no types listed")
    if not fitting:
        return Finding(
            "srun --mpi", "warning", f"{listed}: none of them fits {mpi.family}",
            f"every rank would be 0 of 1; install Slurm's {wanted[0]} plugin or another MPI",
        )  # fmt: skip
    return Finding("srun --mpi", "ok", f"{listed}; slurm.mpi: {fitting[0]} fits {mpi.family}")


_LOAD_HDF5 = """
import json, h5py
print(json.dumps([h5py.version.hdf5_version, bool(h5py.get_config().mpi)]))
"""


def _hdf5() -> Iterator[Finding]:
    done = _python_says(_LOAD_HDF5)
    if isinstance(done, str):
        yield Finding("HDF5", "missing", done, "pip install h5py")
        return
    version, parallel = done
    kind = "with MPI" if parallel else "serial, which is all that is needed"
    yield Finding("HDF5", "ok", f"{version}, h5py {_version('h5py')} {kind}")


def _extras() -> Iterator[Finding]:
    for name, use in (
        ("tokenizers", "BPE tokens"),
        ("tensorboard", "train.tensorboard"),
        ("safetensors", "export"),
    ):
        version = _version(name)
        found = version or f"not installed ({use}: pip install 'hpctrain[{name}]')"
        yield Finding(f"extra {name}", "ok", found)


# ---- hardware -----------------------------------------------------------------------------

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_PCI = Path("/sys/bus/pci/devices")


def gpu_vendors(devices: Path = _PCI) -> dict[str, int]:
    """GPUs by vendor, from the PCI bus: 3D controllers, accelerators, and VGA of NVIDIA, AMD."""
    found: dict[str, int] = {}
    try:
        entries = sorted(devices.iterdir())
    except OSError:
        return found
    for entry in entries:
        kind, vendor = _line(entry / "class"), _VENDORS.get(_line(entry / "vendor"))
        display = kind.startswith("0x0300") and vendor in ("NVIDIA", "AMD")
        accelerator = kind.startswith(("0x0302", "0x0380", "0x1200"))
        if vendor is not None and (display or accelerator):
            found[vendor] = found.get(vendor, 0) + 1
    return found


def _gpus() -> Iterator[Finding]:
    vendors = gpu_vendors()
    tools = {"NVIDIA": ["nvidia-smi", "-L"], "AMD": ["rocm-smi", "--showproductname"]}
    if shutil.which("nvidia-smi") and "NVIDIA" not in vendors:
        vendors["NVIDIA"] = 0  # a container may hide the PCI bus
    if not vendors:
        yield Finding("GPUs", "ok", "none: ranks train on the CPU (gloo)")
        return
    for vendor, count in sorted(vendors.items()):
        tool = tools.get(vendor)
        if tool is None or shutil.which(tool[0]) is None:
            name = f" ({tool[0]})" if tool else ""
            yield Finding(
                "GPUs", "warning", f"{count} of {vendor} on the PCI bus, no driver tool{name}",
                "install or load the vendor's driver and tools",
            )  # fmt: skip
            continue
        code, text = _run(tool)
        names = [line.strip() for line in text.splitlines() if "GPU" in line or "Card" in line]
        if code:
            yield Finding("GPUs", "warning", f"{tool[0]} fails: {_first(text)}", "check the driver")
        elif names:
            yield Finding("GPUs", "ok", f"{vendor}: " + "; ".join(dict.fromkeys(names)))


def _cores() -> Iterator[Finding]:
    mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{mine} of {all_cores} cores usable, {format_bytes(memory)} memory"
    quota = _cpu_quota()
    if quota is not None and quota < mine:
        yield Finding(
            "cores", "warning", f"{found}, but the container may use {quota:g}",
            f"start no more than {max(1, int(quota))} ranks, or raise the container's limit",
        )  # fmt: skip
        return
    yield Finding("cores", "ok", found)


def _cpu_quota() -> float | None:
    """Cores that the control group grants (version 2), None for no limit."""
    words = _line(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(words) != 2 or not words[0].isdigit():
        return None
    return int(words[0]) / int(words[1])


def _limits() -> Iterator[Finding]:
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < 1024
    yield Finding(
        "open files", "warning" if few else "ok", f"{_limit(files)} a process",
        "raise it: ulimit -n 4096" if few else "",
    )  # fmt: skip
    if any(Path("/sys/class/infiniband").glob("*")):
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        low = locked != resource.RLIM_INFINITY and locked < _GIB
        yield Finding(
            "locked memory", "warning" if low else "ok", _limit(locked),
            "InfiniBand registers memory: ulimit -l unlimited (in Slurm PropagateResourceLimits)"
            if low else "",
        )  # fmt: skip


def _limit(value: int) -> str:
    import resource

    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


# ---- file systems -------------------------------------------------------------------------

_VANISHING = {"tmpfs", "ramfs", "overlay"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs"}


def _file_systems() -> Iterator[Finding]:
    import tempfile

    for topic, path, least in (
        ("working directory", Path.cwd(), 5 * _GIB),
        ("temporary files", Path(tempfile.gettempdir()), _GIB),
        ("shared memory", Path("/dev/shm"), _GIB // 2),  # noqa: S108  looked at, not written
    ):
        yield _file_system(topic, path, least)


def _file_system(topic: str, path: Path, least: int) -> Finding:
    try:
        room = os.statvfs(path)
    except OSError as error:
        return Finding(topic, "missing", f"{path}: {error.strerror}", "a directory belongs there")
    kind, free = file_system_type(path), room.f_bavail * room.f_frsize
    found = f"{path}, {kind}, {format_bytes(free)} free"
    if not os.access(path, os.W_OK):
        return Finding(topic, "warning", f"{found}, not writable", "submit from another directory")
    if free < least:
        advice = (
            "MPI and data loaders keep buffers there; start the container with --shm-size=2g"
            if topic == "shared memory"
            else "checkpoints need room: a full disk stops none of the run, but saves nothing"
        )
        return Finding(topic, "warning", found, advice)
    if topic == "working directory" and kind in _VANISHING:
        return Finding(topic, "ok", f"{found} (gone with the container or a restart)")
    if topic == "working directory" and kind in _NETWORK:
        return Finding(
            topic, "warning", found,
            "checkpoints are slow here: set checkpoint.path to the site's scratch file system",
        )  # fmt: skip
    return Finding(topic, "ok", found)


def file_system_type(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Type of the file system that a path lies on, as the kernel names it."""
    path = path.resolve()
    best, kind = "", "unknown"
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return kind
    for text in lines:
        before, _, after = text.partition(" - ")
        # Blanks and backslashes of a mount point are octal escapes.
        point = before.split()[4].encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


# ---- helpers ------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _first(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else "no output"


def _run(tokens: list[str]) -> tuple[int, str]:
    """Exit code and output of a command; code 1 where it cannot be started or hangs."""
    try:
        done = subprocess.run(
            tokens, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr


def _python_says(script: str) -> list[Any] | str:
    """The JSON list that a script prints in a Python of its own, or why it failed."""
    code, text = _run([sys.executable, "-c", script])
    lines = [line for line in text.splitlines() if line.strip()]
    if code == 0 and lines:
        try:
            answer = json.loads(lines[-1])
        except json.JSONDecodeError:
            answer = None
        if isinstance(answer, list):
            return answer
    return lines[-1].strip() if lines else f"Python ended with code {code}"
