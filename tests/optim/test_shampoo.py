"""Shampoo against a plain dense implementation, in one block and in several."""

from __future__ import annotations

import pytest
import torch

from hpctrain.optim.shampoo import Shampoo, inverse_root

LR, BETAS, EPS, DECAY, DAMPING = 0.05, (0.9, 0.95), 1e-8, 0.2, 1e-6


def gradients(steps: int, rows: int, columns: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(rows, columns, generator=generator).double() for _ in range(steps)]


def power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    """By the SVD, which of a positive definite matrix is its eigendecomposition."""
    u, s, vt = torch.linalg.svd(matrix)
    return u @ torch.diag(s**exponent) @ vt


def dense(weight: torch.Tensor, steps: list[torch.Tensor], interval: int = 1) -> torch.Tensor:
    """Shi et al. 2023, algorithm 1, for one matrix in one block, with Adam's graft."""
    rows, columns = weight.shape
    left, right = torch.zeros(rows, rows).double(), torch.zeros(columns, columns).double()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, g in enumerate(steps, start=1):
        left = BETAS[1] * left + (1 - BETAS[1]) * g @ g.T
        right = BETAS[1] * right + (1 - BETAS[1]) * g.T @ g
        mean = BETAS[0] * mean + (1 - BETAS[0]) * g
        square = BETAS[1] * square + (1 - BETAS[1]) * g**2
        if (t - 1) % interval == 0:
            roots = []
            for factor in (left, right):
                hat = factor / (1 - BETAS[1] ** t)
                largest = torch.linalg.matrix_norm(hat, 2)
                roots.append(power(hat + DAMPING * largest * torch.eye(len(hat)), -0.25))
        hat = mean / (1 - BETAS[0] ** t)
        adam = hat / ((square / (1 - BETAS[1] ** t)).sqrt() + EPS)
        direction = roots[0] @ hat @ roots[1]
        direction *= adam.norm() / direction.norm()
        weight = (1 - LR * DECAY) * weight - LR * direction
    return weight


def ours(weight: torch.Tensor, steps: list[torch.Tensor], **options) -> torch.Tensor:
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = Shampoo(
        [parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, damping=DAMPING, **options
    )
    for gradient in steps:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (4, 9), (9, 4)])
def test_one_block_is_the_textbook(rows, columns, interval):
    weight, *steps = gradients(8, rows, columns)
    found = ours(weight, steps, block=16, interval=interval)
    torch.testing.assert_close(found, dense(weight, steps, interval), rtol=1e-7, atol=1e-9)


def test_blocks_are_matrices_of_their_own():
    weight, *steps = gradients(5, 10, 7)
    found = ours(weight, steps, block=4, interval=2)
    for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
        for columns in (slice(0, 4), slice(4, 7)):
            box = (rows, columns)
            alone = dense(weight[box], [g[box] for g in steps], 2)
            torch.testing.assert_close(found[box], alone, rtol=1e-7, atol=1e-9)


def test_rows_of_a_matrix_name_their_blocks_by_the_whole():
    parameter = torch.nn.Parameter(torch.zeros(6, 3))
    optimizer = Shampoo([parameter], lr=0.1, block=4, first_rows={parameter: 8})
    parameter.grad = torch.ones(6, 3)
    optimizer.step()
    assert {"left_2_0", "right_2_0", "left_3_0", "right_root_3_0"} <= set(
        optimizer.state[parameter]
    )
    with pytest.raises(ValueError, match="multiple of 4"):
        Shampoo([parameter], lr=0.1, block=4, first_rows={parameter: 6})


def test_inverse_root():
    q, _ = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(2)).double())
    values = torch.tensor([1.0, 16.0, 81.0, 256.0, 625.0], dtype=torch.float64)
    found = inverse_root(q @ torch.diag(values) @ q.T, 4, 1e-15)
    expected = q @ torch.diag(1 / torch.arange(1.0, 6.0, dtype=torch.float64)) @ q.T
    torch.testing.assert_close(found, expected)
    # Of rank one: the ridge bounds what no gradient has touched.
    ridge = inverse_root(torch.diag(torch.tensor([1.0, 0.0])), 4, 1e-4)
    torch.testing.assert_close(ridge, torch.diag(torch.tensor([1.0, 10.0])), rtol=1e-4, atol=0)


def test_no_gradient_yet_moves_nothing():
    weight = torch.ones(3, 3).double()
    torch.testing.assert_close(
        ours(weight, [torch.zeros(3, 3).double()]), (1 - LR * DECAY) * weight
    )
