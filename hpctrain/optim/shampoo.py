"""Distributed Shampoo: Kronecker-factored preconditioning of blocks of matrices.

Shampoo (Gupta, Koren and Singer 2018, algorithm 1) with what made it practical (Shi et al. 2023,
section 3): matrices in blocks, exponential averages with bias correction, roots computed every
few steps, and the step size of another method (Adam) grafted on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
FACTORS = ("left", "right", "left_root", "right_root")


def inverse_root(factor: Tensor, order: int, damping: float) -> Tensor:
    """factor^(−1/order) of a symmetric positive semidefinite matrix.

    The ridge ``damping``·λmax is added first, relative to the largest eigenvalue (Anil et al.
    2020, section 3.4), so that the result does not depend on the loss's scale. Through the
    eigendecomposition in float64.

    Args:
        factor: (n, n).
        order: 4 for both sides of a matrix.
        damping: above 0.
    """
    values, vectors = torch.linalg.eigh(factor.double())
    values = values.clamp(min=0.0)
    # All zeros (no gradient yet): the identity, which grafting scales anyway.
    ridge = damping * values[-1]
    values = torch.where(values[-1] > 0, values + ridge, torch.ones_like(values))
    root: Tensor = (vectors * values.pow(-1.0 / order)) @ vectors.mT
    return root.to(factor.dtype)


def block_keys(rows: range, columns: int, block: int) -> Iterator[tuple[int, int]]:
    """(row block, column block) of rows of a matrix.

    Args:
        rows: of the whole matrix; starts at a multiple of ``block``.
        columns: of the matrix.
        block: longest side of a block.
    """
    for row in range(rows.start // block, -(-rows.stop // block)):
        yield from ((row, column) for column in range(-(-columns // block)))


class Shampoo(torch.optim.Optimizer):
    """Shampoo over matrices or runs of whole row blocks of them, in place.

    For each block, with G its gradient and bias-corrected averages (hats)::

        L ← β₂·L + (1 − β₂)·G·Gᵀ        R ← β₂·R + (1 − β₂)·Gᵀ·G
        M ← β₁·M + (1 − β₁)·G           V ← β₂·V + (1 − β₂)·G²
        P = L̂^(−1/4)·M̂·R̂^(−1/4)         A = M̂ / (√V̂ + ε)
        W ← (1 − lr·λ)·W − lr·P·‖A‖/‖P‖

    The roots are those of the step 1, 1 + interval, 1 + 2·interval … before.

    Args:
        parameters: matrices.
        lr, betas, eps, weight_decay: as AdamW's.
        block: longest side of a block.
        interval: steps between computations of the roots.
        damping: see inverse_root.
        first_rows: of a parameter that is some rows of a matrix: the number of its first row
            in the matrix, a multiple of ``block``; 0 without. Blocks are named by their place
            in the matrix, whoever holds them.

    Raises:
        ValueError: a parameter that is no matrix, or rows that do not begin with a block.
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
        interval: int = 10,
        damping: float = 1e-6,
        first_rows: Mapping[Tensor, int] | None = None,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self._betas, self._eps = betas, eps
        self._block, self._interval, self._damping = block, interval, damping
        self._first_rows = dict(first_rows or {})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    shape = list(parameter.shape)
                    raise ValueError(f"Shampoo takes matrices, not the shape {shape}")
                if self._first_rows.get(parameter, 0) % block:
                    raise ValueError(f"rows have to begin at a multiple of {block}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "gradients are computed before the step"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter_lr = group["lr"]
                    direction = self._direction(parameter, parameter.grad)
                    parameter.mul_(1.0 - parameter_lr * group["weight_decay"])
                    parameter.add_(direction, alpha=-parameter_lr)

    def _direction(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        first, second = self._betas
        step = int(state["step"].add_(1.0))
        corrected = 1.0 - second**step
        state["exp_avg"].lerp_(gradient, 1.0 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        mean = state["exp_avg"] / (1.0 - first**step)
        adam = mean / ((state["exp_avg_sq"] / corrected).sqrt_() + self._eps)
        direction = torch.empty_like(parameter)
        for name, box in self._blocks(parameter):
            block = gradient[box]
            for side, gram in (("left", block @ block.mT), ("right", block.mT @ block)):
                key = f"{side}_{name}"
                if key not in state:
                    state[key] = torch.zeros_like(gram)
                    state[f"{side}_root_{name}"] = torch.zeros_like(gram)
                state[key].mul_(second).add_(gram, alpha=1.0 - second)
                if (step - 1) % self._interval == 0:
                    root = inverse_root(state[key] / corrected, 4, self._damping)
                    state[f"{side}_root_{name}"].copy_(root)
            shaped = state[f"left_root_{name}"] @ mean[box] @ state[f"right_root_{name}"]
            size = torch.linalg.matrix_norm(shaped)
            graft = torch.linalg.matrix_norm(adam[box]) / size.clamp(
                min=torch.finfo(size.dtype).tiny
            )
            direction[box] = shaped * graft
        return direction

    def _blocks(self, parameter: Tensor) -> Iterator[tuple[str, tuple[slice, slice]]]:
        block = self._block
        first = self._first_rows.get(parameter, 0)
        rows, columns = parameter.shape
        for row, column in block_keys(range(first, first + rows), columns, block):
            start = row * block - first
            yield (
                f"{row}_{column}",
                (
                    slice(start, min(start + block, rows)),
                    slice(column * block, min((column + 1) * block, columns)),
                ),
            )
