"""The schedule itself: a frozen table of actions, its placement and what its method claims."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hpctrain.schedule.actions import TRANSFERS, Action, ActionKind
from hpctrain.schedule.graph import Program, compile_table
from hpctrain.schedule.stages import StageMap

FORMAT = "hpctrain-schedule"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Claim:
    """What the method promises for these p, v and m; checked by the validator and the tests.

    Attributes:
        source: the paper.
        peak_activations: the most any rank holds, in activations of one micro-batch over one
            p-th of the model (the unit of plain 1F1B: there rank 0 holds p).
        bubble_fraction: 1 - mean busy time / makespan with F = I = W, B = I + W and free
            transfers; None where no closed form is known.
    """

    source: str
    peak_activations: float
    bubble_fraction: float | None = None


@dataclass(frozen=True)
class Schedule:
    """One training step of a pipeline, as data.

    Attributes:
        name: the method's name in the registry.
        stages: which rank holds which stage.
        micro_batches: m.
        actions: for each rank its actions in order.
        claim: what the method promises.
        route_of: route of each micro-batch; all 0 but for bidirectional pipelines.
        vocabulary: barriers that vocabulary passes put between the last stage's forward and
            its backward (Vocabulary Parallelism): 1 or 2; 0 without such passes.
        options: the method's own options, as given.
    """

    name: str
    stages: StageMap
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    claim: Claim
    route_of: tuple[int, ...] = ()
    vocabulary: int = 0
    options: tuple[tuple[str, int | float | str], ...] = field(default=())

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"at least 1 micro-batch, found {self.micro_batches}")
        if not self.route_of:
            object.__setattr__(self, "route_of", (0,) * self.micro_batches)

    @property
    def ranks(self) -> int:
        """Pipeline ranks, p."""
        return self.stages.ranks

    @property
    def chunks(self) -> int:
        """Stages a rank holds on one route, v."""
        return self.stages.chunks

    def rank_of(self, stage: int, micro_batch: int = 0) -> int:
        """The rank that computes ``stage`` for ``micro_batch``."""
        return self.stages.routes[self.route_of[micro_batch]][stage]

    @cached_property
    def split_backward(self) -> bool:
        """Whether the backward is cut into I and W."""
        return any(a.kind is ActionKind.I for row in self.actions for a in row)

    @cached_property
    def has_transfers(self) -> bool:
        """Whether sends and receives are in the table (one rank alone never has any)."""
        return any(a.kind in TRANSFERS for row in self.actions for a in row)

    @cached_property
    def program(self) -> Program:
        """The table compiled for the simulator.

        Raises:
            InvalidScheduleError: the table cannot be run.
        """
        return compile_table(
            self.stages, self.micro_batches, self.route_of, self.actions, self.vocabulary
        )

    def with_actions(self, actions: tuple[tuple[Action, ...], ...], **changes: Any) -> Schedule:
        """A copy with another table (and other fields)."""
        return replace(self, actions=actions, **changes)

    def to_json(self) -> dict[str, Any]:
        """The schedule as plain JSON data; :meth:`from_json` restores it exactly."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "options": dict(self.options),
            "micro_batches": self.micro_batches,
            "ranks": self.ranks,
            "routes": [list(route) for route in self.stages.routes],
            "route_of": list(self.route_of),
            "vocabulary": self.vocabulary,
            "claim": {
                "source": self.claim.source,
                "peak_activations": self.claim.peak_activations,
                "bubble_fraction": self.claim.bubble_fraction,
            },
            "actions": [[action.to_json() for action in row] for row in self.actions],
        }

    @classmethod
    def from_json(cls, data: str | Mapping[str, Any]) -> Schedule:
        """Read what :meth:`to_json` wrote (a mapping, or its JSON text).

        Raises:
            ValueError: not such a document; the message names the key.
        """
        tree = json.loads(data) if isinstance(data, str) else data
        if not isinstance(tree, Mapping) or tree.get("format") != FORMAT:
            raise ValueError(f"not a schedule: format should be {FORMAT!r}")
        if tree.get("version") != VERSION:
            raise ValueError(f"version: {VERSION} can be read, found {tree.get('version')!r}")
        try:
            return cls(
                name=str(tree["name"]),
                stages=StageMap(int(tree["ranks"]), tuple(tuple(r) for r in tree["routes"])),
                micro_batches=int(tree["micro_batches"]),
                actions=tuple(
                    tuple(Action.from_json(cells) for cells in row) for row in tree["actions"]
                ),
                claim=Claim(**tree["claim"]),
                route_of=tuple(tree["route_of"]),
                vocabulary=int(tree["vocabulary"]),
                options=tuple(dict(tree["options"]).items()),
            )
        except KeyError as missing:
            raise ValueError(f"not a schedule: {missing} is missing") from None
        except TypeError as wrong:
            raise ValueError(f"not a schedule: {wrong}") from None
