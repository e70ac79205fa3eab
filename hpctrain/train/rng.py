"""Every random generator of a rank: seeded by rule, saved and restored without pickle.

Seed rule: Python's, numpy's and torch's generators of a rank start from
``mix(seed, data-parallel rank)``. Weights depend on (seed, name) and dropout of our own
transformer on (seed, sample), so neither depends on these generators; a user's own model,
data set or loss may, and finds the same numbers again after a restart on the same layout.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def mix(*words: int) -> int:
    """63 bits that depend on all words; the same on every machine and version."""
    text = ":".join(str(word) for word in words).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int, rank: int) -> None:
    """Start all generators of this rank; ``rank`` is the data-parallel one."""
    value = mix(seed, rank)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


class Generators:
    """Takes the states of all generators of this process, quickly."""

    def __init__(self) -> None:
        self._numpy: Any = np.random.get_state()
        self._seen = (0, b"")
        self._python: Any = random.getstate()
        self._python_seen = b""

    def capture(self) -> Callable[[], dict[str, NDArray[np.generic]]]:
        """The state of every generator now, as a function that gives it as arrays of integers.

        Taking the states is quick; making arrays of them is not, and can be left for later.
        """
        python, numpy = self._python_state(), self._numpy_state()
        torch_state = torch.default_generator.get_state()
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

        def arrays() -> dict[str, NDArray[np.generic]]:
            version, words, gauss = python
            assert version == 3
            name, keys, position, has_gauss, cached = numpy
            assert name == "MT19937"
            state: dict[str, NDArray[np.generic]] = {
                "python": np.asarray(words, dtype=np.uint64),
                "python_gauss": np.asarray([np.nan if gauss is None else gauss]),
                "numpy": np.asarray([*keys, position, has_gauss], dtype=np.uint64),
                "numpy_gauss": np.asarray([cached]),
                "torch": torch_state.numpy(),
            }
            if cuda is not None:
                state["cuda"] = cuda.numpy()
            return state

        return arrays

    def _python_state(self) -> Any:
        """Python's state, asked for only where it may have changed, as with numpy's: it makes an
        object of each word."""
        getstate: Any = random.getstate
        generator = getstate.__self__
        # In CPython the words follow the object's head: where they are not found, ask always.
        room = type(generator).__basicsize__ - object.__basicsize__
        words = ctypes.string_at(id(generator) + object.__basicsize__, min(4 * 625, room))
        if words != self._python_seen or generator.gauss_next is not None or self._python[2]:
            self._python = random.getstate()
            *keys, position = self._python[1]
            expected = np.asarray([position, *keys], dtype=np.uint32).tobytes()
            self._python_seen = words if words == expected else b""
        return self._python

    def _numpy_state(self) -> Any:
        """numpy's legacy state, asked for only where it may have changed: numpy takes longer to
        give it than everything else together, and most models never draw from it.

        The words of the Mersenne twister are compared where they lie. The only other thing is a
        second normal number kept for later: while there is none, none can come without a draw.
        """
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        address = generator.ctypes.state_address
        words = ctypes.string_at(address, 4 * 625)
        _, keys, position, has_gauss, _ = self._numpy
        if (address, words) != self._seen or has_gauss:
            self._numpy = np.random.get_state()
            _, keys, position, _, _ = self._numpy
            expected = keys.tobytes() + int(position).to_bytes(4, sys.byteorder, signed=True)
            # A numpy that lays its state out in another way is asked every time.
            self._seen = (address, words) if words == expected else (0, b"")
        return self._numpy


def restore(state: dict[str, NDArray[np.generic]]) -> None:
    """Put every generator back to what :meth:`Generators.capture` saw."""
    gauss = float(state["python_gauss"][0])
    words = tuple(int(word) for word in state["python"])
    random.setstate((3, words, None if np.isnan(gauss) else gauss))
    *keys, position, has_gauss = (int(word) for word in state["numpy"])
    cached = float(state["numpy_gauss"][0])
    np.random.set_state(("MT19937", np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.from_numpy(np.ascontiguousarray(state["torch"], dtype=np.uint8)))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(
            torch.from_numpy(np.ascontiguousarray(state["cuda"], dtype=np.uint8))
        )
