"""What a rank of a pipeline does: the cells of a schedule's table.

A schedule is data, and this is its alphabet. Everything that reads a schedule (validator,
simulator, drawer, executor, planner) reads lists of :class:`Action` and nothing else.

How an executor reads them, in the order of the list:

* ``F B I W S T E D OPT`` are computed, one after the other.
* ``SEND_*`` starts a send of what this rank has just computed; it need not be waited for.
  ``RECV_*`` posts a receive; the action that needs the tensor waits for it. The lists are
  ordered such that even sends that block until they are received cannot deadlock, and
  between two ranks messages are received in the order in which they are sent.
* ``SHARE COMBINE STATS REDUCE`` are collectives over the pipeline's ranks (``REDUCE``: two of
  them), ``GATHER RESHARD SCATTER`` over the data-parallel group of this rank. All of them
  may run beside the computation; every member meets them in the same order.
* Consecutive communication actions may be posted as one batch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

Cell = str | int | None


class ActionKind(StrEnum):
    """What one action does; the value is the name used in JSON and in pictures."""

    F = "F"
    """Forward of one stage for one micro-batch; its activations are kept from here on."""
    B = "B"
    """Full backward: gradients of input and weights; frees the activations."""
    I = "I"  # noqa: E741 - the letter the literature uses
    """Backward for the input only: the part the previous stage waits for."""
    W = "W"
    """Backward for the weights only, some time after ``I``; frees the activations."""

    SEND_F = "SEND_F"
    """Send the output of ``stage`` to ``peer``, which holds ``stage + 1``."""
    RECV_F = "RECV_F"
    """Receive the input of ``stage`` from ``peer``, which holds ``stage - 1``."""
    SEND_B = "SEND_B"
    """Send the gradient of the input of ``stage`` to ``peer``, which holds ``stage - 1``."""
    RECV_B = "RECV_B"
    """Receive the gradient of the output of ``stage`` from ``peer`` (``stage + 1``)."""

    GATHER = "GATHER"
    """All-gather the sharded parameters of ``chunk`` over the data-parallel group."""
    RESHARD = "RESHARD"
    """Drop the gathered parameters of ``chunk`` again."""
    SCATTER = "SCATTER"
    """Reduce-scatter the gradients of ``chunk`` over the data-parallel group."""
    REDUCE = "REDUCE"
    """Sum the gradients of ``stage`` with ``peer``, which holds a second copy of it."""

    OFFLOAD = "OFFLOAD"
    """Copy the activations of (stage, micro-batch) to host memory and free them."""
    RELOAD = "RELOAD"
    """Copy them back; the backward that needs them waits for it."""

    E = "E"
    """Embedding look-up in this rank's slice of the vocabulary."""
    D = "D"
    """Gradient of this rank's slice of the embedding."""
    S = "S"
    """Output layer on this rank's slice of the vocabulary: logits and local softmax."""
    T = "T"
    """The output layer's weight gradient (with ``STATS``: also its input gradient)."""
    SHARE = "SHARE"
    """Broadcast from ``peer`` to all ranks: the last stage's output (before ``S``), or the
    gradient of the first stage's input (before ``D``); ``stage`` says which."""
    COMBINE = "COMBINE"
    """Sum over all ranks, for ``peer``: embeddings (after ``E``), or the gradient of the last
    stage's output (after ``S``; after ``T`` where there are ``STATS``)."""
    STATS = "STATS"
    """All-reduce of the softmax's maximum and sum between ``S`` and ``T``."""

    OPT = "OPT"
    """Optimizer step of this rank."""

    __hash__ = str.__hash__  # Enum's own is Python code; tables hash millions of these


class Action(NamedTuple):
    """One cell of the table: what, of which stage, for which micro-batch.

    A tuple, not a dataclass: a planner makes millions of them.

    Attributes:
        kind: what to do.
        stage: place in the model, 0 .. stages - 1; None for ``OPT``.
        micro_batch: 0 .. micro_batches - 1; None where there is none.
        chunk: index of the stage among those this rank holds: the executor's module list.
        peer: the other rank of a transfer, the root of ``SHARE`` and ``COMBINE``.
    """

    kind: ActionKind
    stage: int | None = None
    micro_batch: int | None = None
    chunk: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        text = self.kind.value
        if self.stage is not None:
            text += f" stage {self.stage}"
        if self.micro_batch is not None:
            text += f" micro-batch {self.micro_batch}"
        if self.peer is not None:
            text += f" peer {self.peer}"
        return text

    def to_json(self) -> list[Cell]:
        """The action as a short JSON array; trailing nulls are left out."""
        cells: list[Cell] = [self.kind.value, *self[1:]]
        while cells[-1] is None:
            cells.pop()
        return cells

    @classmethod
    def from_json(cls, cells: list[Cell]) -> Action:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: not an array of a known kind and up to four integers.
        """
        if not isinstance(cells, list) or not 1 <= len(cells) <= 5:
            raise ValueError(f"an action is an array of 1 to 5 cells, found {cells!r}")
        kind, *rest = cells
        for cell in rest:
            if cell is not None and (not isinstance(cell, int) or isinstance(cell, bool)):
                raise ValueError(f"{cells!r}: {cell!r} is not an integer")
        return cls(ActionKind(str(kind)), *rest)  # type: ignore[arg-type]


# What computes, in the order of the simulator's codes.
COMPUTE = tuple(ActionKind(letter) for letter in "FBIWSTED")
TRANSFERS = (ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B)
SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)
COLLECTIVES = (ActionKind.SHARE, ActionKind.COMBINE, ActionKind.STATS, ActionKind.REDUCE)
