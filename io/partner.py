"""A copy on another node, sent over a socket in the background.

Each rank listens, and knows after one exchange at the start where its partner listens: the rank
of the same place on the next node. A copy is sent straight out of the buffer and lies at the
partner as any other share: images under the checkpoint's file names and a part. MPI is not
used, for its calls belong to the training thread.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from hpctrain.errors import CheckpointError
from hpctrain.io.comm import Communicator, fault_text
from hpctrain.io.directory import replace_durably
from hpctrain.io.extents import write_bytes
from hpctrain.io.flush import Abandoned, Pace
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
_TIMEOUT = 60.0
_LENGTH = struct.Struct("!Q")
_LARGEST_HEADER = 1 << 30


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
        self._listener = socket.create_server(("", 0), backlog=16)
        port = self._listener.getsockname()[1]
        nodes = comm.allgather((node, own_addresses(), port))
        self._token = comm.bcast(secrets.token_bytes(32))
        numbers = [number for number, _, _ in nodes]
        partner = partner_of(comm.rank, numbers)
        if partner is None:
            self._listener.close()
            raise CheckpointError(
                "a copy on a partner node needs two nodes, and all ranks are on one",
                hint="leave checkpoint.partner.every out",
            )
        self._leads = comm.rank == numbers.index(node)
        self._node = numbers[partner]
        _, self._addresses, self._port = nodes[partner]
        self._closed = False
        threading.Thread(target=self._serve, name="checkpoint-partner", daemon=True).start()

    def newest_sequence(self) -> int:
        return max((part.sequence for _, part in held_parts(self.root)), default=0)

    def write(self, snapshot: Snapshot, hurry: Callable[[], bool]) -> None:
        """Send the share; returns when the partner has made it durable.

        Raises:
            OSError, CheckpointError, Abandoned: it could not be sent or stored.
        """
        plan = snapshot.staging.plan
        pieces = [(piece.name, piece.start, piece.bytes) for piece in plan.pieces]
        head = {
            "rank": self._rank,
            "folder": folder_name(snapshot.step, snapshot.sequence),
            "pieces": pieces,
        }
        pace = Pace(self._bandwidth, hurry)
        try:
            with self._connect() as link:
                link.sendall(self._token)
                _send(link, json.dumps(head).encode())
                for index, piece in enumerate(plan.pieces):
                    view = snapshot.staging.images[index].data
                    for first in range(0, piece.bytes, _BLOCK):
                        end = min(first + _BLOCK, piece.bytes)
                        snapshot.wait_ready(index, end)
                        if not snapshot.wanted():
                            raise Abandoned
                        link.sendall(view[first:end])
                        pace.wrote(end - first)
                _send(link, snapshot.wait_sealed().to_bytes())
                answer = _receive(link, 1 << 16).decode(errors="replace")
        except OSError as error:
            raise CheckpointError(f"partner on node {self._node}: {fault_text(error)}") from error
        if answer != "ok":
            raise CheckpointError(f"partner on node {self._node}: {answer}")

    def _connect(self) -> socket.socket:
        failure: OSError | None = None
        for address in self._addresses:
            try:
                link = socket.create_connection((address, self._port), timeout=3.0)
            except OSError as error:
                failure = error
                continue
            link.settimeout(_TIMEOUT)
            self._addresses = [address]
            return link
        raise failure or OSError("no address")

    def retain(self, snapshot: Snapshot) -> list[str]:
        return remove_old(self.root, self.keep) if self._leads else []

    def close(self, *, forget: bool) -> None:
        self._closed = True
        self._listener.close()
        if forget:
            remove_folder(self.root)

    # ---- receiving --------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._take, args=(link,), daemon=True).start()

    def _take(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            link.settimeout(_TIMEOUT)
            token = bytearray(32)
            _fill(link, memoryview(token))
            if not hmac.compare_digest(bytes(token), self._token):
                return
            try:
                self._store(link)
                answer = "ok"
            except OSError as error:
                answer = fault_text(error)
            except (CheckpointError, ValueError) as error:
                answer = str(error)
            _send(link, answer.encode())

    def _store(self, link: socket.socket) -> None:
        head: dict[str, Any] = json.loads(_receive(link, _LARGEST_HEADER))
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
                        _fill(link, part)
                        write_bytes(descriptor, part, start + first)
                    os.fsync(descriptor)
                except OSError as error:
                    raise OSError(error.errno, error.strerror or str(error), str(path)) from error
                finally:
                    os.close(descriptor)
            text = _receive(link, _LARGEST_HEADER)
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


def own_addresses() -> list[str]:
    """IPv4 addresses of this host, the loopback one last."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return sorted(dict.fromkeys(found), key=lambda text: text.startswith("127."))


def _send(link: socket.socket, data: bytes) -> None:
    link.sendall(_LENGTH.pack(len(data)))
    link.sendall(data)


def _receive(link: socket.socket, limit: int) -> bytes:
    head = bytearray(_LENGTH.size)
    _fill(link, memoryview(head))
    (count,) = _LENGTH.unpack(head)
    if count > limit:
        raise OSError(f"{count} bytes announced")
    data = bytearray(count)
    _fill(link, memoryview(data))
    return bytes(data)


def _fill(link: socket.socket, view: memoryview) -> None:
    while view:
        count = link.recv_into(view)
        if count == 0:
            raise OSError("the other side closed the connection")
        view = view[count:]
