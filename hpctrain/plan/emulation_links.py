"""Links of an emulated machine: seconds of every operation of every group, by the planner's rates.

A message of the small model that ranks compute stands for one of the job's; what is counted in
bytes is scaled by how much larger the job's is.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.layout import ParallelLayout
from hpctrain.plan.collectives import Group, Wires
from hpctrain.plan.experts import experts_apart
from hpctrain.plan.inputs import Placement, Strategy, Workload
from hpctrain.plan.layer import exchanged_heads, head_exchange_time
from hpctrain.plan.seconds import LayerTime
from hpctrain.plan.simulated_data import ReplicatedParameters, handing_out
from hpctrain.plan.steptime import StepModel
from hpctrain.spec.job import JobSpec
from hpctrain.spec.resolve import layout_of
from hpctrain.spec.shadow import shadow

Links = dict[str, dict[str, list[float]]]
"""Axis -> operation -> [seconds, seconds a byte of the small model's messages]."""
_AXES = ("tp", "cp", "pp", "dp_replicate", "dp_shard")
_FP32 = 4.0
_PASSES_OF_KEYS = 3
"""Times that keys and values, or their gradients, go round a ring in a block."""


def links_of(spec: JobSpec, model: StepModel, strategy: Strategy, scales: Scales) -> Links:
    """All groups of a resolved job.

    Args:
        spec: the job.
        model, strategy: the planner's of it.
        scales: of the small model.
    """
    layout, strides, wires = strategy.layout, strategy.strides(), model.wires
    sharded = strategy.states.fully_sharded
    links: Links = {}
    for axes in _joined(layout):
        group = wires.group(*((getattr(layout, a), strides[a]) for a in reversed(axes)))
        links[axes_name(axes)] = _group(wires, group, *scales.on(axes, sharded))
    for axis in ("tp", "pp"):
        if axis in links and (axis == "pp" or strategy.sequence_parallel):
            # Blocks gather and scatter: what is summed are numbers that a loss has of a token.
            group = wires.group((getattr(layout, axis), strides[axis]))
            links[axis]["all_reduce"] = _group(wires, group, 1.0, scales.tokens, 1.0)["all_reduce"]
    block = model.layer(strategy)[0]
    if layout.cp > 1:
        links["cp"] |= _context_links(model, strategy, block, scales)
    if model.work.model.experts:
        links |= _expert_links(spec, model, strategy, block)
    if not (sharded or strategy.states.optimizer is Placement.REPLICATED):
        _hand_out(links, model, strategy)
    return links


def axes_name(axes: tuple[str, ...]) -> str:
    """What communicators call axes taken together."""
    return "_".join(axes).replace("dp_replicate_dp_shard", "dp")


def _context_links(
    model: StepModel, strategy: Strategy, block: LayerTime, scales: Scales
) -> dict[str, list[float]]:
    """Exchanges of heads between neighbours, and what attention does not hide of the keys' and
    values' way, dealt out to the messages of a ring."""
    work, layout, wires, found = model.work, strategy.layout, model.wires, {}
    if strategy.exchange > 1:
        near = wires.group((strategy.exchange, strategy.strides()["cp"]))
        # The small model has a head of keys for each of queries.
        heads, keys = work.model.heads / layout.tp, work.model.kv_heads / layout.tp
        many = exchanged_heads(heads, heads, strategy.exchange)
        handed = scales.activations * exchanged_heads(heads, keys, strategy.exchange) / many
        found["all_to_all"] = _group(wires, near, 1.0, 1.0, handed)["all_to_all"]
    hops = _PASSES_OF_KEYS * (layout.cp // strategy.exchange - 1)
    if hops:
        talk = block.forward.cp + block.backward.cp
        ring = talk - 2.0 * head_exchange_time(work, wires, strategy)
        found["send"] = [ring / hops, 0.0]
    return found


def _hand_out(links: Links, model: StepModel, strategy: Strategy) -> None:
    """Ranks that updated some rows each hand them out at once; those of the small model are so
    few that they are cut unevenly, and their bytes say nothing."""
    held, layers = ReplicatedParameters.of(model, strategy), model.pipe(strategy).layers
    count = sum(map(held.block, range(layers))) + held.table
    axes = tuple(a for a in ("dp_replicate", "cp") if getattr(strategy.layout, a) > 1)
    for name, seconds in zip(
        (axes_name(axes), "edp"),
        handing_out(model, strategy, count, max(0, layers - held.dense_layers)),
        strict=True,
    ):
        if name in links:
            links[name]["all_gather"] = [seconds, 0.0]


def _expert_links(spec: JobSpec, model: StepModel, strategy: Strategy, block: LayerTime) -> Links:
    """Links of the expert mesh: a way there and one back for each part of a block's tokens, as
    long as the planner has them with even routing, and sums over the ranks with copies."""
    work, layout, wires = model.work, strategy.layout, model.wires
    found: Links = {}
    messages = 2 * spec.parallel.dispatch.chunks
    for axis in ("etp", "ep"):  # both: the ranks that share an expert have their part in "ep"
        if getattr(layout, axis) > 1:
            found = {axis: {"all_to_all": [block.forward.ep / messages, 0.0]}}
    if layout.edp > 1:
        group = wires.group((layout.edp, layout.ep * layout.etp))
        small = shadow(spec).model.transformer()
        count = spec.model.transformer().routed_parameters / small.routed_parameters / _FP32
        kept = 2.0 if strategy.states.fully_sharded and work.dtype != "fp32" else work.weight_bytes
        found["edp"] = _group(wires, group, count * kept, count * work.gradient_bytes, 1.0)
    return found


def _joined(layout: ParallelLayout) -> list[tuple[str, ...]]:
    """Axes with more than one rank, and those that gradients are summed over together."""
    wanted: list[tuple[str, ...]] = [(axis,) for axis in _AXES]
    wanted += [("dp_replicate", "dp_shard")]
    wanted += [("dp_replicate", "cp"), ("dp_shard", "cp"), ("dp_replicate", "dp_shard", "cp")]
    return [axes for axes in wanted if all(getattr(layout, axis) > 1 for axis in axes)]


def _group(
    wires: Wires, group: Group, kept: float, summed: float, handed: float
) -> dict[str, list[float]]:
    """Seconds of an operation, and a byte that a rank hands in, by operation."""
    fixed = wires.gather(0.0, group)
    each = (wires.gather(1e12, group) - fixed) / 1e12
    spread = wires.all_to_all(0.0, group)
    every = (wires.all_to_all(1e12, group) - spread) / 1e12
    return {
        "all_gather": [fixed, each * group.size * kept],
        "reduce_scatter": [fixed, each * summed],
        "all_reduce": [2.0 * fixed, 2.0 * each * summed],
        "reduce": [fixed, each * summed],
        "broadcast": [fixed, each * kept],
        "all_to_all": [spread, every * handed],
    }


@dataclass(frozen=True)
class Scales:
    """Bytes of the job's model that a byte of the small one stands for.

    Attributes:
        activations: between stages and inside blocks.
        parameters, gradients: gathered and summed.
        tokens: single numbers of each token.
    """

    activations: float
    parameters: float
    gradients: float
    tokens: float

    def on(self, axes: tuple[str, ...], sharded: bool) -> tuple[float, float, float]:
        """Of what is gathered, summed and exchanged over some axes."""
        if axes in (("tp",), ("pp",)):
            return (self.activations,) * 3
        # Context ranks alone exchange activations, but sum gradients.
        inside = axes == ("cp",) and not sharded
        kept = self.activations if inside else self.parameters
        return kept, self.gradients, self.activations

    @classmethod
    def of(cls, spec: JobSpec, work: Workload, sharded: bool) -> Scales:
        small = shadow(spec)
        assert spec.data.sequence_length and small.data.sequence_length
        assert spec.model.hidden and small.model.hidden
        wide = spec.data.sequence_length * spec.model.hidden
        narrow = small.data.sequence_length * small.model.hidden
        full = work.dtype == "fp32"
        large, little = spec.model.transformer(), small.model.transformer()
        count = large.parameters / little.parameters
        if work.model.experts and experts_apart(layout_of(spec)):
            most, least = (
                (d.layers - d.dense_layers) * d.routed_parameters for d in (large, little)
            )
            count = (large.parameters - most) / (little.parameters - least)
        return cls(
            activations=(4.0 if full else 2.0) * wide / (_FP32 * narrow),
            parameters=count * (2.0 if sharded and not full else work.weight_bytes) / _FP32,
            gradients=count * work.gradient_bytes / _FP32,
            tokens=spec.data.sequence_length / small.data.sequence_length,
        )
