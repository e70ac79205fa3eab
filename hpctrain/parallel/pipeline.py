"""The one executor of pipeline schedules: walks a rank's list of actions.

The schedule says everything about order; what an action does is the same for all of them::

    F        input -> stage -> output; of the last stage, loss
    B        gradient of the output -> gradients of input and weights
    I, W     the two halves of B, see :mod:`hpctrain.parallel.split_backward`
    SEND     starts a message with what was just computed; nobody waits for it
    RECV     posts a receive; the pass that needs it waits
    GATHER   RESHARD SCATTER   parameters and gradients over the data-parallel ranks
    REDUCE   gradients of a stage that two ranks hold
    OFFLOAD  RELOAD            activations to host memory and back
    OPT      the end: clipping and the optimizer step are the training step's

Passes of Vocabulary Parallelism are in :mod:`hpctrain.parallel.pipeline_vocabulary`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hpctrain.parallel.offload import Shelf
from hpctrain.parallel.pipeline_exchange import Arrival, Exchange, Receive, Send
from hpctrain.parallel.pipeline_gradients import ChunkGradients, SummedCopies
from hpctrain.parallel.pipeline_stages import Wire
from hpctrain.parallel.pipeline_vocabulary import Vocabulary
from hpctrain.parallel.split_backward import WeightGrads
from hpctrain.schedule import Action, ActionKind, Schedule
from hpctrain.schedule.actions import SENDS, TRANSFERS

if TYPE_CHECKING:
    from hpctrain.parallel.batch import MicroBatch

K = ActionKind
Cell = tuple[int, int]
"""(stage, micro-batch)"""


@dataclass(slots=True)
class _Live:
    """One stage of one micro-batch between its forward and the end of its backward."""

    source: Tensor | None = None
    """The stage's input, where its gradient arrives; None where nobody wants that."""
    edge: GradientEdge | None = None
    """Where backward starts: the output, or the loss."""
    dtype: torch.dtype = torch.float32
    """Of the output."""
    buffers: list[Tensor] = field(default_factory=list)
    """Received tensors that backward still reads."""
    shelf: Shelf | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """One action as it was run; times in seconds of ``time.perf_counter``, waiting excluded."""

    action: Action
    start: float
    end: float


class Pipeline:
    """Runs the forwards and backwards of a step on this rank.

    Args:
        schedule: with transfers.
        rank: of this process in the pipeline.
        modules: its chunks, as wrapped for data parallelism.
        call: (module, input, dropout keys, micro-batch) -> output.
        loss: (output of the last stage, micro-batch) -> mean loss.
        wire: form of what passes between stages.
        exchange: messages.
        gradients: of each chunk over the data-parallel ranks.
        copies: of chunks that another rank holds too (``REDUCE``), by chunk.
        tied: gradients summed with another rank's at the end of the step.
        store: of the weight gradients, where backward is split.
        lenders: chunk that borrows a weight -> chunk that has it.
        vocabulary: passes of Vocabulary Parallelism; its gradients are the last of
            ``gradients``.
        scale: factor of the loss whose gradients are accumulated.

    Attributes:
        spans: set to a list to have what is run noted down.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        modules: Sequence[nn.Module],
        *,
        call: Callable[[nn.Module, Tensor, Tensor, MicroBatch], Tensor],
        loss: Callable[[Tensor, MicroBatch], Tensor],
        wire: Wire,
        exchange: Exchange,
        gradients: Sequence[ChunkGradients],
        copies: dict[int, SummedCopies] | None = None,
        tied: Sequence[SummedCopies] = (),
        store: WeightGrads | None = None,
        lenders: dict[int, int] | None = None,
        vocabulary: Vocabulary | None = None,
        scale: float = 1.0,
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self.modules = modules
        self.call = call
        self.loss = loss
        self.wire = wire
        self.exchange = exchange
        self.gradients = gradients
        self.copies = copies or {}
        self.tied = tied
        self.store = WeightGrads() if store is None else store  # an empty one is false
        self.lenders = lenders or {}
        self.vocabulary = vocabulary
        self.spans: list[Span] | None = None
        self._scale = scale / schedule.micro_batches
        self._last = schedule.stages.stages - 1
        self._held = {stage for _, stage in schedule.stages.held[rank]}
        self._gathers = any(action.kind is K.GATHER for action in schedule.actions[rank])
        self._copy_stream = (
            torch.cuda.Stream(exchange.device)  # type: ignore[no-untyped-call]
            if exchange.device.type == "cuda"
            else None
        )
        self._offloaded = {
            (a.stage, a.micro_batch) for a in schedule.actions[rank] if a.kind is K.OFFLOAD
        }
        self._do: dict[ActionKind, Callable[[Action], None]] = {
            K.F: self._forward,
            K.B: self._backward,
            K.I: self._input_gradient,
            K.W: self._weight_gradient,
            K.GATHER: self._gather,
            K.RESHARD: self._reshard,
            K.SCATTER: self._scatter,
            K.REDUCE: self._reduce,
            K.OFFLOAD: self._offload,
            K.RELOAD: self._reload,
        }
        if vocabulary is not None:
            self._do |= dict.fromkeys(vocabulary.passes, self._vocabulary_pass)
            self._do[K.SHARE] = vocabulary.share
        self._steps = list(self._compile(schedule.actions[rank]))
        # Of the step under way
        self._micro_batches: Sequence[MicroBatch] = ()
        self._keys: Sequence[Tensor] = ()
        self._compute: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self._shapes: Sequence[torch.Size | None] = ()
        self._live: dict[Cell, _Live] = {}
        self._inputs: dict[Cell, Tensor] = {}
        self._grads: dict[Cell, Tensor] = {}
        self._arrivals: dict[tuple[ActionKind, int, int], Arrival] = {}
        self._outgoing: dict[tuple[ActionKind, int, int], Tensor] = {}
        self._total: Tensor = torch.zeros(())

    # ---- a step -----------------------------------------------------------------------------

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        keys: Sequence[Tensor],
        compute: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Tensor:
        """Accumulate the gradients of one step.

        Args:
            micro_batches: of this rank, as many as the schedule was made for.
            keys: dropout keys of each.
            compute: context of forwards (autocast).

        Returns:
            This rank's part of the mean loss: 0 where it holds no last stage. The parts of a
            pipeline's ranks add up to the mean.
        """
        assert len(micro_batches) == self.schedule.micro_batches
        self._micro_batches, self._keys, self._compute = micro_batches, keys, compute
        self._shapes = self.wire.shapes(micro_batches[0].batch)
        self._total = torch.zeros((), device=self.exchange.device)
        for gradients in self.gradients:
            gradients.begin()
            if not self._gathers:  # what is kept for the whole step is gathered before its start
                gradients.gather()
        if self.vocabulary is not None:
            self.vocabulary.begin([micro.batch for micro in micro_batches])
            self.gradients[-1].gather(wait=True)
        for step in self._steps:
            step()
        for gradients in self.gradients:
            gradients.finish()
        for copies in self.copies.values():
            copies.finish(self.exchange)
        for tied in self.tied:
            tied.start(self.exchange)
        for tied in self.tied:
            tied.finish(self.exchange)
        self.exchange.flush()
        if self.vocabulary is not None:
            self.vocabulary.finish()
            for loss in self.vocabulary.losses:
                self._total += loss / self.schedule.micro_batches
        assert not self._live and not self._arrivals and not len(self.store), "all is done"
        self._micro_batches = self._keys = ()
        return self._total

    def _compile(self, row: Sequence[Action]) -> Iterable[Callable[[], None]]:
        """The list as calls: neighbouring messages in one, reductions where they are due."""
        due: dict[int, list[int]] = {}
        for chunk, index in self._last_gradients(row).items():
            due.setdefault(index, []).append(chunk)
        place, complete = 0, list[int]()
        for transfers, run in groupby(row, key=lambda action: action.kind in TRANSFERS):
            actions = list(run)
            if transfers:
                yield _bound(self._communicate, actions)
            for index, action in enumerate(actions, start=place):
                # What a neighbour waits for has gone before gradients are summed.
                yield from (self.gradients[chunk].reduce for chunk in complete)
                complete = due.get(index, [])
                if not transfers and action.kind in self._do:
                    yield _bound(self._do[action.kind], action)
            place += len(actions)
        yield from (self.gradients[chunk].reduce for chunk in complete)

    def _last_gradients(self, row: Sequence[Action]) -> dict[int, int]:
        """Chunk -> place after which its gradients are complete."""
        last: dict[int, int] = {}
        for index, action in enumerate(row):
            if action.kind in (K.B, K.W):
                assert action.chunk is not None
                last[action.chunk] = index
            elif action.kind in (K.T, K.D):
                last[len(self.gradients) - 1] = index
        for borrower, lender in self.lenders.items():
            last[lender] = max(last[lender], last[borrower])
        return last

    # ---- passes -----------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        cell = stage, j = _cell(action)
        live = self._live[cell] = _Live()
        source = self._input(cell, live)
        if cell in self._offloaded:
            live.shelf = Shelf(self._copy_stream)
        with self._timed(action), self._saving(live), self._compute():
            micro = self._micro_batches[j]
            output = self.call(self._module(action), source, self._keys[j], micro)
            if stage == self._last and self.vocabulary is None:
                loss = self.loss(output, micro)
                self._total += loss.detach() / self.schedule.micro_batches
                output = loss * self._scale
        live.edge, live.dtype = get_gradient_edge(output), output.dtype
        if stage == self._last and self.vocabulary is not None:
            self.vocabulary.give_output(j, output.detach())
        self._pass_on(K.SEND_F, stage + 1, j, output.detach())

    def _input(self, cell: Cell, live: _Live) -> Tensor:
        """The input of a stage: tokens, what a neighbour sent or what this rank made itself."""
        stage, j = cell
        arrival = self._arrivals.pop((K.RECV_F, stage, j), None)
        if arrival is not None:
            buffer = arrival.wait()
            live.buffers.append(buffer)
            source = buffer.detach().to(self.wire.stream)
        elif cell in self._inputs:
            source = self._inputs.pop(cell)
        elif self.vocabulary is not None:
            source = self.vocabulary.embedded(j)
        else:
            return self._micro_batches[j].batch[0]  # type: ignore[no-any-return]
        live.source = source.requires_grad_()
        return source

    def _backward(self, action: Action) -> None:
        cell = _cell(action)
        live, grad = self._live[cell], self._gradient(cell)
        with self._timed(action):
            self._propagate(action, live, grad)
        self.exchange.release(*self._live.pop(cell).buffers)

    def _input_gradient(self, action: Action) -> None:
        cell = _cell(action)
        live, grad = self._live[cell], self._gradient(cell)
        with self._timed(action), self.store.defer(cell):
            self._propagate(action, live, grad)
        live.edge = live.source = live.shelf = None

    def _weight_gradient(self, action: Action) -> None:
        cell = _cell(action)
        with self._timed(action):
            self.store.run(cell)
        assert action.chunk is not None
        self.gradients[action.chunk].settle()
        self.exchange.release(*self._live.pop(cell).buffers)

    def _gradient(self, cell: Cell) -> Tensor | None:
        """The gradient of a stage's output; None where it is the loss."""
        live = self._live[cell]
        arrival = self._arrivals.pop((K.RECV_B, *cell), None)
        if arrival is not None:
            buffer = arrival.wait()
            live.buffers.append(buffer)
            return buffer.to(live.dtype)
        if cell[0] == self._last and self.vocabulary is not None:
            return self.vocabulary.output_gradient(cell[1]).to(live.dtype)
        return self._grads.pop(cell, None)

    def _propagate(self, action: Action, live: _Live, grad: Tensor | None) -> None:
        stage, j = _cell(action)
        if live.shelf is not None:
            live.shelf.wait()
        assert live.edge is not None
        torch.autograd.backward([live.edge], [grad])
        if live.source is None:
            return
        found = live.source.grad
        assert found is not None
        live.source.grad = None
        if grad is not None and _same_memory(found, grad):
            found = found.clone()  # the buffer will be used again
        if stage == 0 and self.vocabulary is not None:
            self.vocabulary.give_input_gradient(j, found)
        self._pass_on(K.SEND_B, stage - 1, j, found)

    def _pass_on(self, kind: ActionKind, target: int, j: int, tensor: Tensor) -> None:
        """Keep a result for the stage that needs it: here, or where a message will go."""
        if not 0 <= target <= self._last:
            return
        if self.schedule.rank_of(target, j) == self.rank:
            found = self._inputs if kind is K.SEND_F else self._grads
            found[target, j] = tensor
        else:
            self._outgoing[kind, target, j] = tensor.to(self.wire.dtype)

    def _vocabulary_pass(self, action: Action) -> None:
        assert self.vocabulary is not None
        with self._timed(action):
            self.vocabulary.passes[action.kind](_cell(action)[1])
        self.gradients[-1].settle()

    # ---- the others -------------------------------------------------------------------------

    def _communicate(self, actions: Sequence[Action]) -> None:
        messages: list[Send | Receive] = []
        for action in actions:
            stage, j = _cell(action)
            assert action.peer is not None
            if action.kind in SENDS:
                target = stage + 1 if action.kind is K.SEND_F else stage - 1
                messages.append((self._outgoing.pop((action.kind, target, j)), action.peer))
            else:
                # What arrives for B has the form of the stage's output: the next one's input.
                shape = self._shapes[stage if action.kind is K.RECV_F else stage + 1]
                assert shape is not None
                messages.append((shape, self.wire.dtype, action.peer))
        arrivals = iter(self.exchange.post(messages))
        for action in actions:
            if action.kind not in SENDS:
                self._arrivals[action.kind, *_cell(action)] = next(arrivals)

    def _gather(self, action: Action) -> None:
        self._chunk(action).gather()

    def _reshard(self, action: Action) -> None:
        self._chunk(action).reshard(keep_root=action.chunk in self.lenders.values())

    def _scatter(self, action: Action) -> None:
        """Reductions are put where gradients are complete, which is where these stand."""

    def _reduce(self, action: Action) -> None:
        assert action.chunk is not None
        self.gradients[action.chunk].finish()
        self.copies[action.chunk].start(self.exchange)

    def _offload(self, action: Action) -> None:
        shelf = self._live[_cell(action)].shelf
        assert shelf is not None
        shelf.offload()

    def _reload(self, action: Action) -> None:
        shelf = self._live[_cell(action)].shelf
        assert shelf is not None
        shelf.reload()

    def _chunk(self, action: Action) -> ChunkGradients:
        assert action.chunk is not None
        return self.gradients[action.chunk]

    def _module(self, action: Action) -> nn.Module:
        assert action.chunk is not None
        return self.modules[action.chunk]

    def _saving(self, live: _Live) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if live.shelf is None else live.shelf.saving()

    @contextlib.contextmanager
    def _timed(self, action: Action) -> Any:
        start = time.perf_counter()
        yield
        if self.spans is not None:
            self.spans.append(Span(action, start, time.perf_counter()))


def _cell(action: Action) -> Cell:
    assert action.stage is not None and action.micro_batch is not None
    return action.stage, action.micro_batch


def _bound(function: Callable[[Any], None], argument: Any) -> Callable[[], None]:
    return lambda: function(argument)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
