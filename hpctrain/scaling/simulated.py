"""Runs of an emulated machine that are too large for ranks here: simulated, and written as runs.

A simulated run has the files of a run, so that status and report read it as any other; its
hardware says that it is simulated.
"""

from __future__ import annotations

import socket
import time

from hpctrain.machine import Machine
from hpctrain.plan.simulated import SimulatedStep, simulate_step
from hpctrain.records import (
    EventRecord,
    LaunchRecord,
    StateRecord,
    StepRecord,
    append_line,
    read_json,
    write_json,
)
from hpctrain.rundir import RunDir
from hpctrain.spec.job import JobSpec

MOST_RANKS = 128
"""Ranks that are emulated by real ones; a job with more is simulated."""
MOST_DEVICES = 10_000


def is_simulated(spec: JobSpec) -> bool:
    """Whether a resolved job is simulated rather than run."""
    assert isinstance(spec.ranks_per_node, int), "resolve() leaves no auto"
    many = spec.nodes * spec.ranks_per_node > MOST_RANKS
    return spec.simulated or (spec.emulated and many)


def write_simulated(run: RunDir, spec: JobSpec, machine: Machine) -> SimulatedStep:
    """Simulate a job and write its records.

    Raises:
        UsageError: a model of the user's own.
    """
    assert isinstance(spec.ranks_per_node, int)
    ranks = spec.nodes * spec.ranks_per_node
    found = simulate_step(spec, machine)
    origin = read_json(run.provenance) or {}
    hardware = {**(origin.get("hardware") or {}), "simulated": True}
    write_json(run.provenance, origin | {"hardware": hardware})
    now = time.time()
    run.add_launch(LaunchRecord(0, "local", now, ranks, host=socket.gethostname()))
    tokens = spec.train.global_batch * (spec.data.sequence_length or 1)
    comm = {
        axis: {"calls": 0, "bytes": 0, "volume": 0.0, "seconds": seconds}
        for axis, seconds in (found.talk | {"pp": found.pipeline, "dp": found.data}).items()
        if seconds
    }
    for step in range(1, spec.train.steps + 1):
        append_line(
            run.metrics,
            StepRecord(
                step=step,
                time=now + step * found.seconds,
                loss=None,
                lr=0.0,
                grad_norm=None,
                tokens=step * tokens,
                step_seconds=found.seconds,
                tokens_per_second=tokens / found.seconds,
                memory_bytes=int(found.plan.used),
                comm=comm,
                compute_seconds=found.compute,
            ),
        )
    layout = found.plan.strategy.layout.describe()
    words = f"{ranks} devices on {spec.nodes} nodes, simulated, {layout}"
    run.add_event(EventRecord("started", now, words))
    run.write_state(StateRecord("finished", spec.train.steps, spec.train.steps, now, ranks))
    return found
