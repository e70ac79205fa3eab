"""Ranks inside a container image: options of srun, or a program before theirs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import ImpossibleError, UsageError
from hpctrain.machine import Option

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.rundir import RunDir
    from hpctrain.spec import JobSpec

_RENDERED = ("apptainer", "pyxis", "podman-hpc")


def runtime_of(spec: JobSpec, machine: Machine) -> tuple[str, str]:
    """What starts the image, and from where that is known.

    Raises:
        ImpossibleError: nobody says, or it is one that is not rendered.
    """
    if spec.container.runtime != "auto":
        return spec.container.runtime, "container.runtime"
    block = machine.containers
    if block is None:
        raise ImpossibleError(
            f"container.runtime: machine {machine.name} does not say what starts images",
            hint=f"set it to one of {', '.join(_RENDERED)}",
        )
    if block.runtime not in _RENDERED:
        raise ImpossibleError(
            f"container.runtime: machine {machine.name} starts images with {block.runtime}, which "
            f"is not rendered [{block.source}]",
            hint=f"set it to one of {', '.join(_RENDERED)} if the site has it"
            + (f"; the site's own way: {block.options}" if block.options else ""),
        )
    return block.runtime, block.source


def mounts(spec: JobSpec, run: RunDir) -> list[str]:
    """``source:target`` of all that the ranks read and write, each once.

    Raises:
        UsageError: a path with a colon or comma, which no runtime takes apart again.
    """
    wanted = [str(run.root)]
    if spec.data.path is not None:
        wanted.append(str(Path(spec.data.path).parent))
    if spec.checkpoint.path is not None:
        wanted.append(spec.checkpoint.path)
    for path in wanted:
        if ":" in path or "," in path:
            raise UsageError(f"container: {path!r} cannot be bound: it holds a colon or a comma")
    for index, bind in enumerate(spec.container.binds):
        if bind.count(":") > 1 or "," in bind or not bind.startswith("/"):
            raise UsageError(
                f"container.binds.{index}: found {bind!r}; /source:/target or one absolute path "
                "belongs here"
            )
    wanted += spec.container.binds
    return list(dict.fromkeys(one if ":" in one else f"{one}:{one}" for one in wanted))


def srun_options(spec: JobSpec, machine: Machine, run: RunDir) -> list[Option]:
    """Options of srun that start the ranks in the image (pyxis); none where a program does."""
    if spec.container.image is None:
        return []
    runtime, source = runtime_of(spec, machine)
    if runtime != "pyxis":
        return []
    return [
        Option((f"--container-image={spec.container.image}",), "container.image", "of the ranks"),
        Option(
            (f"--container-mounts={','.join(mounts(spec, run))}",),
            "container.binds",
            "run directory, data, checkpoints and what the job asks for",
        ),
        Option(("--no-container-mount-home",), source, "the image's own Python, not one at home"),
    ]


def program(spec: JobSpec, machine: Machine, run: RunDir, outside: list[str]) -> list[str]:
    """What each rank executes.

    Args:
        spec, machine, run: of the job.
        outside: the program on the node itself, from hpctrain.launchers.rank_program.
    """
    if spec.container.image is None:
        return outside
    inside = [spec.container.program, "run", str(run.root)]
    runtime, _ = runtime_of(spec, machine)
    if runtime == "apptainer":
        binds = [word for one in mounts(spec, run) for word in ("--bind", one)]
        gpu = {"nvidia": ["--nv"], "amd": ["--rocm"]}.get(machine.node.device.vendor, [])
        return ["apptainer", "exec", *gpu, *binds, spec.container.image, *inside]
    if runtime == "podman-hpc":
        binds = [word for one in mounts(spec, run) for word in ("--volume", one)]
        gpu = ["--gpu"] if machine.node.device.vendor == "nvidia" else []
        # MPI inside finds its peers by the step's own variables and sockets.
        return [
            "podman-hpc", "run", "--rm", "--mpi", "--env-host", "--network=host", "--ipc=host",
            *gpu, *binds, spec.container.image, *inside,
        ]  # fmt: skip
    return inside
