"""The order in which samples are seen: a pure function of (seed, position), with no memory.

The samples of all epochs form one endless sequence. Position ``p`` belongs to epoch ``p //
n_samples``; in each epoch every sample stands exactly once. Samples lie in blocks of
consecutive indices; an epoch goes through the blocks in a shuffled order and through each
block in a shuffled order, so that a file is read a block at a time. A step of ``global_batch``
samples takes the next positions, also across the end of an epoch: no sample is left out.

Both shuffles are Feistel networks over the next power of four with cycle walking (Black and
Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, methods 2 and 3 combined): any
position is worked out alone, in constant time and memory, for any size of data set. The round
function is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014). docs/data.md gives the rule in full; it is part of the
format and does not change with numpy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class SampleOrder:
    """Which sample stands at each position.

    Args:
        n_samples: samples of the data set, at least 1.
        seed: of the order.
        block: consecutive samples that are shuffled as one, at least 1.
    """

    def __init__(self, n_samples: int, *, seed: int, block: int) -> None:
        if n_samples < 1 or block < 1:
            raise ValueError(f"{n_samples} samples in blocks of {block}: both at least 1")
        self.n_samples = n_samples
        self.seed = seed
        self.block = min(block, n_samples)
        self._blocks = -(-n_samples // self.block)
        self._last = n_samples - (self._blocks - 1) * self.block

    def indices(self, start: int, count: int) -> Indices:
        """Samples at positions ``start`` to ``start + count`` of the endless sequence."""
        if start < 0 or count < 0:
            raise ValueError(f"positions {start} to {start + count}: none is negative")
        out = np.empty(count, np.int64)
        done = 0
        while done < count:
            epoch, within = divmod(start + done, self.n_samples)
            part = min(count - done, self.n_samples - within)
            out[done : done + part] = self._epoch(epoch, within, part)
            done += part
        return out

    def _epoch(self, epoch: int, start: int, count: int) -> Indices:
        key = _mix(_mix(self.seed & _MASK) ^ epoch)
        block_key = np.array(_mix(key ^ 1), np.uint64)
        position = np.arange(start, start + count, dtype=np.int64)
        # One block may be short. Where it stands decides where the blocks behind it begin.
        last_block = np.array([self._blocks - 1], np.uint64)
        short_slot = int(_permute(last_block, self._blocks, block_key, inverse=True)[0])
        gap = self.block - self._last
        after_short = position >= short_slot * self.block + self._last
        shifted = position + np.where(after_short, gap, 0)
        slot, inner = np.divmod(shifted, self.block)
        slots, where = np.unique(slot, return_inverse=True)
        blocks = _permute(slots.astype(np.uint64), self._blocks, block_key)[where]
        inner_key = _mix_words(blocks ^ np.uint64(_mix(key ^ 2)))
        inner_words = inner.astype(np.uint64)
        result = np.empty(count, np.uint64)
        full = slot != short_slot
        for chosen, size in ((full, self.block), (~full, self._last)):
            result[chosen] = _permute(inner_words[chosen], size, inner_key[chosen])
        return (blocks * np.uint64(self.block) + result).astype(np.int64)


def _permute(values: _Words, size: int, key: _Words, *, inverse: bool = False) -> _Words:
    """A keyed permutation of 0 … size-1, at ``values``; ``key`` is one word or one a value."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.broadcast_to(key, values.shape)
    out = _feistel(values, half, keys, inverse)
    while True:
        outside = out >= np.uint64(size)
        if not outside.any():
            return out
        out[outside] = _feistel(out[outside], half, keys[outside], inverse)


def _feistel(values: _Words, half: int, keys: _Words, inverse: bool) -> _Words:
    """A permutation of 0 … 4^half - 1: a balanced Feistel network of eight rounds."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for number in reversed(range(_ROUNDS)) if inverse else range(_ROUNDS):
        tweak = np.uint64(number << 56)
        if inverse:
            left, right = right ^ (_mix_words((left ^ tweak) + keys) & mask), left
        else:
            left, right = right, left ^ (_mix_words((right ^ tweak) + keys) & mask)
    return (left << shift) | right


def _mix_words(words: _Words) -> _Words:
    """SplitMix64: add the golden gamma and mix, modulo 2^64."""
    z = words + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix(word: int) -> int:
    """The same on one Python integer (numpy warns of overflow on scalars, not on arrays)."""
    z = (word + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
