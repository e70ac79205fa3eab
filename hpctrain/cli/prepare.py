"""From a job file to a job that can be launched: read, resolve, check. Touches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.machine import Machine
    from hpctrain.spec import Job


@dataclass(frozen=True, slots=True)
class Prepared:
    """A resolved job and the machine that it was resolved for."""

    job: Job
    machine: Machine

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        per_node = self.job.spec.ranks_per_node
        assert isinstance(per_node, int), "resolve() leaves no auto"
        return self.job.spec.nodes * per_node


@dataclass(frozen=True, slots=True)
class _Site:
    """What resolving asks of a machine."""

    devices_per_node: int | None


def devices(machine: Machine) -> int | None:
    """Devices that ``auto`` gives a rank each; the cores of the local host are not such."""
    if machine.kind == "local" and machine.node.device.vendor == "cpu":
        return None
    return machine.devices_per_node


def load(path: str, overrides: Sequence[str]) -> Prepared:
    """The job of a file, resolved for its machine and the present directory.

    Raises:
        UsageError, SpecError: the file, an override or the machine's name is not valid.
        ImpossibleError: numbers that do not fit the machine or each other.
    """
    from hpctrain.spec import read_job

    return prepare(read_job(path, overrides), Path.cwd())


def find_machine(job: Job, directory: Path) -> Machine:
    """The machine that a job names; a path is taken from ``directory``."""
    from hpctrain.machine import get_machine

    name = job.spec.machine_name
    machine = get_machine(directory / name if "/" in name else name)
    # Hardware alone: an emulated machine has no scheduler, and no limits.
    return machine.model_copy(update={"kind": "generic"}) if job.spec.emulated else machine


def prepare(job: Job, directory: Path, machine: Machine | None = None) -> Prepared:
    """The job resolved for its machine, relative paths taken from ``directory``.

    Args:
        job: as validated.
        directory: see above.
        machine: that :func:`find_machine` gave before; None looks for it.
    """
    from hpctrain.schedule.job import check_pipeline
    from hpctrain.spec import resolve
    from hpctrain.spec.resolve import check

    machine = machine or find_machine(job, directory)
    if job.spec.emulated:
        from hpctrain.plan.emulation import check_emulated

        check_emulated(job.spec, ranks=False)
    site = _Site(devices(machine))
    if job.spec.parallel.layout == "auto":
        from hpctrain.plan.auto import chosen

        job = chosen(job, machine, site, directory)
    resolved = resolve(job, site, directory)
    check(resolved)
    check_pipeline(resolved)
    ranks_per_node = resolved.spec.ranks_per_node
    assert isinstance(ranks_per_node, int), "resolve() leaves no auto"
    machine.check_ranks_per_node(ranks_per_node)
    if job.spec.emulated:
        from hpctrain.scaling.simulated import is_simulated

        check_emulated(resolved.spec, ranks=not is_simulated(resolved.spec))
    return Prepared(resolved, machine)
