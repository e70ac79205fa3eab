"""YAML by the 1.2 core rules, with the place of every key and value.

PyYAML resolves by YAML 1.1, where ``12:00:00`` is 43200, ``no`` is false, ``1e-4`` is text
and ``012345`` is 5349. Here nodes are composed by PyYAML (safe: no tags, no objects) and
resolved by the core schema of YAML 1.2.2, section 10.3.2. Repeated keys are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from hpctrain.errors import Problem, SpecError

Path = tuple[str | int, ...]

_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_OCT = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
_MAX_DEPTH = 50
_MAX_NODES = 100_000


@dataclass(frozen=True, slots=True)
class Scalar:
    """A plain (unquoted) scalar that is not text, with the text it was written as.

    A field that holds text takes ``raw`` (``account: 012345``), every other ``value``.
    """

    value: int | float | bool | None
    raw: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Place of a key and of its value, 1-based."""

    line: int
    column: int
    file: str


@dataclass(slots=True)
class Tree:
    """A document: mappings, lists, text and :class:`Scalar`, and where each of them stands."""

    value: Any
    marks: dict[Path, Mark] = field(default_factory=dict)

    def mark(self, path: Path) -> Mark | None:
        """The place of ``path``, or of the nearest parent that was written."""
        for end in range(len(path), -1, -1):
            if (mark := self.marks.get(path[:end])) is not None:
                return mark
        return None

    def copy(self) -> Tree:
        """A tree that may be changed; its scalars, which cannot be, are shared."""
        return Tree(_copied(self.value), dict(self.marks))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value


def resolve(text: str) -> str | Scalar:
    """A plain scalar by the YAML 1.2 core schema."""
    if _NULL.fullmatch(text):
        return Scalar(None, text)
    if _BOOL.fullmatch(text):
        return Scalar(text.lower() == "true", text)
    if _INT.fullmatch(text) and len(text) < 4000:
        return Scalar(int(text), text)
    if _OCT.fullmatch(text):
        return Scalar(int(text[2:], 8), text)
    if _HEX.fullmatch(text):
        return Scalar(int(text[2:], 16), text)
    if _FLOAT.fullmatch(text):
        return Scalar(float(text.lower().replace(".inf", "inf").replace(".nan", "nan")), text)
    return text


def load_tree(text: str, file: str) -> Tree:
    """Compose one document.

    Raises:
        SpecError: not YAML, more than one document, repeated or non-text keys, tags,
            endless aliases.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(str(part) for part in (error.context, error.problem) if part)
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        raise SpecError([Problem("", f"not valid YAML: {what}", file, line, column)]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SpecError([Problem("", f"not valid YAML: {error}", file)]) from None
    if node is None:
        return Tree({}, {(): Mark(1, 1, file)})
    builder = _Builder(file)
    value = builder.build(node, (), 0)
    if builder.problems:
        raise SpecError(builder.problems)
    return Tree(value, builder.marks)


class _Builder:
    def __init__(self, file: str) -> None:
        self.file = file
        self.marks: dict[Path, Mark] = {}
        self.problems: list[Problem] = []
        self.count = 0

    def build(self, node: yaml.Node, path: Path, depth: int) -> Any:
        self.count += 1
        # Aliases can make a small text stand for a tree of any size ("billion laughs").
        if depth > _MAX_DEPTH or self.count > _MAX_NODES:
            self._problem(path, node, "nested too deep, or aliases that repeat without end")
            return None
        self.marks.setdefault(path, self._mark(node))
        if node.tag not in _TAGS:
            self._problem(path, node, f"tag {node.tag} is not taken here; write plain YAML")
            return None
        if isinstance(node, yaml.ScalarNode):
            return resolve(node.value) if node.style is None else node.value
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, i), depth + 1) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        return dict(self._items(node, path, depth))

    def _items(self, node: yaml.MappingNode, path: Path, depth: int) -> Iterator[tuple[str, Any]]:
        seen: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            if self.problems and self.count > _MAX_NODES:
                return
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(path, key_node, "a key must be text")
                continue
            key = key_node.value
            if key in seen:
                first = seen[key].start_mark.line + 1
                message = f"{key} stands twice; it was first given in line {first}"
                self._problem((*path, key), key_node, message)
                continue
            seen[key] = key_node
            self.marks[(*path, key)] = self._mark(key_node)
            yield key, self.build(value_node, (*path, key), depth + 1)

    def _mark(self, node: yaml.Node) -> Mark:
        return Mark(node.start_mark.line + 1, node.start_mark.column + 1, self.file)

    def _problem(self, path: Path, node: yaml.Node, message: str) -> None:
        mark = self._mark(node)
        if len(self.problems) < 100:
            self.problems.append(Problem(dotted(path), message, self.file, mark.line, mark.column))


def dotted(path: Path) -> str:
    """``train.betas[1]`` from ``("train", "betas", 1)``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def plain(value: Any) -> Any:
    """The tree with every Scalar replaced by its value."""
    if isinstance(value, Scalar):
        return value.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


class _Loader(yaml.SafeLoader):
    """Composes only; every plain scalar is text until :func:`resolve` looks at it."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or 1.2 would read as something else than text."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", _OCT, ["0"])


def dump(data: Any) -> str:
    """YAML text that :func:`load_tree` and any YAML 1.1 reader read back as ``data``."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=96
    )
