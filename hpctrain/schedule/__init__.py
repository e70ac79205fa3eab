"""Pipeline schedules as data: one table of actions a rank.

``make`` builds a schedule by name, ``validate`` proves that it can be run, ``simulate`` says how
long it takes and what it holds, ``draw_text``, ``draw_svg`` and ``draw_trace`` show it. An
executor walks ``schedule.actions[rank]`` (see :mod:`hpctrain.schedule.actions`).

>>> from hpctrain.schedule import make, simulate
>>> timeline = simulate(make("zb-v", ranks=4, micro_batches=8))
>>> round(timeline.bubble_fraction, 4), max(timeline.peak_activations)
(0.0588, 4.0)
"""

from __future__ import annotations

from hpctrain.schedule.actions import Action, ActionKind
from hpctrain.schedule.balance import Memory, share_layers, split_layers, stage_sums
from hpctrain.schedule.costs import UNIT, Costs
from hpctrain.schedule.draw import draw_json, draw_text, draw_trace
from hpctrain.schedule.graph import InvalidScheduleError
from hpctrain.schedule.registry import METHODS, TRANSFORMS, Method, describe, make, names
from hpctrain.schedule.simulate import Span, Timeline, simulate
from hpctrain.schedule.stages import StageMap, bidirectional, loop, wave
from hpctrain.schedule.svg import draw_svg
from hpctrain.schedule.table import Claim, Schedule
from hpctrain.schedule.transfers import with_transfers, without_transfers
from hpctrain.schedule.transforms import (
    two_stage,
    with_offload,
    with_sharding,
    with_vocabulary,
)
from hpctrain.schedule.validate import find_problems, validate

__all__ = [
    "METHODS",
    "TRANSFORMS",
    "UNIT",
    "Action",
    "ActionKind",
    "Claim",
    "Costs",
    "InvalidScheduleError",
    "Memory",
    "Method",
    "Schedule",
    "Span",
    "StageMap",
    "Timeline",
    "bidirectional",
    "describe",
    "draw_json",
    "draw_svg",
    "draw_text",
    "draw_trace",
    "find_problems",
    "loop",
    "make",
    "names",
    "share_layers",
    "simulate",
    "split_layers",
    "stage_sums",
    "two_stage",
    "validate",
    "wave",
    "with_offload",
    "with_sharding",
    "with_transfers",
    "with_vocabulary",
    "without_transfers",
]
