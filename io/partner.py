"""A copy on another node, sent over a socket in the background.

The partner of a rank is the one of the same place on the next node. A copy is sent straight out
of the buffer and lies at the partner as any other share: images under the checkpoint's file
names and a part.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import CheckpointError
from hpctrain.io.comm import Communicator, fault_text
from hpctrain.io.directory import replace_durably
from hpctrain.io.extents import write_bytes
from hpctrain.io.flush import Abandoned, Pace
from hpctrain.io.links import LARGEST_MESSAGE, Links, fill, hear, receive, send
from hpctrain.io.parts import part_name
from hpctrain.io.snapshot import Snapshot
from hpctrain.io.tiers import (
    PARTNER,
    folder_name,
    held_parts,
    private_folder,
    remove_folder,
    remove_old,
)

_BLOCK = 4 << 20


class PartnerTier:
    """Sends this rank's share to a partner and keeps what others send. Made by all ranks at once.

    Args:
        root: the run's directory for copies, on this node.
        comm: all ranks; used here and never again.
        node: number of this rank's node.
        keep: newest copies kept.
        bandwidth: bytes a second sent at most.

    Raises:
        CheckpointError: there is only one node.
    """

    name = PARTNER

    def __init__(
        self,
        root: Path,
        comm: Communicator,
        node: int,
        *,
        keep: int = 1,
        bandwidth: float | None = None,
    ) -> None:
        self.root = root
        self.keep = keep
        self._rank = comm.rank
        self._bandwidth = bandwidth
        self._links = Links(comm, node, self._store)
        nodes = [peer.node for peer in self._links.peers]
        partner = partner_of(comm.rank, nodes)
        if partner is None:
            self._links.close()
            raise CheckpointError(
                "a copy on a partner node needs two nodes, and all ranks are on one",
                hint="leave checkpoint.partner.every out",
            )
        self._leads = comm.rank == nodes.index(node)
        self._partner = partner
        self._where = f"partner on node {nodes[partner]}"

    def newest_sequence(self) -> int:
        return max((part.sequence for _, part in held_parts(self.root)), default=0)

    def write(self, snapshot: Snapshot, hurry: Callable[[], bool]) -> None:
        """Send the share; returns when the partner has made it durable.

        Raises:
            CheckpointError, Abandoned: it could not be sent or stored.
        """
        plan = snapshot.staging.plan
        head = {
            "rank": self._rank,
            "folder": folder_name(snapshot.step, snapshot.sequence),
            "pieces": [(piece.name, piece.start, piece.bytes) for piece in plan.pieces],
        }
        pace = Pace(self._bandwidth, hurry)
        try:
            with self._links.connect(self._partner) as link:
                send(link, json.dumps(head).encode())
                for index, piece in enumerate(plan.pieces):
                    view = snapshot.staging.images[index].data
                    for first in range(0, piece.bytes, _BLOCK):
                        end = min(first + _BLOCK, piece.bytes)
                        snapshot.wait_ready(index, end)
                        if not snapshot.wanted():
                            raise Abandoned
                        link.sendall(view[first:end])
                        pace.wrote(end - first)
                send(link, snapshot.wait_sealed().to_bytes())
                fault = hear(link)
        except OSError as error:
            raise CheckpointError(f"{self._where}: {fault_text(error)}") from error
        if fault is not None:
            raise CheckpointError(f"{self._where}: {fault}")

    def retain(self, snapshot: Snapshot) -> list[str]:
        return remove_old(self.root, self.keep) if self._leads else []

    def close(self, *, forget: bool) -> None:
        self._links.close()
        if forget:
            remove_folder(self.root)

    def _store(self, link: socket.socket) -> None:
        head: dict[str, Any] = json.loads(receive(link, LARGEST_MESSAGE))
        folder = private_folder(self.root) / Path(head["folder"]).name
        folder.mkdir(exist_ok=True)
        buffer = memoryview(bytearray(_BLOCK))
        try:
            for name, start, size in head["pieces"]:
                path = folder / Path(name).name
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                try:
                    for first in range(0, size, _BLOCK):
                        part = buffer[: min(_BLOCK, size - first)]
                        fill(link, part)
                        write_bytes(descriptor, part, start + first)
                    os.fsync(descriptor)
                except OSError as error:
                    raise OSError(error.errno, error.strerror or str(error), str(path)) from error
                finally:
                    os.close(descriptor)
            text = receive(link, LARGEST_MESSAGE)
            replace_durably(folder / part_name(int(head["rank"])), text)
        except BaseException:
            # Half a copy is none; what other ranks sent into the same folder goes with it.
            shutil.rmtree(folder, ignore_errors=True)
            raise


def partner_of(rank: int, nodes: Sequence[int]) -> int | None:
    """The rank that keeps the copy of ``rank``: of the same place on the next node, counted
    round; None where there is one node.

    Args:
        rank: whose partner.
        nodes: number of each rank's node.
    """
    order = sorted(set(nodes))
    if len(order) < 2:
        return None
    own = nodes[rank]
    place = [r for r, number in enumerate(nodes) if number == own].index(rank)
    other = order[(order.index(own) + 1) % len(order)]
    members = [r for r, number in enumerate(nodes) if number == other]
    return members[place % len(members)]
