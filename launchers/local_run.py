"""Start, watch and end the ranks of a run on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import Exit, UsageError
from hpctrain.launchers.environment import check_job_env, without_leaks
from hpctrain.launchers.mpiexec import LocalLauncher
from hpctrain.launchers.shape import Launcher, world_size
from hpctrain.records import LaunchRecord
from hpctrain.runtime.environment import within_one_machine

if TYPE_CHECKING:
    from hpctrain.rundir import RunDir
    from hpctrain.spec import JobSpec

_POLL_SECONDS = 0.1


def start(
    spec: JobSpec,
    run: RunDir,
    program: Sequence[str],
    environ: Mapping[str, str],
    *,
    restore: int = -1,
    launcher: Launcher | None = None,
) -> LocalProcess:
    """Start all ranks in a session of their own and write the LaunchRecord.

    Their output goes to ``run.job_log``, appended. They outlive the calling process and its
    terminal.

    Args:
        spec: the resolved job.
        run: its run directory.
        program: what each rank executes; see hpctrain.launchers.rank_program.
        environ: the caller's environment.
        restore: checkpoint step to start from; -1 is the newest good one.
        launcher: None takes LocalLauncher.find.

    Raises:
        UsageError: no mpiexec, or a job variable that cannot be passed.
    """
    tokens = (launcher or LocalLauncher.find(environ)).command(spec, program)
    now = time.time()
    variables = rank_environment(spec, environ, now)
    run.logs.mkdir(parents=True, exist_ok=True)
    run.stop_file.unlink(missing_ok=True)
    launch = LaunchRecord(
        attempt=len(run.read_launches()),
        launcher="local",
        submitted=now,
        world_size=world_size(spec),
        host=socket.gethostname(),
        restore=restore,
    )
    pid, gate = _fork(tokens, variables, run.job_log)
    try:
        launch = dataclasses.replace(launch, pid=pid, pid_started=_started(pid) or 0)
        run.add_launch(launch)
        os.write(gate, b"go")
    except BaseException:
        os.close(gate)
        os.waitpid(pid, 0)
        raise
    os.close(gate)
    return LocalProcess(run, launch, child=True)


def _fork(tokens: Sequence[str], variables: Mapping[str, str], log: Path) -> tuple[int, int]:
    """A process that executes ``tokens`` once something is written to the returned descriptor.

    So the launch is written down before a rank can look for it, and nothing runs that is not
    written down: where the caller dies in between, the process sees the end of the pipe and
    leaves. subprocess cannot wait between fork and exec, and a shell in between would change
    the environment (dash resets IFS).
    """
    names = [os.fsencode(token) for token in tokens]
    environ = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
    read_end, gate = os.pipe()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    pid = os.fork()
    if pid:
        os.close(read_end)
        os.close(output)
        return pid, gate
    try:
        os.close(gate)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        if os.read(read_end, 2):
            os.execve(names[0], names, environ)  # noqa: S606 (tokens, no shell)
    except OSError as error:
        os.write(2, f"hpctrain: {tokens[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def rank_environment(spec: JobSpec, environ: Mapping[str, str], now: float) -> dict[str, str]:
    """Environment of local ranks: the caller's without leaks, ours, then the job's.

    Args:
        spec: the resolved job.
        environ: the caller's.
        now: when the ranks start, seconds since the epoch.
    """
    check_job_env(spec.env)
    variables = without_leaks(environ)
    variables |= within_one_machine(variables)
    # Ranks on this machine are forked whatever scheduler hydra thinks to have found.
    variables["HYDRA_LAUNCHER"] = "fork"
    if "OMP_NUM_THREADS" not in variables:
        cores = len(os.sched_getaffinity(0))
        variables["OMP_NUM_THREADS"] = str(max(1, cores // world_size(spec)))
    variables.pop("HPCTRAIN_DEADLINE", None)
    if spec.slurm.time is not None:
        variables["HPCTRAIN_DEADLINE"] = str(int(now + spec.slurm.time - spec.slurm.margin))
    return variables | spec.env


class LocalProcess:
    """The launcher process of a local run and the ranks below it.

    Attributes:
        launch: how it was started.
    """

    def __init__(self, run: RunDir, launch: LaunchRecord, *, child: bool) -> None:
        self.launch = launch
        self._run = run
        self._child = child
        self._code: int | None = None

    @classmethod
    def attach(cls, run: RunDir, launch: LaunchRecord) -> LocalProcess:
        """The process of a run that another process, perhaps long gone, has started.

        Raises:
            UsageError: it runs on another host.
        """
        if local_alive(launch) is None:
            raise UsageError(
                f"run {run.id} was started on {launch.host}, this is {socket.gethostname()}",
                hint=f"log in to {launch.host} for that",
            )
        return cls(run, launch, child=False)

    def poll(self) -> int | None:
        """Exit code of the run, or None while it is alive; see :func:`outcome`."""
        if self._code is None:
            status: int | None = None
            if self._child:
                pid, wait_status = os.waitpid(self.launch.pid, os.WNOHANG)
                if pid == 0:
                    return None
                status = os.waitstatus_to_exitcode(wait_status)
            elif local_alive(self.launch):
                return None
            self._code = outcome(self._run, self.launch, status)
        return self._code

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end; exit code, or None where ``timeout`` seconds have passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = _POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(_POLL_SECONDS, left))
        return code

    def terminate(self, grace: float) -> int:
        """Ask the ranks to checkpoint and stop; kill what is left after ``grace`` seconds.

        They are asked by the stop file, which reaches them under every launcher: mpiexec of
        MPICH dies of SIGUSR2 and SIGHUP instead of passing them on, and ranks that have not
        come far enough to handle signals would die of any.

        Returns:
            The exit code: 75 where the ranks stopped resumable.
        """
        self._run.stop_file.touch()
        code = self.wait(grace)
        return self.kill() if code is None else code

    def kill(self) -> int:
        """End launcher and ranks at once and return the exit code."""
        if self.poll() is None:
            _kill_tree(self.launch.pid)
            code = self.wait(10.0)
            assert code is not None, f"process {self.launch.pid} outlived SIGKILL"
        assert self._code is not None
        return self._code


def local_alive(launch: LaunchRecord) -> bool | None:
    """Whether the launcher process of a local run is alive; None on another host than its own.

    The start time tells it from a later process with the same number.
    """
    if launch.host != socket.gethostname():
        return None
    return launch.pid > 0 and _started(launch.pid) == launch.pid_started


def outcome(run: RunDir, launch: LaunchRecord, status: int | None) -> int:
    """Exit code of a run that has ended, from what its ranks wrote down.

    mpiexec's own status says little: MPICH's kills all ranks as soon as one of them leaves,
    and then reports 9, or 0 where another rank failed.

    Args:
        run: the run.
        launch: this incarnation.
        status: of the launcher process, negative for a signal; None where it is unknown.
    """
    state = run.read_state()
    if state is not None and state.time < launch.submitted:
        state = None  # of an earlier start
    if state is not None and state.status in ("finished", "stopped"):
        return Exit.OK if state.status == "finished" else Exit.STOPPED
    if status in {int(code) for code in Exit} - {Exit.OK}:
        return status
    if status is None or state is not None or run.read_failures(launch.attempt):
        return Exit.RANK_FAILED
    return 128 - status if status < 0 else status


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None where it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # pid (comm) state ppid …: comm may hold blanks and parentheses itself.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _kill_tree(pid: int) -> None:
    """SIGKILL to a process and all below it: mpiexec gives each rank a session of its own."""
    import psutil

    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while any(_started(process.pid) for process in family) and time.monotonic() < deadline:
        time.sleep(0.01)
