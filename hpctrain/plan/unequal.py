"""Nodes of different devices or cards in one job: uneven micro-batches, shards and stages.

Two ways to use them, both planned and the faster one taken:

- *data*: every device holds the whole model, faster ones take more micro-batches, and those with
  more memory hold larger shards of the training state (Cephalo);
- *pipeline*: stages lie on one kind of device each, faster ones with more blocks (Holmes, Zorse,
  Yuan 2.0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.errors import ImpossibleError
from hpctrain.layout import ParallelLayout, divisors
from hpctrain.plan.inputs import Placement, StatePlacement, Strategy, Workload
from hpctrain.plan.memory import activations, counts, limit, state_bytes
from hpctrain.plan.platform import Platform
from hpctrain.plan.steptime import StepModel
from hpctrain.schedule.balance import Memory, split_layers


@dataclass(frozen=True, slots=True)
class Part:
    """Devices of one kind.

    Attributes:
        name: of their machine.
        work: the job as planned for them.
        devices: how many.
    """

    name: str
    work: Workload
    devices: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one kind of device does.

    Attributes:
        part: the devices.
        micro_batches: each rank's, of a step.
        state: share of the training state that each rank holds.
        stages: pipeline stages that lie on them.
        layers: blocks of each of those stages.
        seconds: busy time a step.
        memory: bytes of the fullest rank.
    """

    part: Part
    micro_batches: int
    state: float
    stages: int
    layers: tuple[int, ...]
    seconds: float
    memory: float


@dataclass(frozen=True, slots=True)
class Mixed:
    """A plan over several kinds of devices.

    Attributes:
        way: ``data`` or ``pipeline``.
        seconds: of a step.
        even: seconds with the same share for every device, None where that cannot be.
        shares: by kind.
        micro_batch, tensor: as chosen.
    """

    way: str
    seconds: float
    even: float | None
    shares: tuple[Share, ...]
    micro_batch: int
    tensor: int

    @property
    def gain(self) -> float | None:
        """Speed over equal shares."""
        return None if self.even is None else self.even / self.seconds


def share_micro_batches(seconds: Sequence[float], ranks: Sequence[int], total: int) -> list[int]:
    """Micro-batches of each rank of each kind, so that the last to finish is as early as can be.

    Args:
        seconds: of one micro-batch, by kind.
        ranks: of each kind.
        total: micro-batches of all ranks together.

    Raises:
        ImpossibleError: no numbers of whole micro-batches add up to ``total``.
    """
    # Each candidate for the last finish is a whole number of some kind's micro-batches. Ascending,
    # the first at which the kinds can add up to the total is the least.
    bounds = sorted({n * t for t in seconds for n in range(1, total + 1)})
    low, high = 0, len(bounds) - 1

    def capacity(bound: float) -> int:
        return sum(r * int(bound / t + 1e-9) for r, t in zip(ranks, seconds, strict=True))

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if capacity(bounds[middle]) >= total else (middle + 1, high)
    for bound in bounds[low:]:
        most = [int(bound / t + 1e-9) for t in seconds]
        found = _add_up(most, ranks, total)
        if found is not None:
            return found
    raise ImpossibleError(
        f"{total} micro-batches cannot be dealt to {' and '.join(map(str, ranks))} ranks with "
        "equal numbers inside a kind",
        hint="a global batch that is a multiple of each kind's ranks, or a smaller micro-batch",
    )


def _add_up(most: Sequence[int], ranks: Sequence[int], total: int) -> list[int] | None:
    """Numbers of at most ``most`` a rank, at least 0, that add up; the largest first kinds."""
    reachable: dict[int, list[int]] = {0: []}
    for number, size in zip(most, ranks, strict=True):
        following: dict[int, list[int]] = {}
        for held, chosen in reachable.items():
            for n in range(number, -1, -1):
                if held + n * size <= total:
                    following.setdefault(held + n * size, [*chosen, n])
        reachable = following
    return reachable.get(total)


def share_state(total: float, room: Sequence[float], ranks: Sequence[int]) -> list[float]:
    """Share of the training state of each rank of each kind, by the room that each has.

    Args:
        total: bytes of the state.
        room: bytes that a rank of each kind has left for it.
        ranks: of each kind.

    Raises:
        ImpossibleError: all rooms together are too small.
    """
    whole = sum(max(0.0, r) * n for r, n in zip(room, ranks, strict=True))
    if whole < total:
        raise ImpossibleError(
            f"training state of {total / 2**30:.1f} GiB, room for {whole / 2**30:.1f} GiB on all "
            "devices together",
            hint="more devices, a smaller micro-batch or recomputation",
        )
    return [max(0.0, r) / whole for r in room]


def plan_mixed(parts: Sequence[Part], *, tensor: Sequence[int] | None = None) -> Mixed:
    """The faster of both ways over all micro-batches and tensor degrees that fit.

    Args:
        parts: at least one kind; the job must be the same for all.
        tensor: degrees to try; the divisors of every kind's node where None.

    Raises:
        ImpossibleError: nothing fits.
    """
    degrees = tensor or [
        t
        for t in divisors(min(p.work.platform.node_devices for p in parts))
        if all(p.devices % t == 0 and p.work.model.heads % t == 0 for p in parts)
    ]
    best: Mixed | None = None
    reasons: list[str] = []
    for degree in degrees:
        for micro in divisors(parts[0].work.global_batch):
            for way in (_data_parallel, _pipeline):
                try:
                    found = way(parts, degree, micro)
                except ImpossibleError as error:
                    reasons.append(error.message)
                    continue
                if best is None or found.seconds < best.seconds:
                    best = found
    if best is None:
        raise ImpossibleError(
            f"no uneven plan fits {' and '.join(p.name for p in parts)}: {reasons[-1]}"
        )
    return best


def _data_parallel(parts: Sequence[Part], tensor: int, micro: int) -> Mixed:
    ranks = [p.devices // tensor for p in parts]
    work = parts[0].work
    if work.global_batch % micro:
        raise ImpossibleError(f"micro-batch {micro} does not divide the global batch")
    total = work.global_batch // micro
    states = StatePlacement.zero(3)
    dp = sum(ranks)
    layout = ParallelLayout(tp=tensor, dp_shard=dp)
    plan = Strategy(
        layout=layout,
        micro_batch=micro,
        states=states,
        sequence_parallel=tensor > 1 and work.stack.sequence_parallel,
    )
    slow = _slowest_wires(parts)
    each, extra, room, fixed = [], [], [], []
    for part in parts:
        shared = replace(part.work, platform=_with_network(part.work.platform, slow))
        model = StepModel(shared)
        pipe, state = model.pipe(plan), model.state(plan, shared.model.layers)
        values = shared.values
        hidden = values.fsdp_overlap * state.gathering
        exposed = max(0.0, hidden - pipe.block.total) + state.gathering - hidden
        each.append(pipe.kinds[0].seconds + exposed * shared.model.layers + state.ends)
        extra.append(state.reduction + state.serial + values.step_seconds)
        used = _fixed_bytes(shared, plan)
        fixed.append(used)
        room.append(limit(shared) - used)
    state_total = _state_total(parts[0].work, plan)
    shares = share_state(state_total, room, ranks)
    numbers = share_micro_batches(each, ranks, total)
    busy = [n * t + e for n, t, e in zip(numbers, each, extra, strict=True)]
    even = None
    if total % dp == 0 and all(state_total / dp <= r for r in room):
        even = max(total // dp * t + e for t, e in zip(each, extra, strict=True))
    return Mixed(
        way="data",
        seconds=max(busy),
        even=even,
        shares=tuple(
            Share(part, n, s, 0, (), b, f + s * state_total)
            for part, n, s, b, f in zip(parts, numbers, shares, busy, fixed, strict=True)
        ),
        micro_batch=micro,
        tensor=tensor,
    )


def _pipeline(parts: Sequence[Part], tensor: int, micro: int) -> Mixed:
    """One run of stages a kind; as many data-parallel copies as every kind's devices allow."""
    ranks = [p.devices // tensor for p in parts]
    work = parts[0].work
    best: Mixed | None = None
    for copies in divisors(math.gcd(*ranks)):
        share, rest = divmod(work.global_batch, copies * micro)
        stages = [r // copies for r in ranks]
        pp = sum(stages)
        if rest or not share or pp < 2 or pp > work.model.layers:
            continue
        layout = ParallelLayout(tp=tensor, pp=pp, dp_replicate=copies)
        plan = Strategy(
            layout=layout,
            micro_batch=micro,
            sequence_parallel=tensor > 1 and work.stack.sequence_parallel,
        )
        try:
            found = _stages(parts, stages, plan, share)
        except ImpossibleError:
            continue
        if best is None or found.seconds < best.seconds:
            best = found
    if best is None:
        raise ImpossibleError("no cut of the model into stages on these devices fits")
    return best


def _stages(
    parts: Sequence[Part], stages: Sequence[int], plan: Strategy, micro_batches: int
) -> Mixed:
    slow = _slowest_wires(parts)
    blocks, sends, heads, speeds, limits = [], [], [], [], []
    for part, count in zip(parts, stages, strict=True):
        shared = replace(part.work, platform=_with_network(part.work.platform, slow))
        model = StepModel(shared)
        block, _, head, _ = model.layer(plan)
        blocks.append(block.total)
        heads.append(head)
        sends.append(model.send(plan))
        speeds += [1.0 / block.total] * count
        limits += [limit(shared)] * count
    work = parts[0].work
    layers = work.model.layers
    kept, size, bytes_each = activations(work, plan), counts(work, plan), state_bytes(work, plan)
    pp = plan.layout.pp
    state = size.dense * (sum(bytes_each.common) + bytes_each.block)
    ends = max(size.first, size.last) * (sum(bytes_each.common) + bytes_each.ends)
    base = kept.buffers + kept.live + work.context_bytes + ends + kept.logits
    held = tuple(float(min(pp - i, micro_batches)) for i in range(pp))
    memory = Memory(
        state=(state,) * layers,
        activation=(kept.kept,) * layers,
        in_flight=held,
        limit=tuple(room - base for room in limits),
    )
    # the output layer weighs as much as some blocks of the device that holds it
    cut = split_layers([1.0] * layers, pp, speeds=speeds, memory=memory)
    kinds = [k for k, count in enumerate(stages) for _ in range(count)]
    seconds = [n * blocks[k] + sends[k] for n, k in zip(cut, kinds, strict=True)]
    seconds[-1] += heads[kinds[-1]]
    slowest = max(seconds)
    running = micro_batches * slowest + sum(seconds) - slowest
    extra = 0.0
    for part, count in zip(parts, stages, strict=True):
        mine = [n for n, k in zip(cut, kinds, strict=True) if parts[k] is part]
        if count:
            shared = replace(part.work, platform=_with_network(part.work.platform, slow))
            cost = StepModel(shared).state(plan, max(mine))
            extra = max(extra, cost.reduction + cost.optimizer + part.work.values.step_seconds)
    even = None
    if layers % pp == 0:
        flat = [layers // pp * blocks[k] + sends[k] for k in kinds]
        flat[-1] += heads[kinds[-1]]
        even = micro_batches * max(flat) + sum(flat) - max(flat) + extra
    shares, start = [], 0
    for number, (part, count) in enumerate(zip(parts, stages, strict=True)):
        here = cut[start : start + count]
        used = max(
            (base + n * (state + h * kept.kept) for n, h in zip(here, held[start:], strict=False)),
            default=0.0,
        )
        busy = micro_batches * max((n * blocks[number] + sends[number] for n in here), default=0.0)
        shares.append(
            Share(part, micro_batches, sum(here) / layers / max(count, 1), count, here, busy, used)
        )
        start += count
    return Mixed("pipeline", running + extra, even, tuple(shares), plan.micro_batch, plan.layout.tp)


def _slowest_wires(parts: Sequence[Part]) -> float:
    """Bytes/s one way of a device into the network they share."""
    return min(p.work.platform.nic_bandwidth for p in parts)


def _with_network(platform: Platform, nic: float) -> Platform:
    return replace(platform, nic_bandwidth=nic, card_bandwidth=nic)


def _fixed_bytes(work: Workload, plan: Strategy) -> float:
    """Bytes of a rank besides its share of the state."""
    kept, size, state = activations(work, plan), counts(work, plan), state_bytes(work, plan)
    ends = size.first + size.last
    layers = work.model.layers
    gathered = state.unit * size.dense + state.block * layers * size.dense + state.ends * ends
    whole = layers * kept.kept + kept.live + kept.logits + gathered + work.context_bytes
    if work.stack.accumulates_whole:
        whole += work.state_gradient_bytes * (layers * size.dense + ends)
    return whole


def _state_total(work: Workload, plan: Strategy) -> float:
    """Bytes of the sharded training state of all ranks of a tensor-parallel part."""
    size = counts(work, plan)
    parameters = work.model.layers * size.dense + size.first + size.last
    each = work.weight_bytes + work.optimizer_bytes
    if work.weight_bytes == 2.0:
        each = 4.0 + work.optimizer_bytes - 4.0
    if not work.stack.accumulates_whole:
        each += work.state_gradient_bytes
    assert plan.states.optimizer is not Placement.REPLICATED
    return parameters * each
