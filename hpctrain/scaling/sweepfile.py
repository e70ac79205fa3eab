"""The sweep file: strict YAML to what is to be run, with every fault at once."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpctrain.errors import Problem, SpecError, UsageError
from hpctrain.scaling.conditions import Condition
from hpctrain.spec.fields import show
from hpctrain.spec.yaml_tree import Path as KeyPath
from hpctrain.spec.yaml_tree import Scalar, Tree, dotted, load_tree, plain

Kind = Literal["strong", "weak", "grid"]
Grow = Literal["batch", "layers", "hidden"]

KEYS = {
    "name": "Name of the sweep; starts its directory's name. [the file's name]",
    "job": "Job file of every point, relative to the sweep file.",
    "kind": "strong (the same work on more ranks), weak (work grows with the ranks) or grid.",
    "axes": "Keys of the job and the values each takes; all combinations are run.",
    "zip": "A list of mappings of keys whose values go together: the first with the first.",
    "set": "Keys of the job that every point replaces.",
    "grow": "weak: what grows with the ranks: batch, layers or hidden. [batch]",
    "repeats": "Runs of each point. [1]",
    "when": "Conditions on keys of the job that a point has to meet.",
    "baseline": "Keys and values of the point that others are compared with. [fewest ranks]",
    "max_queued": "Jobs in Slurm's queue at a time. [the site's limit]",
}
"""Every key of a sweep file with its meaning."""

_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MOST_POINTS = 10_000


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the job and its value.

    Attributes:
        key: dotted.
        text: value as YAML on one line, as ``--set key=text`` takes it.
        line, column: where it stands in the sweep file.
    """

    key: str
    text: str
    line: int = 0
    column: int = 0

    @property
    def override(self) -> str:
        return f"{self.key}={self.text}"


@dataclass(frozen=True, slots=True)
class Axis:
    """Settings that are varied together: one row a value."""

    rows: tuple[tuple[Setting, ...], ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(setting.key for setting in self.rows[0])


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A validated sweep file; see KEYS for the meaning of its keys."""

    name: str
    job: Path
    kind: Kind
    axes: tuple[Axis, ...]
    fixed: tuple[Setting, ...] = ()
    grow: Grow = "batch"
    repeats: int = 1
    when: tuple[Condition, ...] = ()
    baseline: tuple[Setting, ...] = ()
    max_queued: int | None = None
    file: str = ""
    text: str = field(default="", repr=False)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every varied key, in the order of the file."""
        return tuple(key for axis in self.axes for key in axis.keys)


def read_sweep(path: Path) -> SweepFile:
    """Read and validate a sweep file.

    Raises:
        UsageError: it cannot be read.
        SpecError: every fault found, each with its place.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_sweep(text, path)


def parse_sweep(text: str, path: Path) -> SweepFile:
    """As :func:`read_sweep`, from text; ``path`` is where it would lie."""
    tree = load_tree(text, str(path))
    return _Reader(tree, path, text).read()


class _Reader:
    def __init__(self, tree: Tree, path: Path, text: str) -> None:
        self.tree, self.path, self.text = tree, path, text
        self.problems: list[Problem] = []

    def read(self) -> SweepFile:
        top = self.tree.value
        if not isinstance(top, dict) or not top:
            self._problem((), f"found {show(top)}; a sweep file is a mapping of keys")
            raise SpecError(self.problems)
        for key in top:
            if key not in KEYS:
                close = difflib.get_close_matches(key, KEYS, 1, 0.6)
                known = f"did you mean {close[0]}?" if close else f"known: {', '.join(KEYS)}"
                self._problem((key,), f"unknown key; {known}")
        job = self._word("job", None)
        if job is None:
            self._problem((), "job is missing: the job file that every point starts from")
        axes = [*self._axes(), *self._zipped()]
        if not axes and not {"axes", "zip"} & top.keys():
            self._problem((), "axes is missing: keys of the job and their values, for example "
                          "axes: {nodes: [1, 2, 4]}")  # fmt: skip
        self._distinct(axes)
        kind = self._choice("kind", ("strong", "weak", "grid"), "grid")
        if "grow" in top and kind != "weak":
            self._problem(("grow",), f"only kind: weak grows anything; found kind: {kind}")
        found = SweepFile(
            name=self._word("name", self.path.stem) or "sweep",
            job=self.path.parent / (job or ""),
            kind=kind,  # type: ignore[arg-type]
            axes=tuple(axes),
            fixed=tuple(self._settings("set")),
            grow=self._choice("grow", ("batch", "layers", "hidden"), "batch"),  # type: ignore[arg-type]
            repeats=self._count("repeats", 1) or 1,
            when=tuple(self._conditions()),
            baseline=tuple(self._settings("baseline")),
            max_queued=self._count("max_queued", None),
            file=str(self.path),
            text=self.text,
        )
        self._size(found)
        if self.problems:
            raise SpecError(sorted(self.problems, key=lambda one: (one.line, one.column)))
        return found

    # ---- axes ------------------------------------------------------------------------------

    def _axes(self) -> Iterator[Axis]:
        for key, values in self._mapping("axes").items():
            path: KeyPath = ("axes", key)
            if self._values(path, values) and self._once(path, [_text(one) for one in values]):
                yield Axis(tuple((self._setting(("axes", key, i), key, value),)
                                 for i, value in enumerate(values)))  # fmt: skip

    def _zipped(self) -> Iterator[Axis]:
        groups = self.tree.value.get("zip", [])
        if isinstance(groups, dict):
            self._problem(("zip",), "found a mapping; write a list of mappings, each with keys "
                          "that go together")  # fmt: skip
            return
        if not isinstance(groups, list):
            self._problem(("zip",), f"found {show(groups)}; a list of mappings belongs here")
            return
        for number, group in enumerate(groups):
            path: KeyPath = ("zip", number)
            if not isinstance(group, dict) or not group:
                self._problem(path, f"found {show(group)}; a mapping of keys belongs here")
                continue
            good = [self._values((*path, key), values) for key, values in group.items()]
            if not all(good):
                continue
            lengths = {key: len(values) for key, values in group.items()}
            if len(set(lengths.values())) > 1:
                found = ", ".join(f"{key} has {count}" for key, count in lengths.items())
                self._problem(path, f"values that go together must be as many: {found}")
                continue
            together = [
                " ".join(f"{key}={_text(value)}" for key, value in zip(group, row, strict=True))
                for row in zip(*group.values(), strict=True)
            ]
            if not self._once(path, together):
                continue
            yield Axis(
                tuple(
                    tuple(self._setting((*path, key, i), key, group[key][i]) for key in group)
                    for i in range(next(iter(lengths.values())))
                )
            )

    def _values(self, path: KeyPath, values: Any) -> bool:
        """Whether a key and its list of values can be an axis."""
        if not _KEY.fullmatch(str(path[-1])):
            self._problem(path, "a key of the job belongs here, such as train.lr")
            return False
        if not isinstance(values, list) or not values:
            self._problem(path, f"found {show(values)}; a list of values belongs here")
            return False
        return True

    def _once(self, path: KeyPath, texts: list[str]) -> bool:
        twice = next((text for text in texts if texts.count(text) > 1), None)
        if twice is not None:
            self._problem(path, f"{twice} stands twice; repeats: N runs a point several times")
            return False
        return True

    def _distinct(self, axes: list[Axis]) -> None:
        seen: set[str] = {setting.key for setting in self._settings("set")}
        for axis in axes:
            for setting in axis.rows[0]:
                if setting.key in seen:
                    message = f"{setting.key} is given twice in this sweep"
                    self.problems.append(
                        Problem(setting.key, message, str(self.path), setting.line, setting.column)
                    )
                seen.add(setting.key)

    def _size(self, found: SweepFile) -> None:
        points = found.repeats
        for axis in found.axes:
            points *= len(axis.rows)
        if points > _MOST_POINTS:
            self._problem(("axes",), f"{points} runs; a sweep has at most {_MOST_POINTS}")

    # ---- single keys -----------------------------------------------------------------------

    def _settings(self, key: str) -> list[Setting]:
        found = []
        for name, value in self._mapping(key).items():
            if _KEY.fullmatch(name):
                found.append(self._setting((key, name), name, value))
            else:
                self._problem((key, name), "a key of the job belongs here, such as train.lr")
        return found

    def _setting(self, path: KeyPath, key: str, value: Any) -> Setting:
        mark = self.tree.mark(path)
        line, column = (mark.line, mark.column) if mark else (0, 0)
        return Setting(key, _text(value), line, column)

    def _mapping(self, key: str) -> dict[str, Any]:
        value = self.tree.value.get(key, {})
        if isinstance(value, dict):
            return value
        if not (isinstance(value, Scalar) and value.value is None):
            self._problem((key,), f"found {show(value)}; a mapping of keys of the job belongs here")
        return {}

    def _conditions(self) -> Iterator[Condition]:
        given = self.tree.value.get("when", [])
        for number, one in enumerate(given if isinstance(given, list) else [given]):
            text = one.raw if isinstance(one, Scalar) else one
            path: KeyPath = ("when", number) if isinstance(given, list) else ("when",)
            if not isinstance(text, str):
                self._problem(path, f"found {show(one)}; a condition belongs here")
                continue
            try:
                yield Condition.parse(text)
            except ValueError as error:
                self._problem(path, str(error))

    def _word(self, key: str, default: str | None) -> str | None:
        value = self.tree.value.get(key, default)
        text = value.raw if isinstance(value, Scalar) else value
        if value is not default and (not isinstance(text, str) or not text.strip()):
            self._problem((key,), f"found {show(value)}; text belongs here")
            return default
        return text

    def _choice(self, key: str, options: tuple[str, ...], default: str) -> str:
        value = plain(self.tree.value.get(key, default))
        if value in options:
            return str(value)
        close = difflib.get_close_matches(str(value), options, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        self._problem((key,), f"found {show(value)}; {' or '.join(options)} belongs here{hint}")
        return default

    def _count(self, key: str, default: int | None) -> int | None:
        value: Any = plain(self.tree.value.get(key))
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._problem((key,), f"found {show(value)}; a whole number of at least 1 belongs here")
            return default
        return int(value)

    def _problem(self, path: KeyPath, message: str) -> None:
        mark = self.tree.mark(path)
        line, column = (mark.line, mark.column) if mark else (1, 1)
        problem = Problem(dotted(path), message, str(self.path), line, column)
        if problem not in self.problems:
            self.problems.append(problem)


def _text(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, Scalar):
        return value.raw or "null"
    return json.dumps(plain(value), ensure_ascii=False)


def shown(text: str) -> str:
    """A setting's value as people read it: without the quotes of plain words."""
    if len(text) > 2 and text[0] == text[-1] == '"' and re.fullmatch(r"[\w.+:/-]+", text[1:-1]):
        return text[1:-1]
    return text
