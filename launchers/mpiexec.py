"""mpiexec: the one of the mpich wheel for this machine, or a site's own by its path."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.launchers.shape import world_size

if TYPE_CHECKING:
    from hpctrain.spec import JobSpec


class MpiexecLauncher:
    """Ranks through an mpiexec of the site.

    Args:
        mpiexec: its path.
        options: further options of that mpiexec (``-ppn 4``, ``--map-by ppr:4:node``); MPI
            libraries do not agree on them.
    """

    def __init__(self, mpiexec: Path | str, options: Sequence[str] = ()) -> None:
        self.mpiexec = str(mpiexec)
        self.options = tuple(options)

    def command(self, spec: JobSpec, program: Sequence[str]) -> list[str]:
        """``mpiexec -n RANKS [options] PROGRAM``."""
        return [self.mpiexec, "-n", str(world_size(spec)), *self.options, *program]


class LocalLauncher:
    """All ranks of a job on this machine, those of several planned nodes included.

    One rank needs no mpiexec: every MPI library starts a world of one by itself.

    Args:
        mpiexec: path of mpiexec; None where the machine has none.
    """

    def __init__(self, mpiexec: Path | str | None) -> None:
        self.mpiexec = None if mpiexec is None else str(mpiexec)

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> LocalLauncher:
        """With the mpiexec beside this Python (the mpich wheel's), else the first on PATH."""
        beside = Path(sys.executable).absolute().parent / "mpiexec"
        if beside.is_file():
            return cls(beside)
        return cls(shutil.which("mpiexec", path=environ.get("PATH", "")))

    def command(self, spec: JobSpec, program: Sequence[str]) -> list[str]:
        """The program itself for one rank, ``mpiexec -n RANKS PROGRAM`` for more.

        Raises:
            UsageError: there is no mpiexec.
        """
        ranks = world_size(spec)
        if ranks == 1:
            return list(program)
        if self.mpiexec is None:
            raise UsageError(
                f"no mpiexec found to start {ranks} ranks here: neither beside {sys.executable} "
                "nor on PATH",
                hint="on a machine without MPI: pip install 'hpctrain[local]'; on a cluster load "
                "the site's MPI module, whose mpiexec is then on PATH, or submit to Slurm",
            )
        return MpiexecLauncher(self.mpiexec).command(spec, program)
