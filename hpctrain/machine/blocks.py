"""Where a value comes from and how far it can be trusted.

A machine description is made of blocks. Each names its source, the date of the copy that was
read and a confidence; single fields that are less (or more) certain than their block are listed
under its ``doubts``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from hpctrain.units import format_walltime, parse_bytes, parse_walltime

Confidence = Literal["high", "medium", "low"]
"""``high``: stated by the site's or vendor's own documentation. ``medium``: public scripts used
on that machine, partner documentation. ``low``: from memory or inferred."""

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
"""A size: a number of bytes, or text such as ``64GiB``."""


def _walltime(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError(f'a walltime is text such as "12:00:00" or "2-00:00:00", not {value!r}')
    return parse_walltime(value)


Walltime = Annotated[int, BeforeValidator(_walltime), PlainSerializer(format_walltime)]
"""Seconds, written in any form that Slurm takes (``12:00:00``, ``2-00:00:00``) or ``1h30m``."""

Rate = Annotated[float, Field(gt=0)]
"""Bytes a second, one way."""


class Part(BaseModel):
    """Base of everything in a machine file: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Provenance(Part):
    """Where a value was read.

    Attributes:
        source: page, repository or file.
        as_of: date of the copy that was read, ``YYYY-MM-DD``; None where not known.
        confidence: see Confidence.
    """

    source: str = Field(min_length=1)
    as_of: str | None = Field(default=None, pattern=r"^\d{4}(-\d{2}){0,2}$")
    confidence: Confidence

    def __str__(self) -> str:
        dated = f", {self.as_of}" if self.as_of else ""
        return f"{self.source}{dated} ({self.confidence} confidence)"


class Doubt(Part):
    """Provenance of one field where it differs from its block's; what is None is the block's."""

    confidence: Confidence
    source: str | None = None
    as_of: str | None = None
    why: str | None = None


class Block(Provenance):
    """A part of a machine description that says where it comes from.

    Attributes:
        notes: sentences for people: traps, advice, what the fields cannot say.
        doubts: dotted field path inside this block -> its own provenance; covers all that lies
            below the path, and ``*`` stands for any one step (``nics.*.name``).
    """

    notes: tuple[str, ...] = ()
    doubts: dict[str, Doubt] = Field(default_factory=dict)

    def provenance(self, path: str = "") -> Provenance:
        """Provenance of a field of this block, by its dotted path, or of the block itself."""
        parts = path.split(".") if path else []
        longest = max(
            (pattern for pattern in self.doubts if _covers(pattern.split("."), parts)),
            key=lambda pattern: pattern.count("."),
            default=None,
        )
        if longest is not None:
            doubt = self.doubts[longest]
            return Provenance(
                source=doubt.source or self.source,
                as_of=doubt.as_of or (None if doubt.source else self.as_of),
                confidence=doubt.confidence,
            )
        return Provenance(source=self.source, as_of=self.as_of, confidence=self.confidence)


def _covers(pattern: list[str], path: list[str]) -> bool:
    return len(pattern) <= len(path) and all(
        want in ("*", have) for want, have in zip(pattern, path, strict=False)
    )


class When(Part):
    """For which jobs something applies: node counts, both ends included."""

    min_nodes: int = 1
    max_nodes: int | None = None

    def holds(self, nodes: int) -> bool:
        """Whether a job of ``nodes`` nodes is meant."""
        return self.min_nodes <= nodes and (self.max_nodes is None or nodes <= self.max_nodes)

    def __str__(self) -> str:
        if self.max_nodes is None:
            return "any number of nodes" if self.min_nodes <= 1 else f"{self.min_nodes}+ nodes"
        if self.max_nodes == self.min_nodes:
            return f"{self.min_nodes} node{'s' if self.min_nodes > 1 else ''}"
        return f"{self.min_nodes}-{self.max_nodes} nodes"


@dataclass(frozen=True, slots=True)
class Fact:
    """One value of a machine file with where it comes from.

    Attributes:
        path: dotted path in the file, for example ``node.device.peak_flops.bf16``.
        value: the value.
        provenance: its source, date and confidence.
    """

    path: str
    value: Any
    provenance: Provenance

    def __str__(self) -> str:
        return f"{self.path} = {self.value}: {self.provenance}"


_ABOUT = frozenset({"source", "as_of", "confidence", "notes", "doubts", "why"})


def facts(root: Part) -> Iterator[Fact]:
    """Every value below ``root`` that lies in a block, in file order; unknowns (None) left out."""
    yield from _walk(root, "", None, "", None)


def _walk(
    value: Any, path: str, block: Block | None, inside: str, own: Provenance | None
) -> Iterator[Fact]:
    """``inside`` is the path below ``block``; ``own`` is the provenance of a list entry's own."""
    if isinstance(value, Block):
        block, inside, own = value, "", None
    elif isinstance(value, Part) and block is not None:
        confidence = getattr(value, "confidence", None)
        source = getattr(value, "source", None)
        if confidence or source:
            base = own or block.provenance(inside)
            own = Provenance(
                source=source or base.source,
                as_of=None if source else base.as_of,
                confidence=confidence or base.confidence,
            )
    if isinstance(value, Part):
        entries: Any = (
            (field.alias or name, getattr(value, name))
            for name, field in type(value).model_fields.items()
            if name not in _ABOUT and name in value.model_fields_set
        )
    elif isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, tuple) and any(isinstance(item, Part) for item in value):
        entries = enumerate(value)
    else:
        if value is not None and value != () and block is not None:
            yield Fact(path, value, own or block.provenance(inside))
        return
    for name, item in entries:
        step = str(name)
        yield from _walk(
            item,
            f"{path}.{step}" if path else step,
            block,
            f"{inside}.{step}" if inside else step,
            own,
        )
