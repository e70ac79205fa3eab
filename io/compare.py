"""What differs between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpctrain.io.dtypes import widen
from hpctrain.io.restore import CheckpointReader

_ROWS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the same in both.

    Attributes:
        name: of the tensor.
        what: in words.
        elements: how many differ, None where they cannot be compared one by one.
        largest: largest absolute difference; None where there is none to speak of.
    """

    name: str
    what: str
    elements: int | None = None
    largest: float | None = None


def differences(one: CheckpointReader, other: CheckpointReader) -> Iterator[Difference]:
    """Tensors that are missing in one, have another form, or other bits; scalars too."""
    left, right = one.tensors(), other.tensors()
    for name in sorted(left.keys() | right.keys()):
        if name not in right:
            yield Difference(name, "only in the first")
        elif name not in left:
            yield Difference(name, "only in the second")
        elif left[name] != right[name]:
            forms = (f"{dtype} {list(shape)}" for shape, dtype in (left[name], right[name]))
            yield Difference(name, " and ".join(forms))
        else:
            found = _compare(name, one, other)
            if found is not None:
                yield found
    for key in sorted(one.scalars.keys() | other.scalars.keys()):
        a, b = one.scalars.get(key), other.scalars.get(key)
        if a != b:
            yield Difference(f"scalar {key}", f"{a!r} and {b!r}")


def _compare(name: str, one: CheckpointReader, other: CheckpointReader) -> Difference | None:
    shape, dtype = one.tensors()[name]
    count, largest, nan = 0, 0.0, False
    row = int(np.prod(shape[1:], dtype=np.int64)) * 8 if shape else 8
    step = max(1, _ROWS_BYTES // max(1, row))
    for first in range(0, shape[0] if shape else 1, step):
        offsets = (first, *(0 for _ in shape[1:])) if shape else ()
        part = (min(step, shape[0] - first), *shape[1:]) if shape else ()
        a, b = one.read(name, offsets, part), other.read(name, offsets, part)
        bits = f"u{a.dtype.itemsize}" if a.dtype.itemsize <= 8 else a.dtype
        unequal = np.atleast_1d(a).view(bits) != np.atleast_1d(b).view(bits)
        if not unequal.any():
            continue
        count += int(unequal.sum())
        if not dtype.startswith("float8") and a.dtype != np.bool_:
            with np.errstate(invalid="ignore", over="ignore"):
                x, y = widen(a, dtype), widen(b, dtype)
                wide = x.dtype if x.dtype.kind == "c" else np.float64
                gap = np.abs(x.astype(wide) - y.astype(wide))
            nan = nan or bool(np.isnan(gap).any())
            largest = max(largest, float(np.nanmax(gap)) if not np.isnan(gap).all() else 0.0)
    if not count:
        return None
    total = int(np.prod(shape, dtype=np.int64))
    more = ", NaN among them" if nan else ""
    return Difference(name, f"{count} of {total} elements differ{more}", count, largest)
