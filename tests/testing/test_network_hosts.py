"""Hosts behind rate-limited links: separate, as slow as asked for, and gone afterwards."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from testing_rank_programs import bandwidth, host_and_peers
from testing_traces import runs, traces_of, wait_until_gone

import hpctrain
from hpctrain.errors import RankFailedError, UsageError
from hpctrain.testing.hosts import Hosts, rate_bit_s
from hpctrain.testing.ranks import environment, mpiexec, run_ranks
from hpctrain.testing.slurm import SlurmCluster
from hpctrain.testing.wait import wait_until

MEGA = 1e6
_count = itertools.count()


def unique_seconds() -> str:
    """A time to sleep by which the sleeper is known among all processes."""
    return f"{10_000_000 + os.getpid()}.{next(_count)}"


def test_each_host_is_its_own(hosts_factory: Callable[..., Hosts]) -> None:
    hosts = hosts_factory(3)
    script = "echo $$ >/dev/shm/mark; hostname; hostname -i; ls /dev/shm; ps ax | wc -l"
    for i in (1, 2, 3):
        lines = hosts.run(i, "sh", "-c", script).stdout.split()
        assert lines[:3] == [f"node{i}", hosts.address(i), "mark"]
        assert int(lines[3]) < 8
    assert not Path("/dev/shm/mark").exists()
    assert len({hosts.address(i) for i in (1, 2, 3)}) == 3
    lookup = hosts.run(1, "getent", "ahostsv4", "node3").stdout.split()
    assert lookup[0] == hosts.address(3)


@pytest.mark.mpi
def test_link_between_hosts_has_the_rate_and_memory_within_one_has_not(
    hosts_factory: Callable[..., Hosts],
) -> None:
    hosts = hosts_factory(2, rate="200mbit")
    launcher = hosts.launcher(per_host=2)
    assert run_ranks(4, host_and_peers, launcher=launcher) == [
        ["node1", 2], ["node1", 2], ["node2", 2], ["node2", 2],
    ]  # fmt: skip
    inside = run_ranks(4, bandwidth, 1, 2**22, 8, launcher=launcher)[0]
    across = run_ranks(4, bandwidth, 2, 2**22, 4, launcher=launcher)[0]
    # Never above the rate, but for the bucket of 4 ms; a busy machine may be slower.
    assert 100 * MEGA < across < 203 * MEGA
    assert inside > 5 * across
    hosts.set_rate("50mbit")
    slow = run_ranks(4, bandwidth, 3, 2**21, 2, launcher=launcher)[0]
    assert 25 * MEGA < slow < 51 * MEGA
    hosts.set_rate("1gbit")
    fast = run_ranks(4, bandwidth, 2, 2**22, 8, launcher=launcher)[0]
    assert 2 * across < fast < 1020 * MEGA
    # One slow cable slows what goes over it.
    hosts.set_rate("50mbit", 2)
    assert run_ranks(4, bandwidth, 2, 2**21, 2, launcher=launcher)[0] < 51 * MEGA


def test_power_failure_and_pulled_cable(hosts_factory: Callable[..., Hosts]) -> None:
    hosts = hosts_factory(2)
    serve = [sys.executable, "-m", "http.server", "8000"]
    ask = (
        "import socket, sys; socket.create_connection((sys.argv[1], 8000), timeout=1).close();"
        "print('answer')"
    )

    def answers() -> bool:
        done = hosts.run(1, sys.executable, "-c", ask, hosts.address(2), check=False)
        return done.stdout == "answer\n"

    server = subprocess.Popen(hosts.command(2, *serve), stderr=subprocess.DEVNULL)
    wait_until(answers, timeout=20)
    hosts.set_link(2, up=False)
    assert not answers()
    assert server.poll() is None
    hosts.set_link(2, up=True)
    assert answers()
    seconds = unique_seconds()
    hosts.run(2, "sh", "-c", f"setsid sleep {seconds} >/dev/null 2>&1 &")
    assert runs(seconds)
    hosts.power_off(2)
    assert server.wait(timeout=10) != 0
    assert not answers()
    assert not runs(seconds)
    with pytest.raises(UsageError, match=r"host 2 is not up, these are: \[1\]"):
        hosts.run(2, "true")
    hosts.power_on(2)
    assert hosts.run(2, "hostname").stdout == "node2\n"
    assert "rate 200Mbit" in hosts.run(2, "tc", "qdisc", "show", "dev", "eth0").stdout


@pytest.mark.mpi
def test_a_program_over_time_leaves_no_ranks(hosts_factory: Callable[..., Hosts]) -> None:
    hosts = hosts_factory(2)
    seconds = unique_seconds()
    with pytest.raises(RankFailedError, match="ran over 2 s"):
        hosts.mpiexec(["sleep", seconds], timeout=2)
    wait_until(lambda: not runs(seconds), timeout=10)
    with pytest.raises(RankFailedError, match="ended 3"):
        hosts.mpiexec(["sh", "-c", "exit 3"])
    # Orphans that ended do not stay as zombies.
    hosts.run(1, "sh", "-c", "(setsid sh -c 'sleep 0.1' &)")
    time.sleep(0.3)
    assert "<defunct>" not in hosts.run(1, "ps", "ax").stdout


def test_two_instances_coexist_and_leave_nothing(hosts_factory: Callable[..., Hosts]) -> None:
    one, two = hosts_factory(2, rate="100mbit"), hosts_factory(2, rate="100mbit")
    assert one.address(1) != two.address(1)
    one.set_rate("300mbit")
    show = ["tc", "qdisc", "show", "dev", "eth0"]
    assert "rate 300Mbit" in one.run(1, *show).stdout
    assert "rate 100Mbit" in two.run(1, *show).stdout
    first, second = (one.root, one.uplink), (two.root, two.uplink)
    assert len(traces_of(*first)) >= 3 * 2 + 2
    one.stop()
    assert traces_of(*first) == []
    assert two.run(2, "getent", "ahostsv4", "node1").stdout.split()[0] == two.address(1)
    two.stop()
    assert traces_of(*second) == []


LINKS = """
mount -t sysfs sysfs /sys || exit  # where UCX finds devices: it shows those of who mounts it
ip link set lo up
while :; do
    for i in 1 2 3 4 5 6; do
        echo "link add one$i type veth peer name other$i"
        echo "addr add 10.77.$i.1/24 dev one$i"
        echo "link set one$i up"
        echo "link set other$i up"
    done | ip -batch -
    sleep 0.02
    for i in 1 2 3 4 5 6; do echo "link del one$i"; done | ip -batch -
done &
links=$!
for i in $(seq 20); do
    timeout 60 "$@" || break
    echo "start $i"
done
kill $links
"""


def test_ranks_start_while_links_come_and_go(hosts_factory: Callable[..., Hosts]) -> None:
    """Those of containers do, and so do hosts here: UCX loses ranks that look at them."""
    hosts_factory(1)
    apart = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    ranks = [mpiexec() or "mpiexec", "-n", "4", sys.executable, "-c", "from mpi4py import MPI"]
    done = subprocess.run(
        [*apart, "sh", "-c", LINKS, "sh", *ranks],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["start 20"], done.stderr[-2000:]


def test_hosts_end_with_the_process_that_started_them(
    hosts_factory: Callable[..., Hosts],
) -> None:
    hosts_factory(1)
    seconds = unique_seconds()
    code = (
        "from hpctrain.testing.hosts import Hosts; import time\n"
        "hosts = Hosts(2).start()\n"
        f"hosts.run(1, 'sh', '-c', 'setsid sleep {seconds} >/dev/null 2>&1 &')\n"
        "print(hosts.root, hosts.uplink, flush=True); time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        root, link = owner.stdout.readline().split()
        assert runs(seconds)
        owner.kill()
    wait_until_gone(Path(root))
    assert not runs(seconds)
    shutil.rmtree(root)
    wait_until(lambda: traces_of(Path(root), link) == [], timeout=20)


def test_ordinary_user_inside_a_user_namespace(hosts_factory: Callable[..., Hosts]) -> None:
    hosts_factory(1)
    code = (
        "from hpctrain.testing.hosts import Hosts; import os\n"
        "with Hosts(2) as h: print(os.getuid(), h.run(2, 'hostname').stdout)\n"
    )
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    become += ["unshare", "-Unm", "--map-current-user", "--keep-caps"]
    path = str(Path(hpctrain.__file__).parents[1])
    become += ["env", f"PYTHONPATH={path}", "PYTHONDONTWRITEBYTECODE=1"]
    probe = [*become, "/usr/bin/python3", "-c", "import hpctrain.testing.hosts"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("no user namespaces, or no Python that user 65534 may run")
    done = subprocess.run(
        [*become, "/usr/bin/python3", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["65534", "node2"], "")


def test_without_network_only_the_rest_is_separate(hosts_factory: Callable[..., Hosts]) -> None:
    hosts = hosts_factory(2, network=False)
    assert hosts.run(2, "hostname").stdout == "node2\n"
    network = hosts.run(2, "readlink", "/proc/self/ns/net").stdout.strip()
    assert network == os.readlink("/proc/self/ns/net")
    assert hosts.run(2, "getent", "ahostsv4", "node1").stdout.split()[0] == "127.0.0.1"
    with pytest.raises(UsageError, match="network=False"):
        hosts.set_rate("1gbit")


@pytest.mark.network
@pytest.mark.mpi
def test_slurm_nodes_on_hosts_of_their_own(
    slurm_cluster_factory: Callable[..., SlurmCluster], tmp_path: Path
) -> None:
    cluster = slurm_cluster_factory(nodes=3, netns=True, rate="200mbit")
    hosts = cluster.hosts
    assert hosts is not None
    script = "#!/bin/bash\nsrun sh -c 'echo $SLURMD_NODENAME $(hostname) $(hostname -i)'\n"
    job = cluster.submit(script, "-N3", "--ntasks-per-node=1", "-oout", cwd=tmp_path)
    cluster.wait_job(job, "COMPLETED", timeout=30)
    expected = [f"node{i} node{i} {hosts.address(i)}" for i in (1, 2, 3)]
    assert sorted((tmp_path / "out").read_text().splitlines()) == expected
    # Rank 0 and 1 share node1, rank 2 is on node2.
    srun = ["srun", "--mpi=pmi2", "--kill-on-bad-exit=1", "-N2", "--ntasks-per-node=2"]
    inside = run_ranks(4, bandwidth, 1, 2**22, 8, launcher=srun, env=cluster.env)[0]
    across = run_ranks(4, bandwidth, 2, 2**22, 4, launcher=srun, env=cluster.env)[0]
    assert across < 203 * MEGA < 5 * across
    assert inside > 5 * across
    # A power failure takes the whole host; the job goes on elsewhere.
    job = cluster.submit(
        "#!/bin/bash\nsrun sh -c 'touch started.$SLURM_PROCID; sleep 60'\n",
        "-N2", "--ntasks-per-node=1", "-o/dev/null", cwd=tmp_path,
    )  # fmt: skip
    wait_until(lambda: len(list(tmp_path.glob("started.*"))) == 2)
    assert cluster.wait_job(job, "RUNNING", timeout=30).nodes == "node[1-2]"
    cluster.kill_node(2)
    cluster.wait_job(job, "PENDING", timeout=30)
    assert cluster.wait_job(job, "RUNNING", timeout=60).nodes == "node[1,3]"
    cluster.start_node(2)
    assert cluster.nodes_up() == {1, 2, 3}


@pytest.mark.network
def test_slurm_nodes_with_hostnames_of_their_own(
    slurm_cluster_factory: Callable[..., SlurmCluster],
) -> None:
    cluster = slurm_cluster_factory(nodes=2, uts=True)
    done = cluster.run("srun", "-N2", "--ntasks-per-node=1", "hostname")
    assert sorted(done.stdout.split()) == ["node1", "node2"]
    assert cluster.hosts is not None
    roots = (cluster.root, cluster.hosts.root)
    cluster.stop()
    assert [traces_of(root) for root in roots] == [[], []]


def test_rates_are_read_as_tc_writes_them() -> None:
    assert rate_bit_s("200mbit") == 200e6
    assert rate_bit_s("1.5gbit") == 1.5e9
    for wrong in ("200", "0mbit", "fast", "-1gbit", "1 gbit"):
        with pytest.raises(UsageError, match="write for example 200mbit"):
            Hosts(2, rate=wrong)
    with pytest.raises(UsageError, match="0 hosts; a switch has 1 to 250"):
        Hosts(0)
