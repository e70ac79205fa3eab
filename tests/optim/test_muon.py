"""Muon: Newton-Schulz against the SVD, one step by hand, its scale."""

from __future__ import annotations

import pytest
import torch

from hpctrain.optim.muon import Muon, orthogonalize, update_scale


def matrix(rows: int, columns: int, lowest: float) -> torch.Tensor:
    """Random singular vectors, singular values evenly from ``lowest`` to 1."""
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    u, s, vt = torch.linalg.svd(drawn, full_matrices=False)
    return u @ torch.diag(torch.linspace(lowest, 1.0, len(s), dtype=torch.float64)) @ vt


@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (16, 40), (40, 16), (1, 7)])
def test_newton_schulz_against_the_svd(rows, columns):
    source = 37.0 * matrix(rows, columns, 0.1)
    u, _, vt = torch.linalg.svd(source, full_matrices=False)
    found = orthogonalize(source)
    inside = u.mT @ found @ vt.mT
    values = inside.diagonal()
    # The singular vectors are the matrix's own; its values near 1, as the coefficients promise.
    assert (inside - torch.diag(values)).abs().max() < 1e-10
    assert (found - u @ torch.diag(values) @ vt).abs().max() < 1e-10
    assert values.min() > 0.68
    assert values.max() < 1.14
    assert torch.linalg.norm(found - u @ vt) / torch.linalg.norm(u @ vt) < 0.32


def test_a_batch_is_its_members_and_zero_stays_zero():
    batch = torch.stack([matrix(8, 12, 0.2), 5 * matrix(8, 12, 0.5), torch.zeros(8, 12).double()])
    found = orthogonalize(batch)
    for source, result in zip(batch, found, strict=True):
        torch.testing.assert_close(result, orthogonalize(source))
    assert not found[2].any()


def test_two_steps_of_an_orthogonal_gradient_by_hand():
    """NS acts on the one singular value s of s·Q alone: a scalar iteration tells the result."""

    def scalar(size: int) -> float:
        value = size**-0.5  # of Q over its Frobenius norm
        for _ in range(5):
            value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
        return value

    q, _ = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)).double())
    weight = torch.nn.Parameter(torch.eye(6, dtype=torch.float64))
    optimizer = Muon([weight], lr=0.1, weight_decay=0.5, momentum=0.9)
    expected = torch.eye(6, dtype=torch.float64)
    for factor in (3.0, 0.25):
        weight.grad = factor * q
        optimizer.step()
        expected = 0.95 * expected - 0.1 * 0.2 * 6**0.5 * scalar(6) * q
    torch.testing.assert_close(weight.detach(), expected)


def test_momentum_and_nesterov():
    first, second = matrix(5, 9, 0.3), matrix(5, 9, 0.6).flip(0)
    for nesterov in (True, False):
        weight = torch.nn.Parameter(torch.zeros(5, 9, dtype=torch.float64))
        optimizer = Muon([weight], lr=1.0, momentum=0.8, nesterov=nesterov, scale="spectral")
        # Keller Jordan's form, a sum in place of an average.
        total, expected = torch.zeros(5, 9).double(), torch.zeros(5, 9).double()
        for gradient in (first, second):
            weight.grad = gradient
            optimizer.step()
            total = 0.8 * total + gradient
            looked = gradient + 0.8 * total if nesterov else total
            expected -= orthogonalize(looked)
        torch.testing.assert_close(weight.detach(), expected)


def test_matched_scale_is_a_fifth_in_root_mean_square():
    for rows, columns in ((16, 64), (64, 16)):
        u, _, vt = torch.linalg.svd(matrix(rows, columns, 0.5), full_matrices=False)
        update = update_scale(rows, columns, "match-rms") * (u @ vt)
        assert float(update.square().mean().sqrt()) == pytest.approx(0.2)
    assert update_scale(64, 16, "spectral") == 2.0
    assert update_scale(16, 64, "spectral") == 1.0


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"\[7\]"):
        Muon([torch.nn.Parameter(torch.zeros(7))], lr=0.1)
