"""Keys of a job file's checkpoints: intervals and levels."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    model_validator,
)

from hpctrain.spec.fields import (
    Boolean,
    Count,
    OptionalAutoCount,
    OptionalCount,
    OptionalSize,
    OptionalText,
    Plain,
    Section,
    Text,
    Walltime,
)


def _absolute(value: str | None) -> str | None:
    if value is not None and not value.startswith("/"):
        raise ValueError(f"found {value!r}; an absolute path belongs here, the same on every node")
    return value


AbsolutePath = Annotated[OptionalText, AfterValidator(_absolute)]


class MemoryLevelSpec(Section):
    """Checkpoints in the node's memory: survive a crash of the ranks, not of the node."""

    every: OptionalCount = Field(None, description="Steps between them. [none are taken]")
    path: Text = Field("/dev/shm", description="A tmpfs of the node.")  # noqa: S108


class NodeLevelSpec(Section):
    """Checkpoints on the node's own storage: survive a crash of the node's processes."""

    every: OptionalCount = Field(None, description="Steps between them. [none are taken]")
    keep: Count = Field(1, description="Newest ones kept.")
    path: AbsolutePath = Field(
        None,
        description="A directory that each node has for itself, for example on NVMe; absolute.",
    )

    @model_validator(mode="after")
    def _has_path(self) -> Self:
        if self.every is not None and self.path is None:
            raise ValueError("every is given and path is not: where do the nodes keep them?")
        return self


class PartnerLevelSpec(Section):
    """A copy on another node: survives the loss of a node."""

    every: OptionalCount = Field(None, description="Steps between them. [none are taken]")
    keep: Count = Field(1, description="Newest ones kept.")
    path: AbsolutePath = Field(
        None,
        description="Directory of the receiving node where copies are kept. [checkpoint.node.path, "
        "else checkpoint.memory.path]",
    )


class ParityLevelSpec(Section):
    """Parity over sets of nodes: survives the loss of a node of each set, in less room."""

    every: OptionalCount = Field(None, description="Steps between them. [none are taken]")
    keep: Count = Field(1, description="Newest ones kept.")
    nodes: Annotated[Count, Field(ge=2)] = Field(
        8,
        description="Nodes of a set. Beside its own share a node keeps a share's size divided by "
        "one less than that.",
    )
    path: AbsolutePath = Field(
        None,
        description="A directory that each node has for itself. [checkpoint.node.path, else "
        "checkpoint.memory.path]",
    )


class CheckpointSpec(Section):
    """When and where training state is saved."""

    every: OptionalAutoCount = Field(
        None,
        description="Steps between checkpoints; auto works it out from their measured cost and "
        "`mtbf` (Young, Daly). [a tenth of train.steps]",
    )
    keep: Count = Field(2, description="Newest checkpoints kept; older ones are removed.")
    path: OptionalText = Field(
        None, description="Directory of the checkpoints. [checkpoints/ in the run directory]"
    )
    on_error: Annotated[Literal["continue", "stop"], Plain] = Field(
        "continue",
        description="When a checkpoint cannot be written (no space, quota, I/O error): train on "
        "with the previous one, or stop.",
    )
    mtbf: Walltime = Field(
        86400, description="Mean time between failures of the whole job, for `every: auto`."
    )
    background: Boolean = Field(
        True, description="Train on while a checkpoint is copied and written."
    )
    buffers: Annotated[Count, Field(le=8)] = Field(
        2,
        description="Checkpoints in flight at most. Each takes as much host memory as the rank's "
        "share of the state.",
    )
    when_busy: Annotated[Literal["wait", "skip"], Plain] = Field(
        "wait", description="Where all buffers are in use: wait for one, or skip the checkpoint."
    )
    files: Annotated[Literal["auto", "one", "node", "rank"], Plain] = Field(
        "auto",
        description="HDF5 files a checkpoint: one, one a node, one a rank; auto chooses by the "
        "file system (hpctrain checkpoint tune measures).",
    )
    direct: Boolean = Field(
        True, description="Write past the page cache (O_DIRECT), where the file system can."
    )
    bandwidth: OptionalSize = Field(
        None, description="Bytes a second that a rank writes in the background at most. [no cap]"
    )
    memory: MemoryLevelSpec = Field(
        default_factory=lambda: MemoryLevelSpec(), description="Level in the node's memory."
    )
    node: NodeLevelSpec = Field(
        default_factory=lambda: NodeLevelSpec(), description="Level on the node's storage."
    )
    partner: PartnerLevelSpec = Field(
        default_factory=lambda: PartnerLevelSpec(), description="Level on a partner node."
    )
    parity: ParityLevelSpec = Field(
        default_factory=lambda: ParityLevelSpec(), description="Level over sets of nodes."
    )
