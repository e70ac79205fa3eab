"""One optimizer step: micro-batches forward and backward, clip, update."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.model.build import user_function
from hpctrain.model.dropout import dropout_keys
from hpctrain.optim.schedule import learning_rate
from hpctrain.parallel.data import accumulating
from hpctrain.parallel.expert import balance_by_bias, take_loads
from hpctrain.parallel.model import unwrapped

if TYPE_CHECKING:
    from hpctrain.parallel.batch import MicroBatch
    from hpctrain.parallel.model import ParallelModel
    from hpctrain.spec.job import JobSpec
    from hpctrain.spec.transformer import TransformerDims
    from hpctrain.train.emulation import Emulation

Loss = Callable[[nn.Module, "MicroBatch", torch.Tensor], torch.Tensor]
"""(model, micro-batch, dropout keys of its samples) -> mean loss of the micro-batch."""


def loss_of(spec: JobSpec, parallel: ParallelModel) -> Loss:
    """The job's loss: the user's, or cross entropy of the next token in nats."""
    entry, args = spec.train.loss.module, spec.train.loss.args
    if entry is not None:
        function = user_function(entry, "train.loss.module")
        if "keys" in inspect.signature(function).parameters:
            return lambda model, micro, keys: function(model, micro.batch, keys=keys, **args)
        return lambda model, micro, _keys: function(model, micro.batch, **args)
    if spec.model.module is not None:
        # A user's model with our loss takes tokens and gives logits.
        return lambda model, micro, _: parallel.token_loss(model(micro.batch[0]), micro.batch[1])

    def loss(model: nn.Module, micro: MicroBatch, keys: torch.Tensor) -> torch.Tensor:
        tokens, targets = micro.batch
        inputs = (tokens, keys, micro.positions, micro.starts)
        if spec.parallel.stream is not None:
            return model(*inputs, targets) * micro.weight  # type: ignore[no-any-return]
        return parallel.token_loss(model(*inputs), targets) * micro.weight

    return loss


class Stepper:
    """Takes optimizer steps.

    Args:
        model: as parallelised.
        optimizer: over its parameters.
        spec: resolved job.
        emulation: of a machine that takes a time of its own for the optimizer's step.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        spec: JobSpec,
        *,
        emulation: Emulation | None = None,
    ) -> None:
        self._emulation = emulation
        self.model = model
        self.optimizer = optimizer
        self.train = spec.train
        self.loss = loss_of(spec, model)
        self.device = model.context.device
        sharded = spec.parallel.fsdp
        # FSDP2 casts by its own policy; autocast would cast what it already gathered.
        self._autocast = spec.train.precision == "bf16" and not sharded
        own = spec.model.module is not None
        self._moe = spec.model.transformer() if not own and spec.model.moe.experts else None
        self._loads: torch.Tensor | None = None

    def micro_loss(self, step: int, micro: MicroBatch) -> torch.Tensor:
        """Mean loss of a micro-batch of a step; not in a pipeline."""
        keys = dropout_keys(self.train.seed, step, micro.keys)
        if self.model.contexts is not None:
            self.model.contexts.enter(micro)
        with self._compute():
            return self.loss(self.model.whole, micro, keys)

    def forward_backward(self, step: int, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Accumulate the gradients of a step's micro-batches.

        Args:
            step: number of the step, 1 for the first.
            micro_batches: of this rank.

        Returns:
            Their mean loss. In a pipeline only ranks with a last stage know a loss: there it is
            this rank's part of it times the number of pipeline ranks, so that the mean over all
            ranks is the loss of the step with or without a pipeline.
        """
        pipeline = self.model.pipeline
        if pipeline is not None:
            all_keys = [dropout_keys(self.train.seed, step, micro.keys) for micro in micro_batches]
            part = pipeline.run(micro_batches, all_keys, self._compute)
            return part * self.model.context.size("pp")
        count, model = len(micro_batches), self.model.whole
        total = torch.zeros((), device=self.device)
        for index, micro in enumerate(micro_batches):
            with accumulating(model, last=index == count - 1):
                loss = self.micro_loss(step, micro)
                (loss / count).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() / count
        return total

    def update(self, step: int) -> torch.Tensor:
        """Clip, update with the learning rate of ``step``, forget the gradients.

        Returns:
            Global L2 norm of the gradients before clipping, a scalar on the device.
        """
        if self._emulation is not None:
            self._emulation.update()
        self.model.sum_partial_gradients()
        norm = self.model.clip(self.train.clip)
        rate = learning_rate(step, self.train)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._moe is not None:
            self._balance(self._moe)
        return norm

    def take_loads(self) -> torch.Tensor | None:
        """What this rank's routers saw since the last take, (layers, experts + 1) as of
        :func:`~hpctrain.parallel.expert.take_loads`; None in a model without experts."""
        found, self._loads = self._loads, None
        return found

    def _balance(self, dims: TransformerDims) -> None:
        chunks = [unwrapped(chunk) for chunk in self.model.chunks]
        seen = take_loads(chunks, dims)
        self._loads = seen if self._loads is None else self._loads + seen
        if dims.moe is not None and dims.moe.bias_rate:
            balance_by_bias(chunks, self._over_all_ranks(seen[:, :-1].contiguous()))

    def _over_all_ranks(self, loads: torch.Tensor) -> torch.Tensor:
        context = self.model.context
        if context.world_size == 1:
            return loads
        on_device = loads.to(self.device)
        torch.distributed.all_reduce(on_device)
        return on_device.cpu()

    def _compute(self) -> AbstractContextManager[Any]:
        if not self._autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)
