"""How a site wants ranks started: options, modules, environment."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from hpctrain.machine.blocks import Block, Confidence, Part, Provenance, When


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One environment variable to render.

    Attributes:
        name, value: as exported; ``value`` is literal text unless ``expand``.
        expand: ``${NAME}`` in the value is for the shell to expand on the node.
        source: where the value was read.
        confidence: of that source.
        why: what it is for.
    """

    name: str
    value: str
    source: str
    why: str
    confidence: Confidence = "high"
    expand: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One srun or sbatch option to render.

    Attributes:
        tokens: argument tokens, unquoted.
        source, confidence, why: as in EnvVar.
    """

    tokens: tuple[str, ...]
    source: str
    why: str
    confidence: Confidence = "high"


class _Entry(Part):
    """An entry of a block that may have its own provenance."""

    why: str = Field(min_length=1)
    when: When = When()
    source: str | None = None
    confidence: Confidence | None = None


class VariableSpec(_Entry):
    """An environment variable of a site file; see EnvVar."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    value: str
    expand: bool = False


class OptionSpec(_Entry):
    """An option of a site file: ``option`` is split as a shell would, without expansion."""

    option: str = Field(pattern=r"^-")


class Launch(Block):
    """How ranks are started.

    Attributes:
        mpi: type for ``srun --mpi=``; None keeps the site's default.
        srun, sbatch: options beside those that the launcher renders itself (nodes, tasks,
            cpus-per-task, walltime, output, kill-on-bad-exit).
    """

    mpi: str | None = None
    srun: tuple[OptionSpec, ...] = ()
    sbatch: tuple[OptionSpec, ...] = ()

    def options(
        self, command: Literal["srun", "sbatch"], nodes: int, *, include_low: bool = False
    ) -> list[Option]:
        """Options of a job of ``nodes`` nodes, low-confidence ones only if asked for."""
        found = []
        for index, spec in enumerate(getattr(self, command)):
            origin = _origin(self, f"{command}.{index}", spec)
            if spec.when.holds(nodes) and (include_low or origin.confidence != "low"):
                found.append(
                    Option(
                        tuple(shlex.split(spec.option)), origin.source, spec.why, origin.confidence
                    )
                )
        return found


class Environment(Block):
    """Modules, variables and what has to exist on a node before the ranks start.

    Attributes:
        modules: for ``module load``, in order.
        variables: rendered as quoted exports.
        node_directories: made empty on every node before the first step; may hold ``${NAME}``.
        mpi4py_build: how mpi4py is built against the site's MPI.
        proxy: how compute nodes reach the internet, if at all.
    """

    modules: tuple[str, ...] = ()
    variables: tuple[VariableSpec, ...] = ()
    node_directories: tuple[str, ...] = ()
    mpi4py_build: str | None = None
    proxy: str | None = None

    @model_validator(mode="after")
    def _no_overlap(self) -> Environment:
        for index, one in enumerate(self.variables):
            for other in self.variables[:index]:
                if one.name == other.name and _overlap(one.when, other.when):
                    raise ValueError(
                        f"variables: {one.name} has two values for the same node count "
                        f"({other.value!r} and {one.value!r})"
                    )
        return self

    def render(self, nodes: int, *, include_low: bool = False) -> list[EnvVar]:
        """Variables of a job of ``nodes`` nodes, low-confidence ones only if asked for."""
        found = []
        for index, spec in enumerate(self.variables):
            origin = _origin(self, f"variables.{index}", spec)
            if spec.when.holds(nodes) and (include_low or origin.confidence != "low"):
                found.append(
                    EnvVar(
                        spec.name,
                        spec.value,
                        origin.source,
                        spec.why,
                        origin.confidence,
                        spec.expand,
                    )
                )
        return found


def _overlap(one: When, other: When) -> bool:
    first = max(one.min_nodes, other.min_nodes)
    return one.holds(first) and other.holds(first)


def _origin(block: Block, path: str, spec: _Entry) -> Provenance:
    base = block.provenance(path)
    return Provenance(
        source=spec.source or base.source,
        as_of=None if spec.source else base.as_of,
        confidence=spec.confidence or base.confidence,
    )
