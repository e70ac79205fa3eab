"""The JobSpec tree: every key of a job file, its meaning, unit and default.

The descriptions below are what ``hpctrain explain``, the JSON Schema and docs/job-file.md
print; they are written once, here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from hpctrain.spec.checkpoint import (
    CheckpointSpec,
)
from hpctrain.spec.fields import (
    AutoCount,
    Count,
    Line,
    Section,
    Text,
    as_line,
    as_text,
    show,
)
from hpctrain.spec.life import (
    ContainerSpec,
    HealthSpec,
    PythonEnvSpec,
    node_range,
)
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.parallel import (
    ParallelSpec,
)
from hpctrain.spec.sequence import SequenceSplit
from hpctrain.spec.slurm import SlurmSpec
from hpctrain.spec.training import DataSpec, TrainSpec

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_EMULATED = re.compile(r"(emulate|simulate):(.+)")


def _machine(value: Any) -> Any:
    """A name; ``{emulate: NAME}`` becomes ``emulate:NAME``."""
    if not isinstance(value, dict):
        return value
    how = "simulate" if "simulate" in value else "emulate"
    if set(value) != {how}:
        raise ValueError(
            f"found the keys {', '.join(map(str, value)) or 'none'}; a machine's name or "
            "{emulate: NAME} or {simulate: NAME} belongs here"
        )
    name = value[how]
    name = name if isinstance(name, str) else getattr(name, "raw", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"found {how}: {show(value[how])}; a machine's name belongs here")
    return f"{how}:{name}"


def _as_given(value: str) -> Any:
    found = _EMULATED.fullmatch(value)
    return value if found is None else {found[1]: found[2]}


MachineName = Annotated[
    str,
    BeforeValidator(lambda value: as_text(_machine(value))),
    AfterValidator(as_line),
    PlainSerializer(_as_given),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                *(
                    {
                        "type": "object",
                        "properties": {how: {"type": "string"}},
                        "required": [how],
                        "additionalProperties": False,
                    }
                    for how in ("emulate", "simulate")
                ),
            ]
        }
    ),
]
"""A machine's name; of an emulated one ``emulate:NAME``, of a simulated one ``simulate:NAME``."""


class JobSpec(Section):
    """A job: everything that is asked for, in one document."""

    @property
    def emulated(self) -> bool:
        """Whether the job runs here with the times of another machine."""
        return _EMULATED.fullmatch(self.machine) is not None

    @property
    def simulated(self) -> bool:
        """Whether it has no ranks: its schedule is simulated with that machine's times."""
        return self.machine.startswith("simulate:")

    @property
    def machine_name(self) -> str:
        """Name or path of the machine, of an emulated one too."""
        found = _EMULATED.fullmatch(self.machine)
        return self.machine if found is None else found[2]

    name: Line = Field("job", description="Name of the run; starts its run directory's name.")
    machine: MachineName = Field(
        "local",
        description="Machine the job runs on: a site name, or the path of a site file; or "
        "{emulate: NAME}, which runs the job's ranks on this machine with the times of that one; "
        "or {simulate: NAME}, without ranks.",
    )
    nodes: Count = Field(1, description="Nodes.")
    ranks_per_node: AutoCount = Field(
        "auto",
        description="MPI ranks a node; auto is one a device of the machine, and 1 on local.",
    )
    model: ModelSpec = Field(..., description="The model.")
    parallel: ParallelSpec = Field(
        default_factory=lambda: ParallelSpec(), description="How the ranks share the work."
    )
    data: DataSpec = Field(..., description="Training data.")
    train: TrainSpec = Field(..., description="The optimisation.")
    checkpoint: CheckpointSpec = Field(
        default_factory=lambda: CheckpointSpec(), description="Saving and keeping state."
    )
    slurm: SlurmSpec = Field(default_factory=lambda: SlurmSpec(), description="Slurm's part.")
    health: HealthSpec = Field(
        default_factory=lambda: HealthSpec(), description="What watches over the ranks."
    )
    container: ContainerSpec = Field(
        default_factory=lambda: ContainerSpec(), description="An image that the ranks run in."
    )
    python_env: PythonEnvSpec = Field(
        default_factory=lambda: PythonEnvSpec(),
        description="A packed environment that the ranks run from.",
    )
    env: Annotated[dict[str, Text], BeforeValidator(lambda v: {} if _null(v) else v)] = Field(
        default_factory=dict,
        description="Environment variables of every rank, byte for byte as written.",
    )

    @model_validator(mode="before")
    @classmethod
    def _most_nodes(cls, value: Any) -> Any:
        """Without ``nodes`` a range of nodes starts with its most."""
        if not isinstance(value, dict) or "nodes" in value:
            return value
        slurm = value.get("slurm")
        try:
            wanted = node_range(slurm.get("nodes")) if isinstance(slurm, dict) else None
        except ValueError:
            return value  # said where it stands
        return value if wanted is None else {**value, "nodes": wanted.most}

    @model_validator(mode="after")
    def _nodes_in_range(self) -> Self:
        wanted = self.slurm.nodes
        if wanted is not None and not wanted.fewest <= self.nodes <= wanted.most:
            raise ValueError(
                f"nodes is {self.nodes}, which is not within slurm.nodes {wanted}; leave it out, "
                "or give one of them"
            )
        return self

    def sequence_split(self) -> SequenceSplit:
        """How a sequence of the resolved job lies over its context-parallel ranks."""
        context = self.parallel.context
        if self.model.attention == "linear":
            return SequenceSplit(context.size, zigzag=False)
        inner = {"ring": 1, "ulysses": context.size}.get(context.method, context.inner)
        assert isinstance(inner, int), "resolve() leaves no auto"
        return SequenceSplit(context.size, inner)

    @field_validator("env", mode="before")
    @classmethod
    def _env_mapping(cls, value: Any) -> Any:
        if not isinstance(value, dict) and not _null(value):
            raise ValueError(f"found {show(value)}; a mapping of variables belongs here")
        return value

    @field_validator("env")
    @classmethod
    def _env_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} cannot name an environment variable")
        return value


def _null(value: Any) -> bool:
    return value is None or getattr(value, "raw", "x") in ("", "~", "null")
