"""A machine: what a node holds, how nodes are joined, how jobs are launched and limited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpctrain.errors import ImpossibleError
from hpctrain.machine.blocks import Fact, Part, facts
from hpctrain.machine.hardware import Affinity, LinkClass, LinkKind, Links, Network, NodeTopology
from hpctrain.machine.launch import Environment, EnvVar, Launch, Option
from hpctrain.machine.measured import Measured
from hpctrain.machine.scheduling import Scheduling
from hpctrain.machine.storage import Containers, Storage


class Machine(Part):
    """One machine, as a site file describes it or as the local host is.

    Attributes:
        name: the name it is asked for by.
        aliases: further names.
        title, operator: for people.
        kind: ``site`` has a scheduler with limits; ``generic`` is hardware only; ``local`` is
            the host we stand on.
        oversubscribe: more ranks than devices may share a node.
        node, network, links, affinity, launch, rendering, scheduling, storage, containers:
            the blocks, each with its provenance (the ``environment`` block of a file is the
            attribute ``rendering``, since ``environment()`` renders it).
        measured: what `hpctrain calibrate` measured on a node; None where nobody did.
        notes: what fits no block.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    aliases: tuple[str, ...] = ()
    title: str
    operator: str | None = None
    kind: Literal["site", "generic", "local"] = "site"
    oversubscribe: bool = False
    node: NodeTopology
    network: Network
    links: Links = Links()
    affinity: Affinity
    launch: Launch
    rendering: Environment = Field(alias="environment")
    scheduling: Scheduling
    storage: Storage
    containers: Containers | None = None
    measured: Measured | None = None
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _slots_exist(self) -> Machine:
        if self.node.devices is None and self.kind != "local":
            raise ValueError("node.devices: only the local machine may leave it open")
        count = self.node.devices
        for index, slot in enumerate(self.affinity.slots):
            if count is not None and slot.device >= count:
                raise ValueError(
                    f"affinity.slots.{index}.device is {slot.device}, the node has devices 0 to "
                    f"{count - 1}"
                )
        named = [slot.device for slot in self.affinity.slots]
        if len(set(named)) != len(named):
            raise ValueError(f"affinity.slots give one device to two ranks: {named}")
        return self

    # ---- sizes -----------------------------------------------------------------------------

    @property
    def devices_per_node(self) -> int:
        """Devices of a node, which is the number of ranks that a full node runs."""
        assert self.node.devices is not None, "the local machine was not fitted to its host"
        return self.node.devices

    @property
    def cores_per_rank(self) -> int:
        """What ``--cpus-per-task`` gets on a full node, in the units that the site counts."""
        if self.affinity.cpus_per_task is not None:
            return self.affinity.cpus_per_task
        cores = self.node.usable_cores or self.node.cores or self.devices_per_node
        return max(1, cores // self.devices_per_node)

    def cores_for(self, ranks_per_node: int) -> int:
        """``--cpus-per-task`` for that many ranks a node.

        Fewer ranks than devices keep the cores next to their devices, except on the local
        machine, where they share all of them.
        """
        full = self.cores_per_rank * self.devices_per_node
        if ranks_per_node > self.devices_per_node or self.kind == "local":
            return max(1, full // ranks_per_node)
        return self.cores_per_rank

    def check_ranks_per_node(self, ranks_per_node: int) -> None:
        """Refuses more ranks a node than devices, where a device belongs to one rank.

        Raises:
            ImpossibleError: too many ranks.
        """
        if ranks_per_node > self.devices_per_node and not self.oversubscribe:
            raise ImpossibleError(
                f"machine {self.name}: {ranks_per_node} ranks a node, but a node has "
                f"{self.devices_per_node} devices and each rank owns one",
                hint=f"nearest possible: {self.devices_per_node} ranks a node",
            )

    # ---- places and links ------------------------------------------------------------------

    def slot_devices(self, ranks_per_node: int | None = None) -> tuple[int, ...]:
        """Device number of each local rank of a node."""
        count = self.devices_per_node
        ranks = count if ranks_per_node is None else ranks_per_node
        order = [slot.device for slot in self.affinity.slots] or list(range(count))
        if ranks <= len(order):
            return tuple(order[:ranks])
        return tuple(order[local * len(order) // ranks] for local in range(ranks))

    def slot_packages(self, ranks_per_node: int | None = None) -> tuple[int, ...]:
        """Package number of each local rank of a node."""
        return tuple(self.node.package_of(d) for d in self.slot_devices(ranks_per_node))

    def slot_nics(self, ranks_per_node: int | None = None) -> tuple[int, ...]:
        """Index of the network card of each local rank; 0 where the node lists none."""
        return tuple(self.node.nic_of(d) or 0 for d in self.slot_devices(ranks_per_node))

    def switch_groups(self, nodes: int) -> tuple[int, ...]:
        """Switch group of each of ``nodes`` consecutive nodes of the machine.

        An allocation is rarely consecutive: where Slurm's topology addresses are known,
        ``switch_groups_of`` (hpctrain.machine.probe) reads them. One group where the size of a
        group is unknown.
        """
        size = self.network.nodes_per_group or max(nodes, 1)
        return tuple(node // size for node in range(nodes))

    def link_class(
        self,
        rank_a: int,
        rank_b: int,
        ranks_per_node: int | None = None,
        *,
        groups: Sequence[int] | None = None,
    ) -> LinkKind:
        """The class of link between two ranks, numbered node by node.

        Args:
            rank_a, rank_b: global ranks.
            ranks_per_node: ranks of each node; None: one a device.
            groups: switch group of each node; None: see switch_groups.
        """
        per_node = ranks_per_node or self.devices_per_node
        (node_a, a), (node_b, b) = divmod(rank_a, per_node), divmod(rank_b, per_node)
        devices = self.slot_devices(per_node)
        if node_a == node_b:
            if devices[a] == devices[b]:
                return LinkKind.DEVICE
            same = self.node.package_of(devices[a]) == self.node.package_of(devices[b])
            return LinkKind.PACKAGE if same else LinkKind.NODE
        if groups is None:
            groups = self.switch_groups(max(node_a, node_b) + 1)
        if groups[node_a] != groups[node_b]:
            return LinkKind.GLOBAL
        return (
            LinkKind.RAIL
            if self._rail(devices[a]) == self._rail(devices[b])
            else (LinkKind.SWITCH_GROUP)
        )

    def _rail(self, device: int) -> int:
        nic = self.node.nic_of(device)
        return 0 if nic is None else self.node.nics[nic].rail

    def link(self, kind: LinkKind) -> LinkClass:
        """Speed of a class of links, from the file or, where it does not say, derived.

        Between nodes an unstated class has the speed of a network card, which for ``global`` is
        only an upper bound; inside a package it is the node's; on one device its memory's.
        """
        stated = self.links.get(kind)
        if stated is not None and stated.bandwidth is not None:
            return stated
        latency = None if stated is None else stated.latency
        if kind is LinkKind.DEVICE:
            return self._derived(self.node.device.memory_bandwidth, "memory of the device")
        if kind is LinkKind.PACKAGE:
            return self.link(LinkKind.NODE)
        if kind is LinkKind.NODE:
            return stated or self._derived(None, "not stated")
        rates = [nic.bandwidth for nic in self.node.nics if nic.bandwidth is not None]
        found = self._derived(min(rates, default=None), "network card of the node")
        update: dict[str, object] = {"latency": latency}
        if kind is LinkKind.GLOBAL:
            update["confidence"] = "low"
            update["notes"] = ("an upper bound: the file does not say how groups are joined",)
        return found.model_copy(update=update)

    def _derived(self, bandwidth: float | None, what: str) -> LinkClass:
        origin = self.node.provenance()
        return LinkClass(
            bandwidth=bandwidth,
            source=f"{what}: {origin.source}",
            as_of=origin.as_of,
            confidence=origin.confidence,
        )

    def bandwidth(
        self,
        rank_a: int,
        rank_b: int,
        ranks_per_node: int | None = None,
        *,
        groups: Sequence[int] | None = None,
    ) -> float | None:
        """Bytes/s one way between two ranks with nothing else on the link; None if unknown.

        Arguments as for link_class. Where cards of different numbers meet only inside a node
        (``network.rail_only``) the slower of the two hops counts.
        """
        kind = self.link_class(rank_a, rank_b, ranks_per_node, groups=groups)
        speed = self.link(kind).bandwidth
        if self.network.rail_only and kind in (LinkKind.SWITCH_GROUP, LinkKind.GLOBAL):
            inside = self.link(LinkKind.NODE).bandwidth
            if speed is None or inside is None:
                return None
            return min(speed, inside)
        return speed

    # ---- what is rendered ------------------------------------------------------------------

    @property
    def mpi(self) -> str | None:
        """Type for ``srun --mpi=``; None keeps the site's default."""
        return self.launch.mpi

    def environment(self, nodes: int, *, include_low: bool = False) -> list[EnvVar]:
        """Environment variables of a job of ``nodes`` nodes.

        Those of low confidence are left out unless asked for; ``low_confidence`` lists them.
        """
        return self.rendering.render(nodes, include_low=include_low)

    def srun_options(self, nodes: int, *, include_low: bool = False) -> list[Option]:
        """srun options beside those that the launcher renders itself; see environment."""
        return self.launch.options("srun", nodes, include_low=include_low)

    def sbatch_options(self, nodes: int, *, include_low: bool = False) -> list[Option]:
        """sbatch options beside those that the script renders itself; see environment."""
        return self.launch.options("sbatch", nodes, include_low=include_low)

    # ---- provenance ------------------------------------------------------------------------

    def facts(self) -> list[Fact]:
        """Every stated value with its source, date and confidence."""
        return list(facts(self))

    def low_confidence(self) -> list[Fact]:
        """The values that nothing may rely on without saying so."""
        return [fact for fact in self.facts() if fact.provenance.confidence == "low"]

    def fact(self, path: str) -> Fact:
        """One stated value by its dotted path.

        Raises:
            KeyError: nothing is stated there.
        """
        for fact in facts(self):
            if fact.path == path:
                return fact
        raise KeyError(path)
