"""The slurm.conf of a local cluster: pure text from a few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """What a local cluster pretends to be.

    Attributes:
        nodes: number of compute nodes, node1 … nodeN.
        cpus: cores of a node; may exceed those of the machine.
        memory_mb: memory of a node in MiB; may exceed that of the machine.
        gpus: GPUs of a node; device files that are links to /dev/null.
        gpu_type: type name of the GPUs, empty for none.
        gpu_flags: gres.conf flags that pick which visibility variable Slurm sets
            (``nvidia_gpu_env``, ``amd_gpu_env``, ``intel_gpu_env``, ``opencl_env``); empty sets
            all of them.
        extra_conf: lines for slurm.conf, for example ``KillWait=1``; a setting that is there
            already is replaced.

    Raises:
        ValueError: a size below the smallest possible one.
    """

    nodes: int = 4
    cpus: int = 8
    memory_mb: int = 4000
    gpus: int = 0
    gpu_type: str = ""
    gpu_flags: str = ""
    extra_conf: str = ""

    def __post_init__(self) -> None:
        for key, low in {"nodes": 1, "cpus": 1, "memory_mb": 1, "gpus": 0}.items():
            value = getattr(self, key)
            if value < low:
                raise ValueError(f"{key} is {value}; a cluster needs at least {low}")

    @property
    def node_names(self) -> tuple[str, ...]:
        """node1 … nodeN."""
        return tuple(f"node{i}" for i in range(1, self.nodes + 1))


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the daemons of a local cluster listen; node fields in Slurm's bracket form.

    Attributes:
        controller_host: short hostname of the machine that the controller runs on.
        controller: its address.
        controller_port: its port.
        node_hosts: short hostnames that the nodes' daemons see.
        nodes: their addresses.
        node_ports: their ports, or one port for all.
    """

    controller_host: str
    controller: str
    controller_port: int
    node_hosts: str
    nodes: str
    node_ports: str


# batch: the default. short: a time limit that a request can exceed. single: a node limit that a
# request can exceed. low: its jobs are requeued when a job of urgent wants their nodes.
_PARTITIONS = (
    "batch Nodes=ALL Default=YES MaxTime=60 DefaultTime=10 PriorityTier=10 PreemptMode=OFF",
    "short Nodes=ALL MaxTime=2 DefaultTime=1 PriorityTier=10 PreemptMode=OFF",
    "single Nodes=ALL MaxNodes=1 MaxTime=60 DefaultTime=10 PriorityTier=10 PreemptMode=OFF",
    "low Nodes=ALL MaxTime=60 DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE",
    "urgent Nodes=ALL MaxTime=60 DefaultTime=10 PriorityTier=100 PreemptMode=OFF",
)


def slurm_conf(
    shape: ClusterShape, where: Addresses, *, root: Path, user: str, first_job_id: int
) -> str:
    """Text of slurm.conf.

    Args:
        shape: size of the cluster and extra settings.
        where: addresses and ports.
        root: directory that holds everything of the cluster.
        user: user that all daemons run as.
        first_job_id: number of the first job. MPICH names its shared memory after the job and
            step number, so two clusters on one machine must not both run a job 1.
    """
    settings = {
        "ClusterName": "local",
        "SlurmctldHost": f"{where.controller_host}({where.controller})",
        "SlurmctldPort": str(where.controller_port),
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        # A requeued job waits until its old credential has expired: 120 s by default.
        "AuthInfo": f"socket={root}/munge/socket,cred_expire=5",
        "StateSaveLocation": f"{root}/spool/controller",
        "SlurmdSpoolDir": f"{root}/spool/%n",
        "TmpFS": f"{root}/local/%n",
        "SlurmctldPidFile": f"{root}/run/slurmctld.pid",
        "SlurmdPidFile": f"{root}/run/%n.pid",
        "SlurmctldLogFile": f"{root}/log/slurmctld.log",
        "SlurmdLogFile": f"{root}/log/%n.log",
        # Believe CPUs and RealMemory below rather than the machine.
        "SlurmdParameters": "config_overrides",
        "ProctrackType": "proctrack/linuxproc",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": str(max(1, shape.memory_mb // shape.cpus)),
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "ReturnToService": "1",
        "EnforcePartLimits": "ALL",
        "JobRequeue": "1",
        "FirstJobId": str(first_job_id),
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=1,sched_min_interval=0,bf_interval=1,"
        "batch_sched_delay=0",
        "PropagateResourceLimits": "NONE",
        "KillWait": "10",
        "CompleteWait": "0",
        "SlurmdTimeout": "10",
        "MessageTimeout": "10",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "5",
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": f"{root}/log/jobcomp.log",
    }
    node = (
        f"NodeName=node[1-{shape.nodes}] NodeHostname={where.node_hosts} NodeAddr={where.nodes} "
        f"Port={where.node_ports} CPUs={shape.cpus} Sockets=1 CoresPerSocket={shape.cpus} "
        f"ThreadsPerCore=1 RealMemory={shape.memory_mb} State=UNKNOWN"
    )
    if shape.gpus:
        settings["GresTypes"] = "gpu"
        node += f" Gres=gpu:{shape.gpu_type}{':' if shape.gpu_type else ''}{shape.gpus}"
    extra = []
    for line in shape.extra_conf.splitlines():
        key, _, value = line.partition("=")
        if key.strip() in settings:
            settings[key.strip()] = value.strip()
        else:
            extra.append(line)
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [node, *(f"PartitionName={partition}" for partition in _PARTITIONS), *extra]
    return "\n".join(lines) + "\n"


def gres_conf(shape: ClusterShape, *, root: Path) -> str:
    """Text of gres.conf, which has to lie beside slurm.conf; empty without GPUs."""
    if not shape.gpus:
        return ""
    kind = f" Type={shape.gpu_type}" if shape.gpu_type else ""
    flags = f" Flags={shape.gpu_flags}" if shape.gpu_flags else ""
    files = f"{root}/dev/gpu[0-{shape.gpus - 1}]"
    return f"NodeName=node[1-{shape.nodes}] Name=gpu{kind}{flags} File={files}\n"
