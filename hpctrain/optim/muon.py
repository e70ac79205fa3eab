"""Muon: momentum whose singular values are all made (nearly) one (Jordan et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

Scale = Literal["match-rms", "spectral"]

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of Jordan's iteration: steep at 0, so that five steps lift singular values
from about 0.005 on; it does not converge to 1 but stays around it, between 0.68 and 1.14."""


def orthogonalize(
    matrices: Tensor, iterations: int = 5, dtype: torch.dtype | None = None
) -> Tensor:
    """About U·Vᵀ of each matrix U·S·Vᵀ, by Newton-Schulz.

    X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ, begun at the matrix over its Frobenius norm.

    Args:
        matrices: (…, m, n).
        iterations: five in the source.
        dtype: of the products; the matrices' own without.

    Returns:
        A new tensor of the same shape and dtype. Singular vectors are those of the input;
        singular values that were above about 1/200 of the norm are between 0.68 and 1.14. A
        matrix of zeros stays one.
    """
    a, b, c = _QUINTIC
    x: Tensor = matrices.to(dtype or matrices.dtype)
    wide = x.shape[-2] <= x.shape[-1]
    if not wide:
        x = x.mT  # the smaller Gram matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + torch.finfo(x.dtype).tiny)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x if wide else x.mT).to(matrices.dtype)


def update_scale(rows: int, columns: int, scale: Scale) -> float:
    """What the orthogonal update is multiplied by, beside the learning rate.

    - match-rms: 0.2·√max(m, n). A matrix with orthogonal rows or columns has elements of root
      mean square 1/√max(m, n); this makes it 0.2, about AdamW's, so that both take one learning
      rate and one weight decay (Liu et al. 2025, section 2.2).
    - spectral: √max(1, m/n), as in Jordan's own code; wants a learning rate of its own (0.02).
    """
    if scale == "match-rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class Muon(torch.optim.Optimizer):
    """Muon over whole matrices, in place; decoupled weight decay.

    M ← μ·M + (1 − μ)·G; the update is NS(M), or with Nesterov's look ahead
    NS((1 − μ)·G + μ·M); W ← (1 − lr·λ)·W − lr·scale·update. The average is a scaled sum, and
    Newton-Schulz does not see scales.

    Args:
        parameters: matrices (rows, columns), each whole.
        lr: learning rate.
        weight_decay: λ.
        momentum: μ.
        nesterov: look ahead.
        iterations: Newton-Schulz steps.
        scale: see update_scale.
        dtype: of the Newton-Schulz products; the parameters' own without.

    Raises:
        ValueError: a parameter that is no matrix.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        iterations: int = 5,
        scale: Scale = "match-rms",
        dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(parameters, defaults)
        self._nesterov, self._iterations = nesterov, iterations
        self._scale: Scale = scale
        self._dtype = dtype
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon takes matrices, not the shape {list(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "gradients are computed before the step"
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"].lerp_(parameter.grad, 1.0 - momentum)
                if self._nesterov:
                    average = parameter.grad.lerp(average, momentum)
                update = orthogonalize(average, self._iterations, self._dtype)
                parameter.mul_(1.0 - rate * group["weight_decay"])
                rows, columns = parameter.shape
                scale = update_scale(rows, columns, self._scale)
                parameter.add_(update, alpha=-rate * scale)
