"""Energy of a node, where its files offer it.

HPE Cray nodes count the whole node, accelerators included, in joules
(``/sys/cray/pm_counters/energy``); Linux counts processor packages in microjoules that wrap around
(``/sys/class/powercap/intel-rapl:N``, readable by root on most systems).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys")
_CRAY = "cray/pm_counters/energy"
_PACKAGES = "class/powercap/intel-rapl:?"


@dataclass(frozen=True, slots=True)
class _Reading:
    joules: float
    wraps_at: float


class EnergyMeter:
    """Counts from when it is made.

    Args:
        root: of the files; another one in tests.

    Attributes:
        source: ``cray pm_counters``, ``rapl``, or empty where the node offers nothing.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._start = self._read()
        cray = (root / _CRAY).is_file()
        self.source = "" if not self._start else "cray pm_counters" if cray else "rapl"

    def joules(self) -> float | None:
        """Since it was made; None where the node offers nothing. A counter may wrap around once."""
        now = self._read()
        if not self._start or now.keys() != self._start.keys():
            return None
        total = 0.0
        for name, reading in now.items():
            used = reading.joules - self._start[name].joules
            total += used if used >= 0 else used + reading.wraps_at
        return total

    def _read(self) -> dict[str, _Reading]:
        try:
            text = (self._root / _CRAY).read_text()
            return {"node": _Reading(float(text.split()[0]), 0.0)}
        except (OSError, ValueError, IndexError):
            pass
        found = {}
        for folder in sorted(self._root.glob(_PACKAGES)):
            try:
                used = int((folder / "energy_uj").read_text())
                most = int((folder / "max_energy_range_uj").read_text())
            except (OSError, ValueError):
                return {}
            found[folder.name] = _Reading(used * 1e-6, most * 1e-6)
        return found
