"""What the health checks of a run found, as read by the login node and the batch script."""

from __future__ import annotations

from hpctrain.records import read_json
from hpctrain.rundir import RunDir


def bad_nodes(run: RunDir) -> tuple[str, ...]:
    """Nodes that a run is to do without, by its newest preflight."""
    found = read_json(run.health / "preflight.json") or {}
    return tuple(sorted({str(name) for name in found.get("bad_nodes", ())}))
