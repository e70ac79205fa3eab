"""How each torch dtype lies in HDF5: the dtype of the bytes, and the type a reader sees.

Everything is little-endian. bfloat16 is a custom 16-bit float (8 exponent bits, 7 mantissa
bits, bias 127) that HDF5 converts to exact float32 on reading and HDF5 2.0 knows as its own
bfloat16; the 8-bit floats are raw bytes, for HDF5 cannot express float8_e4m3fn (its largest
exponent is not reserved for infinities). Each dataset says its ``torch_dtype``.
"""

from __future__ import annotations

import h5py
import numpy as np
from numpy.typing import DTypeLike

_RAW: dict[str, DTypeLike] = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "u1",
    "float8_e5m2": "u1",
    "float8_e4m3fnuz": "u1",
    "float8_e5m2fnuz": "u1",
    "complex64": "<c8",
    "complex128": "<c16",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "u1",
    "bool": "?",
}


def raw_dtype(torch_dtype: str) -> np.dtype:
    """numpy dtype of the bytes of ``torch_dtype`` (uint16 for bfloat16, uint8 for 8-bit floats).

    Raises:
        ValueError: a dtype that checkpoints do not hold.
    """
    try:
        return np.dtype(_RAW[torch_dtype])
    except KeyError:
        known = ", ".join(_RAW)
        raise ValueError(f"torch dtype {torch_dtype!r} is none of {known}") from None


def hdf5_type(torch_dtype: str) -> h5py.h5t.TypeID:
    """Type of a dataset that holds ``torch_dtype``."""
    if torch_dtype == "bfloat16":
        kind = h5py.h5t.IEEE_F16LE.copy()
        kind.set_fields(15, 7, 8, 0, 7)
        kind.set_size(2)
        kind.set_precision(16)
        kind.set_ebias(127)
        return kind
    return h5py.h5t.py_create(raw_dtype(torch_dtype), logical=True)


def widen(array: np.ndarray, torch_dtype: str) -> np.ndarray:
    """The numbers of raw bits: float32 for bfloat16 (exact), the same array for what numpy knows.

    Raises:
        ValueError: 8-bit floats, which nothing here computes with.
    """
    if torch_dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if torch_dtype.startswith("float8"):
        raise ValueError(f"{torch_dtype} cannot be converted")
    return array


def narrow(array: np.ndarray, torch_dtype: str) -> np.ndarray:
    """Raw bits of numbers in another type, rounded to nearest, ties to even.

    Raises:
        ValueError: 8-bit floats.
    """
    if torch_dtype == "bfloat16":
        bits = array.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # A NaN must not round to infinity.
        quiet = (bits >> 16) | 0x40
        return np.where(np.isnan(array), quiet, rounded).astype(np.uint16)
    if torch_dtype.startswith("float8"):
        raise ValueError(f"{torch_dtype} cannot be converted")
    return array.astype(raw_dtype(torch_dtype))
