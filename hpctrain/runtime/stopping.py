"""When to stop early: signals, the stop file, the deadline; agreed by all ranks.

A handler only notes the signal: it may arrive on one rank, on some, or between two steps of
different ranks. At each step boundary the ranks take the largest reason of all; from then on
everyone knows, at the same step.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

REASONS = (
    "",
    "stop file: someone asked with hpctrain cancel or Ctrl-C",
    "deadline: the walltime ends within the margin",
    "signal SIGUSR2",
    "signal SIGUSR1: the scheduler announces the end of the walltime",
    "signal SIGTERM: cancelled, preempted or requeued by the scheduler",
)
_STOP_FILE, _DEADLINE, _USR2, _USR1, _TERM = range(1, 6)
_SIGNALS = {signal.SIGUSR2: _USR2, signal.SIGUSR1: _USR1, signal.SIGTERM: _TERM}
_POLL_SECONDS = 1.0


@dataclass
class StopWatch:
    """This rank's reasons to stop.

    Attributes:
        stop_file: looked for about once a second, by the rank that is given it.
        deadline: seconds since the epoch.
    """

    stop_file: Path | None = None
    deadline: float | None = None
    _noted: int = 0
    _polled: float = field(default=-1e9)

    def install(self) -> None:
        """Handle SIGUSR1, SIGUSR2 and SIGTERM in this process from now on."""
        for number in _SIGNALS:
            signal.signal(number, self._note)
        # A terminal's Ctrl-C reaches every process; the launcher decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._noted = max(self._noted, _SIGNALS[signal.Signals(number)])

    def reason(self) -> int:
        """This rank's reason as an index of REASONS; 0 is none."""
        found = self._noted
        if self.deadline is not None and time.time() >= self.deadline:
            found = max(found, _DEADLINE)
        if self.stop_file is not None and time.monotonic() - self._polled >= _POLL_SECONDS:
            self._polled = time.monotonic()
            if self.stop_file.exists():
                self._noted = found = max(found, _STOP_FILE)
        return found
