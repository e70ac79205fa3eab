"""Collectives in two levels: inside the node, across the rails, inside again.

With m members on each of k nodes, a flat ring passes ``2(n-1)/n·S`` bytes of an all-reduce over
each node's link. Reducing inside the node first leaves each rail ``S/m``, and all rails of a
node together ``2(k-1)/k·S`` (Cho et al. 2019, BlueConnect; Singhania et al. 2025, NVRAR). Large
messages are cut into pieces, so that a node's inside works on one piece while another is under
way between nodes.

Order of summation: members of a node in their order in the group, then the nodes by the
backend's own all-reduce. Integers and sums that are exact in the type come out as flat ones do,
bit for bit; other floating-point sums may differ from flat ones by rounding, never between
ranks. Sums of 16-bit types inside a node are taken in fp32 and rounded once.

Every function is called by all members, with tensors of equal shape, and returns when the
result stands in its output (on a GPU: for work on the current stream).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.runtime.levels import Levels
from hpctrain.runtime.packing import PackedExchange

Op = Literal["sum", "max", "min", "product"]

LAG = 2
"""Pieces that a stage may be ahead of the next one; more only adds to what is in memory."""

OPS: dict[Op, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
# Newer names of PyTorch first; the older ones are deprecated there.
all_gather_op = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_op = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(levels: Levels, tensor: Tensor, op: Op, pieces: int) -> None:
    """Reduce ``tensor`` over all members, in place."""
    if not levels.even:
        _all_reduce_by_leaders(levels, tensor, op, pieces)
        return
    m = levels.per_node
    work = _padded(tensor, m)
    cuts = _cuts(work.numel() // m, pieces)
    parts = [work[m * low : m * high] for low, high in cuts]
    received: dict[int, Tensor] = {}
    reduced: dict[int, Tensor] = {}

    def scatter(i: int) -> Any:
        return _start_reduce_scatter(levels.inside, levels, parts[i], op, received, i)

    def across(i: int) -> Any:
        reduced[i] = _finish_reduce_scatter(received.pop(i), op)
        return dist.all_reduce(reduced[i], OPS[op], levels.across, async_op=True)

    def gather(i: int) -> Any:
        return all_gather_op(parts[i], reduced[i], group=levels.inside, async_op=True)

    _pipeline(len(parts), [scatter, across, gather])
    _put_back(work, tensor)


def all_reduce_packed(levels: Levels, tensor: Tensor, op: Op, pieces: int) -> None:
    """As all_reduce, on CPU, with messages between nodes packed without loss.

    Between nodes every member sends each of the others its part of what is to be reduced there,
    sums up in the order of the nodes, and hands its result round: as many numbers as the
    backend's all-reduce, in fewer bytes.
    """
    m, k = levels.per_node, levels.nodes
    work = _padded(tensor, m * k)
    cuts = [(k * low, k * high) for low, high in _cuts(work.numel() // (m * k), pieces)]
    parts = [work[m * low : m * high] for low, high in cuts]
    received: dict[int, Tensor] = {}
    reduced: dict[int, Tensor] = {}
    rows: dict[int, Tensor] = {}
    under_way: dict[int, PackedExchange] = {}

    def scatter(i: int) -> Any:
        return _start_reduce_scatter(levels.inside, levels, parts[i], op, received, i)

    def tell_parts(i: int) -> Any:
        reduced[i] = _finish_reduce_scatter(received.pop(i), op)
        own = reduced[i].view(k, -1)
        rows[i] = torch.empty_like(own)
        rows[i][levels.node] = own[levels.node]
        under_way[i] = PackedExchange(levels.across, levels.node, list(own), list(rows[i]))
        return under_way[i].start_sizes()

    def send(i: int) -> Any:
        return under_way[i].start_data()

    def tell_sums(i: int) -> Any:
        under_way.pop(i).finish()
        every = reduced[i].view(k, -1)
        every[levels.node] = _finish_reduce_scatter(rows.pop(i), op)
        mine = [every[levels.node]] * k
        under_way[i] = PackedExchange(levels.across, levels.node, mine, list(every))
        return under_way[i].start_sizes()

    def gather(i: int) -> Any:
        under_way.pop(i).finish()
        return all_gather_op(parts[i], reduced[i], group=levels.inside, async_op=True)

    _pipeline(len(parts), [scatter, tell_parts, send, tell_sums, send, gather])
    _put_back(work, tensor)


def _all_reduce_by_leaders(levels: Levels, tensor: Tensor, op: Op, pieces: int) -> None:
    work = _padded(tensor, 1)
    parts = [work[low:high] for low, high in _cuts(work.numel(), pieces)]
    leader = dist.get_process_group_ranks(levels.inside)[0]

    def to_leader(i: int) -> Any:
        return dist.reduce(parts[i], leader, OPS[op], levels.inside, async_op=True)

    def across(i: int) -> Any:
        if levels.local:
            return None
        return dist.all_reduce(parts[i], OPS[op], levels.across, async_op=True)

    def from_leader(i: int) -> Any:
        return dist.broadcast(parts[i], leader, levels.inside, async_op=True)

    _pipeline(len(parts), [to_leader, across, from_leader])
    _put_back(work, tensor)


def reduce_scatter(levels: Levels, output: Tensor, source: Tensor, op: Op, pieces: int) -> None:
    """Reduce ``source`` over all members; member p keeps the p-th of n equal parts."""
    n, m, k = levels.size, levels.per_node, levels.nodes
    rows = source.reshape(n, -1)
    result = _flat(output)
    order = levels.by_local(source.device)
    cuts = _cuts(rows.shape[1], pieces)
    near: dict[int, Tensor] = {}
    far: dict[int, Tensor] = {}

    def scatter_inside(i: int) -> Any:
        # What goes to rail l, for each node, stands together.
        low, high = cuts[i]
        to_rails = rows[:, low:high].index_select(0, order)
        return _start_reduce_scatter(levels.inside, levels, to_rails.view(m, -1), op, near, i)

    def scatter_across(i: int) -> Any:
        to_nodes = _finish_reduce_scatter(near.pop(i), op)
        return _start_reduce_scatter(levels.across, levels, to_nodes.view(k, -1), op, far, i)

    def keep(i: int) -> None:
        low, high = cuts[i]
        result[low:high] = _finish_reduce_scatter(far.pop(i), op)

    _pipeline(len(cuts), [scatter_inside, scatter_across, keep])
    _put_back(result, output)


def all_gather(levels: Levels, output: Tensor, source: Tensor, pieces: int) -> None:
    """The members' ``source`` one after the other in ``output``."""
    n, m, k = levels.size, levels.per_node, levels.nodes
    own = source.reshape(-1)
    result = _flat(output).view(n, -1)
    order = levels.by_local(source.device)
    cuts = _cuts(own.numel(), pieces)
    rail: dict[int, Tensor] = {}
    every: dict[int, Tensor] = {}

    def across(i: int) -> Any:
        low, high = cuts[i]
        rail[i] = own.new_empty(k * (high - low))
        return all_gather_op(rail[i], own[low:high], group=levels.across, async_op=True)

    def inside(i: int) -> Any:
        every[i] = own.new_empty(m * rail[i].numel())
        return all_gather_op(every[i], rail[i], group=levels.inside, async_op=True)

    def place(i: int) -> None:
        low, high = cuts[i]
        del rail[i]
        result[:, low:high].index_copy_(0, order, every.pop(i).view(n, -1))

    _pipeline(len(cuts), [across, inside, place])
    _put_back(result.view(-1), output)


def all_to_all(levels: Levels, output: Tensor, source: Tensor, pieces: int) -> None:
    """The p-th of n equal parts of ``source`` goes to member p, which keeps it in our place.

    Parts for one rail of all nodes go there together first, so that each member sends k-1
    messages between nodes, not n-m.
    """
    n, m, k = levels.size, levels.per_node, levels.nodes
    rows = source.reshape(n, -1)
    result = _flat(output).view(n, -1)
    to_rails, by_node = levels.by_local(source.device), levels.by_node(source.device)
    cuts = _cuts(rows.shape[1], pieces)
    near: dict[int, Tensor] = {}
    far: dict[int, Tensor] = {}

    def inside(i: int) -> Any:
        low, high = cuts[i]
        parts = rows[:, low:high].index_select(0, to_rails)
        near[i] = torch.empty_like(parts)
        return dist.all_to_all_single(near[i], parts, group=levels.inside, async_op=True)

    def across(i: int) -> Any:
        parts = near.pop(i).view(m, k, -1).transpose(0, 1).contiguous()
        far[i] = torch.empty_like(parts)
        return dist.all_to_all_single(far[i], parts, group=levels.across, async_op=True)

    def place(i: int) -> None:
        low, high = cuts[i]
        result[:, low:high].index_copy_(0, by_node, far.pop(i).view(n, -1))

    _pipeline(len(cuts), [inside, across, place])
    _put_back(result.view(-1), output)


def broadcast(levels: Levels, tensor: Tensor, root: int, pieces: int) -> None:
    """``tensor`` of the member at position ``root`` for all; between nodes it goes once a node."""
    root_node, root_local = levels.place_of(root)
    work = _padded(tensor, 1)
    parts = [work[low:high] for low, high in _cuts(work.numel(), pieces)]
    # Along the root's rail; with uneven nodes along the leaders, which have it from the root.
    carrier = root_local if levels.even else 0
    inside = dist.get_process_group_ranks(levels.inside)

    def to_carrier(i: int) -> Any:
        if levels.node != root_node or carrier == root_local:
            return None
        return dist.broadcast(parts[i], inside[root_local], levels.inside, async_op=True)

    def across(i: int) -> Any:
        if levels.local != carrier:
            return None
        first = dist.get_process_group_ranks(levels.across)[root_node]
        return dist.broadcast(parts[i], first, levels.across, async_op=True)

    def from_carrier(i: int) -> Any:
        if levels.node == root_node and carrier != root_local:
            return None
        return dist.broadcast(parts[i], inside[carrier], levels.inside, async_op=True)

    _pipeline(len(parts), [to_carrier, across, from_carrier])
    _put_back(work, tensor)


def reduce(levels: Levels, tensor: Tensor, root: int, op: Op, pieces: int) -> None:
    """Reduce ``tensor`` to the member at position ``root``; the others' stays as it was."""
    root_node, root_local = levels.place_of(root)
    work = tensor.detach().reshape(-1).clone()
    parts = [work[low:high] for low, high in _cuts(work.numel(), pieces)]
    carrier = root_local if levels.even else 0
    inside = dist.get_process_group_ranks(levels.inside)

    def to_carrier(i: int) -> Any:
        return dist.reduce(parts[i], inside[carrier], OPS[op], levels.inside, async_op=True)

    def across(i: int) -> Any:
        if levels.local != carrier:
            return None
        last = dist.get_process_group_ranks(levels.across)[root_node]
        return dist.reduce(parts[i], last, OPS[op], levels.across, async_op=True)

    def to_root(i: int) -> Any:
        if levels.node != root_node or carrier == root_local:
            return None
        return dist.broadcast(parts[i], inside[carrier], levels.inside, async_op=True)

    _pipeline(len(parts), [to_carrier, across, to_root])
    if (levels.node, levels.local) == (root_node, root_local):
        tensor.copy_(work.view(tensor.shape))


# ---- parts ---------------------------------------------------------------------------------


def _start_reduce_scatter(
    group: dist.ProcessGroup,
    levels: Levels,
    part: Tensor,
    op: Op,
    received: dict[int, Tensor],
    i: int,
) -> Any:
    """Start what _finish_reduce_scatter ends; ``part`` is cut evenly over ``group``.

    gloo's own reduce-scatter is an all-reduce inside, twice the bytes. There everyone sends
    everyone their part, and sums up what arrives in the order of the members.
    """
    members = group.size()
    if levels.backend == "gloo":
        received[i] = part.new_empty((members, part.numel() // members))
        return dist.all_to_all_single(received[i].view(-1), _flat(part), group=group, async_op=True)
    received[i] = part.new_empty((1, part.numel() // members))
    return reduce_scatter_op(received[i].view(-1), _flat(part), OPS[op], group, async_op=True)


def _finish_reduce_scatter(rows: Tensor, op: Op) -> Tensor:
    """Rows combined from the first to the last; shape (columns,)."""
    if rows.shape[0] == 1:
        return rows[0]
    combine, dtype = _COMBINE[op], rows.dtype
    if dtype in (torch.bfloat16, torch.float16):
        rows = rows.float()
    total = combine(rows[0], rows[1])
    for row in rows[2:]:
        combine(total, row, out=total)
    return total.to(dtype)


def _pipeline(pieces: int, stages: Sequence[Callable[[int], Any]]) -> None:
    """Take every piece through all stages in order, several pieces at a time.

    Stage s takes piece i once stage s-1 is done with it. All members issue operations in the
    same order, which is what process groups want.
    """
    works: list[dict[int, Any]] = [{} for _ in stages]
    for tick in range(pieces + LAG * (len(stages) - 1)):
        for number, stage in enumerate(stages):
            i = tick - LAG * number
            if not 0 <= i < pieces:
                continue
            if number:
                _wait(works[number - 1].pop(i))
            works[number][i] = stage(i)
    for work in works[-1].values():
        _wait(work)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _cuts(length: int, pieces: int) -> list[tuple[int, int]]:
    """``length`` cut into at most ``pieces`` parts of equal size, but for the last."""
    step = -(-length // max(1, pieces))
    return [(low, min(low + step, length)) for low in range(0, length, max(1, step))]


def _flat(tensor: Tensor) -> Tensor:
    """``tensor`` as one dimension; a copy where its memory is not in order."""
    return tensor.detach().reshape(-1)


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """As _flat, with zeros at the end up to a multiple."""
    flat = _flat(tensor)
    missing = -flat.numel() % multiple
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def _put_back(work: Tensor, tensor: Tensor) -> None:
    """Copy the result into the caller's tensor, unless it was made there."""
    if work.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(work[: tensor.numel()].view(tensor.shape))
