"""Where the ranks meet: rank 0 listens on a free port and MPI carries the address.

No address comes from the environment and no port is fixed: a fallback to localhost makes
every node a world of its own, and a port derived from a job id collides. Rank 0 offers all
its addresses, every rank says which of them it can reach, and the first that all can is taken.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpctrain.errors import ImpossibleError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

TIMEOUT = timedelta(seconds=30)
_PROBE_SECONDS = 3.0
# Interfaces of fast fabrics first, then wired ones; containers' bridges reach nobody.
_PREFERENCE = ("hsn", "ib", "eth", "en", "bond", "")
_NEVER = ("docker", "virbr", "veth", "br-", "cni", "podman")


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store all ranks are connected to, and the interface this rank uses to reach it."""

    store: TCPStore
    address: str
    port: int
    interface: str


def meet(comm: Any, host: str, interface: str | None = None) -> Meeting:
    """Connect every rank of ``comm`` to one TCPStore.

    Args:
        comm: MPI communicator.
        host: this rank's host name, for messages.
        interface: the only interface to use, where the user named one.

    Raises:
        ImpossibleError: on every rank, when no address of rank 0 is reachable by all.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    hosts = comm.allgather(socket.gethostname())
    several = len(set(hosts)) > 1
    server = None
    offer: Any = None
    if comm.rank == 0:
        server = TCPStore(
            "0.0.0.0",  # noqa: S104  the nonce below is what lets a client in
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=TIMEOUT,
        )
        nonce = uuid.uuid4().hex
        server.set("hpctrain", nonce)
        offer = (server.port, _addresses(several, interface), nonce)
    port, addresses, nonce = comm.bcast(offer)
    reached = [address for _, address in addresses if _reaches(address, port)]
    everyone = comm.allgather(reached)
    common = [a for _, a in addresses if all(a in reachable for reachable in everyone)]
    if not common:
        raise ImpossibleError(_unreachable(addresses, port, hosts, everyone))
    address = common[0]
    store = server or TCPStore(address, port, is_master=False, timeout=TIMEOUT)
    found = store.get("hpctrain").decode()
    strangers = [hosts[r] for r, same in enumerate(comm.allgather(found == nonce)) if not same]
    if strangers:
        raise ImpossibleError(
            f"rank 0's address {address}:{port} belongs to another job as seen from "
            f"{', '.join(sorted(set(strangers)))}",
            hint="set GLOO_SOCKET_IFNAME in the job's env to the interface that joins the nodes",
        )
    return Meeting(store, address, port, interface or interface_towards(address, port))


def _addresses(several_hosts: bool, only: str | None) -> list[tuple[str, str]]:
    """(interface, IPv4 address) of this host, best first."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, entries in psutil.net_if_addrs().items():
        if name not in up or (only is not None and name not in only.split(",")):
            continue
        if only is None and name.startswith(_NEVER):
            continue
        found += [(name, entry.address) for entry in entries if entry.family == socket.AF_INET]

    def rank(item: tuple[str, str]) -> tuple[bool, int]:
        name, address = item
        loopback = ipaddress.ip_address(address).is_loopback
        # One host: loopback is always there and never leaves it. Several: the last resort,
        # right only where they are really one (several slurmd on a test machine).
        return (
            loopback == several_hosts,
            next(i for i, prefix in enumerate(_PREFERENCE) if name.startswith(prefix)),
        )

    return sorted(found, key=rank)


def _reaches(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), _PROBE_SECONDS):
        return True
    return False


def interface_towards(address: str, port: int) -> str:
    """The local interface that a packet to ``address`` leaves by."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        own = probe.getsockname()[0]
    if ipaddress.ip_address(own).is_loopback:
        return "lo"
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in entries):
            return name
    return "lo"


def _unreachable(
    addresses: list[tuple[str, str]], port: int, hosts: list[str], reached: list[list[str]]
) -> str:
    lines = [f"no address of rank 0 (host {hosts[0]}, port {port}) is reachable from all ranks:"]
    if not addresses:
        lines.append("  rank 0 has no IPv4 address on an interface that is up")
    for interface, address in addresses:
        missing = sorted({hosts[r] for r, seen in enumerate(reached) if address not in seen})
        lines.append(f"  {address} ({interface}): not from {', '.join(missing)}")
    lines.append(
        "  open a port range between the nodes, or name the interface that joins them with "
        "GLOO_SOCKET_IFNAME in the job's env"
    )
    return "\n".join(lines)
