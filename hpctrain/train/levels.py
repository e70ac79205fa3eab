"""Near levels of a job's checkpoints: where they lie on this node, and when each is due."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import ImpossibleError
from hpctrain.io.flush import WriteOptions
from hpctrain.io.parity import ParityTier
from hpctrain.io.partner import PartnerTier
from hpctrain.io.recover import Level
from hpctrain.io.tiers import MEMORY, NODE, PARITY, PARTNER, MemoryTier, NodeTier, Tier

if TYPE_CHECKING:
    from hpctrain.runtime.context import RankContext
    from hpctrain.spec.checkpoint import CheckpointSpec


class Levels:
    """The levels nearer than the parallel file system that a job asks for; made by all ranks.

    Args:
        root: directory of the checkpoints; two runs with different ones never meet.
        settings: the job's section ``checkpoint``.
        context: of this rank.
        write: how files are written.

    Raises:
        ImpossibleError: a partner or a set is asked for and there is only one node.
    """

    def __init__(
        self, root: Path, settings: CheckpointSpec, context: RankContext, write: WriteOptions
    ) -> None:
        self._settings = settings
        asked = {
            MEMORY: settings.memory.every,
            NODE: settings.node.every,
            PARTNER: settings.partner.every,
            PARITY: settings.parity.every,
        }
        self._every = {name: every for name, every in asked.items() if every is not None}
        self._rank = context.rank
        self._node = context.node
        self._leads = context.local_rank == 0
        self._write = write
        for name in (PARTNER, PARITY):
            if name in self._every and context.nodes < 2:
                raise ImpossibleError(
                    f"checkpoint.{name}: what is kept on other nodes needs two nodes, the job has "
                    "one",
                    hint=f"set checkpoint.{name}.every: null",
                )
        key = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=8).hexdigest()
        self._folder = f"hpctrain-{os.getuid()}-{key}"
        if self.any and _share_a_host(context):
            self._folder += f"-node{context.node}"

    @property
    def any(self) -> bool:
        """Whether the job asks for one."""
        return bool(self._every)

    def due(self, step: int) -> set[str]:
        """Levels that are to hold a checkpoint of ``step``."""
        return {name for name, every in self._every.items() if step % every == 0}

    def near(self) -> list[Level]:
        """Where to look for what an earlier incarnation left."""
        return [Level(name, self._root(name)) for name in self._every]

    def _root(self, name: str) -> Path:
        settings = self._settings
        base = settings.memory.path
        if name == NODE:
            base = settings.node.path or base
        elif name == PARTNER:
            base = settings.partner.path or settings.node.path or base
        elif name == PARITY:
            base = settings.parity.path or settings.node.path or base
        return Path(base) / self._folder / name

    def tiers(self, comm: Any) -> list[Tier]:
        """The levels to save to, nearest first; collective."""
        asked = self._every
        settings = self._settings
        found: list[Tier] = []
        if MEMORY in asked:
            found.append(MemoryTier(self._root(MEMORY), self._rank, leads=self._leads))
        if NODE in asked:
            found.append(
                NodeTier(
                    self._root(NODE),
                    self._rank,
                    leads=self._leads,
                    keep=settings.node.keep,
                    options=dataclasses.replace(self._write, check_space=False),
                )
            )
        if PARITY in asked:
            found.append(
                ParityTier(
                    self._root(PARITY),
                    comm,
                    self._node,
                    size=settings.parity.nodes,
                    leads=self._leads,
                    keep=settings.parity.keep,
                    options=dataclasses.replace(self._write, check_space=False),
                )
            )
        if PARTNER in asked:
            found.append(
                PartnerTier(
                    self._root(PARTNER),
                    comm,
                    self._node,
                    keep=settings.partner.keep,
                    bandwidth=settings.bandwidth,
                )
            )
        return found


def _share_a_host(context: RankContext) -> bool:
    """Whether two nodes of the job are one machine, as in tests: each needs its own folders."""
    pairs = set(context.comm.allgather((context.node, os.uname().nodename)))
    hosts = [host for _, host in pairs]
    return len(hosts) != len(set(hosts))
