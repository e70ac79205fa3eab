"""A plan: what a job needs, how fast it is, what would be better, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hpctrain.errors import ImpossibleError
from hpctrain.fabric import Fabric
from hpctrain.layout import DEFAULT_ORDER, RankGrid
from hpctrain.machine import Machine
from hpctrain.placement import AxisLinks, Placement, axis_links, place
from hpctrain.plan.advice import Warning, warnings
from hpctrain.plan.inputs import Strategy, Workload
from hpctrain.plan.job import RECOMPUTE, STATES, strategy_of, workload_of
from hpctrain.plan.memory import StageMemory, limit
from hpctrain.plan.pipeline import form_of, has_form
from hpctrain.plan.search import Candidate, Found, search
from hpctrain.plan.software import DEFAULT_STACK, Fitted
from hpctrain.plan.space import Space
from hpctrain.plan.steptime import StepModel, StepTime
from hpctrain.plan.volume import traffic
from hpctrain.schedule import Costs, Timeline, make, simulate
from hpctrain.spec.checkpoint import CheckpointSpec
from hpctrain.spec.job import JobSpec

NODE_MTBF = 250 * 86400.0
"""Seconds between failures of one node: Llama 3 (Grattafiori et al. 2024, section 3.3.4) lost 419
times on 2,048 nodes in 54 days."""
STORAGE = 1e9
"""Bytes/s that a node writes to a parallel file system, where nothing was measured."""
STORAGE_LIMIT = 100e9
"""Bytes/s that a file system takes from all nodes together, where nothing was measured."""
_ACTIONS = 200_000
"""Longest table of actions that is run: about a second."""
_WORTH = 1.01
"""Least gain that makes an alternative worth a line."""
_LIKELY = 1.645
"""Standard deviations of an interval that holds nine in ten."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A layout that is better, and why.

    Attributes:
        candidate: it and its score.
        step: its time.
        gain: speed over the plan's own.
        why: where it saves time.
        settings: keys of the job file and their values.
    """

    candidate: Candidate
    step: StepTime
    gain: float
    why: str
    settings: dict[str, object]


@dataclass(frozen=True, slots=True)
class Run:
    """The whole run.

    Attributes:
        hours: wall time of all steps.
        node_hours: of all nodes.
        checkpoint_bytes, checkpoint_seconds: size of one and time to write it.
        interval_seconds, interval_steps: between checkpoints, by Young's formula
            sqrt(2·write time·mean time between failures of the job) (Young 1974; Daly 2006).
        mtbf: seconds between failures of the job: its own figure, else assumed from NODE_MTBF.
        staging_bytes: of a node's host memory that checkpoints are held in while they are written.
    """

    hours: float
    node_hours: float
    checkpoint_bytes: float
    checkpoint_seconds: float
    interval_seconds: float
    interval_steps: int
    mtbf: float
    staging_bytes: float


@dataclass(frozen=True)
class Plan:
    """Everything that ``hpctrain plan`` says of a job."""

    spec: JobSpec
    machine: Machine
    work: Workload
    strategy: Strategy
    fitted: Fitted
    step: StepTime
    memory: tuple[StageMemory, ...]
    limit: float
    alternatives: tuple[Alternative, ...] = ()
    found: Found | None = field(default=None, repr=False)

    @property
    def fits(self) -> bool:
        return self.used <= self.limit

    @property
    def used(self) -> float:
        """Bytes of the fullest rank."""
        return max(stage.total for stage in self.memory)

    @property
    def fullest(self) -> int:
        """Number of the stage that is the fullest."""
        totals = [stage.total for stage in self.memory]
        return totals.index(max(totals))

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds of a step between which nine in ten should lie."""
        width = math.exp(_LIKELY * self.work.values.spread)
        return self.step.seconds / width, self.step.seconds * width

    @property
    def devices(self) -> int:
        return self.strategy.layout.world_size

    @property
    def tokens_per_second(self) -> float:
        return self.work.global_batch * self.work.sequence / self.step.seconds

    def _rate(self, flops_per_token: float) -> float:
        return self.tokens_per_second * flops_per_token / self.devices

    @property
    def model_flops(self) -> float:
        """FLOP/s of a device, without recomputation (Chowdhery et al. 2022)."""
        return self._rate(self.work.model.model_flops_per_token(self.work.sequence))

    @property
    def hardware_flops(self) -> float:
        """FLOP/s of a device, recomputed layers counted."""
        if self.strategy.recompute != "full":
            return self.model_flops
        return self._rate(self.work.model.hardware_flops_per_token(self.work.sequence))

    @property
    def utilisation(self) -> float:
        """Model FLOP/s over the peak of the type that products run in (MFU)."""
        return self.model_flops / self.work.platform.peak_flops(self.work.dtype)

    @cached_property
    def fabric(self) -> Fabric:
        per_node = self.spec.ranks_per_node
        assert isinstance(per_node, int)
        return Fabric.of(self.machine, self.spec.nodes, per_node)

    @cached_property
    def links(self) -> list[AxisLinks]:
        """What links the groups of each axis."""
        grid = RankGrid(self.strategy.layout, self.strategy.order)
        return axis_links(grid, self.fabric)

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Seconds of communication of each axis that nothing hides."""
        split = self.step.split
        data = split["gradient reduction"] + split["sharded state"]
        found = {
            "tp": split["tensor parallel"],
            "cp": split["context parallel"],
            "pp": split["pipeline sends"] + split["pipeline bubble"],
            "ep": split["expert parallel"],
        }
        layout = self.strategy.layout
        found["dp_shard" if layout.dp_shard > 1 else "dp_replicate"] = data
        return found

    @cached_property
    def warnings(self) -> list[Warning]:
        return warnings(self.work, self.strategy, self.step, self.memory, self.limit)

    @cached_property
    def timeline(self) -> Timeline | None:
        """The schedule's own table of actions run with this plan's times; None without a
        pipeline, and where the table is too long to be worth it."""
        layout = self.strategy.layout
        actions = 3 * layout.pp * self.strategy.virtual * self.step.micro_batches
        if layout.pp == 1 or actions > _ACTIONS:
            return None
        return simulate_schedule(self)

    @cached_property
    def placement(self) -> Placement:
        """The cheapest order of axes and nodes for this layout's traffic."""
        return place(self.strategy.layout, self.fabric, traffic(self.work, self.strategy), swaps=0)

    @cached_property
    def run(self) -> Run:
        spec = self.spec
        seconds = self.step.seconds * spec.train.steps
        parameters = self.work.model.parameters
        size = 12.0 * parameters  # fp32 parameters and two moments
        measured = self.machine.measured
        node = measured.write_bandwidth if measured is not None else None
        rate = min((node or STORAGE) * spec.nodes, STORAGE_LIMIT)
        write = size / rate
        stated = spec.checkpoint.mtbf
        usual = stated == CheckpointSpec.model_fields["mtbf"].default
        mtbf = NODE_MTBF / spec.nodes if usual else float(stated)
        interval = math.sqrt(2.0 * write * mtbf)
        return Run(
            hours=seconds / 3600,
            node_hours=seconds / 3600 * spec.nodes,
            checkpoint_bytes=size,
            checkpoint_seconds=write,
            interval_seconds=interval,
            interval_steps=max(1, round(interval / self.step.seconds)),
            mtbf=mtbf,
            staging_bytes=spec.checkpoint.buffers * size / spec.nodes,
        )


def make_plan(
    spec: JobSpec, machine: Machine, *, stack: str = DEFAULT_STACK, alternatives: int = 3
) -> Plan:
    """The plan of a resolved job.

    Args:
        spec: resolved.
        machine: the one that it names.
        stack: software that it is planned for.
        alternatives: better layouts to look for; 0 looks for none.

    Raises:
        UsageError: the model is the user's own.
        ImpossibleError: the planner knows no such stack.
    """
    work, fitted = workload_of(spec, machine, stack)
    strategy = strategy_of(spec)
    model = StepModel(work)
    plan = Plan(
        spec=spec,
        machine=machine,
        work=work,
        strategy=strategy,
        fitted=fitted,
        step=model.step(strategy),
        memory=model.memory(strategy),
        limit=limit(work),
    )
    if not alternatives:
        return plan
    try:
        found = search(work, strategy.layout.world_size, job_space(spec, strategy.layout.cp))
    except ImpossibleError:
        return plan
    better = best_alternatives(plan, model, found, alternatives)
    return replace(plan, alternatives=tuple(better), found=found)


def simulate_schedule(plan: Plan) -> Timeline:
    """One step of the schedule's table, every stage with its own blocks, head and embedding."""
    strategy, step = plan.strategy, plan.step
    pp, virtual = strategy.layout.pp, strategy.virtual
    name = form_of(strategy.schedule, virtual).name
    if not has_form(strategy.schedule):
        name = strategy.schedule
    table = make(name, ranks=pp, micro_batches=step.micro_batches, chunks=virtual, transfers=False)
    block = step.layer
    inputs = block.total - block.forward.total - block.weights
    stages = table.stages.stages
    share = [step.layers[table.stages.routes[0][s]] / virtual for s in range(stages)]
    # what a stage does beside its blocks is split over the passes as a block is
    own = [0.0] * stages
    for rank, seconds in enumerate(step.stages):
        mine = [s for s in range(stages) if table.stages.routes[0][s] == rank]
        rest = seconds - step.layers[rank] * block.total
        at = mine[-1] if rank == table.stages.routes[0][-1] else mine[0]
        own[at] += rest
    parts = (block.forward.total, inputs, block.weights)
    costs = [
        tuple(part * (n + extra / block.total) for n, extra in zip(share, own, strict=True))
        for part in parts
    ]
    return simulate(table, Costs(forward=costs[0], input_grad=costs[1], weight_grad=costs[2]))


def job_space(spec: JobSpec, context: int = 1) -> Space:
    """What a job file of this version can ask for, of what the search knows.

    Experts are spread in every way. Their channels are cut as the job cuts them or not at all, and
    sequences are shared if the job shares them: every further degree would multiply the search.

    Args:
        spec: the job.
        context: ranks that share a sequence in it.
    """
    cuts = {1, spec.parallel.expert_tensor}
    whole = spec.train.optimizer.kind != "adamw"  # matrices that no axis may cut
    return Space(
        tensor=(1,) if whole else None,
        context=None if context > 1 else (1,),
        expert=None,
        expert_tensor=tuple(sorted(cuts)),
        schedules=("1f1b", "interleaved", "zb-h1"),
        recompute=tuple(RECOMPUTE.values()),
        states=("none", "zero1") if whole else tuple(STATES),
        orders=(DEFAULT_ORDER,),
        zero1_shards=False,
        indivisible=True,
    )


def best_alternatives(plan: Plan, model: StepModel, found: Found, count: int) -> list[Alternative]:
    """The fastest layouts that differ from the plan's and from each other, if they are faster."""
    better: list[Alternative] = []
    seen = {_kind(plan.strategy)} if plan.fits else set()
    for candidate in found.best:
        kind = _kind(candidate.strategy)
        if kind in seen or len(better) == count:
            continue
        gain = plan.step.seconds / candidate.seconds
        if plan.fits and gain < _WORTH:
            break
        seen.add(kind)
        step = model.step(candidate.strategy)
        keys = settings(candidate.strategy, plan.work, plan.strategy.layout.cp > 1)
        better.append(Alternative(candidate, step, gain, _why(plan, step, candidate), keys))
    return better


def _kind(strategy: Strategy) -> tuple[object, ...]:
    layout = strategy.layout
    sharded = layout.dp_shard > 1
    return (
        layout.tp,
        layout.cp,
        layout.pp,
        layout.ep,
        layout.etp,
        strategy.virtual,
        strategy.states if sharded else None,
        strategy.recompute,
        strategy.micro_batch,
    )


def _why(plan: Plan, step: StepTime, candidate: Candidate) -> str:
    """Where an alternative saves most, and what it pays."""
    saved = {k: plan.step.split[k] - step.split[k] for k in plan.step.split}
    parts = []
    if not plan.fits:
        parts.append(f"it fits: {candidate.memory / 2**30:.1f} GiB")
    whole = plan.step.seconds
    for name, seconds in sorted(saved.items(), key=lambda item: -item[1])[:2]:
        if seconds > 0.01 * whole:
            parts.append(f"{name} -{seconds / whole:.0%}")
    name, seconds = min(saved.items(), key=lambda item: item[1])
    if -seconds > 0.01 * whole:
        parts.append(f"{name} +{-seconds / whole:.0%}")
    return ", ".join(parts) or "a little of everything"


def settings(strategy: Strategy, work: Workload, context: bool = False) -> dict[str, object]:
    """Keys of a job file that ask for a strategy; those of experts where the model has any, and
    that of context parallelism where it has a degree or ``context`` says that a job gives one."""
    layout, states = strategy.layout, strategy.states
    found: dict[str, object] = {"parallel.tensor": layout.tp}
    if layout.tp > 1:
        found["parallel.sequence"] = strategy.sequence_parallel
    found["parallel.pipeline"] = layout.pp
    if layout.pp > 1:
        found["parallel.schedule"] = form_of(strategy.schedule, strategy.virtual).name
        if strategy.virtual > 1:
            found["parallel.chunks"] = strategy.virtual
    if context or layout.cp > 1:
        found["parallel.context"] = layout.cp
    if work.model.experts:
        found["parallel.expert"] = layout.ep
        found["parallel.expert_tensor"] = layout.etp
    sharding = next(name for name, placement in STATES.items() if placement == states)
    found["parallel.sharding"] = sharding
    if states.fully_sharded:
        found["parallel.shard"] = "auto" if layout.dp_replicate == 1 else layout.dp_shard
    found["parallel.recompute"] = next(k for k, v in RECOMPUTE.items() if v == strategy.recompute)
    found["train.micro_batch"] = strategy.micro_batch
    return found


def fits_on(work: Workload, counts: Sequence[int], space: Space) -> list[Candidate]:
    """Best candidates of several device counts that no other beats in time, memory and devices."""
    found: list[Candidate] = []
    for devices in counts:
        try:
            found += search(work, devices, space, keep=1).front
        except ImpossibleError:
            continue
    return [
        c
        for c in found
        if not any(
            o is not c
            and o.seconds <= c.seconds
            and o.memory <= c.memory
            and o.devices <= c.devices
            and (o.seconds, o.memory, o.devices) != (c.seconds, c.memory, c.devices)
            for o in found
        )
    ]
