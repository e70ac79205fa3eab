"""Every valid layout of a job, scored; pruned by memory and divisibility and by nothing else.

A branch is left out only where a bound proves that nothing in it can be valid: a lower bound of
the memory of all its members is more than a device holds. Everything else is scored, with the
same parts and the same composition as ``StepModel.step``.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field, replace

from hpctrain.errors import ImpossibleError
from hpctrain.layout import ParallelLayout, divisors
from hpctrain.plan.inputs import StatePlacement, Strategy, Workload
from hpctrain.plan.memory import Activations, activations, counts, limit, state_bytes
from hpctrain.plan.pipeline import FORMS
from hpctrain.plan.space import STATES, Space, chunkings, degrees
from hpctrain.plan.statetime import StateCost
from hpctrain.plan.steptime import Pipe, StepModel, compose

_SHARDED = StatePlacement.zero(3)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with its score.

    Attributes:
        strategy: the cut.
        seconds: of a step.
        memory: bytes of the fullest rank.
        devices: how many it runs on.
    """

    strategy: Strategy
    seconds: float
    memory: float
    devices: int


@dataclass(slots=True)
class Found:
    """What a search found.

    Attributes:
        best: the fastest candidates that fit, fastest first.
        front: no other candidate is both as fast and as small; by time.
        scored: valid layouts that were scored.
        too_big: branches that were left out because nothing in them fits.
        least_memory: smallest memory met among what does not fit, for the message.
    """

    best: list[Candidate] = field(default_factory=list)
    front: list[Candidate] = field(default_factory=list)
    scored: int = 0
    too_big: int = 0
    least_memory: float = float("inf")


@dataclass(frozen=True, slots=True)
class _State:
    """A placement of the states, ready to be combined with any pipeline of its degrees."""

    placement: StatePlacement
    shard: int
    cost: StateCost
    block: float
    """Bytes a block of a stage."""
    first: float
    last: float
    whole: float
    """Bytes of what stands once, however many blocks a stage has."""
    sharded: bool
    """Parameters are sharded."""
    reach: int
    """As Wires.reach: where a pipeline's chain lies depends on how wide shards are."""


@dataclass(frozen=True, slots=True)
class _States:
    """Placements, and for each of their four sizes the least of all: a bound of any of them."""

    members: list[_State]
    least: tuple[float, float, float, float]


def _states(
    model: StepModel, plan: Strategy, layers: int, space: Space, order: tuple[str, ...]
) -> _States:
    """Every placement of the states over the data-parallel ranks of a layout."""
    work, layout = model.work, plan.layout
    dp = layout.dp
    found = []
    for name, placement in STATES:
        if name not in space.states:
            continue
        if name == "none" or (name == "zero1" and not space.zero1_shards):
            shards: tuple[int, ...] = (1,)
        else:
            shards = divisors(dp)
        for shard in shards:
            alone = shard == 1 and (layout.cp == 1 or (name == "zero1" and dp > 1))
            if dp == 1 and "none" not in space.states:
                alone = False  # nothing to share, but nothing else to try either
            if name != "none" and alone and (dp == 1 or space.zero1_shards or name != "zero1"):
                continue  # nothing to share: the same as "none"
            divided = replace(layout, dp_replicate=dp // shard, dp_shard=shard)
            cut = replace(plan, layout=divided, states=placement, order=order)
            size, state = counts(work, cut), state_bytes(work, cut)
            common, routed = sum(state.common), sum(state.routed)
            block = size.dense + size.experts
            found.append(
                _State(
                    placement=placement,
                    shard=shard,
                    cost=model.state(cut, layers),
                    block=size.dense * common
                    + size.experts * routed
                    + state.block * block
                    + state.matrices,
                    first=size.first * (common + state.ends),
                    last=size.last * (common + state.ends),
                    whole=state.unit * block,
                    sharded=placement.fully_sharded,
                    reach=_reach(model, cut),
                )
            )
    least = (
        min(s.block for s in found),
        min(s.whole for s in found),
        min(s.first for s in found),
        min(s.last for s in found),
    )
    return _States(found, least)


def _reach(model: StepModel, plan: Strategy) -> int:
    """How a pipeline's chain lies over the domains of fast links."""
    return model.wires.reach(plan.layout.pp, plan.strides()["pp"])


class _Fills:
    """Bytes of activations of the stages that can be the fullest, and their blocks.

    Held micro-batches never grow along the stages of a closed form, so that of a run of like
    stages the first is the fullest.
    """

    __slots__ = ("alone", "blocks_first", "blocks_last", "first", "inner", "last")

    def __init__(
        self,
        pp: int,
        virtual: int,
        m: int,
        schedule: str,
        work: Workload,
        pipe: Pipe,
        kept: Activations,
    ) -> None:
        base = kept.buffers + work.context_bytes
        held = FORMS[schedule].held
        runs = [
            (
                k.layers,
                kept.stage(k.layers, held(k.start, pp, virtual, m) if pp > 1 else 1.0, virtual),
            )
            for k in pipe.kinds
        ]
        self.alone = pp == 1
        self.blocks_first, bytes_first = runs[0]
        self.blocks_last, bytes_last = runs[-1]
        self.first = bytes_first + base + (kept.logits if self.alone else 0.0)
        self.last = bytes_last + base + kept.logits
        self.inner = [(layers, held_bytes + base) for layers, held_bytes in runs[1:-1]]

    def bytes(self, block: float, whole: float, first: float, last: float) -> float:
        """Of the fullest stage, with the given bytes a block, a rank and the two ends."""
        most = self.first + self.blocks_first * block + first
        if self.alone:
            return most + whole + last
        other = self.last + self.blocks_last * block + last
        if other > most:
            most = other
        for blocks, fixed in self.inner:
            other = fixed + blocks * block
            if other > most:
                most = other
        return most + whole


def search(
    work: Workload,
    devices: int,
    space: Space | None = None,
    *,
    keep: int = 50,
    room: float | None = None,
) -> Found:
    """Scores every valid layout of ``devices`` devices.

    Args:
        work: the job.
        devices: how many there are; all are used.
        space: what is tried; everything where None.
        keep: fastest candidates that are returned.
        room: bytes a device may fill; what the platform allows where None.

    Raises:
        ImpossibleError: nothing divides, or nothing fits; names the rule and the nearest.
    """
    space = space or Space()
    room = limit(work) if room is None else room
    model = StepModel(work)
    found = Found()
    heap: list[tuple[float, int, Candidate]] = []
    front = _Front()
    any_layout = False
    for layout in degrees(work, devices, space):
        any_layout = True
        _score(model, layout, devices, space, room, keep, found, heap, front)
    if not any_layout:
        raise _nothing_divides(work, devices)
    if not heap:
        raise ImpossibleError(
            f"no layout of {devices} devices fits: the smallest needs "
            f"{found.least_memory / 2**30:.1f} GiB a device, {work.platform.name} can fill "
            f"{room / 2**30:.1f} GiB",
            hint=f"nearest possible: about {_devices_needed(found, devices, room)} devices, "
            "devices with more memory, or a smaller model or sequence",
        )
    found.best = [c for _, _, c in sorted(heap, key=lambda item: (-item[0], -item[1]))]
    found.front = front.members()
    return found


def _score(
    model: StepModel,
    layout: ParallelLayout,
    devices: int,
    space: Space,
    room: float,
    keep: int,
    found: Found,
    heap: list[tuple[float, int, Candidate]],
    front: _Front,
) -> None:
    """Scores all layouts of one set of degrees."""
    work, values = model.work, model.work.values
    tp, pp, dp = layout.tp, layout.pp, layout.dp
    fsdp, dp_hidden, fixed_seconds = values.fsdp_overlap, work.dp_overlap(pp), values.step_seconds
    share = work.global_batch // dp
    orders = space.orders if pp > 1 else space.orders[:1]  # they differ in where pp lies
    splits = [
        split
        for split in (space.sequence_parallel if tp > 1 else (False,))
        if not split or work.sequence % (tp * layout.cp) == 0
    ]
    whole = work.stack.accumulates_whole
    reaches = {o: _reach(model, Strategy(layout=layout, order=o)) for o in orders}
    states_of: dict[tuple[int, tuple[str, ...], bool], _States] = {}
    for micro in space.micro_batch or divisors(share):
        if share % micro:
            continue
        m = share // micro
        chunked = chunkings(work, pp, m, space)
        for split, recompute in itertools.product(splits, space.recompute):
            base = Strategy(
                layout=layout,
                micro_batch=micro,
                recompute=recompute,
                sequence_parallel=split,
            )
            # what mixed precision keeps can depend on whether parameters are sharded
            kept = (activations(work, base),) * 2
            if work.stack.fp32_stream:
                kept = (kept[0], activations(work, replace(base, states=_SHARDED)))
            for (schedule, virtual), order in itertools.product(chunked, orders):
                plan = Strategy(
                    layout=layout,
                    micro_batch=micro,
                    virtual=virtual,
                    schedule=schedule,
                    recompute=recompute,
                    sequence_parallel=split,
                    order=order,
                )
                pipe = model.pipe(plan)
                pipes = {reaches[order]: pipe}
                fills = _Fills(pp, virtual, m, schedule, work, pipe, kept[0])
                other = fills
                if kept[1] is not kept[0]:
                    other = _Fills(pp, virtual, m, schedule, work, pipe, kept[1])
                key = (pipe.layers, order, whole and m > 1)
                states = states_of.get(key)
                if states is None:
                    states = _states(model, plan, pipe.layers, space, order)
                    states_of[key] = states
                bound = min(fills.bytes(*states.least), other.bytes(*states.least))
                if bound > room:
                    # less than any placement of the states needs: nothing here can fit
                    found.too_big += 1
                    if bound < found.least_memory:
                        found.least_memory = bound
                    continue
                for state in states.members:
                    mine = other if state.sharded else fills
                    memory = mine.bytes(state.block, state.whole, state.first, state.last)
                    if memory > room:
                        if memory < found.least_memory:
                            found.least_memory = memory
                        continue
                    cost = state.cost
                    lying = pipes.get(state.reach)
                    if lying is None:
                        wide = replace(layout, dp_replicate=dp // state.shard, dp_shard=state.shard)
                        lying = pipes[state.reach] = model.pipe(replace(plan, layout=wide))
                    running, bubble, reduction, _ = compose(lying, cost, fsdp, dp_hidden)
                    seconds = running + bubble + reduction + cost.serial + fixed_seconds
                    found.scored += 1
                    full = len(heap) >= keep
                    if full and -heap[0][0] <= seconds and not front.takes(seconds, memory):
                        continue
                    divided = replace(layout, dp_replicate=dp // state.shard, dp_shard=state.shard)
                    chosen = replace(plan, layout=divided, states=state.placement)
                    candidate = Candidate(chosen, seconds, memory, devices)
                    front.add(candidate)
                    entry = (-seconds, -found.scored, candidate)
                    if not full:
                        heapq.heappush(heap, entry)
                    elif seconds < -heap[0][0]:
                        heapq.heapreplace(heap, entry)


class _Front:
    """Candidates that no other beats in both time and memory."""

    def __init__(self) -> None:
        self._members: list[Candidate] = []

    def takes(self, seconds: float, memory: float) -> bool:
        return not any(c.seconds <= seconds and c.memory <= memory for c in self._members)

    def add(self, candidate: Candidate) -> None:
        if self.takes(candidate.seconds, candidate.memory):
            self._members = [
                c
                for c in self._members
                if c.seconds < candidate.seconds or c.memory < candidate.memory
            ]
            self._members.append(candidate)

    def members(self) -> list[Candidate]:
        return sorted(self._members, key=lambda c: c.seconds)


def _nothing_divides(work: Workload, devices: int) -> ImpossibleError:
    batch = work.global_batch
    return ImpossibleError(
        f"no layout of {devices} devices divides {work.model.heads} heads, "
        f"{work.model.layers} layers and a global batch of {batch}",
        hint=f"nearest possible: a global batch of {-(-batch // devices) * devices}, or "
        f"{max(d for d in divisors(batch) if d <= devices)} devices",
    )


def _devices_needed(found: Found, devices: int, room: float) -> int:
    """Devices over which the smallest layout would have to be spread, if memory divided."""
    return max(devices + 1, -(-int(devices * found.least_memory) // int(room)))
