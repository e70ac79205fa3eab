"""Who talks to whom: a torch process group and an MPI communicator for each axis.

All of them follow the rank grid: the members of a group stand in the order of their coordinates,
whatever a placement made of their ranks. One DeviceMesh holds the groups of the dense axes, one
those of the expert axes; joint axes (``dp`` with ``cp``), nodes, rails and the halves of
hierarchical collectives are made when they are asked for. Axes with one rank get no group of
their own: all of them share one that holds this rank alone.

Groups are made by all ranks of the job together. What makes one says so, and has to be called
by every rank, in the same order.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.errors import ImpossibleError
from hpctrain.layout import ALIASES, DENSE_AXES, EXPERT_AXES, RankGrid, expand_axes
from hpctrain.runtime.counting import Counter
from hpctrain.runtime.mpi_counting import counted_comm

if TYPE_CHECKING:
    from hpctrain.runtime.levels import Levels


@dataclass(frozen=True, slots=True)
class GroupCost:
    """What making a group cost this rank.

    Attributes:
        name: axis, ``axis/inside`` or ``mpi:axis``.
        size: members.
        seconds: until it was made.
        rss_bytes: growth of this process's resident memory; later buffers are not part of it.
    """

    name: str
    size: int
    seconds: float
    rss_bytes: int


@dataclass(eq=False)
class Communicator:
    """The group of this rank along one axis, or several taken together.

    Attributes:
        name: of the axis; what it counts under.
        ranks: global ranks of the members, in order of coordinate.
        place: of this rank among them.
        nodes: node number of each member.
        group: torch process group in the same order.
        device: type of device whose tensors it moves.
        levels: halves of hierarchical collectives, once :meth:`Communicators.prepare` made them.
    """

    name: str
    ranks: tuple[int, ...]
    place: int
    nodes: tuple[int, ...]
    group: dist.ProcessGroup
    device: torch.device
    counter: Counter
    levels: Levels | None = None
    _make_mpi: Callable[[Communicator], Any] = field(repr=False, default=lambda _: None)
    _worker: ThreadPoolExecutor | None = field(repr=False, default=None)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def node_count(self) -> int:
        """Nodes that the members are on."""
        return len(set(self.nodes))

    @property
    def has_worker(self) -> bool:
        """Whether operations in two levels go through :attr:`worker`."""
        return self._worker is not None

    @property
    def worker(self) -> ThreadPoolExecutor:
        """The thread that drives operations in two levels, one after the other.

        Once it is there all of them go through it: every member issues them in one order.
        """
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"levels-{self.name}")
        return self._worker

    def close(self) -> None:
        """End the thread, if there is one, when it has done what it was given."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    @cached_property
    def mpi(self) -> Any:
        """MPI communicator of the members, for control; the first use is collective over them."""
        return self._make_mpi(self)


class Communicators:
    """Groups of all axes of a job; collective over all its ranks.

    Args:
        comm: MPI communicator of all ranks.
        grid: ranks and coordinates.
        nodes: node number of each rank.
        device: this rank's.
        counter: where their traffic is counted.

    Attributes:
        mesh: DeviceMesh over the dense axes.
        costs: of every group made so far.

    Raises:
        ImpossibleError: the placement needs groups in another order than that of their ranks,
            and this PyTorch has none.
    """

    def __init__(
        self,
        comm: Any,
        grid: RankGrid,
        nodes: Sequence[int],
        device: torch.device,
        counter: Counter,
    ) -> None:
        self.comm = comm
        self.grid = grid
        self.nodes = tuple(nodes)
        self.device = device
        self.counter = counter
        self.costs: list[GroupCost] = []
        self._made: dict[str, Communicator] = {}
        self._halves: dict[tuple[str, int], tuple[Any, Any]] = {}
        self._groups: list[dist.ProcessGroup] = []  # that this object made and this rank is in
        self._rank = comm.rank
        default = dist.group.WORLD
        assert default is not None, "init_process_group comes first"
        self._default = default
        counter.name(default, "world")
        self._alone = default if comm.size == 1 else self._timed("alone", 1, self._make_alone)
        self.mesh = self._mesh(DENSE_AXES)

    # ---- groups ----------------------------------------------------------------------------

    def along(self, *axes: str) -> Communicator:
        """The communicator along ``axes`` taken together, first axis slowest.

        One axis of the dense mesh is there from the start. The first use of anything else makes
        groups: every rank of the job has to come here. Axes with one rank add nothing: ``dp`` is
        the very communicator of ``dp_shard`` where there is one replica.

        Raises:
            ValueError: an unknown or repeated axis, or axes of both meshes.
        """
        names = [axis for axis in expand_axes(axes) if self.grid.layout.size(axis) > 1]
        name = _joint_name(names)
        if name not in self._made:
            rows = self.grid.groups(*names).tolist()
            # A group of its own for joint axes, and for expert axes, which may hold the same
            # ranks as a dense one but talk at the same time.
            may_share = len(names) < 2 and not set(names) - set(DENSE_AXES)
            self._made[name] = self._communicator(name, rows, share=may_share)
        return self._made[name]

    def halves(self, axis: str, inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """An axis cut in two: groups of ``inner`` neighbours, and of those with equal place.

        Every rank of the job has to come here. Both count under the axis.

        Returns:
            The group between, and the one of neighbours.
        """
        if (axis, inner) not in self._halves:
            whole = self.along(axis)
            if inner in (1, whole.size):
                pair = (whole.group, self._alone)
                self._halves[axis, inner] = pair if inner == 1 else pair[::-1]
            else:
                rows = self.grid.groups(axis).tolist()
                near = [row[i : i + inner] for row in rows for i in range(0, len(row), inner)]
                far = [row[i::inner] for row in rows for i in range(inner)]
                self._halves[axis, inner] = (
                    self.make_groups(axis, far),
                    self.make_groups(axis, near),
                )
        return self._halves[axis, inner]

    @property
    def world(self) -> Communicator:
        """All ranks, in order of rank; counts under the axis that covers them, else ``world``."""
        if "world" not in self._made:
            rows = [list(range(self.comm.size))]
            name = self.counter.axis_of(self._default)
            self._made["world"] = self._communicator(name, rows, share=True)
        return self._made["world"]

    @property
    def node(self) -> Communicator:
        """The ranks of this node. Every rank has to come here first."""
        return self._by("node", self.nodes)

    @property
    def rail(self) -> Communicator:
        """Ranks with the same local rank on all nodes that have as many. Every rank comes here."""
        return self._by("rail", self._local_ranks())

    @property
    def leaders(self) -> Communicator | None:
        """The first rank of each node; None on the others. Every rank has to come here."""
        rail = self.rail
        return rail if self._local_ranks()[self._rank] == 0 else None

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """DeviceMesh over pp, edp, ep and etp. Every rank has to come here first."""
        return self._mesh(EXPERT_AXES)

    def prepare(self, *axes: str) -> Communicator:
        """The communicator along ``axes``, ready for hierarchical collectives.

        Every rank of the job has to come here. Nothing is made where no group of these axes
        spans several nodes with several members on one of them.
        """
        from hpctrain.runtime.levels import build_levels

        found = self.along(*axes)
        if found.levels is None and found.size > 1:
            names = [axis for axis in expand_axes(axes) if self.grid.layout.size(axis) > 1]
            rows = self.grid.groups(*names).tolist()
            found.levels = build_levels(self, found, rows)
        return found

    def make_groups(self, name: str, rows: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """This rank's group among ``rows``, which every rank gives alike.

        Members stand in the order of their row. A rank in no row, or alone in one, gets the
        group that holds it alone.
        """
        mine = next((list(row) for row in rows if self._rank in row), [self._rank])
        group: dist.ProcessGroup = self._timed(name, len(mine), lambda: self._make(name, rows))
        if len(mine) > 1:
            self.counter.name(group, name)
        return group

    def close_threads(self) -> None:
        """End the threads of all communicators; a later operation starts another."""
        for communicator in self._made.values():
            communicator.close()

    def close(self) -> None:
        """End all threads and the counting."""
        self.close_threads()
        self.counter.close()

    def free(self) -> None:
        """Give back all groups made here, with the threads and buffers that each of them holds.

        For programs that lay one grid after another over the same ranks. Every rank has to come
        here, and nothing that used a group may be used again.
        """
        self.close_threads()
        for communicator in self._made.values():
            if "mpi" in vars(communicator):
                communicator.mpi.Free()
                del communicator.mpi
        self.counter.forget(self._groups)
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()
        self._made.clear()
        self._halves.clear()

    # ---- what it cost ----------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """What making the groups cost this rank: for the ``started`` event and ``topo``."""
        return {
            "groups": len(self.costs),
            "seconds": sum(cost.seconds for cost in self.costs),
            "rss_bytes": sum(cost.rss_bytes for cost in self.costs),
            "each": [
                {
                    "name": cost.name,
                    "size": cost.size,
                    "seconds": cost.seconds,
                    "rss_bytes": cost.rss_bytes,
                }
                for cost in self.costs
            ],
        }

    # ---- making ----------------------------------------------------------------------------

    def _mesh(self, axes: Sequence[str]) -> DeviceMesh:
        """A DeviceMesh of our own groups.

        DeviceMesh would make groups itself, but in the order of ranks: where a placement moved
        ranks, members would then stand elsewhere than their coordinates say, and shards be
        gathered in the wrong order without a word.
        """
        array = torch.from_numpy(self.grid.rank_array(axes))
        groups = [self.along(axis).group for axis in axes]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=tuple(axes))
        return DeviceMesh.from_group(
            groups, self.device.type, mesh=array, mesh_dim_names=tuple(axes)
        )

    def _communicator(
        self, name: str, rows: Sequence[Sequence[int]], *, share: bool = False
    ) -> Communicator:
        """This rank's communicator among groups that cover all ranks."""
        mine = tuple(next(row for row in rows if self._rank in row))
        if len(mine) == 1:
            group = self._alone
        elif share and len(rows) == 1 and list(mine) == sorted(mine):
            group = self._default
            self.counter.name(group, name)
        else:
            group = self.make_groups(name, rows)
        return Communicator(
            name=name,
            ranks=mine,
            place=mine.index(self._rank),
            nodes=tuple(self.nodes[rank] for rank in mine),
            group=group,
            device=self.device,
            counter=self.counter,
            _make_mpi=self._make_mpi,
        )

    def _by(self, name: str, keys: Sequence[int]) -> Communicator:
        """Communicators of the ranks with equal keys."""
        if name not in self._made:
            rows: dict[int, list[int]] = {}
            for rank, key in enumerate(keys):
                rows.setdefault(key, []).append(rank)
            self._made[name] = self._communicator(name, list(rows.values()))
        return self._made[name]

    def _local_ranks(self) -> list[int]:
        seen: dict[int, int] = {}
        found = []
        for node in self.nodes:
            found.append(seen.get(node, 0))
            seen[node] = seen.get(node, 0) + 1
        return found

    def _make_alone(self) -> dist.ProcessGroup:
        # Nobody else is in it, so nobody has to be waited for.
        alone: dist.ProcessGroup = _new_group([self._rank], "alone", use_local_synchronization=True)
        self._groups.append(alone)
        return alone

    def _make(self, name: str, rows: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Groups of all rows, made by all ranks in the same order, as new_group wants it."""
        found = self._alone
        for row in rows:
            if len(row) > 1:
                group = _new_group(list(row), name)
                if self._rank in row:
                    self._groups.append(group)
                    found = group
        return found

    def _make_mpi(self, of: Communicator) -> Any:
        def make() -> Any:
            if of.size == 1:
                from mpi4py import MPI

                return MPI.COMM_SELF.Dup()
            group = self.comm.Get_group().Incl(list(of.ranks))
            return self.comm.Create_group(group)

        made = self._timed(f"mpi:{of.name}", of.size, make)
        return counted_comm(made, self.counter, f"mpi:{of.name}")

    def _timed(self, name: str, size: int, make: Callable[[], Any]) -> Any:
        before, began = _resident(), time.perf_counter()
        made = make()
        self.costs.append(GroupCost(name, size, time.perf_counter() - began, _resident() - before))
        return made


def _new_group(row: list[int], name: str, **options: Any) -> Any:
    if row != sorted(row):
        options["sort_ranks"] = False
    try:
        return dist.new_group(row, group_desc=name, **options)
    except TypeError:
        raise ImpossibleError(
            f"axis {name}: the placement wants the group {row}, but PyTorch {torch.__version__} "
            "makes groups in the order of ranks only",
            hint="use the default placement, or a PyTorch whose new_group takes sort_ranks",
        ) from None


def _joint_name(names: Sequence[str]) -> str:
    """``dp_cp`` of dp_replicate, dp_shard and cp; ``alone`` of no axis."""
    rest = list(names)
    parts = []
    dp = ALIASES["dp"]
    while rest:
        if tuple(rest[: len(dp)]) == dp:
            parts.append("dp")
            rest = rest[len(dp) :]
        else:
            parts.append(rest.pop(0))
    return "_".join(parts) or "alone"


def _resident() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize()
