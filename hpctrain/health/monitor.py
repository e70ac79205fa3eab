"""All that watches over a rank while it trains, as the loop sees it: mark, step, close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.health.dispersion import look
from hpctrain.health.heartbeat import Heartbeat
from hpctrain.health.preflight import Preflight, node_links, preflight
from hpctrain.health.straggler import Timing, comm_rate, diagnose, slow_links
from hpctrain.health.verdict import Arrivals
from hpctrain.health.watchdog import Watchdog, abort_all
from hpctrain.records import append_line, write_json

if TYPE_CHECKING:
    from hpctrain.parallel.batch import MicroBatch
    from hpctrain.rundir import RunDir
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.job import JobSpec

Tell = Callable[..., None]
"""(kind, message, **data): writes an event on rank 0 and does nothing elsewhere."""


@dataclass
class _Window:
    """Sums over the steps since the ranks were last compared."""

    steps: int = 0
    seconds: float = 0.0
    data: float = 0.0
    comm: float = 0.0
    volume: float = 0.0


class Monitor:
    """Heartbeat, watchdog, stragglers and dispersion of one rank.

    Args:
        run: run directory.
        spec: resolved job.
        context: of this rank.
        attempt: number of the incarnation.
        tell: writes events.
    """

    def __init__(
        self,
        run: RunDir,
        spec: JobSpec,
        context: RankContext,
        attempt: int,
        tell: Tell,
    ) -> None:
        self.run, self.spec, self.context, self.tell = run, spec, context, tell
        if context.is_first:
            run.health.mkdir(parents=True, exist_ok=True)
        places = context.comm.allgather((context.node, context.host))
        mates = [rank for rank, (node, _) in enumerate(places) if node == context.node]
        self.heartbeat = Heartbeat(run, attempt, context.rank, context.node, mates)
        health = spec.health
        self.watchdog = Watchdog(
            run,
            attempt,
            [host for _, host in places],
            self.heartbeat,
            hang_after=health.hang_after if context.world_size > 1 else 0.0,
            every=health.heartbeat,
            arrivals=self._arrivals,
            abort=abort_all(context.comm),
        )
        self._window = _Window()
        self._best_rate: float | None = None
        self._apart: frozenset[int] = frozenset()

    def mark(self, phase: str, step: int | None = None) -> None:
        """This rank is at ``phase`` from now on; see Heartbeat.mark."""
        self.heartbeat.mark(phase, step)

    def close(self) -> None:
        self.mark("end")
        self.watchdog.close()
        self.heartbeat.close()

    def _arrivals(self) -> dict[str, Arrivals]:
        entered = self.context.communicators.counter.entered()
        return {name: Arrivals(*row) for name, row in entered.items()}

    # ---- before the first step -------------------------------------------------------------

    def preflight(self, paths: Sequence[Path], needed_bytes: int) -> Preflight | None:
        """Measure the nodes where the job wants it; collective, the same on every rank."""
        wanted = self.spec.health.preflight
        here = self.spec.machine == "local" or self.spec.emulated
        if wanted == "false" or (wanted == "auto" and here):
            return None
        self.mark("preflight")
        found = preflight(
            self.context,
            paths,
            needed_bytes=needed_bytes,
            bad_below=self.spec.health.bad_below,
        )
        if self.context.is_first:
            write_json(self.run.health / "preflight.json", found.to_dict())
        slowest = min(found.nodes, key=lambda node: node.flops)
        self.tell(
            "preflight",
            f"{len(found.nodes)} node{'s' * (len(found.nodes) > 1)} in {found.seconds:.1f} s, "
            f"slowest {slowest.name} with {slowest.flops / 1e9:.3g} GFLOP/s a device"
            + (f"; bad: {', '.join(found.bad_nodes)}" if found.bad_nodes else ""),
            bad_nodes=list(found.bad_nodes),
            seconds=found.seconds,
        )
        for finding in found.findings:
            self.tell("warning", f"preflight: {finding}")
        return found

    # ---- after each step -------------------------------------------------------------------

    def step(
        self,
        seconds: float,
        data_seconds: float,
        comm: dict[str, dict[str, float]] | None,
        real_seconds: float,
    ) -> None:
        """A step has ended; collective where it is time to compare the ranks.

        Args:
            seconds: of the step on this rank.
            data_seconds: of that, waiting for data.
            comm: what the rank has communicated since it last said so, by axis; None where it
                does not say so after this step.
            real_seconds: that have passed, on an emulated machine not those of the step.
        """
        self.watchdog.step_took(real_seconds)
        every = self.spec.health.stragglers
        if not every or self.context.world_size == 1:
            return
        window = self._window
        window.steps += 1
        window.seconds += seconds
        window.data += data_seconds
        if comm is None:
            return
        rows = [row for axis, row in comm.items() if axis != "control"]
        window.comm += sum(row["seconds"] for row in rows)
        window.volume += sum(row["volume"] for row in rows)
        if window.steps >= every:
            self.mark("health")
            self._compare(window)
            self._window = _Window()

    def _compare(self, window: _Window) -> None:
        context, steps = self.context, window.steps
        comm = min(window.comm, window.seconds - window.data)
        mine = Timing(
            rank=context.rank,
            host=context.host,
            work=(window.seconds - window.data - comm) / steps,
            data=window.data / steps,
            comm=comm / steps,
            volume=window.volume / steps,
        )
        timings = context.comm.allgather(mine)
        findings = diagnose(timings, self._best_rate)
        rate = comm_rate(timings)
        if rate is not None:
            self._best_rate = max(rate, self._best_rate or 0.0)
        for one in findings:
            message = one.message
            if one.kind == "link":
                message += self._probe_links()
            self.tell("straggler", message, ranks=list(one.ranks), slow=one.kind)

    def _probe_links(self) -> str:
        """Measure the links between nodes, and say which of them is slow; collective."""
        context = self.context
        leaders = context.comm.Split(0 if context.local_rank == 0 else 1, context.rank)
        pairs: list[tuple[str, str, float]] = []
        if context.local_rank == 0 and leaders.size > 1:
            pairs = node_links(leaders, leaders.allgather(context.host))
        leaders.Free()
        every = [pair for listed in context.comm.allgather(pairs) for pair in listed]
        slow = slow_links(every, self.spec.health.bad_below)
        if slow:
            return f"; it is that of {', '.join(slow)}"
        return "; measured alone all nodes are alike" if every else ""

    # ---- consistency -----------------------------------------------------------------------

    def looks_at(self, step: int) -> bool:
        """Whether the ranks' gradients are compared in a step."""
        every = self.spec.health.dispersion
        return bool(every) and step % every == 0 and self.context.size("dp") > 1

    def compare_gradients(self, stepper: Any, step: int, micro: MicroBatch) -> None:
        """See :mod:`hpctrain.health.dispersion`; collective."""
        self.mark("health", step)
        group = self.context.communicators.along("dp_replicate", "dp_shard").group
        found = look(stepper, self.context, step, micro, group)
        if self.context.is_first:
            append_line(self.run.health / "dispersion.jsonl", found)
        for rank, why in found.outliers.items():
            if rank in self._apart:  # once, a healthy rank may by chance
                self.tell(
                    "inconsistent",
                    f"step {step}: data-parallel rank {rank} stands out, as in the look before: "
                    f"{why}",
                    rank=rank,
                    step=step,
                )
        self._apart = frozenset(found.outliers)
