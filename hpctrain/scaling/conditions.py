"""Conditions of a sweep (``when:``): comparisons of job keys, read without running any code.

The text is parsed as a Python expression and only the nodes below are understood: numbers, text,
dotted keys, ``+ - * / // %``, comparisons, ``and or not``, ``in`` and lists.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Look = Callable[[str], Any]
"""Dotted key -> its value; raises KeyError where there is none."""

_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_LONGEST = 500


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition.

    Attributes:
        text: as written.
        keys: dotted keys that it asks for.
    """

    text: str
    keys: tuple[str, ...]
    _body: ast.expr

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition.

        Raises:
            ValueError: not an expression, or something in it that is not understood.
        """
        if len(text) > _LONGEST:
            raise ValueError(f"{len(text)} characters; at most {_LONGEST} belong here")
        try:
            body = ast.parse(text, mode="eval").body
        except (SyntaxError, RecursionError, MemoryError, ValueError):
            raise ValueError(
                f"found {text!r}; write a comparison such as parallel.tensor <= ranks_per_node"
            ) from None
        keys: list[str] = []
        _check(body, keys)
        return cls(text, tuple(dict.fromkeys(keys)), body)

    def holds(self, look: Look) -> bool:
        """Whether it is true.

        Raises:
            ValueError: a key that there is not, or values that cannot be compared.
        """
        try:
            return bool(_value(self._body, look))
        except KeyError as error:
            raise ValueError(f"{self.text!r}: no key {error.args[0]}") from None
        except TypeError:
            found = ", ".join(f"{key} = {_shown(look(key))}" for key in self.keys)
            raise ValueError(f"{self.text!r}: cannot compare {found}") from None
        except ZeroDivisionError:
            raise ValueError(f"{self.text!r}: division by zero") from None


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)


def _check(node: ast.expr, keys: list[str]) -> None:
    match node:
        case ast.Constant(value=int() | float() | str()):
            pass
        case ast.Name() | ast.Attribute():
            name = _dotted(node)
            if name not in ("true", "false"):
                keys.append(name)
        case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            for part in parts:
                _check(part, keys)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=inner):
            _check(inner, keys)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            _check(left, keys)
            _check(right, keys)
        case ast.Compare(left=left, ops=ops, comparators=rest) if all(
            type(op) in _COMPARISONS for op in ops
        ):
            for part in (left, *rest):
                _check(part, keys)
        case _:
            raise ValueError(
                f"{ast.unparse(node)!r} is not understood; keys, numbers, + - * / // %, "
                "comparisons, and, or, not belong here"
            )


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=name):
            return f"{_dotted(inner)}.{name}"
    raise ValueError(f"{ast.unparse(node)!r} is no key")


def _value(node: ast.expr, look: Look) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute():
            name = _dotted(node)
            return name == "true" if name in ("true", "false") else look(name)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part, look) for part in parts]
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, look) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, look) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _value(inner, look)
        case ast.UnaryOp(operand=inner):
            return -_value(inner, look)
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_value(left, look), _value(right, look))
        case ast.Compare(left=left, ops=ops, comparators=rest):
            here = _value(left, look)
            for compare, part in zip(ops, rest, strict=True):
                there = _value(part, look)
                if not _COMPARISONS[type(compare)](here, there):
                    return False
                here = there
            return True
    raise AssertionError("parse() lets nothing else in")
