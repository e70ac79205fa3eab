"""A job file as the planner's input: its model, its layout, and the machine it names."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from hpctrain.errors import UsageError
from hpctrain.layout import DEFAULT_ORDER
from hpctrain.machine import LinkKind, Machine
from hpctrain.plan.inputs import Dispatch, Placement, StatePlacement, Strategy, Workload
from hpctrain.plan.optimizers import MatrixOptimizer
from hpctrain.plan.platform import CATALOGUE, Platform, find_accelerator
from hpctrain.plan.shapes import ModelShape
from hpctrain.plan.software import DEFAULT_STACK, Fitted, apply, calibration, stack
from hpctrain.schedule.job import plan_pipeline
from hpctrain.spec.job import JobSpec
from hpctrain.spec.resolve import layout_of

_CORE_FLOPS = 96e9
"""fp32 FLOP/s of a processor core where nothing is known of it: 16 fused operations a cycle."""
_CORE_BYTES = 8e9
"""Memory bandwidth of a core's share of its node."""
_HOST_LINK = 4e9
"""Bytes/s one way between two ranks of a host that has no devices."""

STATES = MappingProxyType(
    {
        "none": StatePlacement.zero(0),
        "zero1": StatePlacement.zero(1),
        "zero2": replace(StatePlacement.zero(3), parameters=Placement.MATERIALISED),
        "zero3": StatePlacement.zero(3),
    }
)
"""Placement of the states that a job file's ``parallel.sharding`` means."""

RECOMPUTE = MappingProxyType({"none": "none", "block": "full", "full": "stage"})
"""Policy that a job file's ``parallel.recompute`` means."""


def platform_of(machine: Machine, ranks_per_node: int) -> Platform:
    """The platform that a machine file describes; gaps are filled from the catalogue."""
    node = machine.node
    device = node.device
    if device.vendor == "cpu":
        return _host_platform(machine, ranks_per_node)
    found = find_accelerator(device.name)
    base = (
        CATALOGUE[found]
        if found
        else replace(CATALOGUE["H100"], name=device.name, family="unknown", known=False)
    )
    peaks = {k: float(v) for k, v in device.peak_flops.items() if v}
    near, package = machine.link(LinkKind.NODE), machine.links.get(LinkKind.PACKAGE)
    together = near.aggregate or near.bandwidth
    injection = node.injection_bandwidth
    devices = machine.devices_per_node
    packaged = max((len(members) for members in node.packages), default=1)
    same = replace(
        base,
        name=device.name,
        peak=MappingProxyType({**base.peak, **peaks}),
        memory_bytes=min(device.memory_bytes or base.memory_bytes, base.memory_bytes),
        memory_bandwidth=device.memory_bandwidth or base.memory_bandwidth,
        node_devices=devices,
        domain_devices=max(devices, base.domain_devices if base.domain_devices > 8 else 0),
        link_bandwidth=together or base.link_bandwidth,
        peer_bandwidth=near.bandwidth or base.peer_bandwidth,
        nic_bandwidth=injection / devices if injection else base.nic_bandwidth,
        card_bandwidth=injection / len(node.nics) if injection else base.card_bandwidth,
    )
    if packaged > 1 and package is not None and package.bandwidth:
        same = replace(same, package_devices=packaged, package_bandwidth=package.bandwidth)
    return same


def _host_platform(machine: Machine, ranks_per_node: int) -> Platform:
    """Ranks that compute on their share of a host's cores."""
    node = machine.node
    cores = (node.usable_cores or node.cores or 1) / ranks_per_node
    memory = (node.memory_bytes or 4 * 2**30) / ranks_per_node
    card = node.injection_bandwidth or _HOST_LINK
    return Platform(
        name=node.cpu or "CPU",
        family="CPU",
        peak=MappingProxyType({"fp32": cores * _CORE_FLOPS, "bf16": cores * _CORE_FLOPS}),
        memory_bytes=memory,
        memory_bandwidth=cores * _CORE_BYTES,
        units=max(1, int(cores)),
        node_devices=ranks_per_node,
        domain_devices=ranks_per_node,
        link_bandwidth=_HOST_LINK,
        peer_bandwidth=_HOST_LINK,
        nic_bandwidth=card / ranks_per_node,
        card_bandwidth=card,
        known=False,
    )


def workload_of(
    spec: JobSpec, machine: Machine, stack_name: str = DEFAULT_STACK
) -> tuple[Workload, Fitted]:
    """What a resolved job trains, on what, with the calibration that holds for it.

    Raises:
        UsageError: the model is the user's own, so that its shape is not known.
    """
    if spec.model.module is not None:
        raise UsageError(
            f"model.module {spec.model.module}: the planner knows no shape of a model of yours",
            hint="give layers, hidden, heads and vocab_size of a transformer that is like it",
        )
    assert spec.data.sequence_length is not None
    assert isinstance(spec.ranks_per_node, int), "resolve() leaves no auto"
    platform = platform_of(machine, spec.ranks_per_node)
    if machine.devices_per_node != spec.ranks_per_node and platform.family != "CPU":
        platform = platform.in_node(spec.ranks_per_node)
    software = stack(stack_name)
    fitted = calibration(platform.family, stack_name)
    measured = machine.measured
    if measured is not None and measured.stack == stack_name:
        values = apply(fitted.values, {**measured.values, "spread": max(measured.spread, 0.05)})
        fitted = Fitted(values, "measured", fitted.rows)
        platform = replace(platform, known=True)
    dispatch = spec.parallel.dispatch
    work = Workload(
        model=ModelShape.of(spec.model.transformer()),
        sequence=spec.data.sequence_length,
        global_batch=spec.train.global_batch,
        dtype=spec.train.precision,
        platform=platform,
        stack=software,
        values=fitted.values,
        stages=_stages(spec),
        dispatch=Dispatch(dispatch.kind, dispatch.chunks, dispatch.copies),
        matrix_optimizer=MatrixOptimizer(spec.train.optimizer.kind, spec.train.optimizer.block),
    )
    return work, fitted


def _stages(spec: JobSpec) -> tuple[int, ...] | None:
    """Blocks of each pipeline rank that a job deals out itself; None where it does not."""
    if not spec.parallel.stage_layers or spec.parallel.pipeline == 1:
        return None
    schedule = plan_pipeline(spec)
    assert schedule is not None
    blocks = [0] * spec.parallel.pipeline
    for stage, count in enumerate(spec.parallel.stage_layers):
        blocks[schedule.stages.routes[0][stage]] += count
    return tuple(blocks)


def strategy_of(spec: JobSpec) -> Strategy:
    """How a resolved job is cut."""
    layout, parallel = layout_of(spec), spec.parallel
    assert isinstance(spec.train.micro_batch, int), "resolve() leaves no auto"
    schedule = plan_pipeline(spec)
    return Strategy(
        layout=layout,
        micro_batch=spec.train.micro_batch,
        virtual=1 if schedule is None else schedule.chunks,
        schedule=parallel.schedule.name,
        states=STATES[parallel.sharding],
        recompute=RECOMPUTE[parallel.recompute],
        sequence_parallel=spec.parallel.sequence and layout.tp > 1,
        order=DEFAULT_ORDER,
        exchange=spec.sequence_split().inner,
        stream=parallel.stream,
    )
