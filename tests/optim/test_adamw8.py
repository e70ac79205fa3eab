"""Block-wise quantised AdamW: its numbers, its error, and steps beside torch's AdamW."""

from __future__ import annotations

import pytest
import torch

from hpctrain.optim.adamw8 import AdamW8bit, Quantiser, block_rows, dynamic_map


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_has_256_numbers_dense_at_zero(signed):
    numbers = dynamic_map(signed=signed)
    assert len(set(numbers.tolist())) == 256
    assert (numbers.diff() > 0).all()
    assert {0.0, 1.0} <= set(numbers.tolist())
    assert (numbers < 0).sum() == (127 if signed else 0)
    # No exponent: the middles of 64 (128 without a sign) parts of [0.1, 1] are evenly spaced.
    top = numbers[numbers > 0.1][:-1]
    assert len(top) == (64 if signed else 128)
    torch.testing.assert_close(top.diff(), torch.full((len(top) - 1,), 0.9 / len(top)))
    # Six zeros: what the last bit leaves, 0.55 of the last decade or its halves.
    smallest = 0.55e-6 if signed else (0.1 + 0.9 / 4) * 1e-6
    assert numbers[numbers > 0][0] == pytest.approx(smallest)


def test_largest_values_and_zeros_are_exact_and_others_near():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(7, 90, generator=generator) * torch.logspace(-6, 3, 7)[:, None]
    values[3] = 0.0
    values = values.abs()
    quantiser = Quantiser(45, signed=False)
    code, scale = torch.empty(7, 90, dtype=torch.uint8), torch.empty(14)
    quantiser.pack(values, code, scale)
    back = quantiser.unpack(code, scale)
    blocks, found = values.view(14, 45), back.view(14, 45)
    assert torch.equal(scale, blocks.amax(dim=1))
    assert torch.equal(found.amax(dim=1), blocks.amax(dim=1))
    assert not back[3].any()
    # Half a step of the linear fraction: 0.9/128 in the first decade, 0.9/64 of a tenth below …
    within = blocks > 1e-1 * scale[:, None]
    assert ((found - blocks).abs() <= 0.51 * 0.9 / 128 * scale[:, None])[within].all()


def test_an_odd_number_of_elements_and_a_block_of_its_own():
    values = torch.tensor([[3.0, -1.0, 0.5], [-8.0, 0.0, 2.0]])
    quantiser = Quantiser(4, signed=True)
    code, scale = torch.empty(2, 3, dtype=torch.uint8), torch.empty(2)
    quantiser.pack(values, code, scale)
    assert scale.tolist() == [8.0, 2.0]
    back = quantiser.unpack(code, scale)
    assert back[1].tolist()[1:] == [0.0, 2.0]
    torch.testing.assert_close(back, values, atol=0.06, rtol=0.0)


@pytest.mark.parametrize(
    ("columns", "block", "rows"), [(64, 64, 1), (32, 64, 2), (96, 64, 2), (61, 64, 64), (1, 8, 8)]
)
def test_rows_of_whole_blocks(columns, block, rows):
    assert block_rows(columns, block) == rows


def test_the_first_step_is_adamw_s_and_ten_are_near():
    """Codes are rounded for the next step only: the first is not quantised at all."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(33, 20, generator=generator)
    target = torch.randn(33, 20, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = AdamW8bit([ours], block=64, **options), torch.optim.AdamW([theirs], **options)
    for step in range(10):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = parameter.detach() - target
            optimizer.step()
        if step == 0:
            torch.testing.assert_close(ours, theirs)
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    assert not torch.equal(ours, theirs)
