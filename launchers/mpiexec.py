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
        cores: of each rank, which it is pinned to by ``taskset``; empty pins none. Ranks beyond
            the list are not pinned.
        taskset: its path.
    """

    def __init__(
        self,
        mpiexec: Path | str | None,
        *,
        cores: Sequence[Sequence[int]] = (),
        taskset: str = "/usr/bin/taskset",
    ) -> None:
        self.mpiexec = None if mpiexec is None else str(mpiexec)
        self.taskset = taskset
        self.cores = tuple(tuple(one) for one in cores)

    @classmethod
    def find(
        cls, environ: Mapping[str, str], *, cores: Sequence[Sequence[int]] = ()
    ) -> LocalLauncher:
        """With the mpiexec beside this Python (the mpich wheel's), else the first on PATH.

        Without ``taskset`` on PATH nothing is pinned, whatever ``cores`` are.
        """
        path = environ.get("PATH", "")
        taskset = shutil.which("taskset", path=path)
        beside = Path(sys.executable).absolute().parent / "mpiexec"
        mpiexec = str(beside) if beside.is_file() else shutil.which("mpiexec", path=path)
        if taskset is None:
            return cls(mpiexec)
        return cls(mpiexec, cores=cores, taskset=taskset)

    def command(self, spec: JobSpec, program: Sequence[str]) -> list[str]:
        """The program itself for one rank, ``mpiexec -n RANKS PROGRAM`` for more.

        Pinned ranks are given one by one: ``mpiexec -n 1 taskset -c 0 PROGRAM : -n 1 …``, which
        every MPI library takes.

        Raises:
            UsageError: there is no mpiexec.
        """
        ranks = world_size(spec)
        pinned = len(self.cores) >= ranks
        if ranks == 1:
            return [*(self._pin(0) if pinned else ()), *program]
        if self.mpiexec is None:
            raise UsageError(
                f"no mpiexec found to start {ranks} ranks here: neither beside {sys.executable} "
                "nor on PATH",
                hint="on a machine without MPI: pip install 'hpctrain[local]'; on a cluster load "
                "the site's MPI module, whose mpiexec is then on PATH, or submit to Slurm",
            )
        if not pinned:
            return MpiexecLauncher(self.mpiexec).command(spec, program)
        command = [self.mpiexec]
        for rank in range(ranks):
            command += [*([":"] if rank else []), "-n", "1", *self._pin(rank), *program]
        return command

    def _pin(self, rank: int) -> tuple[str, ...]:
        return (self.taskset, "-c", ",".join(str(core) for core in self.cores[rank]))
