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
of all nodes see one hostname and one /dev/shm.

Every daemon runs under its own :class:`~hpctrain.testing.keeper.Kept`. Stopping the cluster or
killing a node ends exactly what those started and nothing else, and nothing outlives the Python
process that started the cluster, even when that is killed.
"""

from __future__ import annotations

import os
import pwd
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from hpctrain.errors import SchedulerError, UsageError
from hpctrain.testing.keeper import Kept
from hpctrain.testing.slurmconf import Addresses, ClusterShape, gres_conf, slurm_conf

_PROGRAMS = (
    "munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo",
)  # fmt: skip
_MAX_ROOT = 60
"""A Unix socket's path has at most 107 characters, and Slurm appends node, job and step."""
_START_TRIES = 3
_UP_S = 60.0
_FINAL = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "TIMEOUT",
)  # fmt: skip


def _search_path() -> str:
    """PATH for the cluster: this Python's own programs, the caller's, the system's."""
    found = [str(Path(sys.executable).parent), *os.get_exec_path(), "/usr/sbin", "/sbin"]
    return os.pathsep.join(dict.fromkeys(found))


def available() -> str | None:
    """Why no cluster can be started on this machine, or None where one can."""
    if sys.platform != "linux":
        return f"Slurm needs Linux, this is {sys.platform}"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_search_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt install slurm-wlm munge)"
    return None


@dataclass(frozen=True, slots=True)
class Job:
    """What the controller says about a job.

    Attributes:
        id: job number.
        state: JobState, for example ``RUNNING``.
        reason: why it pends or failed; ``None`` as Slurm prints it.
        exit_code: exit status of the batch script.
        signal: signal that ended the batch script, 0 for none.
        nodes: node list in Slurm's bracket form; empty where it has none.
        restarts: how often it was requeued.
        fields: all of ``scontrol show job``.
    """

    id: int
    state: str
    reason: str
    exit_code: int
    signal: int
    nodes: str
    restarts: int
    fields: Mapping[str, str] = field(repr=False)

    @staticmethod
    def parse(line: str) -> Job:
        """Read one line of ``scontrol -o show job``."""
        # Values may hold blanks and '='; a new field starts at " Word=".
        pairs = re.findall(r"(?:^| )([A-Za-z][\w/:]*)=(.*?)(?= [A-Za-z][\w/:]*=|$)", line.strip())
        fields = dict(pairs)
        status, _, signal = fields["ExitCode"].partition(":")
        nodes = fields.get("NodeList", "")
        return Job(
            id=int(fields["JobId"]),
            state=fields["JobState"],
            reason=fields["Reason"],
            exit_code=int(status),
            signal=int(signal),
            nodes="" if nodes == "(null)" else nodes,
            restarts=int(fields["Restarts"]),
            fields=fields,
        )


class SlurmCluster:
    """A local cluster: a context manager, or ``start()`` and ``stop()``.

    Nodes are counted from 1, as their names are. Partitions: ``batch`` (default, 60 min),
    ``short`` (MaxTime 2 min), ``single`` (one node at most), ``low`` (its jobs are requeued for
    those of ``urgent``), ``urgent``.

    Args:
        root: directory for all that the cluster writes, at most 60 characters long, kept after
            ``stop()``. Without it a new one under /tmp, removed by ``stop()``.
        nodes, cpus, memory_mb, gpus, gpu_type, gpu_flags, extra_conf: see
            :class:`~hpctrain.testing.slurmconf.ClusterShape`.
        env: variables added to :attr:`env`, for example ``OMP_NUM_THREADS``.

    Raises:
        UsageError: a size is not positive.
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
        env: Mapping[str, str] | None = None,
    ) -> None:
        try:
            self.shape = ClusterShape(nodes, cpus, memory_mb, gpus, gpu_type, gpu_flags, extra_conf)
        except ValueError as exc:
            raise UsageError(f"SlurmCluster: {exc}") from None
        self._temporary = root is None
        self._root = root
        self._extra_env = dict(env or {})
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

        It holds PATH, SLURM_CONF, who the user is, and what was given as ``env``; nothing else
        of the caller's, so that a Slurm or MPI around the tests cannot reach into them.
        """
        me = pwd.getpwuid(os.getuid())
        return {
            "PATH": _search_path(),
            "HOME": me.pw_dir,
            "USER": me.pw_name,
            "LOGNAME": me.pw_name,
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.root / "slurm.conf"),
            **self._extra_env,
        }

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
        reason = available()
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
        host = socket.gethostname().partition(".")[0]
        first = _free_ports(self.shape.nodes + 1)
        return Addresses(
            controller_host=host,
            controller="127.0.0.1",
            controller_port=first,
            node_hosts=host,
            nodes="127.0.0.1",
            node_ports=f"[{first + 1}-{first + self.shape.nodes}]",
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
        self._nodes[i] = self._keep(f"node{i}", ["slurmd", "-D", "-N", f"node{i}"])

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

    def nodes_up(self) -> set[int]:
        """Numbers of the nodes that the controller can use now."""
        done = self.run("sinfo", "-h", "-N", "-t", "idle,mix,alloc,comp", "-o", "%N", check=False)
        return {int(name.removeprefix("node")) for name in done.stdout.split()}

    def kill_node(self, i: int, *, tell: bool = True) -> None:
        """Power failure of node ``i``: its daemon, steps and ranks get SIGKILL.

        Args:
            i: number of the node.
            tell: set the node DOWN at once, as health checks of a site do; its jobs are
                requeued in seconds. Otherwise the controller finds out by itself, about half a
                minute later.
        """
        self._nodes.pop(i).kill()
        if tell:
            self.down_node(i)

    def start_node(self, i: int) -> None:
        """Start the daemon of a killed node and wait until it can be used again."""
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

    # -- commands ---------------------------------------------------------------------------

    def run(
        self,
        *argv: str | Path,
        input: str | None = None,
        timeout: float = 60.0,
        check: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this cluster's environment and capture its output.

        Args:
            argv: program and arguments.
            input: text for its stdin, which is empty otherwise.
            timeout: seconds after which it is killed.
            check: raise where the exit status is not 0.
            cwd: working directory; the cluster's own where not given.
            env: variables on top of :attr:`env`.

        Raises:
            SchedulerError: it failed or ran out of time; says what it printed.
        """
        tokens = [str(token) for token in argv]
        try:
            done = subprocess.run(
                tokens,
                input=input or "",
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
                cwd=cwd or self.root,
                env={**self.env, **(env or {})},
            )
        except subprocess.TimeoutExpired as exc:
            said = f"{exc.stdout!r} {exc.stderr!r}"
            raise SchedulerError(f"{tokens} ran over {timeout:g} s", hint=said) from None
        if check and done.returncode != 0:
            said = done.stdout + done.stderr
            raise SchedulerError(f"{tokens} ended {done.returncode}", hint=said)
        return done

    def submit(self, script: str, *options: str, cwd: Path | None = None) -> int:
        """Submit a batch script with ``sbatch``.

        Args:
            script: its text, from ``#!`` on.
            options: options of sbatch.
            cwd: directory that the job starts and logs in; the cluster's own where not given.

        Returns:
            The job's number.

        Raises:
            SchedulerError: sbatch refused it.
        """
        done = self.run("sbatch", "--parsable", *options, input=script, cwd=cwd)
        return int(done.stdout.partition(";")[0])

    def cancel_all(self, timeout: float = 30.0) -> None:
        """Cancel every job and wait until none is left in the queue.

        Raises:
            SchedulerError: some are left after ``timeout`` seconds.
        """
        self.run("scancel", "--me")
        deadline = time.monotonic() + timeout
        while left := self.run("squeue", "-h", "-o", "%i %T").stdout:
            if time.monotonic() > deadline:
                raise SchedulerError(f"jobs left after scancel and {timeout:g} s", hint=left)
            time.sleep(0.1)

    def job(self, job_id: int) -> Job:
        """What the controller says about a job, up to 300 s after its end.

        Raises:
            SchedulerError: it knows no such job.
        """
        return Job.parse(self.run("scontrol", "-o", "show", "job", str(job_id)).stdout)

    def wait_job(self, job_id: int, *states: str, timeout: float = 60.0) -> Job:
        """Wait until a job is in one of ``states``, and return it.

        Raises:
            SchedulerError: it ended otherwise, or ``timeout`` seconds have passed; says what
                the controller knows.
        """
        deadline = time.monotonic() + timeout
        ended = 0
        while True:
            job = self.job(job_id)
            if job.state in states:
                return job
            # A job that is about to be requeued shows a final state for a moment.
            ended = ended + 1 if job.state in _FINAL else 0
            if ended > 20 or time.monotonic() > deadline:
                raise SchedulerError(
                    f"job {job_id} is {job.state}, wanted {' or '.join(states)}",
                    hint="\n".join(f"{key}={value}" for key, value in job.fields.items()),
                )
            time.sleep(0.1)


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
