"""AdamW with states of 8 bits, quantised in blocks (Dettmers et al. 2022).

Each block of elements, in the order of memory, has a scale: its largest absolute value. What is
left lies in [-1, 1] and is rounded to one of 256 numbers, dense near 0: dynamic tree quantisation
(section 1.3 there), in which leading zeros count a power of ten and the other bits are a linear
fraction. The second moment, never negative, uses the sign's bit for its fraction. A state takes one
byte an element and four a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

KEYS = ("step", "exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale")
"""States of a parameter: codes have its shape, a scale stands for each block."""

_EXPONENTS = 7


def dynamic_map(*, signed: bool) -> Tensor:
    """The 256 numbers that codes stand for, ascending; float32.

    With e leading zeros a number is 10^-e times the middle of one of the equal parts that the bits
    left cut [0.1, 1] into; 0 and 1 are numbers of their own.
    """
    numbers = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        parts = 2 ** (_EXPONENTS - 1 - exponent + (not signed))
        for part in range(parts):
            number = 10.0**-exponent * (0.1 + 0.9 * (part + 0.5) / parts)
            numbers += [number, -number] if signed else [number]
    return torch.tensor(sorted(numbers), dtype=torch.float32)


def block_rows(columns: int, block: int) -> int:
    """Fewest rows of a matrix that hold whole blocks only."""
    return block // math.gcd(block, columns)


class Quantiser:
    """Tensors to codes and scales, and back.

    Args:
        block: elements that share a scale.
        signed: whether there are negative ones.
    """

    def __init__(self, block: int, *, signed: bool) -> None:
        self.block = block
        self._map = dynamic_map(signed=signed)
        self._limits = (self._map[1:] + self._map[:-1]) / 2

    def pack(self, values: Tensor, code: Tensor, scale: Tensor) -> None:
        """Write ``values`` (any shape, float32) as uint8 of that shape and float32 a block."""
        blocks = self._blocks(values.reshape(-1))
        torch.amax(blocks.abs(), dim=1, out=scale)
        # A block of zeros stays one.
        unit = blocks / torch.where(scale > 0, scale, 1.0)[:, None]
        limits = self._limits.to(values.device)
        found = torch.bucketize(unit, limits, out_int32=True).to(torch.uint8)
        code.copy_(found.view(-1)[: code.numel()].view(code.shape))

    def unpack(self, code: Tensor, scale: Tensor) -> Tensor:
        """float32 of the shape of ``code``."""
        numbers = self._map.to(code.device)[code.reshape(-1).int()]
        blocks = self._blocks(numbers) * scale[:, None]
        return blocks.view(-1)[: code.numel()].view(code.shape)

    def _blocks(self, flat: Tensor) -> Tensor:
        missing = -flat.numel() % self.block
        return (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(
            -1, self.block
        )


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with both moments in 8 bits, in place.

    Args:
        parameters: float32, contiguous. Of a matrix of which ranks hold some rows each, the rows
            begin and end with a block (see block_rows), so that scales do not depend on who holds
            them.
        lr, betas, eps, weight_decay: as AdamW's.
        block: elements that share a scale.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        block: int = 1024,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self._betas, self._eps = betas, eps
        self._first = Quantiser(block, signed=True)
        self._second = Quantiser(block, signed=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "gradients are computed before the step"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, lr: float, decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state.update(new_state(parameter, self._first.block))
        state["step"] += 1
        step = float(state["step"])
        (beta1, beta2), gradient = self._betas, parameter.grad
        assert gradient is not None
        first = self._first.unpack(state["exp_avg_code"], state["exp_avg_scale"])
        second = self._second.unpack(state["exp_avg_sq_code"], state["exp_avg_sq_scale"])
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self._first.pack(first, state["exp_avg_code"], state["exp_avg_scale"])
        self._second.pack(second, state["exp_avg_sq_code"], state["exp_avg_sq_scale"])
        parameter.mul_(1 - lr * decay)
        size = second.div_(1 - beta2**step).sqrt_().add_(self._eps)
        parameter.addcdiv_(first, size, value=-lr / (1 - beta1**step))


def new_state(parameter: Tensor, block: int) -> dict[str, Tensor]:
    """States of zeros."""
    blocks = -(-parameter.numel() // block)
    zero = int(torch.searchsorted(dynamic_map(signed=True), 0.0))
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg_code": torch.full_like(parameter, zero, dtype=torch.uint8),
        "exp_avg_scale": torch.zeros(blocks, device=parameter.device),
        "exp_avg_sq_code": torch.zeros_like(parameter, dtype=torch.uint8),
        "exp_avg_sq_scale": torch.zeros(blocks, device=parameter.device),
    }
