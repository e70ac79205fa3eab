"""What was measured on a node, for the planner."""

from __future__ import annotations

from pydantic import Field

from hpctrain.machine.blocks import Block


class Measured(Block):
    """Numbers that `hpctrain calibrate` found on a node.

    Attributes:
        device: what they were measured on, as the driver names it.
        stack: software that they hold for, by its name in hpctrain.plan.software.
        ranks_per_node: ranks that a node ran while they were taken.
        values: planner numbers by name (hpctrain.plan.software.Calibration): shares of the rates
            that this file states, and seconds.
        spread: standard deviation of log(measured / predicted) over the measurements.
        write_bandwidth: bytes/s of one process into the checkpoint area.
    """

    device: str
    stack: str
    ranks_per_node: int = Field(default=1, ge=1)
    values: dict[str, float] = Field(default_factory=dict)
    spread: float = Field(default=0.10, ge=0)
    write_bandwidth: float | None = Field(default=None, gt=0)
