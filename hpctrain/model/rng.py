"""Random numbers that are pure functions of a key and a counter.

A stateful generator gives element i its value only after elements 0 … i−1, so what a rank
draws depends on what else it draws. Here element i of a stream is a hash of (key, i): any
part of a tensor can be drawn alone, on any rank, in any order, and comes out the same. The
hash is SplitMix64 (Steele, Lea, Flood 2014, figure 17): the i-th output of the published
generator seeded with ``key`` is ``bits(key, i)``, counted from 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Constants of SplitMix64 as the signed numbers that torch.int64 holds; products wrap.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
_CHUNK = 1 << 18  # elements drawn at once: temporaries stay inside the cache


def stream_key(*parts: int | str) -> int:
    """A 64-bit key, as a signed integer, of numbers and names in this order."""
    text = "\x00".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(key: Tensor | int, counter: Tensor) -> Tensor:
    """64 random bits, int64, for each element of ``key`` and ``counter`` broadcast together."""
    z = counter * _GAMMA + key
    # The shifts have to bring in zeros; on a signed integer that takes a mask.
    z ^= (z >> 30) & ((1 << 34) - 1)
    z *= _MULTIPLIER_1
    z ^= (z >> 27) & ((1 << 37) - 1)
    z *= _MULTIPLIER_2
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z


def normal(
    key: int, shape: Sequence[int], std: float, window: Sequence[slice] | None = None
) -> Tensor:
    """A tensor of normal numbers of mean 0, or a part of it.

    Args:
        key: of the stream; one a tensor.
        shape: of the whole tensor.
        std: standard deviation.
        window: the part wanted, one ``slice(start, stop)`` a dimension; all of it without.

    Returns:
        float32 on CPU. A part equals the same part of the whole, bit for bit.
    """
    if window is None:
        window = [slice(0, size) for size in shape]
    assert len(window) == len(shape), (shape, window)
    sizes = [part.stop - part.start for part in window]
    result = torch.empty(sizes, dtype=torch.float32)
    if result.numel() == 0:
        return result
    rows = result.view(sizes[0] if sizes else 1, -1)
    stride = math.prod(shape[1:])
    inner = _flat_index(shape[1:], window[1:])
    first = window[0].start if shape else 0
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        stop = min(start + step, rows.shape[0])
        outer = torch.arange(first + start, first + stop).unsqueeze(1) * stride
        # 53 bits, spread evenly and strictly inside (−1, 1). The inverse of the normal
        # distribution is taken in float64, so that its last bit, which may differ between
        # vector and scalar code, is gone after rounding to float32.
        uniform = (bits(key, outer + inner) >> 11).to(torch.float64)
        uniform.add_(0.5).mul_(2.0**-52)
        rows[start:stop] = torch.erfinv(uniform).mul_(std * math.sqrt(2.0))
    return result


def _flat_index(shape: Sequence[int], window: Sequence[slice]) -> Tensor:
    """1 + the row-major index of every element of the window, flattened."""
    index = torch.zeros(1, dtype=torch.int64)
    for size, part in zip(shape, window, strict=True):
        index = (index.unsqueeze(-1) * size + torch.arange(part.start, part.stop)).flatten()
    return index + 1  # SplitMix64 counts its outputs from 1
