"""Parallel layouts and the rank grid: who holds what and who talks to whom, as integers.

Two factorisations of the same ranks are folded over each other (MoE Parallel Folding):

- the dense mesh ``pp × dp_replicate × dp_shard × cp × tp`` for attention and dense layers;
- the expert mesh ``pp × edp × ep × etp`` for expert layers.

Both share ``pp``: a pipeline stage owns one set of ranks, whichever mesh looks at it. Inside a
stage the ranks are numbered by the dense axes, and the expert axes cut that number again.

An axis order is written outermost first: in ``("dp_replicate", "pp", "dp_shard", "cp", "tp")``
the tensor-parallel coordinate changes fastest, so tensor-parallel groups are neighbours.

numpy is imported inside the functions that return arrays and nowhere else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from hpctrain.errors import ImpossibleError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    IntArray = NDArray[np.int64]

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the dense mesh in the order of ``rank_array`` (outermost first)."""

DEFAULT_ORDER = ("dp_replicate", "pp", "dp_shard", "cp", "tp")
"""How ranks are numbered unless asked otherwise: tensor parallel groups are neighbours, then
context (with the experts, which fold over what lies inside a stage), shard, pipeline, replicate."""

EXPERT_AXES = ("pp", "edp", "ep", "etp")
"""Axes of the expert mesh, outermost first; ``pp`` is the dense mesh's own."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "world": DENSE_AXES,
}
"""Names that stand for several axes wherever axes are asked for."""

_JOB_KEYS = {
    "tp": "tensor",
    "cp": "context",
    "pp": "pipeline",
    "ep": "expert",
    "etp": "expert_tensor",
}


def divisors(n: int) -> tuple[int, ...]:
    """All divisors of ``n`` in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    large = [n // d for d in reversed(small) if d * d != n]
    return (*small, *large)


def nearest_divisors(n: int, wanted: int) -> tuple[int, ...]:
    """The divisors of ``n`` next below and next above ``wanted`` (one or two values)."""
    below = [d for d in divisors(n) if d <= wanted]
    above = [d for d in divisors(n) if d >= wanted]
    return tuple(sorted({*below[-1:], *above[:1]}))


def nearest_multiples(step: int, wanted: int) -> tuple[int, ...]:
    """The multiples of ``step`` next below (if positive) and next above ``wanted``."""
    low = wanted // step * step
    high = -(-wanted // step) * step
    return tuple(sorted({value for value in (low, high) if value > 0}))


def balanced_shares(
    total: int,
    speeds: Sequence[float],
    *,
    minimum: int = 0,
    limits: Sequence[int | None] | None = None,
) -> tuple[int, ...]:
    """Equal units of work over workers of unequal speed, so that the slowest ends earliest.

    Layers over pipeline stages, micro-batches over replicas, rows over shards where devices are
    unequal. Each unit goes to the worker that would end it first, which is optimal for equal
    units on uniformly faster or slower machines.

    Args:
        total: units to hand out.
        speeds: units a second of each worker, above 0.
        minimum: units that every worker gets in any case.
        limits: most units a worker can take (its memory); None is no limit.

    Returns:
        Units of each worker; they sum to ``total``.

    Raises:
        ImpossibleError: ``minimum`` or ``limits`` leave no way to hand out ``total``.
        ValueError: a speed that is not above 0.
    """
    if not speeds or any(not speed > 0 for speed in speeds):
        raise ValueError(f"speeds {list(speeds)!r} must all be above 0")
    caps = [math.inf if c is None else c for c in limits or [None] * len(speeds)]
    if len(caps) != len(speeds):
        raise ValueError(f"{len(caps)} limits for {len(speeds)} workers")
    if total < minimum * len(speeds):
        raise ImpossibleError(
            f"{total} units cannot give each of {len(speeds)} workers at least {minimum}",
            hint=f"nearest possible: {minimum * len(speeds)} units, or {total // minimum} workers",
        )
    if sum(caps) < total or any(cap < minimum for cap in caps):
        raise ImpossibleError(
            f"{total} units do not fit: the workers can take {list(limits or ())} at most"
            + (f" and need {minimum} each" if minimum else "")
        )
    shares = [minimum] * len(speeds)
    if limits is None:
        # No worker ends with fewer units than total·speed/Σspeeds - 1 (else the last unit would
        # have gone to it), so only a few are left for the heap.
        sure = [max(0, int(total * speed / sum(speeds)) - 1) for speed in speeds]
        if min(sure) >= minimum:
            shares = sure
    heap = [
        ((share + 1) / speed, index)
        for index, (share, speed, cap) in enumerate(zip(shares, speeds, caps, strict=True))
        if share < cap
    ]
    heapq.heapify(heap)
    for _ in range(total - sum(shares)):
        _, index = heapq.heappop(heap)
        shares[index] += 1
        if shares[index] < caps[index]:
            heapq.heappush(heap, ((shares[index] + 1) / speeds[index], index))
    return tuple(shares)


def _either(values: Iterable[int]) -> str:
    return " or ".join(str(v) for v in values)


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Degrees of every kind of parallelism.

    Attributes:
        tp: tensor parallel degree (sequence parallelism shares its group).
        cp: context parallel degree.
        pp: pipeline stages (ranks along the pipeline, not virtual stages).
        dp_replicate: data-parallel copies of the sharded state.
        dp_shard: ranks over which one copy of parameters and states is sharded; 1 is plain
            data parallelism.
        ep: expert parallel degree.
        etp: tensor parallel degree inside an expert.

    Raises:
        ImpossibleError: a degree is below 1 or the expert mesh does not fold over the stage.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ImpossibleError(
                    f"parallel layout: {field.name} = {value!r}: a degree is a whole number of "
                    "at least 1"
                )
        if self.stage_size % (self.ep * self.etp):
            raise ImpossibleError(
                f"parallel layout: the expert mesh must cover a stage's ranks exactly, but "
                f"ep·etp = {self.ep}·{self.etp} = {self.ep * self.etp} does not divide "
                f"tp·cp·dp = {self.tp}·{self.cp}·{self.dp} = {self.stage_size}",
                hint=self._expert_hint(),
            )

    def _expert_hint(self) -> str:
        options = []
        if self.stage_size % self.etp == 0:
            near = nearest_divisors(self.stage_size // self.etp, self.ep)
            options.append(f"ep {_either(near)} with etp {self.etp}")
        if self.stage_size % self.ep == 0:
            near = nearest_divisors(self.stage_size // self.ep, self.etp)
            options.append(f"etp {_either(near)} with ep {self.ep}")
        if not options:
            near = nearest_divisors(self.stage_size, self.ep * self.etp)
            options.append(f"ep·etp {_either(near)}")
        return f"nearest possible: {', or '.join(options)}"

    @property
    def dp(self) -> int:
        """Data-parallel degree, ``dp_replicate · dp_shard``."""
        return self.dp_replicate * self.dp_shard

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage, ``tp · cp · dp = etp · ep · edp``."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """All ranks, ``tp · cp · pp · dp``."""
        return self.stage_size * self.pp

    @property
    def edp(self) -> int:
        """Copies of each expert shard: ``tp · cp · dp / (ep · etp)``."""
        return self.stage_size // (self.ep * self.etp)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model between them, ``tp · cp · pp``."""
        return self.tp * self.cp * self.pp

    def size(self, axis: str) -> int:
        """Degree of one axis or alias (``dp``, ``world``).

        Raises:
            ValueError: no such axis.
        """
        if axis in ALIASES:
            return math.prod(self.size(part) for part in ALIASES[axis])
        if axis not in DENSE_AXES and axis not in EXPERT_AXES:
            known = ", ".join(dict.fromkeys((*DENSE_AXES, *EXPERT_AXES, *ALIASES)))
            raise ValueError(f"no axis {axis!r}; the axes are {known}")
        value = getattr(self, axis)
        assert isinstance(value, int)
        return value

    def describe(self) -> str:
        """Axes with more than one rank, for example ``tp2 pp4 dp_shard8``; ``1 rank`` if none."""
        parts = [
            f"{axis}{self.size(axis)}"
            for axis in ("tp", "cp", "pp", "dp_replicate", "dp_shard", "ep", "etp")
            if self.size(axis) > 1
        ]
        return " ".join(parts) or "1 rank"

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        tensor: int = 1,
        context: int = 1,
        pipeline: int = 1,
        data: int | Literal["auto"] = "auto",
        shard: int | Literal["auto", "node"] = "auto",
        expert: int = 1,
        expert_tensor: int = 1,
        ranks_per_node: int | None = None,
    ) -> ParallelLayout:
        """The layout of ``world_size`` ranks that the degrees of a job file ask for.

        Args:
            world_size: ranks of the job.
            tensor, context, pipeline, expert, expert_tensor: degrees, as in ParallelLayout.
            data: data-parallel degree; ``auto`` takes every rank that is left.
            shard: ranks that share one copy of the training state, a divisor of ``data``: 1 is
                plain data parallelism, ``auto`` all of ``data``, ``node`` the largest shard group
                that stays inside a node (hybrid sharding).
            ranks_per_node: needed by ``shard="node"``.

        Raises:
            ImpossibleError: the degrees do not fit the ranks; names the rule and the nearest
                values that do.
            ValueError: ``shard="node"`` without ``ranks_per_node``.
        """
        given = {
            "tensor": tensor,
            "context": context,
            "pipeline": pipeline,
            "expert": expert,
            "expert_tensor": expert_tensor,
        }
        if data != "auto":
            given["data"] = data
        if not isinstance(shard, str):
            given["shard"] = shard
        for key, degree in {"world size": world_size, **given}.items():
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ImpossibleError(
                    f"parallel.{key} = {degree!r}: a degree is a whole number of at least 1"
                    if key in given
                    else f"the job has {degree!r} ranks; it needs at least 1"
                )
        model = tensor * context * pipeline
        product = f"tensor {tensor} × pipeline {pipeline} × context {context} = {model}"
        if world_size % model:
            raise ImpossibleError(
                f"parallel: {product} does not divide the job's {world_size} ranks",
                hint=_fit_hint(world_size, tensor=tensor, context=context, pipeline=pipeline),
            )
        left = world_size // model
        dp = left if data == "auto" else data
        if dp != left:
            raise ImpossibleError(
                f"parallel: {product}, × data {dp} = {model * dp} ranks, but the job has "
                f"{world_size}",
                hint=f"nearest possible: data {left} (or auto) on {world_size} ranks, or "
                f"{model * dp} ranks with data {dp}",
            )
        if shard == "auto":
            dp_shard = dp
        elif shard == "node":
            if ranks_per_node is None:
                raise ValueError('shard="node" needs ranks_per_node')
            room = max(1, ranks_per_node // (tensor * context))
            dp_shard = max(d for d in divisors(dp) if d <= room)
        else:
            assert isinstance(shard, int)
            dp_shard = shard
            if dp % dp_shard:
                raise ImpossibleError(
                    f"parallel.shard = {shard} does not divide the data-parallel degree {dp}",
                    hint=f"nearest possible: shard {_either(nearest_divisors(dp, shard))}",
                )
        return cls(
            tp=tensor,
            cp=context,
            pp=pipeline,
            dp_replicate=dp // dp_shard,
            dp_shard=dp_shard,
            ep=expert,
            etp=expert_tensor,
        )


def _fit_hint(world_size: int, **degrees: int) -> str:
    """Single changes that make the degrees divide the ranks, for example ``tensor 4 or 8``."""
    product = math.prod(degrees.values())
    options = []
    for key, degree in degrees.items():
        rest = product // degree
        if degree > 1 and world_size % rest == 0:
            options.append(f"{key} {_either(nearest_divisors(world_size // rest, degree))}")
    options.append(f"{_either(nearest_multiples(product, world_size))} ranks")
    return f"nearest possible: {', or '.join(options)}"


@dataclass(frozen=True)
class RankGrid:
    """Ranks and their coordinates on both meshes.

    A *position* is the row-major index of a rank's dense coordinates in ``order``; the rank is
    the position itself, or ``permutation[position]`` where a placement moved it.

    Attributes:
        layout: the degrees.
        order: the dense axes, outermost first: the last one changes fastest.
        permutation: global rank of each position; ``None`` is the identity.

    Raises:
        ValueError: ``order`` is not an ordering of the dense axes, or ``permutation`` not one
            of the ranks.
    """

    layout: ParallelLayout
    order: tuple[str, ...] = DEFAULT_ORDER
    permutation: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(DENSE_AXES):
            raise ValueError(f"order {self.order!r} must name each of {', '.join(DENSE_AXES)} once")
        if self.permutation is not None:
            seen = bytearray(self.size)
            for rank in self.permutation:
                if not 0 <= rank < self.size or seen[rank]:
                    raise ValueError(f"permutation does not name each of {self.size} ranks once")
                seen[rank] = 1
            if len(self.permutation) != self.size:
                raise ValueError(
                    f"permutation has {len(self.permutation)} entries for {self.size} ranks"
                )

    @classmethod
    def from_sizes(
        cls,
        sizes: Mapping[str, int],
        order: Sequence[str] = DEFAULT_ORDER,
        permutation: Sequence[int] | None = None,
    ) -> RankGrid:
        """A grid from axis sizes; axes that are not named have size 1. ``edp`` follows."""
        layout = ParallelLayout(**dict(sizes))
        return cls(layout, tuple(order), None if permutation is None else tuple(permutation))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.layout.world_size

    # ---- one rank, plain Python ------------------------------------------------------------

    @cached_property
    def _positions(self) -> tuple[int, ...] | None:
        """Position of each rank; None when the permutation is the identity."""
        if self.permutation is None:
            return None
        inverse = [0] * self.size
        for position, rank in enumerate(self.permutation):
            inverse[rank] = position
        return tuple(inverse)

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Distance in positions between neighbours along each dense axis."""
        strides, step = {}, 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= self.layout.size(axis)
        return strides

    @cached_property
    def _stage_strides(self) -> dict[str, int]:
        """As _strides, for the number of a rank inside its stage, over dense and expert axes."""
        strides, step = {}, 1
        for axis in reversed(self.order):
            if axis != "pp":
                strides[axis] = step
                step *= self.layout.size(axis)
        step = 1
        for axis in ("etp", "ep", "edp"):
            strides[axis] = step
            step *= self.layout.size(axis)
        return strides

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of ``rank`` on both meshes, by axis name.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"no rank {rank} among {self.size}")
        position = rank if self._positions is None else self._positions[rank]
        found = {
            axis: position // self._strides[axis] % self.layout.size(axis) for axis in DENSE_AXES
        }
        local = sum(found[axis] * self._stage_strides[axis] for axis in DENSE_AXES if axis != "pp")
        for axis in ("edp", "ep", "etp"):
            found[axis] = local // self._stage_strides[axis] % self.layout.size(axis)
        return found

    def rank(self, **coordinates: int) -> int:
        """The rank at the given coordinates of one mesh; axes left out are 0.

        Raises:
            ValueError: an unknown axis, a coordinate outside its axis, or axes of both meshes.
        """
        expert = any(axis in ("edp", "ep", "etp") for axis in coordinates)
        mesh = EXPERT_AXES if expert else DENSE_AXES
        for axis, at in coordinates.items():
            if axis not in mesh:
                raise ValueError(f"axis {axis!r} is not one of {', '.join(mesh)}")
            if not 0 <= at < self.layout.size(axis):
                raise ValueError(f"{axis} = {at}: the axis has {self.layout.size(axis)} places")
        if expert:
            local = sum(
                at * self._stage_strides[axis] for axis, at in coordinates.items() if axis != "pp"
            )
            dense = {
                axis: local // self._stage_strides[axis] % self.layout.size(axis)
                for axis in DENSE_AXES
                if axis != "pp"
            }
            dense["pp"] = coordinates.get("pp", 0)
        else:
            dense = dict(coordinates)
        position = sum(at * self._strides[axis] for axis, at in dense.items())
        return position if self.permutation is None else self.permutation[position]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of ``rank`` along ``axes`` taken together, first axis slowest.

        With no axes the group is the rank alone.

        Raises:
            ValueError: no such rank or axis, or axes of both meshes.
        """
        names = expand_axes(axes)
        here = self.coordinates(rank)
        mesh = mesh_of(names)
        here = {axis: here[axis] for axis in mesh}
        members = [here]
        for axis in names:
            members = [{**m, axis: at} for m in members for at in range(self.layout.size(axis))]
        return tuple(self.rank(**m) for m in members)

    # ---- all ranks at once, numpy ----------------------------------------------------------

    def rank_array(self, axes: Sequence[str] = DENSE_AXES) -> IntArray:
        """Ranks as an array with one dimension an axis of ``axes`` (shape: their sizes).

        ``axes`` is the whole of one mesh in any order; ``torch.distributed.DeviceMesh`` takes the
        result with ``mesh_dim_names=axes``.

        Raises:
            ValueError: ``axes`` is not one whole mesh.
        """
        import numpy as np

        names = tuple(axes)
        ranks = (
            np.arange(self.size, dtype=np.int64)
            if self.permutation is None
            else np.fromiter(self.permutation, dtype=np.int64, count=self.size)
        )
        cube = ranks.reshape([self.layout.size(axis) for axis in self.order])
        if sorted(names) == sorted(DENSE_AXES):
            return np.ascontiguousarray(cube.transpose([self.order.index(axis) for axis in names]))
        if sorted(names) == sorted(EXPERT_AXES):
            stages = np.moveaxis(cube, self.order.index("pp"), 0)
            folded = stages.reshape([self.layout.size(axis) for axis in EXPERT_AXES])
            return np.ascontiguousarray(
                folded.transpose([EXPERT_AXES.index(axis) for axis in names])
            )
        raise ValueError(
            f"axes {names!r} must be all of {', '.join(DENSE_AXES)} or of {', '.join(EXPERT_AXES)}"
        )

    def groups(self, *axes: str) -> IntArray:
        """Every group along ``axes`` taken together.

        Args:
            axes: axes of one mesh, or aliases; ``groups("dp_replicate", "dp_shard", "cp")`` gives
                the groups over which gradients of dense parameters are summed.

        Returns:
            Shape (number of groups, group size). Rows partition the ranks. Within a row the
            first axis changes slowest, as in a flattened DeviceMesh.

        Raises:
            ValueError: an unknown or repeated axis, or axes of both meshes.
        """
        names = expand_axes(axes)
        others = [axis for axis in mesh_of(names) if axis not in names]
        size = math.prod(self.layout.size(axis) for axis in names)
        return self.rank_array((*others, *names)).reshape(-1, size)

    def ascending(self, *axes: str) -> bool:
        """Whether every group along ``axes`` taken together lists its ranks in ascending order.

        torch sorts the ranks of a process group, so only then is a rank's number in the group
        its place in the mesh, which sharded collectives rely on. Without arguments: along every
        single axis of the dense mesh, and of the expert mesh where there are experts. True for
        any order as long as nothing is permuted.
        """
        if not axes:
            experts = self.layout.ep * self.layout.etp > 1
            singles = (*DENSE_AXES, *EXPERT_AXES[1:]) if experts else DENSE_AXES
            return all(self.layout.size(axis) == 1 or self.ascending(axis) for axis in singles)
        rows = self.groups(*axes)
        return bool((rows[:, 1:] > rows[:, :-1]).all())

    def coordinate_table(self, axes: Sequence[str] = DENSE_AXES) -> IntArray:
        """Coordinates of all ranks, shape (ranks, len(axes)), for axes of either mesh.

        Raises:
            ValueError: an unknown axis.
        """
        import numpy as np

        names = expand_axes(axes)
        table = np.empty((self.size, len(names)), dtype=np.int64)
        for mesh in (DENSE_AXES, EXPERT_AXES):
            wanted = [
                axis for axis in names if axis in mesh and (axis != "pp" or mesh is DENSE_AXES)
            ]
            if not wanted:
                continue
            ranks = self.rank_array(mesh)
            for axis in wanted:
                shape = [1] * ranks.ndim
                shape[mesh.index(axis)] = self.layout.size(axis)
                along = np.arange(self.layout.size(axis)).reshape(shape)
                table[ranks, names.index(axis)] = along
        return table


def expand_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Axis names with aliases replaced by what they stand for.

    Raises:
        ValueError: an unknown or repeated axis.
    """
    names: list[str] = []
    for axis in axes:
        names.extend(ALIASES.get(axis, (axis,)))
    for axis in names:
        if axis not in DENSE_AXES and axis not in EXPERT_AXES:
            known = ", ".join(dict.fromkeys((*DENSE_AXES, *EXPERT_AXES, *ALIASES)))
            raise ValueError(f"no axis {axis!r}; the axes are {known}")
        if names.count(axis) > 1:
            raise ValueError(f"axis {axis!r} is named twice in {', '.join(names)}")
    return tuple(names)


def mesh_of(names: Sequence[str]) -> tuple[str, ...]:
    """The mesh that holds all of ``names``: the dense one, unless an expert axis is among them.

    Raises:
        ValueError: axes of both meshes.
    """
    for mesh in (DENSE_AXES, EXPERT_AXES):
        if all(axis in mesh for axis in names):
            return mesh
    raise ValueError(f"axes {', '.join(names)} belong to different meshes")
