"""Every method by name, and :func:`make`, which builds one.

A new method is one generator function and one line in ``METHODS``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.schedule import automatic, classic, transforms, v_shape, waves, zero_bubble, zeropp
from hpctrain.schedule.building import require
from hpctrain.schedule.graph import InvalidScheduleError
from hpctrain.schedule.table import Schedule
from hpctrain.schedule.transfers import with_transfers


@dataclass(frozen=True, slots=True)
class Method:
    """One entry of the registry.

    Attributes:
        generator: called as ``generator(ranks, chunks, micro_batches, **options)``.
        title: what it does, in one line.
        source: the paper.
        chunks: stages a rank if none are asked for.
        bubble: idle over ideal time with F = I = W and free transfers, as published.
        memory: peak activations, in micro-batches over one p-th of the model.
    """

    generator: Callable[..., Schedule]
    title: str
    source: str
    chunks: int
    bubble: str
    memory: str


METHODS: dict[str, Method] = {
    "gpipe": Method(
        classic.gpipe,
        "all forwards, then all backwards",
        classic.GPIPE,
        1,
        "(p-1)/m",
        "m",
    ),
    "1f1b": Method(
        classic.one_f_one_b,
        "one forward, one backward",
        classic.ONE_F_ONE_B,
        1,
        "(p-1)/m",
        "min(p, m)",
    ),
    "interleaved": Method(
        classic.interleaved,
        "1F1B over v stages a rank, round robin",
        classic.INTERLEAVED,
        2,
        "(p-1)/(vm)",
        "p + (p-1)/v",
    ),
    "bfs": Method(
        classic.breadth_first,
        "breadth-first: all micro-batches through a chunk before the next",
        classic.BREADTH_FIRST,
        2,
        "(p-1)/(vm)",
        "m",
    ),
    "layered": Method(
        classic.layered,
        "layered gradient accumulation: one layer for all micro-batches, then the next",
        classic.LAYERED,
        2,
        "(p-1)/(vm)",
        "m",
    ),
    "zb-h1": Method(
        zero_bubble.zb_h1,
        "split backward, 1F1B's memory, a third of its bubble",
        zero_bubble.HAND_MADE,
        1,
        "(p-1)/(3m)",
        "min(p, m)",
    ),
    "zb-h2": Method(
        zero_bubble.zb_h2,
        "split backward, no bubble within a rank's span, twice 1F1B's memory",
        zero_bubble.HAND_MADE,
        1,
        "0 a rank; (p-1)/(3m) from first start to last end",
        "min(2p-1, m)",
    ),
    "zb-v": Method(
        zero_bubble.zb_v,
        "split backward on a V: no bubble within a rank's span, 1F1B's memory",
        zero_bubble.V_SOURCE,
        2,
        "0 a rank; (p-1)/(6m) from first start to last end",
        "min(p, m)",
    ),
    "v-half": Method(
        v_shape.v_half,
        "building blocks on a V: half of 1F1B's memory",
        v_shape.SOURCE,
        2,
        "about p/(2m)",
        "(p+2)//2",
    ),
    "v-min": Method(
        v_shape.v_min,
        "building blocks on a V: a third of 1F1B's memory",
        v_shape.SOURCE,
        2,
        "about 2p/(3m)",
        "(p+4)//3",
    ),
    "hanayo": Method(
        waves.hanayo,
        "waves of two chunks a rank, one copy of the model",
        waves.HANAYO,
        2,
        "one wave: 2(p-1)/(3m) at m = p, (p-1)/(2m) from m = 2p-1 on",
        "min(1.5p, m)",
    ),
    "bitpipe": Method(
        waves.bitpipe,
        "two V-shaped pipelines in opposite directions, two copies of the model",
        waves.BITPIPE,
        2,
        "(p-2)/(4m) to (p-2)/(3m)",
        "min(1.5p, m)",
    ),
    "zeropp": Method(
        zeropp.zeropp,
        "rounds of U micro-batches, chunk by chunk, weight gradients in the gaps",
        zeropp.SOURCE,
        2,
        "2(p-1)/(3vm)",
        "min(2U, m)",
    ),
    "auto": Method(
        automatic.automatic,
        "the shortest found for given times and a memory limit",
        automatic.SOURCE,
        2,
        "",
        "the limit",
    ),
}

TRANSFORMS: dict[str, tuple[Callable[..., Schedule], str]] = {
    "2bp": (transforms.two_stage, "every backward in two stages (2BP)"),
    "vocab": (transforms.with_vocabulary, "output layer and embedding over all ranks"),
    "offload": (transforms.with_offload, "activations parked in host memory"),
    "fsdp": (transforms.with_sharding, "sharded parameters gathered and reduced by chunk"),
}
"""Suffixes of a name, as in ``1f1b+2bp+vocab``; applied in this order."""

ALIASES = {"2bp": "1f1b+2bp"}


def names() -> tuple[str, ...]:
    """Names of all methods; each may be followed by ``+`` and a transform's name."""
    return tuple(METHODS)


def describe(name: str) -> str:
    """One line about a method, with its paper.

    Raises:
        UsageError: no such method.
    """
    base, suffixes = parse(name)
    method = METHODS[base]
    parts = [method.title, *(TRANSFORMS[suffix][1] for suffix in suffixes)]
    return f"{'; '.join(parts)} ({method.source})"


def make(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    chunks: int | None = None,
    transfers: bool = True,
    **options: Any,
) -> Schedule:
    """Build a schedule.

    Args:
        name: a method, optionally with transforms: ``zb-v``, ``1f1b+2bp``, ``bfs+fsdp``.
        ranks: pipeline ranks, p.
        micro_batches: m.
        chunks: stages a rank, v; default: the method's.
        transfers: add sends, receives and pipeline collectives; without them the simulator
            gives the same numbers in less time.
        options: of the method or of its transforms, by name.

    Raises:
        UsageError: no such method or option, or a number below 1.
        ImpossibleError: p, v and m that the method does not allow.
    """
    base, suffixes = parse(name)
    method = METHODS[base]
    if "waves" in options and base == "hanayo":
        chunks = 2 * _number(name, "waves", options.pop("waves"), whole=True)
    chunks = method.chunks if chunks is None else chunks
    for key, value in (("ranks", ranks), ("chunks", chunks), ("micro_batches", micro_batches)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"schedule {name}: {key} is a whole number >= 1, found {value!r}")
    functions = [method.generator, *(TRANSFORMS[suffix][0] for suffix in suffixes)]
    given = [_take(name, function, options) for function in functions]
    if options:
        known = [option for function in functions for option in _options(function)]
        unknown = next(iter(options))
        raise UsageError(
            f"schedule {name} has no option {unknown!r}", hint=_suggest(unknown, known)
        )
    try:
        schedule = method.generator(ranks, chunks, micro_batches, **given[0])
        for function, mine in zip(functions[1:], given[1:], strict=True):
            schedule = function(schedule, **mine)
    except InvalidScheduleError:
        raise  # a fault of a generator, not of who called it
    except ValueError as error:
        raise UsageError(f"schedule {name}: {error}") from None
    return with_transfers(schedule) if transfers else schedule


def parse(name: str) -> tuple[str, list[str]]:
    """A name's method and its transforms, in the order in which they are applied.

    Raises:
        UsageError: an unknown or repeated part.
    """
    base, *suffixes = ALIASES.get(name, name).split("+")
    if base not in METHODS:
        raise UsageError(f"no schedule {base!r}", hint=_suggest(base, METHODS))
    for suffix in suffixes:
        if suffix not in TRANSFORMS:
            raise UsageError(f"no transform {suffix!r}", hint=_suggest(suffix, TRANSFORMS))
    require(len(set(suffixes)) == len(suffixes), name, "each transform at most once")
    return base, [suffix for suffix in TRANSFORMS if suffix in suffixes]


def _suggest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    start = f"did you mean {close[0]!r}? " if close else ""
    return f"{start}known: {', '.join(known) or 'none'}"


def _options(function: Callable[..., Schedule]) -> dict[str, str]:
    """Keyword options of a generator or transform, with their types."""
    return {
        parameter.name: str(parameter.annotation)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _take(name: str, function: Callable[..., Schedule], options: dict[str, Any]) -> dict[str, Any]:
    """Move a function's own options out of ``options``, numbers checked."""
    taken: dict[str, Any] = {}
    for key, annotation in _options(function).items():
        if key in options:
            value = options.pop(key)
            if annotation.startswith(("int", "float")):
                value = _number(name, key, value, whole=annotation.startswith("int"))
            taken[key] = value
    return taken


def _number(name: str, key: str, value: Any, *, whole: bool) -> Any:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        kind = "whole number" if whole else "number"
        raise UsageError(f"schedule {name}: option {key} is a {kind}, found {value!r}")
    return value
