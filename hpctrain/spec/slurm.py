"""Keys of a job file for Slurm."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
)

from hpctrain.spec.fields import (
    Boolean,
    CountOrZero,
    Line,
    OptionalCount,
    OptionalLine,
    OptionalNumber,
    OptionalSize,
    OptionalWalltime,
    Seconds,
    Section,
)
from hpctrain.spec.life import (
    NodeRange,
    Switch,
)


def _token(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.,:+@%=/-]+", value):
        raise ValueError(f"found {value!r}; letters, digits and _.,:+@%=/- belong here")
    return value


SlurmToken = Annotated[
    OptionalLine, AfterValidator(lambda value: value if value is None else _token(value))
]


def _option(value: str) -> str:
    if not re.match(r"--?[A-Za-z][\w-]*(=|\s|$)", value):
        raise ValueError(f"found {value!r}; an option such as --constraint=nvme belongs here")
    return value


class SlurmSpec(Section):
    """What is asked of Slurm; ignored by the local launcher, but for time and margin."""

    account: SlurmToken = Field(None, description="Account (project) to charge.")
    partition: SlurmToken = Field(None, description="Partition. [the machine's, else Slurm's]")
    qos: SlurmToken = Field(None, description="Quality of service.")
    reservation: SlurmToken = Field(None, description="Reservation.")
    constraint: OptionalLine = Field(None, description="Node features, for example gpu&hbm80g.")
    time: OptionalWalltime = Field(
        None,
        description="Walltime: Slurm's six forms, or 1h30m, 2d. The ranks stop, checkpoint and "
        "exit resumable `margin` before it. [the partition's default, without a deadline]",
    )
    margin: Seconds = Field(
        120.0, description="Time kept for the last checkpoint before the walltime ends."
    )
    cpus_per_task: OptionalCount = Field(None, description="Cores a rank. [the machine's]")
    memory: OptionalSize = Field(None, description="Memory a node, in bytes (64GiB).")
    exclusive: Boolean = Field(False, description="Whole nodes only.")
    mpi: SlurmToken = Field(
        None, description="srun --mpi= type. [the machine's; pmi2 where MPI is the mpich wheel]"
    )
    mail_user: SlurmToken = Field(None, description="Address told of begin, end and failure.")
    comment: OptionalLine = Field(None, description="Comment shown by squeue and sacct.")
    requeue: Switch = Field(
        "auto",
        description="How a run goes on by itself after its walltime, a preemption, a lost node or "
        "a failed rank: true requeues the job; false submits a successor that depends on it; auto "
        "requeues, and submits a successor where the site does not let it.",
    )
    max_restarts: CountOrZero = Field(
        20, description="Times that a run goes on by itself; 0 ends it with its first job."
    )
    nodes: NodeRange = Field(
        None,
        description="Fewest and most nodes that the job takes, as 4-8, in place of `nodes`: each "
        "start takes what there is, with the same global batch, learning rate and samples.",
    )
    max_node_hours: OptionalNumber = Field(
        None,
        description="Node-hours of walltime that a submission may ask for without --yes.",
    )
    sbatch_options: tuple[Annotated[Line, AfterValidator(_option)], ...] = Field(
        (), description="Further sbatch options, one a list item, as --name=value."
    )
    srun_options: tuple[Annotated[Line, AfterValidator(_option)], ...] = Field(
        (), description="Further srun options, one a list item, as --name=value."
    )
    modules: tuple[Line, ...] = Field(
        (), description="Environment modules loaded in the batch script, in order."
    )
