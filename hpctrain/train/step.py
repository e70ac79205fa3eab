"""One optimizer step: micro-batches forward and backward, clip, update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.model.build import user_function
from hpctrain.model.loss import next_token_loss
from hpctrain.model.rng import dropout_keys
from hpctrain.optim import clip_by_global_norm, learning_rate
from hpctrain.parallel.data import accumulating

if TYPE_CHECKING:
    from hpctrain.spec.job import JobSpec
    from hpctrain.train.data import MicroBatch

Loss = Callable[[nn.Module, Any], torch.Tensor]


def token_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of the next token, mean over the micro-batch, nats."""
    tokens, targets = batch
    return next_token_loss(model(tokens), targets)


def loss_of(spec: JobSpec) -> Loss:
    """The job's loss: the user's, or next-token cross entropy."""
    entry, args = spec.train.loss.module, spec.train.loss.args
    if entry is None:
        return token_loss
    function = user_function(entry, "train.loss.module")
    return lambda model, batch: function(model, batch, **args)


class Stepper:
    """Takes optimizer steps.

    Args:
        model: as parallelised.
        optimizer: over its parameters.
        spec: resolved job.
        device: of the rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        spec: JobSpec,
        device: torch.device,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.train = spec.train
        self.loss = loss_of(spec)
        self.device = device
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        sharded = spec.parallel.sharding != "none"
        # FSDP2 casts by its own policy; autocast would cast what it already gathered.
        self._autocast = spec.train.precision == "bf16" and not sharded

    def forward_backward(self, micro_batches: Iterable[MicroBatch], count: int) -> torch.Tensor:
        """Accumulate the gradients of ``count`` micro-batches; returns their mean loss."""
        total = torch.zeros((), device=self.device)
        for index, micro in enumerate(micro_batches):
            with accumulating(self.model, last=index == count - 1):
                with self._compute(), dropout_keys(self.model, micro.keys):
                    loss = self.loss(self.model, micro.batch)
                (loss / count).backward()
            total += loss.detach() / count
        return total

    def update(self, step: int) -> torch.Tensor:
        """Clip, set the learning rate of ``step`` (1-based), update, forget the gradients."""
        norm = clip_by_global_norm(self.parameters, self.train.clip)
        rate = learning_rate(step, self.train)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _compute(self) -> AbstractContextManager[Any]:
        if not self._autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)
