"""Every key of the job file as data for people: type in words, unit, default, meaning.

Derived from the JobSpec models; ``explain``, ``init``, ``schema --markdown`` and
docs/job-file.md are written from it.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from hpctrain.errors import UsageError
from hpctrain.spec import fields
from hpctrain.spec.job import JobSpec
from hpctrain.spec.life import Nodes
from hpctrain.units import format_bytes, format_walltime

# The first piece of metadata of each annotated type is its reader, which tells the types apart.
_READERS: dict[Any, tuple[str, str]] = {
    typing.get_args(alias)[1]: (words, unit)
    for alias, words, unit in (
        (fields.Text, "text", ""),
        (fields.OptionalText, "text", ""),
        (fields.OptionalLine, "text on one line", ""),
        (fields.Count, "whole number (1000, 1e9, 2.5M)", ""),
        (fields.OptionalCount, "whole number (1000, 1e9, 2.5M), at least 1", ""),
        (fields.AutoCount, "whole number, at least 1, or auto", ""),
        (fields.OptionalAutoCount, "whole number, at least 1, or auto", ""),
        (fields.Number, "number", ""),
        (fields.OptionalNumber, "number", ""),
        (fields.Boolean, "true or false", ""),
        (fields.Size, "size (4096, 64MiB, 1.5GB)", "bytes"),
        (fields.OptionalSize, "size (4096, 64MiB, 1.5GB)", "bytes"),
        (fields.Walltime, "walltime (2h, 1h30m, 1-12:00:00)", "seconds"),
        (fields.OptionalWalltime, "walltime (2h, 1h30m, 1-12:00:00)", "seconds"),
        (fields.Seconds, "seconds, or 90s, 3m, 1h", "seconds"),
    )
}

UNITS = {
    "nodes": "nodes",
    "ranks_per_node": "ranks",
    "model.layers": "blocks",
    "model.hidden": "elements",
    "model.heads": "heads",
    "model.kv_heads": "heads",
    "model.ffn_hidden": "elements",
    "model.vocab_size": "tokens",
    "model.max_positions": "tokens",
    "model.moe.experts": "experts",
    "model.moe.top_k": "experts",
    "model.moe.hidden": "elements",
    "model.moe.shared": "experts",
    "model.moe.dense_layers": "blocks",
    "model.moe.groups": "groups",
    "model.moe.top_groups": "groups",
    "parallel.dispatch.chunks": "parts",
    "parallel.dispatch.copies": "experts",
    "parallel.chunks": "stages",
    "parallel.stream": "tokens",
    "parallel.stage_layers": "blocks",
    "parallel.prefetch": "blocks",
    "data.sequence_length": "tokens",
    "data.shuffle_block": "samples",
    "train.steps": "steps",
    "train.global_batch": "samples",
    "train.micro_batch": "samples",
    "train.schedule.warmup_steps": "steps",
    "train.schedule.decay_steps": "steps",
    "train.optimizer.block": "elements",
    "train.optimizer.interval": "steps",
    "train.optimizer.iterations": "iterations",
    "train.log_every": "steps",
    "checkpoint.every": "steps",
    "checkpoint.keep": "checkpoints",
    "checkpoint.buffers": "buffers",
    "checkpoint.memory.every": "steps",
    "checkpoint.node.every": "steps",
    "checkpoint.node.keep": "checkpoints",
    "checkpoint.partner.every": "steps",
    "checkpoint.partner.keep": "checkpoints",
    "checkpoint.parity.every": "steps",
    "checkpoint.parity.keep": "checkpoints",
    "checkpoint.parity.nodes": "nodes",
    "slurm.cpus_per_task": "cores",
    "slurm.max_restarts": "restarts",
    "slurm.max_node_hours": "node-hours",
    "health.stragglers": "steps",
    "health.dispersion": "steps",
}
"""What a count counts; sizes and times have their unit from their type, and all counts of
``parallel`` are ranks."""

_BOUNDS = ((Ge, "ge", "at least"), (Gt, "gt", "more than"), (Le, "le", "at most"),
           (Lt, "lt", "less than"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the job file.

    Attributes:
        key: dotted, for example ``train.lr``.
        type: what may stand there, in words.
        unit: of a number; empty where it has none.
        required: whether a job must give it.
        default: as it would be written, ``not given``, or empty where ``required``.
        derived: the default is worked out from what ``default`` names.
        meaning: its description.
        section: whether it holds further keys.
        shorthand: of a section, the key that a bare value in its place means.
    """

    key: str
    type: str
    unit: str
    required: bool
    default: str
    derived: bool
    meaning: str
    section: bool = False
    shorthand: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def all_keys(section: Any = JobSpec, prefix: str = "") -> Iterator[Key]:
    """All keys in the order of the file, a section before what it holds."""
    hints = typing.get_type_hints(section, include_extras=True)
    for name, info in section.model_fields.items():
        key = f"{prefix}{name}"
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, fields.Section):
            yield Key(
                key,
                "section",
                "",
                info.is_required(),
                "",
                False,
                info.description or "",
                True,
                f"{key}.{inner.scalar_key}" if inner.scalar_key else "",
            )
            yield from all_keys(inner, f"{key}.")
        else:
            words, unit = _type(hints[name], info)
            meaning, derived = _meaning(info.description or "")
            default = "" if info.is_required() else derived or _default(info)
            if not unit and "whole number" in words:
                unit = UNITS.get(key, "ranks" if key.startswith("parallel.") else "")
            yield Key(key, words, unit, info.is_required(), default, bool(derived), meaning)


def find_key(name: str) -> Key:
    """The key of that name.

    Raises:
        UsageError: there is none; names the nearest.
    """
    known = {key.key: key for key in all_keys()}
    if name in known:
        return known[name]
    # Values below a free-form mapping belong to it: env.NAME, model.args.width.
    parent = name.rpartition(".")[0]
    while parent:
        if parent in known and not known[parent].section:
            return known[parent]
        parent = parent.rpartition(".")[0]
    close = _similar(name, known)
    hint = (
        f"did you mean {' or '.join(close)}?" if close else "all keys: hpctrain schema --markdown"
    )
    raise UsageError(f"no key {name!r} in a job file", hint=hint)


def _similar(name: str, known: dict[str, Key]) -> list[str]:
    """Up to three keys that may be meant: by last part, by spelling, by what they mean."""
    last = name.rpartition(".")[2]
    ends = {key: key.rpartition(".")[2] for key in known}
    words = last.replace("_", " ").lower()
    return (
        [key for key, end in ends.items() if end == last]
        or difflib.get_close_matches(name, known, 3, 0.6)
        or [
            key for key, end in ends.items()
            if difflib.SequenceMatcher(None, last, end).ratio() > 0.75
        ]
        or [key for key, found in known.items() if words in found.meaning.lower()]
    )[:3]  # fmt: skip


def _type(hint: Any, info: FieldInfo) -> tuple[str, str]:
    metadata = getattr(hint, "__metadata__", ())
    for piece in metadata:
        if piece in _READERS:
            words, unit = _READERS[piece]
            return words + _bounds(info), unit
    return _plain_type(info.annotation), ""


_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def _plain_type(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        choices = ", ".join(str(choice) for choice in inner)
        return choices if len(inner) == 1 else f"one of {choices}"
    if origin is dict:
        return "mapping of names to text" if typing.get_origin(inner[1]) else "mapping"
    if origin is tuple and inner[-1] is Ellipsis:
        whole = typing.get_origin(inner[0]) is typing.Annotated and inner[0].__origin__ is int
        return "list of whole numbers" if whole else "list of text, one line each"
    if origin is tuple:
        return f"list of {len(inner)} numbers"
    if annotation is Nodes:
        return "range of nodes (4-8)"
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_plain_type(one) for one in inner if one is not types.NoneType)
    return _WORDS.get(annotation, "a value")


def _bounds(info: FieldInfo) -> str:
    found = [
        f"{words} {getattr(piece, name):g}"
        for piece in info.metadata
        for kind, name, words in _BOUNDS
        if isinstance(piece, kind)
    ]
    return "".join(f", {text}" for text in found)


def _meaning(description: str) -> tuple[str, str]:
    """The text, and the default that it gives in brackets at its end."""
    match = re.fullmatch(r"(.*?)\s*\[([^\]]*)\]", description, re.DOTALL)
    return (match[1], match[2]) if match else (description, "")


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    return "not given" if value is None else show(value)


def show(value: Any, kind: str = "") -> str:
    """A value as it would be written in a job file; sizes and walltimes readable too."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and kind.startswith("walltime"):
        return format_walltime(value)
    if isinstance(value, int) and kind.startswith("size"):
        return f"{value} ({format_bytes(value)})"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    return str(value)


def markdown() -> str:
    """docs/job-file.md."""
    text = [
        "# The job file",
        "",
        "<!-- Written by `hpctrain schema --markdown`; edit hpctrain/spec/job.py instead. -->",
        "",
        _INTRODUCTION,
    ]
    top = [key for key in all_keys() if "." not in key.key]
    text += ["## Top level", "", *_rows([key for key in top if not key.section])]
    for section in (key for key in all_keys() if key.section):
        model = section.key
        inner = [
            key for key in all_keys()
            if key.key.rpartition(".")[0] == model and not key.section
        ]  # fmt: skip
        text += [f"## {model}", "", section.meaning, ""]
        if section.shorthand:
            example = f"`{model.rpartition('.')[2]}: VALUE`"
            text += [f"A bare value, {example}, means `{section.shorthand}`.", ""]
        if section.required:
            text += ["A job must have this section.", ""]
        text += _rows(inner)
    text += ["## Presets", "", *_presets()]
    return "\n".join(text).rstrip() + "\n"


_INTRODUCTION = """\
One YAML document describes a job. `hpctrain init` writes one to start from, `hpctrain explain
KEY job.yaml` says what a key means and where its value came from, and `hpctrain schema` prints
a JSON Schema for editors. Keys can be replaced on the command line: `--set train.lr=1e-3`.

- Plain values follow the core rules of YAML 1.2: `1e-4` is a number, `no` is text, and
  `12:00:00` and `012345` stay the text they are. Tags and repeated keys are refused.
- Counts may be written `1e9` or `2.5M`, sizes `64MiB`, walltimes in the forms of Slurm or as
  `1h30m`. `1:30` is refused: Slurm reads minutes and seconds, people hours and minutes.
- Unknown keys are refused. All faults of a file are reported at once, each with its line and
  column, and nothing is started.
"""


def _rows(listed: list[Key]) -> list[str]:
    text = ["| key | what stands there | default | meaning |", "|---|---|---|---|"]
    for key in listed:
        plain = key.required or key.derived or key.default == "not given"
        default = key.default if plain else f"`{key.default}`"
        default = "**must be given**" if key.required else default
        words = key.type + (f", in {key.unit}" if key.unit and key.unit not in key.type else "")
        cells = (f"`{key.key}`", words, default, key.meaning)
        text.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*text, ""]


def _presets() -> list[str]:
    from hpctrain.spec.presets import PRESETS

    text = ["Values of `model.preset`; further keys of the section override single dimensions.", ""]
    text += ["| preset | layers | hidden | heads | kv_heads | vocabulary | source |"]
    text += ["|---|---:|---:|---:|---:|---:|---|"]
    for name, (origin, values) in PRESETS.items():
        shape = [values["layers"], values["hidden"], values["heads"]]
        shape += [values.get("kv_heads", values["heads"]), values["vocab_size"]]
        text.append(f"| `{name}` | " + " | ".join(str(n) for n in shape) + f" | {origin} |")
    return text
