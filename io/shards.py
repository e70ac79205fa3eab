"""Tensor shards: what a rank hands in, as a box of a global tensor, and whether boxes tile it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.io.dtypes import raw_dtype

Shape = tuple[int, ...]

RESERVED = "hpctrain"
"""Top-level group that holds what is not a tensor."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A box of a global tensor, without its elements.

    Attributes:
        name: path in the checkpoint, ``model/<fully qualified name>`` or
            ``optimizer/<state>/<fully qualified name>``.
        global_shape: shape of the whole tensor.
        offsets: index of the box's first element in it, one a dimension.
        shape: extent of the box; an axis may be empty.
        torch_dtype: name of the torch dtype without ``torch.``, for example ``bfloat16``.

    Raises:
        ValueError: name, box or dtype do not fit together.
    """

    name: str
    global_shape: Shape
    offsets: Shape
    shape: Shape
    torch_dtype: str

    def __post_init__(self) -> None:
        parts = self.name.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{self.name!r} cannot name a tensor in a checkpoint")
        if "\x00" in self.name:
            raise ValueError(f"{self.name!r} holds a NUL byte")
        if not len(self.global_shape) == len(self.offsets) == len(self.shape):
            raise ValueError(
                f"{self.name}: global shape {self.global_shape}, offsets {self.offsets} and an "
                f"array of shape {self.shape} differ in their number of dimensions"
            )
        axes = zip(self.offsets, self.shape, self.global_shape, strict=True)
        if any(start < 0 or start + count > whole for start, count, whole in axes):
            raise ValueError(
                f"{self.name}: the box {show_box(self.offsets, self.shape)} lies outside "
                f"of the global shape {self.global_shape}"
            )
        raw_dtype(self.torch_dtype)

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.shape)

    @property
    def dtype(self) -> np.dtype:
        """numpy dtype of the elements' bytes."""
        return raw_dtype(self.torch_dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> bool:
        """Whether the box is the tensor."""
        return self.shape == self.global_shape


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A box of a global tensor and its elements, in host memory.

    Attributes:
        name, global_shape, offsets, torch_dtype: see :class:`ShardSpec`.
        array: the elements, of any strides; raw bits (uint16, uint8) where numpy has no such
            type.

    Raises:
        ValueError: name, box or dtype do not fit together, or the name is one of ours.
    """

    name: str
    global_shape: Shape
    offsets: Shape
    array: np.ndarray
    torch_dtype: str

    def __post_init__(self) -> None:
        expected = self.spec.dtype
        if self.name.split("/")[0] == RESERVED:
            raise ValueError(f"{self.name!r} cannot name a tensor in a checkpoint")
        if self.array.dtype != expected:
            raise ValueError(
                f"{self.name}: {self.torch_dtype} arrives as numpy {expected}, "
                f"found {self.array.dtype}"
            )

    @property
    def spec(self) -> ShardSpec:
        shape = self.array.shape
        return ShardSpec(self.name, self.global_shape, self.offsets, shape, self.torch_dtype)


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor: first index and extent of each dimension."""

    offsets: Shape
    shape: Shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> Shape:
        return tuple(start + count for start, count in zip(self.offsets, self.shape, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """The common box, or None where there is none."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(map(min, self.end, other.end))
        shape = tuple(stop - start for start, stop in zip(low, high, strict=True))
        return Box(low, shape) if all(count > 0 for count in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """This box as slices of an array that holds ``outer``."""
        return tuple(
            slice(start - base, start - base + count)
            for start, base, count in zip(self.offsets, outer.offsets, self.shape, strict=True)
        )

    def __str__(self) -> str:
        return show_box(self.offsets, self.shape)


def show_box(offsets: Sequence[int], shape: Sequence[int]) -> str:
    """``[0:4, 8:16]``, as one would write it in Python."""
    axes = (f"{start}:{start + count}" for start, count in zip(offsets, shape, strict=True))
    return f"[{', '.join(axes)}]"


def coverage(global_shape: Shape, boxes: Iterable[Box]) -> str | None:
    """What is wrong where the boxes do not cover a tensor exactly once; None where they do.

    Empty boxes are left out. The boxes are swept along the first dimension and only those
    that are open at the same time are compared: O(n log n) for rows, quadratic in the number
    of boxes side by side.
    """
    filled = sorted((box for box in boxes if box.elements), key=lambda box: box.offsets)
    total = sum(box.elements for box in filled)
    expected = math.prod(global_shape)
    open_boxes: list[Box] = []
    for box in filled:
        if global_shape:
            open_boxes = [other for other in open_boxes if other.end[0] > box.offsets[0]]
        for other in open_boxes:
            common = box.overlap(other)
            if common is not None:
                return f"{common} is given more than once"
        open_boxes.append(box)
    if total != expected:
        return f"{expected - total} of {expected} elements are given by no rank"
    return None
