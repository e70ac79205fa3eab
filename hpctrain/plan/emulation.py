"""What an emulated machine needs to know: seconds of passes, seconds of links, in one table.

The numbers are the planner's own, so that an emulated step can be held against its prediction.
The table is plain JSON; it lies in the run directory, where the ranks read it.
"""

from __future__ import annotations

from typing import Any

from hpctrain.errors import UsageError
from hpctrain.machine import Machine
from hpctrain.plan.collectives import Group, Wires
from hpctrain.plan.inputs import Strategy, Workload
from hpctrain.plan.job import strategy_of, workload_of
from hpctrain.plan.steptime import StepModel
from hpctrain.spec.job import JobSpec
from hpctrain.spec.shadow import shadow

_AXES = ("tp", "cp", "pp", "dp_replicate", "dp_shard")
_FP32 = 4.0
_BLOCK_SECONDS = 3e-3
"""Time of a core that a rank really needs for a small block, forward and backward."""
_COLLECTIVE_SECONDS = 10e-3
"""Time that a small collective really needs where ranks share cores."""
_HOP_SECONDS = 60e-6
"""Time of a core that each rank really needs for every other one in a collective."""
_SPARE = 1.4
"""How many times that the emulated sums take what the real ones need."""
_BUCKETS = 8
"""Of the gradients of replicas; the small model's would all fit one."""
_BUSY = 0.4
"""Share of the cores' time that ranks may need without getting in each other's way."""


def emulation_table(spec: JobSpec, machine: Machine, cores: int = 1) -> dict[str, Any]:
    """The table of a resolved job, for ranks that share ``cores`` of this machine.

    All times are those of the machine times ``slower``.

    ``block``: seconds of a block's forward, input-gradient and weight-gradient pass, without
    communication. ``head``, ``embedding``: of a micro-batch, all passes. ``optimizer``, ``step``:
    of a step. ``links``: axis -> operation -> [seconds, seconds a byte], for the bytes that the
    small model's messages stand for; ``near`` and ``far``: the same for a message to the next
    stage, inside a node and between nodes; ``ranks_per_node``.

    Raises:
        UsageError: a model of the user's own, or one with experts.
    """
    check_emulated(spec, ranks=True)
    work, _ = workload_of(spec, machine)
    strategy = strategy_of(spec)
    model = StepModel(work)
    block, _, head, embedding = model.layer(strategy)
    inputs = block.backward.total - block.backward.communication - block.weights
    pipe = model.pipe(strategy)
    layout = strategy.layout
    strides = strategy.strides()
    wires = model.wires
    activations, parameters, gradients = _scales(spec, work, strategy)
    links: dict[str, dict[str, list[float]]] = {}
    groups: dict[str, tuple[tuple[int, int], ...]] = {
        axis: ((getattr(layout, axis), strides[axis]),)
        for axis in _AXES
        if getattr(layout, axis) > 1
    }
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        groups["dp"] = tuple((getattr(layout, a), strides[a]) for a in ("dp_shard", "dp_replicate"))
    for axis, parts in groups.items():
        group = wires.group(*parts)
        kept, summed = (
            (activations, activations) if axis in ("tp", "cp", "pp") else (parameters, gradients)
        )
        links[axis] = _group(wires, group, kept, summed)
    across = work.platform.network_bandwidth(strides["pp"]) * wires.network
    table = {
        "block": [block.forward.total - block.forward.communication, inputs, block.weights],
        "head": head,
        "embedding": embedding,
        "optimizer": model.state(strategy, pipe.layers).optimizer,
        "step": work.values.step_seconds,
        "links": links,
        "streams": ["dp_shard"] if strategy.states.fully_sharded else [],
        "near": [wires.hop, activations / (work.platform.peer_bandwidth * wires.link)],
        "far": [2.0 * wires.hop, activations / across],
    }
    slower = spec.slower
    if slower is None:
        slower = _slower(model, strategy, cores)
    stretched: dict[str, Any] = _times(table, slower)
    return stretched | {
        "machine": machine.name,
        "ranks_per_node": spec.ranks_per_node,
        "buckets": _BUCKETS,
        "slower": slower,
    }


def _slower(model: StepModel, strategy: Strategy, cores: int) -> float:
    """How many times slower ranks that share ``cores`` have to run to keep time."""
    layout, pipe = strategy.layout, model.pipe(strategy)
    collectives = (10 if layout.tp > 1 else 0) + (3 if strategy.states.fully_sharded else 0)
    each = _BLOCK_SECONDS + collectives * _COLLECTIVE_SECONDS
    needed = pipe.layers * pipe.micro_batches * each * layout.world_size / cores
    slower = max(1.0, needed / (_BUSY * model.step(strategy).seconds))
    reduction = model.state(strategy, pipe.layers).reduction
    if reduction and not strategy.states.fully_sharded:
        # Buckets come one after another at a step's end: the real sums have to be done by then.
        bucket = _COLLECTIVE_SECONDS / 2.0 + layout.dp * layout.cp * _HOP_SECONDS
        sums = _BUCKETS * bucket * layout.world_size / cores
        slower = max(slower, _SPARE * sums / reduction)
    return slower


def _times(value: Any, factor: float) -> Any:
    """Every number of a table times a factor."""
    if isinstance(value, dict):
        return {key: _times(item, factor) for key, item in value.items()}
    if isinstance(value, list):
        return [_times(item, factor) for item in value]
    return value if isinstance(value, str) else value * factor


def check_emulated(spec: JobSpec, *, ranks: bool) -> None:
    """Refuse a job whose passes have no known times.

    Args:
        spec: resolved.
        ranks: whether there are real ranks, or the simulator alone.

    Raises:
        UsageError: a model of the user's own, or ranks with experts.
    """
    if spec.model.module is not None:
        raise UsageError(
            f"machine.emulate: the shape of model.module {spec.model.module} is not known",
            hint="give layers, hidden, heads and vocab_size of a transformer that is like it",
        )
    if ranks and spec.model.moe.experts:
        raise UsageError(
            "machine.emulate: a model with experts (model.moe) has no emulated times",
            hint=f"it can be simulated: machine: {{simulate: {spec.machine_name}}}",
        )


def _group(wires: Wires, group: Group, kept: float, summed: float) -> dict[str, list[float]]:
    """Seconds of an operation, and a byte that a rank hands in, by operation."""
    fixed = wires.gather(0.0, group)
    each = (wires.gather(1e12, group) - fixed) / 1e12
    spread = wires.all_to_all(0.0, group)
    every = (wires.all_to_all(1e12, group) - spread) / 1e12
    return {
        "all_gather": [fixed, each * group.size * kept],
        "reduce_scatter": [fixed, each * summed],
        "all_reduce": [2.0 * fixed, 2.0 * each * summed],
        "broadcast": [fixed, each * kept],
        "all_to_all": [spread, every * kept],
    }


def _scales(spec: JobSpec, work: Workload, strategy: Strategy) -> tuple[float, float, float]:
    """Bytes of the job's model that a byte of the small one stands for: activations,
    gathered parameters, reduced gradients."""
    small = shadow(spec)
    assert spec.data.sequence_length and small.data.sequence_length
    assert spec.model.hidden and small.model.hidden
    wide = spec.data.sequence_length * spec.model.hidden
    narrow = small.data.sequence_length * small.model.hidden
    element = 4.0 if work.dtype == "fp32" else 2.0
    activations = element * wide / (_FP32 * narrow)
    count = spec.model.transformer().parameters / small.model.transformer().parameters
    kept = work.weight_bytes if work.dtype == "fp32" else 2.0
    return activations, count * kept / _FP32, count * work.gradient_bytes / _FP32
