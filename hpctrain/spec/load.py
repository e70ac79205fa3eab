"""From a job file and ``--set`` overrides to a validated JobSpec, with every fault at once."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hpctrain.errors import Problem, SpecError, UsageError
from hpctrain.spec.fields import Section, show
from hpctrain.spec.job import JobSpec
from hpctrain.spec.presets import PRESETS
from hpctrain.spec.yaml_tree import Mark, Scalar, Tree, dotted, dump, load_tree, plain

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the value in force of a key came from.

    ``kind`` is file, set, preset, default or resolved (worked out from other keys);
    ``where`` is ``job.yaml:14:9``, the override, or the preset with its publication.
    """

    kind: str
    where: str


@dataclass(frozen=True, slots=True)
class Job:
    """A validated job and where each of its values came from."""

    spec: JobSpec
    sources: Mapping[str, Source] = field(default_factory=dict)
    file: str = ""
    text: str = ""
    overrides: tuple[str, ...] = ()

    def source(self, key: str) -> Source:
        return self.sources.get(key, Source("default", "hpctrain"))

    def locate(self, key: str, message: str) -> Problem:
        """A Problem about ``key`` at the place where its value was given, if it was."""
        source = self.source(key)
        if source.kind == "file":
            file, line, column = source.where.rsplit(":", 2)
            return Problem(key, message, file, int(line), int(column))
        return Problem(key, message, source.where if source.kind == "set" else self.file)


def read_job(path: Path | str, overrides: Sequence[str] = ()) -> Job:
    """Read, override, validate; nothing is resolved against a machine yet.

    Args:
        path: the job file, UTF-8.
        overrides: ``a.b=c`` each; the value is YAML.

    Raises:
        UsageError: the file cannot be read.
        SpecError: every fault found, each with its place.
    """
    name = str(path)
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"{name}: no such file", hint=f"write one that works: hpctrain init {name}"
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
    return parse_job(text, name, overrides)


def parse_job(text: str, file: str = "job.yaml", overrides: Sequence[str] = ()) -> Job:
    """As :func:`read_job`, from text."""
    return parse_tree(load_tree(text, file), text, file, overrides)


def parse_tree(tree: Tree, text: str, file: str, overrides: Sequence[str] = ()) -> Job:
    """As :func:`parse_job`, from a tree that was composed already, and which stays as it is."""
    tree = tree.copy()
    if isinstance(tree.value, Scalar) and tree.value.value is None:
        tree.value = {}
    if not isinstance(tree.value, dict):
        message = f"found {show(tree.value)}; a job file is a mapping of keys"
        raise SpecError([Problem("", message, file, 1, 1)])
    for override in overrides:
        _override(tree, override)
    presets = _expand_preset(tree)
    try:
        spec = JobSpec.model_validate(tree.value)
    except ValidationError as error:
        raise SpecError(_problems(error, tree, file)) from None
    sources = {dotted(path): _source(mark) for path, mark in tree.marks.items()}
    sources.update(presets)
    return Job(spec, sources, file, text, tuple(overrides))


def dump_job(spec: JobSpec) -> str:
    """A job file that holds every key in force; reading it gives ``spec`` again."""
    return dump(spec.model_dump(mode="json"))


def _source(mark: Mark) -> Source:
    if mark.file.startswith("--set"):
        return Source("set", mark.file)
    return Source("file", f"{mark.file}:{mark.line}:{mark.column}")


def _override(tree: Tree, override: str) -> None:
    file = f"--set {override}"
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise SpecError([Problem("", "write it as key=value, for example train.lr=1e-3", file)])
    value = load_tree(text, file)
    here = tree.value
    path: KeyPath = ()
    for part in parts[:-1]:
        path = (*path, part)
        inner = here.get(part)
        if not isinstance(inner, dict):
            inner = _as_mapping(path, inner)
            here[part] = inner
            tree.marks.setdefault(path, Mark(0, 0, file))
        here = inner
    path = (*path, parts[-1])
    here[parts[-1]] = value.value if text.strip() else Scalar(None, "")
    for old in [old for old in tree.marks if old[: len(path)] == path]:
        del tree.marks[old]
    for inner_path in value.marks:
        tree.marks[path + inner_path] = Mark(0, 0, file)


def _as_mapping(path: KeyPath, value: Any) -> dict[str, Any]:
    """``model: gpt2-124m`` becomes ``{preset: gpt2-124m}`` once a key below it is set."""
    section = _section_at(path)
    key = section.scalar_key if section is not None and issubclass(section, Section) else None
    empty = value is None or (isinstance(value, Scalar) and value.value is None)
    return {} if empty or key is None else {key: value}


def _expand_preset(tree: Tree) -> dict[str, Source]:
    """Put a preset's dimensions beneath the keys that the model section gives."""
    model = tree.value.get("model")
    if isinstance(model, str):
        model = {"preset": model}
    if not isinstance(model, dict) or not isinstance(model.get("preset"), str):
        return {}
    name = model["preset"]
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        known = f"did you mean {close[0]}?" if close else f"known: {', '.join(PRESETS)}"
        mark = tree.mark(("model", "preset"))
        assert mark is not None
        message = f"no preset {name!r}; {known}"
        raise SpecError([Problem("model.preset", message, mark.file, mark.line, mark.column)])
    origin, values = PRESETS[name]
    source = Source("preset", f"{name} ({origin})")
    merged = {**values, **model}
    found = {f"model.{key}": source for key in values if key not in model}
    for key, inner in values.items():
        given = model.get(key)
        if isinstance(inner, dict) and isinstance(given, dict):
            merged[key] = {**inner, **given}
            found |= {f"model.{key}.{name}": source for name in inner if name not in given}
    tree.value["model"] = merged
    return found


def _problems(error: ValidationError, tree: Tree, file: str) -> list[Problem]:
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        path = _known_path(item["loc"], tree)
        key = dotted(path)
        mark = tree.mark(path) or Mark(1, 1, file)
        message = _message(item, path, tree)
        found.setdefault(
            f"{key} {message}", Problem(key, message, mark.file, mark.line, mark.column)
        )
    return sorted(found.values(), key=lambda p: (p.file != file, p.line, p.column, p.key))


def _known_path(loc: Iterable[str | int], tree: Tree) -> KeyPath:
    """Pydantic's location without the tags of unions and validators that it adds."""
    path: KeyPath = ()
    section: Any = JobSpec
    for part in loc:
        fields = getattr(section, "model_fields", None)
        if isinstance(part, str) and fields is not None and part not in fields:
            if (*path, part) not in tree.marks:
                continue
        elif isinstance(part, str) and fields is None and (*path, part) not in tree.marks:
            continue
        path = (*path, part)
        section = _section_at(path)
    return path


def _message(item: Any, path: KeyPath, tree: Tree) -> str:
    kind, context = item["type"], item.get("ctx", {})
    found = show(item["input"])
    if kind == "extra_forbidden":
        section = _section_at(path[:-1])
        names = list(getattr(section, "model_fields", {}))
        close = difflib.get_close_matches(str(path[-1]), names, 1, 0.6)
        return "unknown key; " + (
            f"did you mean {close[0]}?" if close else f"known here: {', '.join(names)}"
        )
    if kind == "missing":
        return f"missing; {_description(path)}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        message = f"found {found}; {context['expected']} belongs here"
        options = [
            option.strip(" '") for option in context["expected"].replace(" or ", ",").split(",")
        ]
        close = difflib.get_close_matches(str(plain(item["input"])), options, 1)
        return message + (f"; did you mean {close[0]}?" if close else "")
    bounds = {
        "greater_than_equal": ("ge", "at least"),
        "greater_than": ("gt", "more than"),
        "less_than": ("lt", "less than"),
        "less_than_equal": ("le", "at most"),
    }
    if kind in bounds:
        name, words = bounds[kind]
        return f"found {found}; {words} {context[name]} belongs here"
    return f"found {found}; {item['msg'][0].lower()}{item['msg'][1:]}"


def _description(path: KeyPath) -> str:
    section = _section_at(path[:-1])
    fields = getattr(section, "model_fields", {})
    info = fields.get(str(path[-1]))
    return info.description if info is not None and info.description else "a value belongs here"


def _section_at(path: KeyPath) -> Any:
    """The Section class at a path of the job tree, or None below free-form fields."""
    section: Any = JobSpec
    for part in path:
        if not isinstance(part, str) or part not in getattr(section, "model_fields", {}):
            return None
        section = _model_of(section.model_fields[part].annotation)
        if section is None:
            return None
    return section


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        for option in typing.get_args(annotation):
            if (found := _model_of(option)) is not None:
                return found
    return None
