"""Pipelines in closed form: idle time and micro-batches held, equal to what the simulator finds.

For stages of equal time the simulator's makespan is ``m·(F + I + W) + bubble``; the forms here
are tested against it on a grid. Methods without a form are simulated (``simulated_bubble``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Form:
    """One schedule.

    Attributes:
        name: as in hpctrain.schedule.
        bubble: idle seconds of one stage that each further stage adds, from the seconds of
            forward, input-gradient and weight-gradient pass and the chunks a rank.
        held: micro-batches of a whole stage that rank ``i`` of ``p`` holds at its fullest, from
            (i, p, v, m).
        chunked: needs several chunks a rank.
        rounds: the number of micro-batches has to be a multiple of the ranks.
    """

    name: str
    bubble: Callable[[float, float, float, int], float]
    held: Callable[[int, int, int, int], float]
    chunked: bool = False
    rounds: bool = False


def _whole(f: float, i: float, w: float, v: int) -> float:
    return (f + i + w) / v


def _h1(f: float, i: float, w: float, v: int) -> float:
    return f + max(0.0, i - w)


def _interleaved(i: int, p: int, v: int, m: int) -> float:
    warm = (v - 1) * p + 2 * (p - i - 1) + 1
    return min(warm, v * m) / v


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        form.name: form
        for form in (
            Form("gpipe", _whole, lambda i, p, v, m: float(m)),
            Form("1f1b", _whole, lambda i, p, v, m: float(min(p - i, m))),
            Form("interleaved", _whole, _interleaved, chunked=True, rounds=True),
            Form("bfs", _whole, lambda i, p, v, m: float(m), chunked=True),
            Form("zb-h1", _h1, lambda i, p, v, m: float(min(p, m))),
        )
    }
)
"""Schedules with a closed form."""

_NAMES = {"interleaved-1f1b": "interleaved", "": "1f1b", "1f1b-interleaved": "interleaved"}


def form_of(schedule: str, virtual: int) -> Form:
    """The form of a schedule by any of its names; the nearest in kind where it has none."""
    name = _NAMES.get(schedule, schedule).split("+")[0]
    if virtual > 1 and name == "1f1b":
        name = "interleaved"
    return FORMS.get(name) or FORMS["interleaved" if virtual > 1 else "1f1b"]


def has_form(schedule: str) -> bool:
    """Whether the closed form of that schedule is its own."""
    return _NAMES.get(schedule, schedule) in FORMS


@lru_cache(maxsize=256)
def simulated(
    schedule: str,
    ranks: int,
    chunks: int,
    micro_batches: int,
    ratios: tuple[float, float],
    rows: float = 0.0,
) -> tuple[float, tuple[float, ...]]:
    """Bubble in units of the forward pass, and micro-batches each rank holds, by simulation.

    Args:
        schedule: name in hpctrain.schedule.
        ranks, chunks, micro_batches: p, v, m.
        ratios: seconds of input- and weight-gradient pass over those of the forward pass.
        rows: those of a rank's rows of the output layer, all passes, over the same; for schedules
            that spread the vocabulary.
    """
    from hpctrain.schedule import Costs, make, simulate

    table = make(schedule, ranks=ranks, micro_batches=micro_batches, chunks=chunks, transfers=False)
    early = 2.0 if table.vocabulary == 1 else 1.0  # thirds of them before the ranks' sums are known
    costs = Costs(
        forward=1.0,
        input_grad=ratios[0],
        weight_grad=ratios[1],
        vocabulary_forward=early / 3.0 * rows,
        vocabulary_weight_grad=(3.0 - early) / 3.0 * rows,
    )
    timeline = simulate(table, costs)
    ideal = micro_batches * (1.0 + ratios[0] + ratios[1] + (rows if table.vocabulary else 0.0))
    return timeline.makespan - ideal, timeline.peak_activations


@lru_cache(maxsize=256)
def ends_apart(schedule: str, ranks: int, chunks: int, micro_batches: int) -> bool:
    """Whether embedding and output layer lie whole on two ranks; arguments as ``simulated``."""
    if has_form(schedule):
        return True
    from hpctrain.schedule import make

    table = make(schedule, ranks=ranks, micro_batches=micro_batches, chunks=chunks, transfers=False)
    route = table.stages.routes[0]
    return route[0] != route[-1] and not table.vocabulary


def spreads_vocabulary(schedule: str) -> bool:
    """Whether embedding and output layer are cut over all ranks of a pipeline."""
    return "vocab" in schedule.split("+")[1:]
