"""Types of job-file fields: text kept as written, counts, sizes, walltimes, numbers.

Each reads what people write, says what would be right, and has its JSON Schema.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from hpctrain.spec.yaml_tree import Scalar, plain
from hpctrain.units import format_walltime, parse_bytes, parse_count, parse_walltime


def show(value: Any) -> str:
    """A found value as it should stand in an error message."""
    if isinstance(value, Scalar):
        return value.raw or "nothing"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return repr(value)


class Section(BaseModel):
    """Base of every section: unknown keys refused, immutable, plain values inside."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    scalar_key: ClassVar[str | None] = None
    """The key that is meant where a bare value stands in place of a mapping."""

    @model_validator(mode="before")
    @classmethod
    def _mapping(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, cls | dict):
            return value
        if isinstance(value, Scalar) and value.value is None:
            return {}  # ``slurm:`` with nothing below it
        if cls.scalar_key is not None and not isinstance(value, list):
            return {cls.scalar_key: value}
        raise ValueError(f"found {show(value)}; a mapping of keys belongs here")


def as_text(value: Any) -> Any:
    if isinstance(value, Scalar):
        value = value.raw if value.value is not None or value.raw else None
    if not isinstance(value, str):
        raise ValueError(f"found {show(value)}; text belongs here")
    if "\x00" in value:
        raise ValueError("a NUL byte cannot be part of text here")
    return value


def as_line(value: str) -> str:
    if "\n" in value or "\r" in value:
        raise ValueError("line breaks cannot be part of this text")
    return value


def _integer(value: Any) -> int:
    found = plain(value)
    if isinstance(found, bool) or found is None or isinstance(found, dict | list):
        raise ValueError(f"found {show(value)}; a whole number belongs here")
    if isinstance(found, int):
        return found
    return parse_count(found)


def _number(value: Any) -> float:
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"found {show(value)}; a number belongs here")
    number = _finite(found)
    if number is None:
        raise ValueError(f"found {show(value)}; a finite number belongs here")
    return number


def _finite(number: int | float) -> float | None:
    """The number as a float, None where that is infinite, not a number, or too large."""
    try:
        found = float(number)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _boolean(value: Any) -> bool:
    found = plain(value)
    if not isinstance(found, bool):
        raise ValueError(f"found {show(value)}; write true or false")
    return found


def _size(value: Any) -> int:
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        raise ValueError(f"found {show(value)}; a size such as 64MiB belongs here")
    return parse_bytes(found)


def _walltime(value: Any) -> int:
    raw = value.raw if isinstance(value, Scalar) else value
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise ValueError(f"found {show(value)}; a walltime such as 2h or 0-02:00:00 belongs here")
    return parse_walltime(raw)


def _seconds(value: Any) -> float:
    found = plain(value)
    if isinstance(found, str):
        factor = {"ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600}
        digits = found.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = found[len(digits) :].strip()
        try:
            found = float(digits) * factor[unit]
        except (ValueError, KeyError):
            found = None
    number = None
    if isinstance(found, int | float) and not isinstance(found, bool):
        number = _finite(found)
    if number is None or number < 0:
        raise ValueError(f"found {show(value)}; write seconds, or 90s, 3m, 1h")
    return number


def _auto(value: Any) -> Any:
    return "auto" if value == "auto" else _integer(value)


def _at_least_one(value: Any) -> Any:
    if value != "auto" and value < 1:
        raise ValueError(f"found {value}; at least 1 or auto belongs here")
    return value


def _or_nothing(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same reader, which also takes null for "not given"."""

    def read_optional(value: Any) -> Any:
        return None if plain(value) is None else read(value)

    return read_optional


def _positive(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ValueError(f"found {value}; at least 1 belongs here")
    return value


_COUNT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "string"}],
    "examples": [1000, "1e9", "2.5M"],
}

Text = Annotated[str, BeforeValidator(as_text)]
"""Text exactly as it was written; numbers and booleans keep their spelling."""
Line = Annotated[str, BeforeValidator(as_text), AfterValidator(as_line)]
"""Text on one line."""
Count = Annotated[int, BeforeValidator(_integer), Field(ge=1), WithJsonSchema(_COUNT_SCHEMA)]
"""A whole number of at least one: 1000, 1e9, 2.5M."""
CountOrZero = Annotated[int, BeforeValidator(_integer), Field(ge=0), WithJsonSchema(_COUNT_SCHEMA)]
Number = Annotated[float, BeforeValidator(_number), WithJsonSchema({"type": "number"})]
Boolean = Annotated[bool, BeforeValidator(_boolean), WithJsonSchema({"type": "boolean"})]
Size = Annotated[
    int,
    BeforeValidator(_size),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}], "examples": ["64MiB"]}),
]
"""Bytes."""
Walltime = Annotated[
    int,
    BeforeValidator(_walltime),
    PlainSerializer(format_walltime, return_type=str),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "integer"}], "examples": ["2h", "1-12:00:00"]}
    ),
]
"""Seconds; written in Slurm's forms or as 1h30m."""
Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}], "examples": ["90s"]}),
]
AutoCount = Annotated[
    int | Literal["auto"],
    BeforeValidator(_auto),
    AfterValidator(_at_least_one),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
]
OptionalText = Annotated[str | None, BeforeValidator(_or_nothing(as_text))]
OptionalLine = Annotated[
    str | None,
    BeforeValidator(_or_nothing(as_text)),
    AfterValidator(lambda value: value if value is None else as_line(value)),
]
OptionalCount = Annotated[
    int | None,
    BeforeValidator(_or_nothing(_integer)),
    AfterValidator(_positive),
    WithJsonSchema({"anyOf": [*_COUNT_SCHEMA["anyOf"], {"type": "null"}]}),
]
OptionalAutoCount = Annotated[
    int | Literal["auto"] | None,
    BeforeValidator(_or_nothing(_auto)),
    AfterValidator(lambda value: value if value is None else _at_least_one(value)),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}, {"type": "null"}]}
    ),
]
OptionalNumber = Annotated[float | None, BeforeValidator(_or_nothing(_number))]
OptionalSize = Annotated[
    int | None,
    BeforeValidator(_or_nothing(_size)),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}),
]
OptionalWalltime = Annotated[
    int | None,
    BeforeValidator(_or_nothing(_walltime)),
    PlainSerializer(lambda value: None if value is None else format_walltime(value)),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}),
]
Plain = BeforeValidator(plain)
"""Marks a field of fixed choices: ``Annotated[Literal["a", "b"], Plain]``."""
Arguments = Annotated[dict[str, Any], BeforeValidator(plain)]
"""Free arguments of a user's own function."""


_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _entry_point(value: str | None) -> str | None:
    if value is not None and not _ENTRY.fullmatch(value):
        raise ValueError(f"found {value!r}; write package.module:function")
    return value


EntryPoint = Annotated[OptionalText, AfterValidator(_entry_point)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
