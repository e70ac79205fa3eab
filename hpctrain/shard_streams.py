"""When shards of parameters are gathered and scattered beside computing, by rule.

As on a device whose host runs ahead of it (FSDP2's implicit prefetching): one gathering after
another on a stream of their own, each from the moment at which the block before it begins to
compute; gradients are scattered on a second stream. Neither waits for the other, for a block is
gathered before the gradients of the one before it are there. A share of both cannot hide, as on
real devices computing gets slower meanwhile.
"""

from __future__ import annotations


class ShardStreams:
    """The two streams of a rank; all moments and durations in seconds.

    Args:
        unhidden: share of each duration that computing does not hide.
    """

    def __init__(self, unhidden: float) -> None:
        self._unhidden = unhidden
        self._gathered = self._scattered = 0.0
        self._next: float | None = None

    def asked(self, now: float) -> float:
        """From when on this rank lets the next gathering begin."""
        return now if self._next is None else self._next

    def gather(self, ready: float, seconds: float) -> float:
        """A gathering for which all ranks were ``ready``; returns when it is over."""
        self._gathered = max(ready, self._gathered) + seconds
        return self._gathered

    def use(self, now: float, over: float, seconds: float, *, inner: bool = False) -> float:
        """What was gathered is needed; returns when computing with it begins.

        ``inner`` is part of a block that computes already, so that the next gathering may have
        begun before.
        """
        begins = max(over, now + self._unhidden * seconds)
        if not inner:
            self._next = begins
        return begins

    def scatter(self, now: float, ready: float, seconds: float) -> float:
        """Gradients are scattered; returns when the rank goes on."""
        self._scattered = max(ready, self._scattered) + seconds
        return now + self._unhidden * seconds

    def drain(self, now: float) -> float:
        """All has to be over, and nothing is gathered ahead; returns when it is."""
        self._next = None
        return max(now, self._scattered)
