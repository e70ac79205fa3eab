"""A real Slurm cluster of several nodes on this one machine.

``slurmctld`` and one ``slurmd`` a node run beside each other with a munge, key, sockets, ports
and directory of their own. A cluster therefore needs no setup, touches no Slurm that may be
installed and running already, and several of them coexist. It works as root and as an ordinary
user, is up within a second or two, and answers to the real ``sbatch``, ``srun``, ``squeue``,
``scancel`` and ``sacct -c``::

    with SlurmCluster(nodes=2, cpus=4) as cluster:
        job = cluster.submit("#!/bin/bash\\nsrun hostname\\n", "-N2")
        cluster.wait_job(job, "COMPLETED", timeout=30)

Two things differ from a machine room: node names do not resolve to addresses, and the programs
of all nodes see one hostname and one /dev/shm. ``uts=True`` gives each node a hostname,
/etc/hosts, /dev/shm and process numbers of its own; ``netns=True`` makes it a whole host, with an
address behind a rate-limited link (:mod:`hpctrain.testing.hosts`). Both need root.

Every daemon runs under its own :class:`~hpctrain.testing.keeper.Kept`. Stopping the cluster or
killing a node ends exactly what those started and nothing else, and nothing outlives the Python
process that started the cluster, even when that is killed.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from hpctrain.errors import SchedulerError, UsageError
from hpctrain.runtime.environment import within_one_machine
from hpctrain.testing.commands import clean_environment, search_path
from hpctrain.testing.hosts import Hosts
from hpctrain.testing.keeper import Kept
from hpctrain.testing.slurmconf import Addresses, ClusterShape, gres_conf, slurm_conf
from hpctrain.testing.slurmjobs import SlurmCommands

_PROGRAMS = (
    "munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo",
)  # fmt: skip
_MAX_ROOT = 60
"""A Unix socket's path has at most 107 characters, and Slurm appends node, job and step."""
_START_TRIES = 3
_UP_S = 60.0


def unavailable() -> str | None:
    """Why no cluster can be started on this machine, or None where one can."""
    if sys.platform != "linux":
        return f"Slurm needs Linux, this is {sys.platform}"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=search_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt install slurm-wlm munge)"
    return None


class SlurmCluster(SlurmCommands):
    """A local cluster: a context manager, or ``start()`` and ``stop()``.

    Nodes are counted from 1, as their names are. Partitions: ``batch`` (default, 60 min),
    ``short`` (MaxTime 2 min), ``single`` (one node at most), ``low`` (its jobs are requeued for
    those of ``urgent``), ``urgent``.

    Args:
        root: directory for all that the cluster writes, at most 60 characters long, kept after
            ``stop()``. Without it a new one under /tmp, removed by ``stop()``.
        nodes, cpus, memory_mb, gpus, gpu_type, gpu_flags, extra_conf: see
            :class:`~hpctrain.testing.slurmconf.ClusterShape`.
        uts: each node sees its own hostname, /dev/shm and processes; needs root.
        netns: each node also has its own network; needs root.
        rate: rate of each node's link with ``netns``, as tc writes it.
        env: variables added to :attr:`env`, for example ``OMP_NUM_THREADS``.

    Attributes:
        hosts: the hosts that the nodes run on with ``uts`` or ``netns``, to change a rate or
            pull a cable; else None.

    Raises:
        UsageError: a size is not positive, or ``rate`` is none.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        nodes: int = 4,
        cpus: int = 8,
        memory_mb: int = 4000,
        gpus: int = 0,
        gpu_type: str = "",
        gpu_flags: str = "",
        extra_conf: str = "",
        uts: bool = False,
        netns: bool = False,
        rate: str = "1gbit",
        env: Mapping[str, str] | None = None,
    ) -> None:
        try:
            self.shape = ClusterShape(nodes, cpus, memory_mb, gpus, gpu_type, gpu_flags, extra_conf)
        except ValueError as exc:
            raise UsageError(f"SlurmCluster: {exc}") from None
        self._temporary = root is None
        self._root = root
        self._extra_env = dict(env or {})
        self.hosts = Hosts(nodes, rate=rate, network=netns) if uts or netns else None
        self._munged: Kept | None = None
        self._controller: Kept | None = None
        self._nodes: dict[int, Kept] = {}

    @property
    def root(self) -> Path:
        """Directory of the cluster: slurm.conf, log/, spool/."""
        if self._root is None:
            raise UsageError("SlurmCluster: not started")
        return self._root

    @property
    def env(self) -> dict[str, str]:
        """A whole environment for commands that talk to this cluster.

        It holds PATH, SLURM_CONF, who the user is, what ranks need whose nodes share a network,
        and what was given as ``env``; nothing else of the caller's, so that a Slurm or MPI around
        the tests cannot reach into them.
        """
        own = {"SLURM_CONF": str(self.root / "slurm.conf")}
        if self.hosts is None or not self.hosts.network:
            own |= within_one_machine(self._extra_env)
        return clean_environment(own | self._extra_env)

    # -- start and stop ---------------------------------------------------------------------

    def __enter__(self) -> SlurmCluster:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> SlurmCluster:
        """Start all daemons and wait until every node is idle.

        Raises:
            UsageError: Slurm is not installed, or ``root`` is too long.
            SchedulerError: the cluster did not come up; says what its logs end with.
        """
        reason = unavailable()
        if reason is not None:
            raise UsageError(f"SlurmCluster: {reason}")
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="hpctrain-slurm-", dir="/tmp"))
        if len(str(self._root)) > _MAX_ROOT:
            raise UsageError(
                f"SlurmCluster: root has {len(str(self._root))} characters, Unix sockets allow "
                f"{_MAX_ROOT}: {self._root}"
            )
        for attempt in range(1, _START_TRIES + 1):
            try:
                if self.hosts is not None:
                    self.hosts.start()
                self._write_files()
                self._start_munged()
                self._start_controller("-c")
                everyone = range(1, self.shape.nodes + 1)
                for i in everyone:
                    self._start_node(i)
                self._wait_up(set(everyone))
                break
            except SchedulerError as exc:
                # Somebody else may have taken a port between our looking and binding.
                if attempt < _START_TRIES and "Address already in use" in str(exc):
                    self._end_daemons()
                    continue
                self.stop()
                raise
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """End every daemon, step and rank of this cluster; remove a temporary ``root``."""
        self._end_daemons()
        if self._temporary and self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def _end_daemons(self) -> None:
        # The controller first: it would requeue what the nodes lose.
        if self._controller is not None:
            self._controller.kill()
            self._controller = None
        while self._nodes:
            self._nodes.popitem()[1].kill()
        if self.hosts is not None:
            self.hosts.stop()
        if self._munged is not None:
            self._munged.stop()
            self._munged = None

    def _write_files(self) -> None:
        root, shape = self.root, self.shape
        # munged trusts no directory that others can write to.
        for name in ("", "munge", "run", "log", "dev", "local", "spool", "spool/controller"):
            (root / name).mkdir(parents=True, exist_ok=True)
            (root / name).chmod(0o755)
        for old in (
            *(root / "log").iterdir(),
            *(root / "dev").iterdir(),
            *(root / "run").iterdir(),
        ):
            old.unlink()
        for name in shape.node_names:
            (root / "local" / name).mkdir(exist_ok=True)
            (root / "local" / name).chmod(0o1777)
        for i in range(shape.gpus):
            # Slurm sets the visibility variables for character devices only.
            (root / f"dev/gpu{i}").symlink_to("/dev/null")
        key = root / "munge/key"
        key.unlink(missing_ok=True)
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(128))
        text = slurm_conf(
            shape,
            self._addresses(),
            root=root,
            user=pwd.getpwuid(os.getuid()).pw_name,
            first_job_id=random.randrange(10_000, 60_000_000),  # noqa: S311
        )
        (root / "slurm.conf").write_text(text)
        (root / "gres.conf").write_text(gres_conf(shape, root=root))

    def _addresses(self) -> Addresses:
        n = self.shape.nodes
        host = socket.gethostname().partition(".")[0]
        first = _free_ports(n + 1)
        one_network = self.hosts is None or not self.hosts.network
        return Addresses(
            controller_host=host,
            controller="127.0.0.1" if self.hosts is None else self.hosts.machine_address,
            controller_port=first,
            node_hosts=host if self.hosts is None else f"node[1-{n}]",
            nodes="127.0.0.1" if self.hosts is None else self.hosts.addresses,
            node_ports=f"[{first + 1}-{first + n}]" if one_network else f"{first + 1}",
        )

    def _start_munged(self) -> None:
        munge = self.root / "munge"
        files = [f"--{one}-file={munge / one}" for one in ("key", "pid", "log", "seed")]
        files.append(f"--socket={munge / 'socket'}")
        (munge / "socket").unlink(missing_ok=True)
        self._munged = self._keep("munged", ["munged", "--foreground", "--force", *files])
        self._wait("munged", self._munged, (munge / "socket").exists)

    def _start_controller(self, *options: str) -> None:
        self._controller = self._keep("slurmctld", ["slurmctld", "-D", *options])

    def _start_node(self, i: int) -> None:
        daemon = ["slurmd", "-D", "-N", f"node{i}"]
        if self.hosts is not None:
            daemon = self.hosts.command(i, *daemon)
        self._nodes[i] = self._keep(f"node{i}", daemon)

    def _keep(self, log: str, argv: Sequence[str]) -> Kept:
        return Kept(argv, env=self.env, log=self.root / f"log/{log}.out", cwd=self.root)

    def _wait(self, what: str, kept: Kept, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _UP_S
        while not ready():
            if kept.returncode is not None:
                raise SchedulerError(f"{what} ended: {kept.returncode}", hint=self.log_tails())
            if time.monotonic() > deadline:
                raise SchedulerError(f"{what} not up in {_UP_S:.0f} s", hint=self.log_tails())
            time.sleep(0.05)

    def _wait_up(self, nodes: set[int]) -> None:
        assert self._controller is not None

        def all_up() -> bool:
            for i in nodes:
                if self._nodes[i].returncode is not None:
                    raise SchedulerError(f"slurmd of node{i} ended", hint=self.log_tails())
            return nodes <= self.nodes_up()

        self._wait("cluster", self._controller, all_up)

    def log_tails(self, lines: int = 5) -> str:
        """The last lines that every daemon of the cluster printed, for error messages."""
        tails = []
        for file in sorted((self.root / "log").glob("*.out")):
            text = file.read_text(errors="replace").splitlines()[-lines:]
            tails += [f"{file.name}: {line}" for line in text]
        return "\n".join(tails)

    # -- what happens to clusters -----------------------------------------------------------

    def kill_node(self, i: int, *, tell: bool = True) -> None:
        """Power failure of node ``i``: its daemon, steps and ranks get SIGKILL.

        Args:
            i: number of the node.
            tell: set the node DOWN at once, as health checks of a site do; its jobs are
                requeued in seconds. Otherwise the controller finds out by itself, about 15 s
                later.
        """
        self._nodes.pop(i).kill()
        if self.hosts is not None:
            self.hosts.power_off(i)
        if tell:
            self.down_node(i)

    def start_node(self, i: int) -> None:
        """Start the daemon of a killed node and wait until it can be used again."""
        if self.hosts is not None:
            self.hosts.power_on(i)
        self._start_node(i)
        self.run("scontrol", "update", f"nodename=node{i}", "state=resume", check=False)
        self._wait_up({i})

    def down_node(self, i: int, reason: str = "test") -> None:
        """Set node ``i`` DOWN; its jobs are ended, and requeued where they may be."""
        self.run("scontrol", "update", f"nodename=node{i}", "state=down", f"reason={reason}")

    def resume_node(self, i: int) -> None:
        """Return a DOWN or drained node to service and wait until it can be used."""
        self.run("scontrol", "update", f"nodename=node{i}", "state=resume")
        self._wait_up({i})

    def restart_controller(self) -> None:
        """Stop slurmctld so that it saves its state, and start it again from there."""
        assert self._controller is not None
        before = self.nodes_up()
        self._controller.stop()
        self._start_controller()
        self._wait_up(before)


def _free_ports(n: int) -> int:
    """First of ``n`` consecutive ports that are free now, below the ephemeral range."""
    for _ in range(500):
        first = random.randrange(20_000, 32_000 - n)  # noqa: S311
        sockets: list[socket.socket] = []
        try:
            for port in range(first, first + n):
                sockets.append(socket.socket())
                sockets[-1].bind(("", port))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise UsageError(f"SlurmCluster: found no {n} free ports in a row from 20000 to 32000")
