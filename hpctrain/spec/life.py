"""Sections of a job about its life on a machine: what watches over it, what it runs in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from hpctrain.spec.fields import (
    Boolean,
    CountOrZero,
    Line,
    Number,
    OptionalText,
    Plain,
    Seconds,
    Section,
    show,
)
from hpctrain.spec.yaml_tree import plain


def _switch(value: Any) -> Any:
    found = plain(value)
    return str(found).lower() if isinstance(found, bool) else found


Switch = Annotated[Literal["auto", "true", "false"], BeforeValidator(_switch)]
"""true, false, or auto."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """A range of node counts, both ends included."""

    fewest: int
    most: int

    def __str__(self) -> str:
        return f"{self.fewest}-{self.most}"

    @property
    def counts(self) -> range:
        return range(self.fewest, self.most + 1)


def node_range(value: Any) -> Nodes | None:
    """Read ``4-8``; raises ValueError."""
    found = plain(value)
    if found is None or isinstance(found, Nodes):
        return found
    match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", found) if isinstance(found, str) else None
    if match is None:
        raise ValueError(f"found {show(value)}; a range of nodes such as 4-8 belongs here")
    fewest, most = int(match[1]), int(match[2])
    if not 1 <= fewest <= most:
        raise ValueError(f"found {show(value)}; from at least 1 node up to at least as many")
    return Nodes(fewest, most)


NodeRange = Annotated[
    Nodes | None,
    BeforeValidator(node_range),
    PlainSerializer(lambda value: None if value is None else str(value)),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}], "examples": ["4-8"]}),
]


class HealthSpec(Section):
    """What watches over the ranks, before the first step and while they run."""

    preflight: Switch = Field(
        "auto",
        description="Measure all nodes before the first step: processor, memory, links, files, "
        "clocks, free space. auto: yes, but on machine local.",
    )
    bad_below: Annotated[Number, Field(gt=0, lt=1)] = Field(
        0.7, description="A node is bad where it reaches less than this part of the median."
    )
    exclude_bad_nodes: Boolean = Field(
        False, description="Go on without bad nodes: requeue at once, and leave them out."
    )
    hang_after: Seconds = Field(
        20.0,
        description="Time without progress after which the ranks are taken for hung, reported and "
        "ended; at least five times the slowest step so far, and fifteen times this long for the "
        "first step and for checkpoints. 0: never.",
    )
    heartbeat: Annotated[Seconds, Field(ge=0.1)] = Field(
        5.0, description="Time between two heartbeats of a node in the run directory."
    )
    stragglers: CountOrZero = Field(
        50, description="Steps between two looks for slow ranks and slow links; 0: never."
    )
    dispersion: CountOrZero = Field(
        0,
        description="Steps between two looks at how far the data-parallel ranks are apart in loss, "
        "gradient norm and gradient direction; 0: never.",
    )


class ContainerSpec(Section):
    """An image that the ranks run in; hpctrain is installed in it."""

    scalar_key: ClassVar[str | None] = "image"

    image: OptionalText = Field(
        None, description="Path or name of the image. [ranks run on the node itself]"
    )
    runtime: Annotated[Literal["auto", "apptainer", "pyxis", "podman-hpc"], Plain] = Field(
        "auto", description="What starts it; auto is the machine's."
    )
    binds: tuple[Line, ...] = Field(
        (),
        description="Directories seen inside, as source:target or one path for both. The run "
        "directory and those of data and checkpoints always are.",
    )
    program: Line = Field("hpctrain", description="hpctrain inside the image.")


class PythonEnvSpec(Section):
    """A packed Python environment (conda-pack, or a tar of a relocatable one)."""

    scalar_key: ClassVar[str | None] = "archive"

    archive: OptionalText = Field(
        None,
        description="A .tar.gz, sent to each node with sbcast and unpacked there. [the ranks use "
        "the environment that submits]",
    )
    path: OptionalText = Field(
        None,
        description="Directory of each node to unpack into; ${NAME} is filled in there. "
        "[node-local storage of the machine]",
    )

    @model_validator(mode="after")
    def _archive_first(self) -> PythonEnvSpec:
        if self.path is not None and self.archive is None:
            raise ValueError("path is given and archive is not: what is to be unpacked there?")
        return self
