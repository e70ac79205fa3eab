"""Seconds of collectives and sends on groups placed in a node, over nodes, or both.

Rings and trees move the bytes that the bandwidth-optimal algorithm needs: (n-1)/n of the result
in an all-gather or reduce-scatter, twice that in an all-reduce. A group with several members in
a node moves inside it over the fast links and between nodes over those members' share of the
cards, the two overlapped; every step adds a latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.plan.platform import Platform
from hpctrain.plan.software import Calibration

_NODE_HOPS = 4.0
"""Latency of a step between nodes against one inside. Gathers go round a ring of the nodes; sums
take a tree where its log2 steps are fewer, as NCCL does."""
_RING_LIMIT = 16


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks of a collective: ``size`` of them, ``local`` of each in one fast domain."""

    size: int
    local: int

    @property
    def domains(self) -> float:
        return self.size / self.local


@dataclass(frozen=True, slots=True)
class Wires:
    """Links of a platform under a calibration."""

    platform: Platform
    link: float
    network: float
    hop: float

    @classmethod
    def of(cls, platform: Platform, values: Calibration) -> Wires:
        return cls(platform, values.link, values.network, values.hop_seconds)

    def group(self, *axes: tuple[int, int]) -> Group:
        """The joint group of nested axes, each given as (ranks, ranks between neighbours)."""
        domain = self.platform.domain_devices
        size = local = 1
        for ranks, stride in axes:
            size *= ranks
            near = min(ranks, max(1, domain // stride))
            while ranks % near:
                near -= 1
            local *= near
        return Group(size, local)

    def gather(self, total: float, group: Group) -> float:
        """Seconds of an all-gather to ``total`` bytes, or a reduce-scatter of ``total`` bytes."""
        if group.size <= 1:
            return 0.0
        return self._moving(total, group) + self._latency(group, group.domains - 1)

    def all_reduce(self, total: float, group: Group) -> float:
        """Seconds of an all-reduce of ``total`` bytes a rank."""
        if group.size <= 1:
            return 0.0
        steps = min(group.domains - 1, math.log2(group.domains))
        return 2.0 * (self._moving(total, group) + self._latency(group, steps))

    def _moving(self, total: float, group: Group) -> float:
        n, local = group.size, group.local
        inside = outside = 0.0
        if local > 1:
            rate = self.platform.domain_bandwidth(local) * self.link
            inside = total * (local - 1) / local / rate
        if n > local:
            rate = min(self.platform.nic_bandwidth * local, self.platform.link_bandwidth)
            outside = total * (n - 1) / n / (rate * self.network)
        return max(inside, outside)

    def _latency(self, group: Group, steps: float) -> float:
        return self.hop * (min(group.local, _RING_LIMIT) - 1 + _NODE_HOPS * steps)

    def all_to_all(self, sent: float, group: Group) -> float:
        """Seconds in which each rank sends ``sent`` bytes, spread evenly over the group."""
        n, local = group.size, group.local
        if n <= 1:
            return 0.0
        inside = outside = 0.0
        if local > 1:
            rate = self.platform.domain_bandwidth(local) * self.link
            inside = sent * (local - 1) / n / rate
        if n > local:
            outside = sent * (n - local) / n / (self.platform.nic_bandwidth * self.network)
        return max(inside, outside) + self.hop * (1 + _NODE_HOPS * math.log2(n / local))

    def exchange(self, moved: float, ranks: int, stride: int) -> float:
        """Seconds of one message to each of a chain's two neighbours, at its slowest rank.

        The chain has ``ranks`` members ``stride`` apart. Where it leaves a domain, some ranks
        have a neighbour across the network, or two where a domain holds one rank of it. As many
        devices of a node send at once as the ranks of the chain's place at its edge.

        Args:
            moved: bytes of a message.
            ranks, stride: of the chain.
        """
        near = moved / (self.platform.peer_bandwidth * self.link) + self.hop
        if stride * ranks <= self.platform.domain_devices:
            return 2.0 * near
        rate = self.platform.network_bandwidth(stride) * self.network
        far = moved / rate + 2.0 * self.hop
        return far + (near if 2 * stride <= self.platform.domain_devices else far)

    def reach(self, ranks: int, stride: int) -> int:
        """What ``exchange`` asks of a stride: equal numbers cost the same."""
        if stride * ranks <= self.platform.domain_devices:
            return 0
        return min(stride, self.platform.domain_devices)
