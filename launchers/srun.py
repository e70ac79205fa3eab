"""srun: ranks of a Slurm step, each option with why it is there and where it comes from."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.launchers.shape import cores_per_rank, ranks_per_node, world_size
from hpctrain.machine import Option

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.spec import JobSpec

OURS = "hpctrain"


class SrunLauncher:
    """Ranks through srun, inside the allocation of a batch script.

    Args:
        machine: whose options and MPI type apply.
        mpich_wheel: the ranks load the MPI of the mpich wheel; see :func:`mpich_wheel`.
    """

    def __init__(self, machine: Machine, *, mpich_wheel: bool) -> None:
        self.machine = machine
        self.mpich_wheel = mpich_wheel

    def command(self, spec: JobSpec, program: Sequence[str]) -> list[str]:
        """``srun OPTIONS PROGRAM``."""
        tokens = [token for option in self.options(spec) for token in option.tokens]
        return ["srun", *tokens, *program]

    def options(self, spec: JobSpec) -> list[Option]:
        """All options in order; where two contradict each other srun takes the later one."""
        cores = cores_per_rank(spec, self.machine)
        found = [
            Option((f"--nodes={spec.nodes}",), "nodes", "all nodes of the allocation"),
            Option((f"--ntasks={world_size(spec)}",), "nodes, ranks_per_node", "one task a rank"),
            Option(
                (f"--ntasks-per-node={ranks_per_node(spec)}",),
                "ranks_per_node",
                "without it Slurm fills the first node before the others",
            ),
            Option(
                (f"--cpus-per-task={cores}",),
                cores_source(spec, self.machine),
                "srun does not take it over from sbatch since Slurm 22.05",
            ),
            Option(("--distribution=block",), OURS, "ranks are numbered node by node, as planned"),
        ]
        found += self._mpi(spec)
        found += [
            Option(
                ("--kill-on-bad-exit=1",), OURS, "a rank that dies must not leave the others hang"
            ),
            Option(
                ("--export=ALL",), OURS, "the exports above reach the ranks whatever sbatch got"
            ),
        ]
        found += self.machine.srun_options(spec.nodes)
        found += [
            Option(split_option(text), f"slurm.srun_options.{index}", "given in the job file")
            for index, text in enumerate(spec.slurm.srun_options)
        ]
        return found

    def _mpi(self, spec: JobSpec) -> Iterator[Option]:
        why = "how the MPI library finds its ranks"
        if spec.slurm.mpi is not None:
            yield Option((f"--mpi={spec.slurm.mpi}",), "slurm.mpi", why)
        elif self.machine.mpi is not None:
            origin = self.machine.launch.provenance("mpi")
            yield Option((f"--mpi={self.machine.mpi}",), origin.source, why, origin.confidence)
        elif self.mpich_wheel:
            yield Option(("--mpi=pmi2",), "the mpich wheel beside this Python", why)


def cores_source(spec: JobSpec, machine: Machine) -> str:
    """Where the number of cores of a rank comes from."""
    if spec.slurm.cpus_per_task is not None:
        return "slurm.cpus_per_task"
    if machine.affinity.cpus_per_task is not None:
        return machine.affinity.provenance("cpus_per_task").source
    return machine.node.provenance("cores").source


def split_option(text: str) -> tuple[str, ...]:
    """Tokens of one option as a job file has it: ``--name=any value`` or ``-x any value``."""
    name, blank, value = text.partition(" ")
    if "=" in name or not blank:
        return (text,)
    return (name, value.strip())


def mpich_wheel(environ: Mapping[str, str]) -> bool:
    """Whether mpi4py of this Python loads the MPI library of the mpich wheel.

    Found out from files alone, as mpi4py does it (mpi4py/_mpiabi.py): an mpi4py wheel looks
    first into the lib directory of its environment, unless MPI4PY_LIBMPI names a library; an
    mpi4py that was built against a site's MPI knows that one only.
    """
    try:
        metadata.distribution("mpich")
    except metadata.PackageNotFoundError:
        return False
    library = Path(sys.prefix) / "lib" / "libmpi.so.12"
    named = environ.get("MPI4PY_LIBMPI")
    if named:
        return Path(named).parent.resolve() == library.parent.resolve()
    found = importlib.util.find_spec("mpi4py")
    if found is None or found.origin is None:
        return False
    has_abi = any(Path(found.origin).parent.glob("MPI.mpich.*.so"))
    return has_abi and library.exists()
