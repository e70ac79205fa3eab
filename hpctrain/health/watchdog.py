"""A thread in each rank that notices when nothing goes on, has every rank say where it stands,
and ends the job.

Ranks wait for each other, so a rank that hangs stops them all within a step, and each notices by
its own clock. What a rank can say goes into a file of its own; the lowest rank that can still
speak puts the files together. Nothing here uses MPI or process groups: those may be what hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hpctrain.errors import Exit
from hpctrain.health.heartbeat import Heartbeat, read_heartbeats
from hpctrain.health.verdict import Arrivals, Position, Report, judge
from hpctrain.records import FailureRecord, read_json, write_json
from hpctrain.rundir import RunDir

if TYPE_CHECKING:
    from types import FrameType

HANG = "HangError"
_POLL_SECONDS = 0.5
_GATHER_SECONDS = 5.0
"""Time for the other ranks to notice, too."""
_LONG = 15
"""How much longer the first step and checkpoints may take than other steps."""
_SLOW_STEPS = 5
_PATIENT = frozenset({"start", "checkpoint", "preflight", "end"})


class Watchdog:
    """Watches over one rank.

    Args:
        run: run directory.
        attempt: number of the incarnation.
        hosts: name of each rank's node.
        heartbeat: of this rank.
        hang_after: seconds without a mark after which the rank is taken for hung.
        every: seconds between two copies of the node's heartbeats.
        arrivals: which collectives this rank has entered, by group.
        abort: ends all ranks of the job; does not return.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        hosts: Sequence[str],
        heartbeat: Heartbeat,
        *,
        hang_after: float,
        every: float,
        arrivals: Callable[[], dict[str, Arrivals]],
        abort: Callable[[Exit], NoReturn],
    ) -> None:
        self.run, self.attempt, self.hosts = run, attempt, hosts
        self.heartbeat, self.hang_after, self.every = heartbeat, hang_after, every
        self._arrivals, self._abort = arrivals, abort
        self._slowest = 0.0
        self._steps = 0
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._published = 0.0
        self._thread = threading.Thread(target=self._watch, name="hpctrain-watchdog", daemon=True)
        self._thread.start()

    def step_took(self, seconds: float) -> None:
        """A step has ended; slow steps make the watchdog more patient."""
        self._steps += 1
        # The first one warms up: it counts until there is another.
        self._slowest = seconds if self._steps <= 2 else max(self._slowest, seconds)

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join(2.0)

    @property
    def limit(self) -> float:
        """Seconds that the rank may stand where it stands now."""
        if self._steps == 0 or self.heartbeat.phase in _PATIENT:
            return _LONG * self.hang_after
        return max(self.hang_after, _SLOW_STEPS * self._slowest)

    def _watch(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            if self.heartbeat.leads and time.monotonic() - self._published >= self.every:
                self._published = time.monotonic()
                with contextlib.suppress(OSError):
                    self.heartbeat.publish()
            if not self.hang_after:
                continue
            # Code that never gives the interpreter back stops this thread as well; the timer of
            # faulthandler needs no interpreter and writes into the rank's log.
            faulthandler.dump_traceback_later(self.limit + 2 * _POLL_SECONDS, file=sys.stderr)
            if time.monotonic() - self.heartbeat.since > self.limit:
                self._hung()

    # ---- a hang ----------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        return self.run.health / f"hang-{self.attempt}"

    def _hung(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(self._file(self.heartbeat.rank), self._own_report().to_dict())
        noticed = time.monotonic()
        while time.monotonic() - noticed < _GATHER_SECONDS and not self._all_there():
            time.sleep(_POLL_SECONDS)
        if self._speaks():
            with contextlib.suppress(OSError):
                self._conclude()
        else:
            time.sleep(2 * _POLL_SECONDS)
        print(f"watchdog: ended, see {self._folder}.txt", file=sys.stderr, flush=True)  # noqa: T201
        self._abort(Exit.RANK_FAILED)

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank{rank:05d}.json"

    def _all_there(self) -> bool:
        return len(list(self._folder.glob("rank*.json"))) >= len(self.hosts)

    def _speaks(self) -> bool:
        """Whether this is the lowest rank that has written a report."""
        first = min((path.name for path in self._folder.glob("rank*.json")), default="")
        return first == self._file(self.heartbeat.rank).name

    def _own_report(self) -> Report:
        beat = self.heartbeat
        frame = sys._current_frames().get(self._main or 0)
        return Report(
            rank=beat.rank,
            host=self.hosts[beat.rank],
            position=Position(beat.step, beat.phase, _place(frame)),
            seconds=round(time.monotonic() - beat.since, 1),
            arrivals=self._arrivals(),
            stack="".join(traceback.format_stack(frame)) if frame is not None else "",
            threads=_all_threads(),
            neighbours={one.rank: _process_state(one.pid) for one in beat.node_beats()},
        )

    def _conclude(self) -> None:
        """Put together what all ranks have said, and write down who holds up the others."""
        reports = []
        for path in sorted(self._folder.glob("rank*.json")):
            data = read_json(path)
            if data is not None:
                reports.append(Report.from_dict(data))
        beats = read_heartbeats(self.run)
        found = judge(reports, len(self.hosts), beats, self.attempt, self.hosts)
        self._folder.with_suffix(".txt").write_text(found.text, encoding="utf-8")
        print(found.text, file=sys.stderr, flush=True)  # noqa: T201
        record = FailureRecord(
            rank=found.rank,
            host=found.host,
            time=time.time(),
            error=HANG,
            message=f"{found.summary}\nreport: {self._folder}.txt",
            traceback=found.stack,
            attempt=self.attempt,
            step=found.step,
        )
        write_json(self.run.failure(self.attempt, found.rank), record.to_dict())


def _place(frame: FrameType | None) -> str:
    """The innermost place in code that is not of a library: ``loss.py:12 in my_loss``."""
    if frame is None:
        return ""
    stack = traceback.extract_stack(frame)
    own = [
        one
        for one in stack
        if "site-packages" not in one.filename and "/lib/python3" not in one.filename
    ]
    last = (own or list(stack))[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"


def _all_threads() -> str:
    """Python stacks of all threads, by faulthandler."""
    with tempfile.TemporaryFile() as stream:
        faulthandler.dump_traceback(file=stream, all_threads=True)
        stream.seek(0)
        return stream.read().decode("utf-8", "replace")


def _process_state(pid: int) -> str:
    """State of a process of this node as the kernel has it: ``T (stopped)``, ``gone`` …"""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("State:"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "gone"


def abort_all(comm: Any) -> Callable[[Exit], NoReturn]:
    """End this rank for certain, and the others by MPI where that still works."""

    def abort(code: Exit) -> NoReturn:
        # Abort may wait for a lock that the hung thread holds.
        threading.Thread(target=lambda: comm.Abort(int(code)), daemon=True).start()
        time.sleep(1.0)
        os._exit(int(code))

    return abort
