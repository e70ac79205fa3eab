"""Sockets between the ranks' background threads, which MPI's calls are not for.

Every rank listens, and knows after one exchange at the start where the others listen. Who
connects shows a token that rank 0 drew and MPI carried.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from hpctrain.errors import CheckpointError
from hpctrain.io.comm import Communicator, fault_text

LARGEST_MESSAGE = 1 << 30
_TIMEOUT = 60.0
_LENGTH = struct.Struct("!Q")
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a rank listens.

    Attributes:
        node: number of its node.
        addresses: IPv4 addresses of its host, the loopback one last.
        port: the same at all of them.
    """

    node: int
    addresses: tuple[str, ...]
    port: int


class Links:
    """A rank's listener and its ways to the others; made by all ranks at once.

    Args:
        comm: all ranks; used here and never again.
        node: number of this rank's node.
        take: called in a thread of its own with each connection; what it raises is told to the
            other side, which hears ``ok`` otherwise.

    Attributes:
        peers: where every rank listens.
    """

    def __init__(
        self, comm: Communicator, node: int, take: Callable[[socket.socket], None]
    ) -> None:
        self._take = take
        self._listener = socket.create_server(("", 0), backlog=64)
        port = self._listener.getsockname()[1]
        own = Listening(node, tuple(own_addresses()), port)
        self.peers: list[Listening] = comm.allgather(own)
        self._token: bytes = comm.bcast(secrets.token_bytes(_TOKEN_BYTES))
        self._known: dict[int, str] = {}
        self._closed = False
        threading.Thread(target=self._serve, name="checkpoint-links", daemon=True).start()

    def connect(self, rank: int) -> socket.socket:
        """A connection to a rank.

        Raises:
            OSError: it cannot be reached at any of its addresses.
        """
        peer = self.peers[rank]
        known = self._known.get(rank)
        failure: OSError | None = None
        for address in peer.addresses if known is None else (known,):
            try:
                link = socket.create_connection((address, peer.port), timeout=3.0)
            except OSError as error:
                failure = error
                continue
            link.settimeout(_TIMEOUT)
            self._known[rank] = address
            link.sendall(self._token)
            return link
        raise failure or OSError("no address")

    def close(self) -> None:
        """Listen no more."""
        self._closed = True
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            link.settimeout(_TIMEOUT)
            token = bytearray(_TOKEN_BYTES)
            fill(link, memoryview(token))
            if not hmac.compare_digest(bytes(token), self._token):
                return
            try:
                self._take(link)
                answer = "ok"
            except OSError as error:
                answer = fault_text(error)
            except (CheckpointError, ValueError) as error:
                answer = str(error)
            send(link, answer.encode())


def hear(link: socket.socket) -> str | None:
    """Wait for the other side's answer; None where all is well there, what is wrong otherwise.

    Raises:
        OSError: there is none.
    """
    answer = receive(link, 1 << 16).decode(errors="replace")
    return None if answer == "ok" else answer


def own_addresses() -> list[str]:
    """IPv4 addresses of this host, the loopback one last."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    return sorted(dict.fromkeys(found), key=lambda text: text.startswith("127."))


def send(link: socket.socket, data: bytes) -> None:
    """A message with its length in front.

    Raises:
        OSError: it could not be sent.
    """
    link.sendall(_LENGTH.pack(len(data)))
    link.sendall(data)


def receive(link: socket.socket, limit: int) -> bytes:
    """What :func:`send` sent.

    Raises:
        OSError: the connection broke, or more than ``limit`` bytes were announced.
    """
    head = bytearray(_LENGTH.size)
    fill(link, memoryview(head))
    (count,) = _LENGTH.unpack(head)
    if count > limit:
        raise OSError(f"{count} bytes announced")
    data = bytearray(count)
    fill(link, memoryview(data))
    return bytes(data)


def fill(link: socket.socket, view: memoryview) -> None:
    """Receive as many bytes as fit.

    Raises:
        OSError: the connection broke.
    """
    while view:
        count = link.recv_into(view)
        if count == 0:
            raise OSError("the other side closed the connection")
        view = view[count:]
