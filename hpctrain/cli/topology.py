"""What ``hpctrain topo`` shows: planned places and links, and what measuring found."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import ImpossibleError, RankFailedError, UsageError

if TYPE_CHECKING:
    from hpctrain.fabric import Fabric
    from hpctrain.layout import RankGrid
    from hpctrain.machine import Machine
    from hpctrain.spec import JobSpec

_FAR_BELOW = 0.5
"""A link that does less than this part of what its description says is worth a warning."""
_MEASURE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Rank:
    """One row of the table of ranks; ``coordinates`` by axis, of axes with several ranks."""

    rank: int
    node: int
    host: str
    cores: str
    device: str
    nic: str
    coordinates: dict[str, int]


@dataclass(frozen=True, slots=True)
class Axis:
    """The groups of an axis; ``bandwidth`` as described, ``measured`` the slowest pair found."""

    axis: str
    size: int
    groups: int
    nodes: int
    link: str
    bandwidth: float | None
    measured: float | None = None


@dataclass(frozen=True)
class Topology:
    """Everything that is known of the ranks of a job; ``named`` is how it calls its machine."""

    machine: Machine
    named: str
    spec: JobSpec | None
    nodes: int
    ranks_per_node: int
    grid: RankGrid
    fabric: Fabric
    ranks: list[Rank]
    axes: list[Axis]
    warnings: list[str]
    links: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.grid.size

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "machine": self.machine.name,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "layout": dataclasses.asdict(self.grid.layout),
            "order": list(self.grid.order),
            "ranks": [dataclasses.asdict(rank) for rank in self.ranks],
            "axes": [dataclasses.asdict(axis) for axis in self.axes],
            "warnings": self.warnings,
            "links": self.links or None,
            "groups": self.groups or None,
        }


def plan(
    job: str | None, overrides: Sequence[str], machine: str | None, nodes: int | None
) -> Topology:
    """Ranks, groups and links as the job and the machine's description have them.

    Raises:
        UsageError: a machine or nodes beside a job, overrides without one, or an unknown machine.
        SpecError, ImpossibleError: as for ``hpctrain submit``.
    """
    from hpctrain.fabric import Fabric
    from hpctrain.layout import RankGrid

    if job is not None and (machine is not None or nodes is not None):
        raise UsageError(
            "--machine and --nodes are for a topology without a job",
            hint="with a job: --set machine=NAME --set nodes=N",
        )
    if job is None and overrides:
        raise UsageError("--set replaces keys of a job file, and none is given")
    spec: JobSpec | None = None
    if job is not None:
        from hpctrain.cli.prepare import load
        from hpctrain.runtime.placing import placement_of

        prepared = load(job, overrides)
        spec, found = prepared.job.spec, prepared.machine
        placed = placement_of(spec, found)
        grid, fabric = placed.grid, placed.fabric
        count, per_node = spec.nodes, _per_node(spec)
    else:
        from hpctrain.machine import get_machine

        found = get_machine(machine or "local")
        count, per_node = nodes or 1, found.devices_per_node
        grid = RankGrid.from_sizes({"dp_shard": count * per_node})
        fabric = Fabric.of(found, count, per_node)
    axes = axes_of(grid, fabric)
    names = [axis.axis for axis in axes]
    return Topology(
        machine=found,
        named=spec.machine if spec else str(machine or "local"),
        spec=spec,
        nodes=count,
        ranks_per_node=per_node,
        grid=grid,
        fabric=fabric,
        ranks=_ranks(found, per_node, grid, fabric, names),
        axes=axes,
        warnings=_doubts(found, axes),
    )


def axes_of(grid: RankGrid, fabric: Fabric) -> list[Axis]:
    """Axes with several ranks, and ``dp`` where it is two of them."""
    from hpctrain.layout import DENSE_AXES
    from hpctrain.placement import axis_links

    names = [*DENSE_AXES, "ep", "etp", "edp"]
    layout = grid.layout
    if layout.ep == layout.etp == 1:
        names = list(DENSE_AXES)
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        names.append("dp")
    return [
        Axis(one.axis, one.size, one.groups, one.nodes, one.kind.value, one.bandwidth)
        for one in axis_links(grid, fabric, names)
    ]


def _per_node(spec: JobSpec) -> int:
    assert isinstance(spec.ranks_per_node, int), "resolve() leaves no auto"
    return spec.ranks_per_node


def _ranks(
    machine: Machine, per_node: int, grid: RankGrid, fabric: Fabric, axes: Sequence[str]
) -> list[Rank]:
    """A row a rank, from the description."""
    from hpctrain.layout import expand_axes

    table = {axis: grid.coordinate_table([axis])[:, 0].tolist() for axis in axes if axis != "dp"}
    if "dp" in axes:
        replicate, shard = (grid.coordinate_table([a])[:, 0] for a in expand_axes(["dp"]))
        table["dp"] = (replicate * grid.layout.dp_shard + shard).tolist()
    slots = [_slot(machine, local, per_node) for local in range(per_node)]
    here = socket.gethostname()
    rows = []
    for rank, node in enumerate(fabric.node_of.tolist()):
        cores, device, nic = slots[rank % per_node]
        host = here if machine.kind == "local" else f"node {node}"
        coordinates = {axis: column[rank] for axis, column in table.items()}
        rows.append(Rank(rank, node, host, cores, device, nic, coordinates))
    return rows


def _slot(machine: Machine, local: int, per_node: int) -> tuple[str, str, str]:
    """Cores, device and network card that the description gives a local rank."""
    slots = machine.affinity.slots
    cores = slots[local].cores if local < len(slots) and per_node <= len(slots) else None
    device = machine.slot_devices(per_node)[local]
    nics = machine.node.nics
    card = nics[machine.slot_nics(per_node)[local]] if nics else None
    nic = "-" if card is None else card.name or f"rail {card.rail}"
    count = machine.cores_for(per_node)
    return cores or f"{count} core{'s' * (count > 1)}", str(device), nic


def _doubts(machine: Machine, axes: Sequence[Axis]) -> list[str]:
    """Links that the axes use and whose speed nobody has stated, or not surely."""
    from hpctrain.machine import LinkKind

    found = []
    for kind in dict.fromkeys(axis.link for axis in axes):
        link = machine.link(LinkKind(kind))
        if link.bandwidth is None:
            found.append(
                f"links.{kind}: the description of {machine.name} gives no speed; "
                "measure it with hpctrain topo --measure"
            )
        elif link.provenance("bandwidth").confidence == "low":
            found.append(
                f"links.{kind}: {link.bandwidth / 1e9:.3g} GB/s has low confidence "
                f"({link.provenance('bandwidth').source})"
            )
    return found


# ---- measuring -----------------------------------------------------------------------------


def measured(planned: Topology) -> Topology:
    """The topology with what real ranks find.

    Raises:
        ImpossibleError: the job is for another machine, and this is no allocation of Slurm.
        RankFailedError: the ranks did not end well; says what they printed.
    """
    request = {
        "machine": planned.named,
        "sizes": dataclasses.asdict(planned.grid.layout),
        "order": list(planned.grid.order),
        "permutation": planned.grid.permutation,
        "ranks_per_node": planned.ranks_per_node,
    }
    with tempfile.TemporaryDirectory(prefix=".hpctrain-topo-", dir=Path.cwd()) as folder:
        asked, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(request))
        program = [sys.executable, "-m", "mpi4py", "-m", "hpctrain.runtime.measure"]
        _run([*_launch(planned, [*program, str(asked), str(answer)])], planned)
        found = json.loads(answer.read_text())
    seen = {one["rank"]: one for one in found["ranks"]}
    ranks = [
        dataclasses.replace(
            rank, node=seen[rank.rank]["node"], host=seen[rank.rank]["host"],
            cores=seen[rank.rank]["cores"],
        )
        for rank in planned.ranks
    ]  # fmt: skip
    axes = [
        dataclasses.replace(axis, measured=slowest(found["links"], planned.grid, axis.axis))
        for axis in planned.axes
    ]
    found_out = {axis.link for axis in axes if axis.measured}
    warnings = [
        text for text in planned.warnings if text.partition(":")[0].removeprefix("links.")
        not in found_out
    ]  # fmt: skip
    warnings += _unlike(planned, ranks)
    warnings += [text for one in found["ranks"] for text in one["warnings"]]
    warnings += _slow(axes)
    return dataclasses.replace(
        planned,
        ranks=ranks,
        axes=axes,
        warnings=warnings,
        links=found["links"],
        groups=found["groups"],
    )


def slowest(links: dict[str, Any], grid: RankGrid, axis: str) -> float | None:
    """Bytes/s of the slowest measured pair of neighbours within a group of an axis.

    Neighbours follow each other in the group, the last and the first too: the hops of a ring.
    None where no such pair was measured.
    """
    place = {rank: number for number, rank in enumerate(links["ranks"])}
    rates = []
    for row in grid.groups(axis).tolist():
        for a, b in zip(row, [*row[1:], row[0]], strict=True):
            if a in place and b in place:
                rate = links["bandwidth"][place[a]][place[b]]
                rates += [] if rate is None else [rate]
    return min(rates, default=None)


def _unlike(planned: Topology, ranks: Sequence[Rank]) -> list[str]:
    """Where the ranks of nodes are not the planned ones; the local machine plays all nodes."""
    if planned.machine.kind == "local":
        return []
    return [
        f"rank {rank.rank} is on node {rank.node} ({rank.host}), planned was node {before.node}: "
        "the launcher numbers ranks in another way"
        for rank, before in zip(ranks, planned.ranks, strict=True)
        if rank.node != before.node
    ][:1]


def _slow(axes: Sequence[Axis]) -> list[str]:
    return [
        f"axis {axis.axis}: {axis.measured / 1e9:.3g} GB/s measured between neighbours, its "
        f"{axis.link.replace('_', ' ')} links are described with {axis.bandwidth / 1e9:.3g} GB/s"
        for axis in axes
        if axis.measured and axis.bandwidth and axis.measured < _FAR_BELOW * axis.bandwidth
    ]


def _launch(planned: Topology, program: list[str]) -> list[str]:
    """Tokens that start the ranks: srun inside an allocation, else mpiexec here."""
    from hpctrain.launchers import LocalLauncher, SrunLauncher, mpich_wheel

    if "SLURM_JOB_ID" in os.environ and shutil.which("srun"):
        launcher = SrunLauncher(planned.machine, mpich_wheel=mpich_wheel(os.environ))
        return launcher.command(_Shape.of(planned), program)  # type: ignore[arg-type]
    if planned.machine.kind != "local":
        raise ImpossibleError(
            f"--measure starts the ranks, and this is neither {planned.machine.name} nor an "
            "allocation of Slurm",
            hint=f"get {planned.nodes} node{'s' * (planned.nodes > 1)} with salloc and run it "
            "there",
        )
    local = LocalLauncher.find(os.environ)
    return local.command(_Shape.of(planned), program)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What launchers ask of a job, for ranks without one."""

    nodes: int
    ranks_per_node: int
    slurm: Any

    @classmethod
    def of(cls, planned: Topology) -> JobSpec | _Shape:
        from hpctrain.spec.slurm import SlurmSpec

        if planned.spec is not None:
            return planned.spec
        return cls(planned.nodes, planned.ranks_per_node, SlurmSpec())


def _run(tokens: Sequence[str], planned: Topology) -> None:
    from hpctrain.launchers import without_leaks
    from hpctrain.runtime.environment import within_one_machine

    inside = "SLURM_JOB_ID" in os.environ and tokens[0].endswith("srun")
    if inside:
        environ = dict(os.environ)
    else:
        environ = without_leaks(os.environ)
        environ |= within_one_machine(environ)
    cores = max(1, len(os.sched_getaffinity(0)) // planned.ranks_per_node)
    environ.setdefault("OMP_NUM_THREADS", str(cores))
    if planned.spec is not None:
        environ |= planned.spec.env
    try:
        done = subprocess.run(
            tokens, env=environ, capture_output=True, text=True, errors="replace",
            timeout=_MEASURE_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RankFailedError(
            f"measuring {planned.size} ranks did not end in {_MEASURE_SECONDS:.0f} s"
        ) from None
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise RankFailedError(f"measuring: {tokens[0]} ended with {done.returncode}:\n{said}")
