"""Floating-point messages made smaller without loss, for links slower than a processor packs.

The last byte of a float holds sign and exponent. Of gradients, whose sizes lie close together, it
carries two to three bits of information, and an entropy coder takes it down to that; the other
bytes are noise and stay as they are (Hershcovitch et al. 2024, ZipNN, section 3). A float32 message
shrinks to about 5/6 and comes back bit for bit; a core packs and unpacks some hundred MB a second.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack(values: Tensor) -> Tensor:
    """The values as uint8: all bytes but the last of each, then the last ones, entropy-coded.

    Args:
        values: one dimension, on the host, of one of DTYPES.
    """
    words = values.view(torch.int16).numpy().view(np.uint16)
    high, low = words[_high(values)], words[:0] if values.element_size() == 2 else words[0::2]
    # Huffman only: there are no repetitions to look for.
    coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress((high >> 8).astype(np.uint8).data) + coder.flush()
    if len(coded) >= values.numel():
        return values.view(torch.uint8)
    packed = np.empty(2 * len(low) + len(high) + len(coded), np.uint8)
    packed[: 2 * len(low)].view(np.uint16)[:] = low
    packed[2 * len(low) : -len(coded)] = high.astype(np.uint8)
    packed[-len(coded) :] = np.frombuffer(coded, np.uint8)
    return torch.from_numpy(packed)


def unpack(packed: Tensor, values: Tensor) -> None:
    """What :func:`pack` was given, into ``values`` (one dimension, without gaps)."""
    count, wide = values.numel(), values.element_size()
    if packed.numel() == count * wide:
        values.view(torch.uint8).copy_(packed)
        return
    words = values.view(torch.int16).numpy().view(np.uint16)
    source = packed.numpy()
    lows, rest = np.split(source, [count * (wide - 2)])
    last = np.frombuffer(zlib.decompress(rest[count:].tobytes(), -15, count), np.uint8)
    words[_high(values)] = last.astype(np.uint16) << 8 | rest[:count]
    if wide == 4:
        # Parts of a larger message begin at any byte.
        words[0::2] = lows.copy().view(np.uint16)


def _high(values: Tensor) -> slice:
    """Which 16-bit words of the values hold their last byte (little-endian)."""
    return slice(1, None, 2) if values.element_size() == 4 else slice(None)


class PackedExchange:
    """Packed messages, one to each member of a group and one from each; in two asynchronous parts.

    Args:
        group: process group on CPU.
        place: of this rank in it.
        outgoing: values for each member; what stands at ``place`` stays here.
        incoming: where theirs go, of as many elements as they send.
    """

    def __init__(
        self, group: dist.ProcessGroup, place: int, outgoing: list[Tensor], incoming: list[Tensor]
    ) -> None:
        self._group, self._place, self._incoming = group, place, incoming
        ready: dict[int, Tensor] = {}  # one tensor may go to several members
        self._blobs = []
        for member, values in enumerate(outgoing):
            if member == place:
                self._blobs.append(torch.empty(0, dtype=torch.uint8))
                continue
            if values.data_ptr() not in ready:
                ready[values.data_ptr()] = pack(values)
            self._blobs.append(ready[values.data_ptr()])
        self._sent = torch.tensor([blob.numel() for blob in self._blobs])
        self._got = torch.empty_like(self._sent)
        self._data = torch.empty(0, dtype=torch.uint8)

    def start_sizes(self) -> Any:
        """Tell the others how much is coming."""
        return dist.all_to_all_single(self._got, self._sent, group=self._group, async_op=True)

    def start_data(self) -> Any:
        """Send it; after the work of :meth:`start_sizes` is done."""
        self._data = torch.empty(int(self._got.sum()), dtype=torch.uint8)
        return dist.all_to_all_single(
            self._data,
            torch.cat(self._blobs),
            self._got.tolist(),
            self._sent.tolist(),
            group=self._group,
            async_op=True,
        )

    def finish(self) -> None:
        """Unpack what came; after the work of :meth:`start_data` is done."""
        for member, blob in enumerate(torch.split(self._data, self._got.tolist())):
            if member != self._place:
                unpack(blob, self._incoming[member])
