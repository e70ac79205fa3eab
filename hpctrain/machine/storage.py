"""File systems of a site, striping, node-local storage, containers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpctrain.machine.blocks import Block, Bytes, Part, Rate


class Area(Part):
    """A place for files.

    Attributes:
        path: may hold ``${NAME}`` and ``<placeholders>``.
        kind: file system.
        quota, purge_days, note: what limits it.
    """

    path: str
    kind: str | None = None
    quota: str | None = None
    purge_days: int | None = None
    note: str | None = None


class StripeRule(Part):
    """Striping for shared files of at least ``min_bytes``."""

    min_bytes: Bytes = 0
    count: int
    size: Bytes | None = None
    pool: str | None = None


class NodeLocal(Part):
    """Storage of one node, gone with the job.

    Attributes:
        path: where it is mounted; None where there is none.
        kind: ``ram`` counts against the job's memory.
        constraint: sbatch option that brings it.
        read, write: bytes/s.
    """

    path: str | None
    kind: Literal["nvme", "ssd", "ram", "none", "site"]
    constraint: str | None = None
    capacity: Bytes | None = None
    read: Rate | None = None
    write: Rate | None = None


class Storage(Block):
    """File systems and how to write to them.

    Attributes:
        areas: by role: ``scratch``, ``home``, ``project``, ``flash`` …
        checkpoint_area: the role that checkpoints should go to.
        stripe: rules for shared files, smallest first; empty: leave the default alone.
        stripe_advice: the same in words.
        node_local: node-local storage.
        python_env: how a Python environment should reach the nodes.
    """

    areas: dict[str, Area] = Field(default_factory=dict)
    checkpoint_area: str | None = None
    stripe: tuple[StripeRule, ...] = ()
    stripe_advice: str | None = None
    node_local: NodeLocal | None = None
    python_env: str | None = None

    @model_validator(mode="after")
    def _area_exists(self) -> Storage:
        if self.checkpoint_area is not None and self.checkpoint_area not in self.areas:
            raise ValueError(
                f"checkpoint_area {self.checkpoint_area!r} is not among {', '.join(self.areas)}"
            )
        return self

    def stripe_for(self, nbytes: int) -> StripeRule | None:
        """The rule for a shared file of that size; None keeps the default."""
        fits = [rule for rule in self.stripe if rule.min_bytes <= nbytes]
        return max(fits, key=lambda rule: rule.min_bytes, default=None)


class Containers(Block):
    """Container runtime of a site.

    Attributes:
        runtime: what starts images.
        options: srun or sbatch options in the site's own words.
    """

    runtime: Literal["apptainer", "pyxis", "podman-hpc", "shifter", "container-engine", "none"]
    options: str | None = None
