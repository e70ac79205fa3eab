"""Hosts with a network of their own behind rate-limited links, on this one machine.

Each host is a set of Linux namespaces: network, hostname, mounts (its own /etc/hosts, /dev/shm
and /proc), System V IPC and processes. One Ethernet link joins it to a switch, which is a
namespace too, and both directions of the link are limited to a rate. What is slow between nodes
and fast within one is therefore really so, and a test can measure it::

    with Hosts(2, rate="200mbit") as hosts:
        done = hosts.run(1, "hostname")
        output = hosts.mpiexec([sys.executable, "-m", "mpi4py", "ring.py"], per_host=2)

Rates are limited; delay is not added. Files are shared by all hosts, as on a parallel file
system. Switch and hosts have no name on this machine; all that can be seen of them is one link
at its end, with a random name and a random network 10.x.y.0/24, so instances coexist. A host is
held up by its first process: when that is gone, so are its other processes, its mounts and its
links. These first processes have a :class:`~hpctrain.testing.keeper.Kept` each and do not
outlive the Python process that started them.

Namespaces need root; or an ordinary user runs the tests inside
``unshare -Unm --map-current-user --keep-caps``.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from types import TracebackType

from hpctrain.errors import RankFailedError, UsageError
from hpctrain.testing.commands import clean_environment, run_command, search_path
from hpctrain.testing.keeper import Kept

_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount", "hostname", "env")
_MAX_HOSTS = 250
_UP_S = 20.0
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

# First process of a host. The number that the machine knows it by is in the machine's /proc,
# which is still mounted when it starts. Ignoring SIGCHLD makes the kernel reap orphans.
_INIT = """\
read -r pid rest </proc/self/stat
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 shm /dev/shm
mount --bind "$2" /etc/hosts
hostname "$1"
echo "$pid" >"$3.new"
mv "$3.new" "$3"
exec env --ignore-signal=CHLD sleep infinity
"""

# Called by mpiexec as it would call ssh: options, host, command line for a shell.
_REMOTE_SHELL = """\
#!/bin/sh
while :; do case "$1" in -*) shift;; *) break;; esac; done
host=$1
shift
read -r pid <{root}/"$host".pid || exit 255
exec {enter} sh -c "$*"
"""


_UNSHARE = (
    "unshare", "--uts", "--mount", "--propagation=private", "--ipc", "--pid", "--fork",
    "--kill-child",
)  # fmt: skip
_ENTER = ("--uts", "--mount", "--ipc", "--pid")


def unavailable() -> str | None:
    """Why no hosts can be made on this machine, or None where they can."""
    if sys.platform != "linux":
        return f"namespaces need Linux, this is {sys.platform}"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=search_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt install iproute2 util-linux)"
    # Everything that start() needs and a kernel or a container may refuse.
    trial = (
        "ip link add br0 type bridge && ip link add veth0 type veth peer name veth1 && "
        "tc qdisc add dev veth0 root tbf rate 1gbit burst 1mb latency 50ms && "
        "mount -t proc proc /proc && mount -t tmpfs shm /dev/shm"
    )
    done = subprocess.run(
        [*_UNSHARE, "--net", "sh", "-c", trial],
        env=clean_environment({}),
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    if done.returncode != 0:
        return f"no permission for namespaces (needs root): {done.stderr.strip()}"
    return None


def rate_bit_s(rate: str) -> float:
    """Bits a second of a rate as tc writes it: ``200mbit``, ``1.5gbit``.

    Raises:
        UsageError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if match is None or float(match[1]) == 0:
        raise UsageError(f"rate {rate!r} is none; write for example 200mbit or 1gbit")
    return float(match[1]) * _UNITS[match[2]]


class Hosts:
    """A few hosts on one switch: a context manager, or ``start()`` and ``stop()``.

    Hosts are counted from 1 and called node1 … nodeN.

    Args:
        n: number of hosts.
        rate: rate of each link, either direction, as tc writes it.
        network: False leaves all of them in this machine's network (their names resolve to
            127.0.0.1); hostname, /dev/shm, IPC and processes are separate still.
        root: directory for files of their own, kept after ``stop()``. Without it a new one
            under /tmp, removed by ``stop()``.
        env: variables added to :attr:`env`.

    Attributes:
        names: names of the hosts.
        network: as given.
        uplink: name of this machine's link to the switch.

    Raises:
        UsageError: ``n`` or ``rate`` is out of range.
    """

    def __init__(
        self,
        n: int = 2,
        *,
        rate: str = "200mbit",
        network: bool = True,
        root: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if not 1 <= n <= _MAX_HOSTS:
            raise UsageError(f"Hosts: {n} hosts; a switch has 1 to {_MAX_HOSTS}")
        rate_bit_s(rate)
        self.names = tuple(f"node{i}" for i in range(1, n + 1))
        self.network = network
        self._rates = dict.fromkeys(range(1, n + 1), rate)
        self._temporary = root is None
        self._root = root
        self._extra_env = dict(env or {})
        self._switch: Kept | None = None
        self._hosts: dict[int, Kept] = {}
        self.uplink = f"veth{secrets.token_hex(5)}"
        self._net = "127.0.0"

    @property
    def root(self) -> Path:
        """Directory of the hosts' own files."""
        if self._root is None:
            raise UsageError("Hosts: not started")
        return self._root

    @property
    def env(self) -> dict[str, str]:
        """A whole environment for programs on the hosts; nothing of the caller's but PATH."""
        return clean_environment(self._extra_env)

    @property
    def machine_address(self) -> str:
        """Address at which the hosts reach this machine; its link has no rate limit."""
        return f"{self._net}.254" if self.network else "127.0.0.1"

    def address(self, i: int) -> str:
        """IPv4 address of host ``i``."""
        return f"{self._net}.{i}" if self.network else "127.0.0.1"

    @property
    def addresses(self) -> str:
        """Addresses of all hosts in Slurm's bracket form."""
        return f"{self._net}.[1-{len(self.names)}]" if self.network else "127.0.0.1"

    # -- start and stop ---------------------------------------------------------------------

    def __enter__(self) -> Hosts:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> Hosts:
        """Start switch and hosts.

        Raises:
            UsageError: this machine or user cannot have them; says why.
        """
        reason = unavailable()
        if reason is not None:
            raise UsageError(f"Hosts: {reason}")
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="hpctrain-hosts-", dir="/tmp"))
        self._root.mkdir(exist_ok=True)
        self._root.chmod(0o755)
        try:
            if self.network:
                self._start_switch()
            self._write_files()
            for i in range(1, len(self.names) + 1):
                self.power_on(i)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Remove hosts and switch with all processes on them; remove a temporary ``root``."""
        while self._hosts:
            self._hosts.popitem()[1].kill()
        if self._switch is not None:
            # The kernel removes links of a dead namespace too, but takes its time.
            self._ip("link", "del", self.uplink, check=False)
            self._switch.kill()
            self._switch = None
        if self._temporary and self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def _start_switch(self) -> None:
        # Its number is that of its first process; unshare and env replace themselves.
        pid_file = self.root / "switch.pid"
        pid_file.unlink(missing_ok=True)
        script = f"echo $$ >{pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep infinity"
        self._switch = self._keep("switch", ["unshare", "--net", "sh", "-c", script])
        pid = self._pid("switch", self._switch)
        self._in_switch("ip", "link", "add", "br0", "type", "bridge")
        self._in_switch("ip", "link", "set", "br0", "up")
        self._net = self._free_net()
        self._ip("link", "add", self.uplink, "type", "veth", "peer", "name", "up0", "netns", pid)
        self._in_switch("ip", "link", "set", "up0", "master", "br0", "up")
        self._ip("addr", "add", f"{self._net}.254/24", "dev", self.uplink)
        self._ip("link", "set", self.uplink, "up")

    def _free_net(self) -> str:
        """First three bytes of a 10.x.y.0/24 that overlaps no route of this machine."""
        shown = json.loads(self._ip("-j", "-4", "route", "show", "table", "all").stdout or "[]")
        routes = [ip_network(one["dst"]) for one in shown if one.get("dst", "default")[0].isdigit()]
        for _ in range(1000):
            net = f"10.{random.randrange(256)}.{random.randrange(256)}"  # noqa: S311
            if not any(ip_network(f"{net}.0/24").overlaps(route) for route in routes):
                return net
        raise UsageError("Hosts: found no free network 10.x.y.0/24; all of 10.0.0.0/8 is routed")

    def _write_files(self) -> None:
        machine = socket.gethostname().partition(".")[0]
        lines = ["127.0.0.1 localhost", f"{self.machine_address} {machine}"]
        lines += [f"{self.address(i)} {name}" for i, name in enumerate(self.names, start=1)]
        (self.root / "hosts").write_text("\n".join(lines) + "\n")
        # Quoted by shlex, but for the one variable that the shell has to fill in.
        enter = shlex.join(self._enter_tokens("PID")).replace("PID", '"$pid"')
        shell = self.root / "remote-shell"
        shell.write_text(_REMOTE_SHELL.format(root=shlex.quote(str(self.root)), enter=enter))
        shell.chmod(0o755)

    def _enter_tokens(self, pid: str) -> list[str]:
        net = ["--net"] if self.network else []
        # nsenter forks to enter the process namespace; its child shall not outlive it.
        die_too = ["setpriv", "--pdeathsig", "KILL"]
        return ["nsenter", "--target", pid, *_ENTER, *net, f"--wdns={self.root}", *die_too]

    def _keep(self, name: str, argv: Sequence[str]) -> Kept:
        return Kept(argv, env=self.env, log=self.root / f"{name}.out", cwd=self.root)

    def _pid(self, name: str, kept: Kept) -> str:
        """Number of the first process of a host or the switch, once that is ready."""
        file = self.root / f"{name}.pid"
        deadline = time.monotonic() + _UP_S
        while not file.exists():
            if kept.returncode is not None or time.monotonic() > deadline:
                raise UsageError(f"Hosts: {name} did not start", hint=kept.log.read_text())
            time.sleep(0.005)
        return file.read_text().strip()

    def _ip(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self._run(["ip", *argv], check=check)

    def _in_switch(self, *argv: str) -> None:
        assert self._switch is not None
        self._run(["nsenter", "--target", self._pid("switch", self._switch), "--net", *argv])

    def _run(
        self, argv: Sequence[str], *, check: bool = True, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        return run_command(
            argv, env=self.env, cwd=self.root, error=RankFailedError, check=check, timeout=timeout
        )

    # -- what happens to hosts --------------------------------------------------------------

    def power_on(self, i: int) -> None:
        """Start host ``i``, with nothing in its memory."""
        name = self.names[i - 1]
        pid_file = self.root / f"{name}.pid"
        pid_file.unlink(missing_ok=True)
        net = ["--net"] if self.network else []
        init = ["sh", "-c", _INIT, "init", name, str(self.root / "hosts"), str(pid_file)]
        self._hosts[i] = self._keep(name, [*_UNSHARE, *net, *init])
        pid = self._pid(name, self._hosts[i])
        if not self.network:
            return
        self._in_switch("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0",
                        "netns", pid)  # fmt: skip
        self._in_switch("ip", "link", "set", name, "master", "br0", "up")
        self._on(i, "ip", "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
        self._on(i, "ip", "link", "set", "lo", "up")
        self._on(i, "ip", "link", "set", "eth0", "up")
        self.set_rate(self._rates[i], i)

    def power_off(self, i: int) -> None:
        """Power failure of host ``i``: all its processes get SIGKILL, its link is gone."""
        self._hosts.pop(i).kill()
        (self.root / f"{self.names[i - 1]}.pid").unlink()

    def set_rate(self, rate: str, i: int | None = None) -> None:
        """Change the rate of the link of host ``i``, or of all of them, while they run.

        Args:
            rate: as tc writes it, for example ``1gbit``; holds for either direction.
            i: number of the host.

        Raises:
            UsageError: it is no rate, or the hosts have no network of their own.
        """
        self._need_network()
        # A bucket of 4 ms, a tick of the slowest usual kernel clock; at least one 64 KiB packet.
        burst = max(66_000, int(rate_bit_s(rate) / 8 * 0.004))
        shape = ["root", "tbf", "rate", rate, "burst", str(burst), "latency", "50ms"]
        for k in [i] if i is not None else list(self._hosts):
            self._rates[k] = rate
            self._on(k, "tc", "qdisc", "replace", "dev", "eth0", *shape)
            self._in_switch("tc", "qdisc", "replace", "dev", self.names[k - 1], *shape)

    def set_link(self, i: int, *, up: bool) -> None:
        """Pull or plug the cable of host ``i``; its processes live on."""
        self._need_network()
        self._in_switch("ip", "link", "set", self.names[i - 1], "up" if up else "down")

    def _need_network(self) -> None:
        if not self.network:
            raise UsageError("Hosts: network=False, so there are no links")

    # -- programs on hosts ------------------------------------------------------------------

    def command(self, i: int, *argv: str) -> list[str]:
        """Tokens that run a program on host ``i``, in :attr:`root`."""
        if i not in self._hosts:
            raise UsageError(f"Hosts: host {i} is not up, these are: {sorted(self._hosts)}")
        return [*self._enter_tokens(self._pid(self.names[i - 1], self._hosts[i])), *argv]

    def _on(self, i: int, *argv: str) -> None:
        self._run(self.command(i, *argv))

    def run(
        self, i: int, *argv: str, timeout: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on host ``i`` and capture its output.

        Raises:
            RankFailedError: it failed or ran over ``timeout`` seconds; says what it printed.
            UsageError: the host is not up.
        """
        return self._run(self.command(i, *argv), timeout=timeout, check=check)

    def launcher(self, per_host: int = 1, hosts: Sequence[int] | None = None) -> list[str]:
        """Tokens that start a program as MPI ranks on hosts, ``per_host`` after each other.

        They are for MPICH's mpiexec, run on this machine, and fit
        :func:`hpctrain.testing.ranks.run_ranks`.

        Args:
            per_host: ranks of a host.
            hosts: numbers of the hosts; all by default.
        """
        names = [self.names[i - 1] for i in hosts or range(1, len(self.names) + 1)]
        return [
            shutil.which("mpiexec", path=search_path()) or "mpiexec",
            "-launcher", "ssh", "-launcher-exec", str(self.root / "remote-shell"),
            "-localhost", self.machine_address,
            "-hosts", ",".join(f"{name}:{per_host}" for name in names),
            "-n", str(per_host * len(names)),
        ]  # fmt: skip

    def mpiexec(
        self, argv: Sequence[str], *, per_host: int = 1, timeout: float = 120.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as MPI ranks, ``per_host`` on every host, and capture its output.

        Raises:
            RankFailedError: it failed or ran over ``timeout`` seconds; says what it printed.
        """
        return self._run([*self.launcher(per_host), *argv], timeout=timeout, check=check)
