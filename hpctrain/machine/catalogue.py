"""Site files: the shipped ones by name, a user's own by path."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from hpctrain.errors import UsageError
from hpctrain.machine.machine import Machine

SITES = Path(__file__).parent / "sites"

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _SiteLoader(_Loader):  # type: ignore[misc]
    """Safe YAML with the core types of YAML 1.2 and no repeated keys.

    ``no`` is text, ``1e9`` a number, ``12:00:00`` text, ``010`` ten.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, Any] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen[key] = key_node
        found = super().construct_mapping(node, deep=deep)
        assert isinstance(found, dict)
        return found


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$",
        "-+.0123456789",
    ),
):
    _SiteLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first)
    )
_SiteLoader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node))
)


class UnknownMachineError(UsageError):
    """No machine of that name; the known ones are listed."""


def machine_names() -> tuple[str, ...]:
    """Names of the shipped machines, in alphabetical order."""
    return tuple(sorted(path.stem for path in SITES.glob("*.yaml")))


def get_machine(name_or_path: str | Path) -> Machine:
    """A machine by name, by an alias, or from a site file by path.

    ``local`` is the host we stand on: its file is filled in with what a probe finds.

    Raises:
        UsageError: unknown name, unreadable file, or a file with faults, all of them named.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        return load_site(Path(text).expanduser())
    names = machine_names()
    if text in names:
        return load_site(SITES / f"{text}.yaml")
    lowered = text.lower().replace("_", "-")
    if lowered in names:
        return load_site(SITES / f"{lowered}.yaml")
    aliases = _aliases(names)
    if lowered in aliases:
        return load_site(SITES / f"{aliases[lowered]}.yaml")
    near = difflib.get_close_matches(lowered, [*names, *aliases], n=1, cutoff=0.6)
    raise UnknownMachineError(
        f"machine {text!r} is not known"
        + (f"; did you mean {near[0]}?" if near else ".")
        + f" Known: {', '.join(names)}",
        hint="or give the path of a site file of your own",
    )


def _aliases(names: tuple[str, ...]) -> dict[str, str]:
    """Alias -> name; read from the files, since the file is where a site is described."""
    found = {}
    for name in names:
        document = _read(SITES / f"{name}.yaml")
        for alias in document.get("aliases", ()):
            found[str(alias)] = name
    return found


def load_site(path: Path) -> Machine:
    """The machine of one site file.

    A file may start from another one with ``base: NAME``: mappings are merged key by key, a
    mapping set to null is dropped, everything else replaces. A block that changes anything has
    to give its own source.

    Raises:
        UsageError: see get_machine.
    """
    document = _resolve(path, ())
    try:
        machine = Machine.model_validate(document)
    except ValidationError as error:
        raise UsageError("\n".join(_faults(path, error))) from None
    if machine.kind == "local":
        from hpctrain.machine.compare import fit_to_host

        return fit_to_host(machine)
    return machine


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"site file {path}: cannot be read: {reason}") from None
    try:
        document = yaml.load(text, Loader=_SiteLoader)  # noqa: S506 (a safe loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise UsageError(f"{where}: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"site file {path}: a mapping was expected, found {_kind(document)}")
    return document


def _resolve(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    """The document with its bases merged in."""
    document = _read(path)
    base = document.pop("base", None)
    if base is None:
        return document
    if not isinstance(base, str):
        raise UsageError(f"{path}: base: a machine's name or a path was expected, found {base!r}")
    shipped = SITES / f"{base}.yaml"
    parent = shipped if base in machine_names() else path.parent / base
    if parent.resolve() in [one.resolve() for one in (*below, path)]:
        raise UsageError(f"{path}: base: {base} leads back to a file that it is the base of")
    if not parent.exists():
        raise UsageError(
            f"{path}: base: {base!r} is neither a known machine nor a file beside it; "
            f"known: {', '.join(machine_names())}"
        )
    merged = _merge(_resolve(parent, (*below, path)), document, path, "")
    assert isinstance(merged, dict)
    return merged


def _merge(base: Any, over: Any, path: Path, key: str) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    if "source" in base and "source" not in over:
        raise UsageError(
            f"{path}: {key}: changes values of a block of its base without saying where they "
            "come from; add source and confidence"
        )
    merged = dict(base)
    if "source" in base:
        # The date and the notes belong to the source that is replaced; doubts name their own.
        merged = {k: v for k, v in base.items() if k not in ("as_of", "notes")}
    if not key:
        merged.pop("aliases", None)
    for name, value in over.items():
        inner = f"{key}.{name}" if key else str(name)
        if value is None and isinstance(merged.get(name), dict):
            del merged[name]
        else:
            merged[name] = _merge(merged.get(name), value, path, inner)
    return merged


# ---- faults of a file, in words ------------------------------------------------------------


def _faults(path: Path, error: ValidationError) -> list[str]:
    lines = _lines(path)
    found = []
    for fault in error.errors(include_url=False):
        loc = tuple(fault["loc"])
        key = ".".join(str(part) for part in loc)
        where = f"{path}:{_line_of(lines, loc)}" if lines else str(path)
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = "no such key" + _did_you_mean(str(loc[-1]), _keys_at(loc[:-1]))
        elif fault["type"] == "missing":
            message = "is missing"
        else:
            message = f"{message} (found {fault['input']!r})" if _short(fault) else message
        found.append(": ".join(part for part in (where, key, message) if part))
    return found


def _short(fault: Mapping[str, Any]) -> bool:
    return fault["type"] != "value_error" and len(repr(fault["input"])) < 80


def _did_you_mean(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; here may stand {', '.join(known)}" if known else ""


def _keys_at(loc: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys that the schema has at a place of the document."""
    current: Any = Machine
    for part in loc:
        if isinstance(current, type) and issubclass(current, BaseModel):
            names = {field.alias or name: field for name, field in current.model_fields.items()}
            if part not in names:
                return ()
            current = _model_in(names[part].annotation)
    if isinstance(current, type) and issubclass(current, BaseModel):
        return tuple(field.alias or name for name, field in current.model_fields.items())
    return ()


def _model_in(annotation: Any) -> Any:
    """The model class inside ``X | None``, ``tuple[X, ...]`` or ``dict[str, X]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None


def _lines(path: Path) -> Any:
    return yaml.compose(path.read_text(encoding="utf-8"), Loader=_SiteLoader)


def _line_of(node: Any, loc: tuple[Any, ...]) -> int:
    """Line of the value at ``loc``, or of the nearest thing above it that the file holds."""
    line = node.start_mark.line + 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            below = [(k, v) for k, v in node.value if k.value == str(part)]
            if not below:
                return int(line)
            key, node = below[0]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            if part >= len(node.value):
                return int(line)
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            return int(line)
    return int(line)


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", type(None): "nothing"}.get(type(value), repr(value))
