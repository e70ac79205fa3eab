"""Collectives over a communicator, flat or in two levels, whichever is faster.

::

    everyone = context.communicators.prepare("dp")      # on every rank of the job
    collectives.all_reduce(everyone, gradients)          # on the members

``algorithm`` is ``flat`` (the backend's own), ``hierarchical``, or ``auto``: hierarchical where
the group spans nodes and a measured crossover says that a message of this size gains. A
hierarchical operation counts once under its axis, as a flat one would, and its halves count
under ``axis/inside`` and ``axis/across``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.errors import ImpossibleError
from hpctrain.runtime import hierarchical, packing
from hpctrain.runtime.communicators import Communicator
from hpctrain.runtime.counting import volume_of
from hpctrain.runtime.hierarchical import OPS
from hpctrain.runtime.levels import Levels

Algorithm = Literal["auto", "flat", "hierarchical"]
ReduceAlgorithm = Literal["auto", "flat", "hierarchical", "packed"]
"""packed: hierarchical, with messages between nodes packed without loss."""
Op = Literal["sum", "avg", "max", "min", "product"]


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where two levels are faster than one.

    Attributes:
        operation: ``all_reduce``, ``all_gather`` …
        backend: of torch.distributed.
        at_least, below: bytes of the larger of what is handed in and what comes out; ``below``
            None: no limit.
        packed: all_reduce of floats on CPU: messages between nodes are packed without loss (see
            packing.py), which can pay where a node's link is slower than about 1 Gbit/s.
    """

    operation: str
    backend: str
    at_least: int = 0
    below: int | None = None
    packed: bool = False

    def covers(self, operation: str, backend: str, size: int) -> bool:
        """Whether a message lies where this row says that two levels are faster."""
        return (
            (operation, backend) == (self.operation, self.backend)
            and size >= self.at_least
            and (self.below is None or size < self.below)
        )


MEASURED: tuple[Crossover, ...] = (
    Crossover("all_reduce", "gloo", at_least=256 * 2**10),
    Crossover("reduce_scatter", "gloo", at_least=256 * 2**10),
    Crossover("all_gather", "gloo", at_least=4 * 2**20),
    Crossover("broadcast", "gloo", at_least=256 * 2**10),
    Crossover("reduce", "gloo", at_least=2**20),
)
"""From benchmarks/collectives.py --crossover: gloo, 2 hosts × 4 ranks, 200 Mbit/s, two cores. An
all-to-all gained nothing at any size. NCCL and RCCL know nodes and rails themselves and were not
measured: nothing of theirs is replaced."""

PIECE_BYTES = 2**20
"""Size of the pieces that large messages are cut into."""
MOST_PIECES = 16


def pays(
    levels: Levels | None, operation: str, size: int, table: Sequence[Crossover] = MEASURED
) -> bool:
    """Whether ``auto`` takes two levels for an operation of ``size`` bytes.

    Args:
        levels: of the group, None where it has one level.
        operation: name as in Crossover.
        size: bytes of the larger of what is handed in and what comes out.
        table: crossovers, for example measured on the machine at hand.
    """
    return levels is not None and any(row.covers(operation, levels.backend, size) for row in table)


def all_reduce(
    communicator: Communicator,
    tensor: Tensor,
    op: Op = "sum",
    *,
    algorithm: ReduceAlgorithm = "auto",
    table: Sequence[Crossover] = MEASURED,
) -> None:
    """Reduce ``tensor`` over all members, in place.

    Raises:
        ValueError: ``avg`` of integers.
        ImpossibleError: ``hierarchical`` is asked for and the group has no two levels; ``packed``
            likewise, and where nodes are uneven or ``tensor`` is not of floats on the host.
    """
    reducing = _reducing(op, tensor)
    if communicator.size == 1:
        return
    levels, packed = _choose_reduction(communicator, tensor, algorithm, table)
    if levels is None:
        dist.all_reduce(tensor, OPS[reducing], communicator.group)
    else:
        reduction = partial(_all_reduce, communicator, levels, tensor, reducing, packed)
        _in_turn(communicator, reduction)
    if op == "avg":
        tensor.div_(communicator.size)


def all_reduce_async(
    communicator: Communicator,
    tensor: Tensor,
    op: Op = "sum",
    *,
    algorithm: ReduceAlgorithm = "auto",
    table: Sequence[Crossover] = MEASURED,
) -> torch.futures.Future[Tensor]:
    """As :func:`all_reduce`, under way when it returns; ``wait()`` of the future ends it.

    Two levels are driven by a thread of the communicator's own on CPU. On a GPU all of it is put
    on the current stream, and what is put there later comes after it.
    """
    reducing = _reducing(op, tensor)
    devices: list[Any] | None = None if tensor.device.type == "cpu" else [tensor.device]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    levels, packed = None, False
    if communicator.size > 1:
        levels, packed = _choose_reduction(communicator, tensor, algorithm, table)
        if levels is None:
            work = dist.all_reduce(tensor, OPS[reducing], communicator.group, async_op=True)
            assert work is not None, "this rank is a member"
            found: torch.futures.Future[Tensor] = work.get_future().then(
                lambda done: _averaged(done.value()[0], op, communicator.size)
            )
            return found

    def drive() -> None:
        try:
            if levels is not None:
                _all_reduce(communicator, levels, tensor, reducing, packed)
                _averaged(tensor, op, communicator.size)
            future.set_result(tensor)
        except BaseException as error:
            future.set_exception(error)  # type: ignore[arg-type]

    if levels is None or devices is not None:
        drive()
    else:
        communicator.worker.submit(drive)
    return future


def reduce_scatter(
    communicator: Communicator,
    output: Tensor,
    source: Tensor,
    op: Op = "sum",
    *,
    algorithm: Algorithm = "auto",
    table: Sequence[Crossover] = MEASURED,
) -> None:
    """Reduce ``source`` over all members; the member at place p keeps the p-th of n equal parts.

    Raises:
        ValueError: ``avg`` of integers, or sizes that do not fit.
        ImpossibleError: as for all_reduce; also where nodes hold different numbers of members.
    """
    reducing = _reducing(op, source)
    _check_parts(communicator, source, output)
    if communicator.size == 1:
        output.copy_(source.view(output.shape))
        return
    levels = _choose(communicator, "reduce_scatter", _bytes(source), algorithm, table, even=True)
    if levels is None:
        hierarchical.reduce_scatter_op(output, source, OPS[reducing], communicator.group)
    else:

        def drive() -> None:
            with _counted(communicator, "reduce_scatter", _bytes(source)):
                pieces = _pieces(levels, _bytes(source))
                hierarchical.reduce_scatter(levels, output, source, reducing, pieces)

        _in_turn(communicator, drive)
    if op == "avg":
        output.div_(communicator.size)


def all_gather(
    communicator: Communicator,
    output: Tensor,
    source: Tensor,
    *,
    algorithm: Algorithm = "auto",
    table: Sequence[Crossover] = MEASURED,
) -> None:
    """The members' ``source`` one after the other in ``output``; raises as reduce_scatter."""
    _check_parts(communicator, output, source)
    if communicator.size == 1:
        output.copy_(source.view(output.shape))
        return
    levels = _choose(communicator, "all_gather", _bytes(output), algorithm, table, even=True)
    if levels is None:
        hierarchical.all_gather_op(output, source, group=communicator.group)
        return

    def drive() -> None:
        with _counted(communicator, "all_gather", _bytes(source)):
            hierarchical.all_gather(levels, output, source, _pieces(levels, _bytes(output)))

    _in_turn(communicator, drive)


def all_to_all(
    communicator: Communicator,
    output: Tensor,
    source: Tensor,
    *,
    algorithm: Algorithm = "auto",
    table: Sequence[Crossover] = MEASURED,
) -> None:
    """The p-th of n equal parts of ``source`` goes to the member at place p.

    Raises:
        ValueError: sizes that do not divide by the number of members, or differ.
        ImpossibleError: as reduce_scatter.
    """
    if output.numel() != source.numel() or source.numel() % communicator.size:
        raise ValueError(
            f"all_to_all of {source.numel()} into {output.numel()} elements over "
            f"{communicator.size} members: both must be one multiple of the members"
        )
    if communicator.size == 1:
        output.copy_(source.view(output.shape))
        return
    levels = _choose(communicator, "all_to_all", _bytes(source), algorithm, table, even=True)
    if levels is None:
        flat_in, flat_out = source.reshape(-1), output.view(-1)
        dist.all_to_all_single(flat_out, flat_in, group=communicator.group)
        return

    def drive() -> None:
        with _counted(communicator, "all_to_all", _bytes(source)):
            hierarchical.all_to_all(levels, output, source, _pieces(levels, _bytes(source)))

    _in_turn(communicator, drive)


def broadcast(
    communicator: Communicator,
    tensor: Tensor,
    root: int = 0,
    *,
    algorithm: Algorithm = "auto",
    table: Sequence[Crossover] = MEASURED,
) -> None:
    """``tensor`` of the member at place ``root`` for all; raises as all_reduce."""
    if communicator.size == 1:
        return
    levels = _choose(communicator, "broadcast", _bytes(tensor), algorithm, table)
    if levels is None:
        dist.broadcast(tensor, communicator.ranks[root], communicator.group)
        return

    def drive() -> None:
        with _counted(communicator, "broadcast", _bytes(tensor)):
            hierarchical.broadcast(levels, tensor, root, _pieces(levels, _bytes(tensor)))

    _in_turn(communicator, drive)


def reduce(
    communicator: Communicator,
    tensor: Tensor,
    root: int = 0,
    op: hierarchical.Op = "sum",
    *,
    algorithm: Algorithm = "auto",
    table: Sequence[Crossover] = MEASURED,
) -> None:
    """Reduce ``tensor`` to the member at place ``root``; that of the others is then undefined."""
    if communicator.size == 1:
        return
    levels = _choose(communicator, "reduce", _bytes(tensor), algorithm, table)
    if levels is None:
        dist.reduce(tensor, communicator.ranks[root], OPS[op], communicator.group)
        return

    def drive() -> None:
        with _counted(communicator, "reduce", _bytes(tensor)):
            hierarchical.reduce(levels, tensor, root, op, _pieces(levels, _bytes(tensor)))

    _in_turn(communicator, drive)


# ---- parts ---------------------------------------------------------------------------------


def _choose(
    communicator: Communicator,
    operation: str,
    size: int,
    algorithm: Algorithm,
    table: Sequence[Crossover],
    *,
    even: bool = False,
) -> Levels | None:
    """The levels to use, or None for a flat operation; ``even``: uneven nodes cannot do it."""
    levels, name = communicator.levels, communicator.name
    if algorithm == "hierarchical":
        if levels is None:
            nodes = communicator.node_count
            raise ImpossibleError(
                f"{operation} over {name}: a hierarchical one needs a group with several members "
                f"on one of several nodes, and its halves made; there are {communicator.size} "
                f"members on {nodes} node{'s' * (nodes > 1)}",
                hint=f'call communicators.prepare("{name}") on every rank first, or take '
                'algorithm="auto"',
            )
        if even and not levels.even:
            raise ImpossibleError(
                f"{operation} over {name}: a hierarchical one needs as many members on every "
                f"node, there are {', '.join(map(str, levels.counts))}",
                hint='take algorithm="auto", which is flat here; all_reduce, reduce and broadcast '
                "work on uneven nodes",
            )
        return levels
    if algorithm == "flat" or levels is None or (even and not levels.even):
        return None
    return levels if pays(levels, operation, size, table) else None


def _choose_reduction(
    communicator: Communicator,
    tensor: Tensor,
    algorithm: ReduceAlgorithm,
    table: Sequence[Crossover],
) -> tuple[Levels | None, bool]:
    """Levels of an all-reduce, None where it is flat, and whether messages are packed."""
    size = _bytes(tensor)
    if algorithm != "packed":
        levels = _choose(communicator, "all_reduce", size, algorithm, table)
        if levels is None or algorithm == "hierarchical":
            return levels, False
        rows = (row for row in table if row.covers("all_reduce", levels.backend, size))
        return levels, next(rows).packed and levels.even and _can_pack(tensor)
    levels = _choose(communicator, "all_reduce", size, "hierarchical", table, even=True)
    if not _can_pack(tensor):
        raise ImpossibleError(
            f"a packed all_reduce over {communicator.name} takes floats of 16 or 32 bits on the "
            f"host, not {tensor.dtype} on {tensor.device}",
            hint='take algorithm="hierarchical"',
        )
    return levels, True


def _can_pack(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in packing.DTYPES


def _in_turn(communicator: Communicator, drive: Callable[[], None]) -> None:
    """Run an operation in two levels after those that are under way, as every member does."""
    if communicator.has_worker:
        communicator.worker.submit(drive).result()
    else:
        drive()


@contextmanager
def _counted(communicator: Communicator, operation: str, handed_in: int) -> Iterator[None]:
    """One operation of the axis, as its flat form would count."""
    counter, axis = communicator.counter, communicator.name
    counter.add(axis, operation, handed_in, volume_of(operation, handed_in, communicator.size))
    with counter.during(axis):
        yield


def _all_reduce(
    communicator: Communicator, levels: Levels, tensor: Tensor, op: hierarchical.Op, packed: bool
) -> None:
    size = _bytes(tensor)
    work = hierarchical.all_reduce_packed if packed else hierarchical.all_reduce
    with _counted(communicator, "all_reduce", size):
        work(levels, tensor, op, _pieces(levels, size))


def _pieces(levels: Levels, size: int) -> int:
    """How many pieces to cut a message of ``size`` bytes into."""
    # A piece costs NCCL a kernel launch a stage; it keeps its own pipeline full.
    return max(1, min(MOST_PIECES, size // PIECE_BYTES)) if levels.backend == "gloo" else 1


def _reducing(op: Op, tensor: Tensor) -> hierarchical.Op:
    """The reduction that ``op`` is made of: an average is a sum, then divided."""
    if op != "avg":
        return op
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the average of {tensor.dtype} is no {tensor.dtype}: sum and divide")
    return "sum"


def _averaged(tensor: Tensor, op: Op, members: int) -> Tensor:
    return tensor.div_(members) if op == "avg" else tensor


def _check_parts(communicator: Communicator, whole: Tensor, part: Tensor) -> None:
    if whole.numel() != communicator.size * part.numel():
        raise ValueError(
            f"{communicator.size} members with {part.numel()} elements each make "
            f"{communicator.size * part.numel()}, not {whole.numel()}"
        )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
