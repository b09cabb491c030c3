"""Inputs and parameters that are drawn again keep what a problem may need: signs, masks, zeros."""

from math import inf

import pytest
import torch

from referee.reference import random_values


@pytest.mark.parametrize("sign", [1, -1])
def test_values_of_one_sign_drawn_again_differ_and_keep_it(sign):
    values = sign * torch.tensor([1.0, 2.0, 0.0, inf])
    other = random_values.vary(values, 3)
    assert torch.equal(other, random_values.vary(values, 3))
    assert torch.equal(other.sign(), values.sign())
    assert (other[:2] != values[:2]).all()
    assert random_values.vary(torch.zeros(9), 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_of_both_signs_drawn_again_get_other_signs(dtype):
    values = torch.randn(1000).to(dtype)
    values[::10] = 0
    values[1::10] = inf
    values[2::10] = -20_000  # a mask that is added
    other = random_values.vary(values, 3)
    assert other.dtype == dtype
    assert torch.equal(other, random_values.vary(values, 3))
    is_drawn = (values != 0) & (values.abs() < 10_000)
    assert torch.equal(other.sign()[~is_drawn], values.sign()[~is_drawn])
    are_flipped = other.sign()[is_drawn] != values.sign()[is_drawn]
    assert 0.4 < are_flipped.double().mean() < 0.6
    ratio = (other[is_drawn].double() / values[is_drawn].double()).abs()
    assert 0.49 < ratio.min() < ratio.max() < 1.51


def test_all_of_many_values_drawn_again_differ(monkeypatch):
    """The factors of the first part are used again, for the values of other parts, too."""
    monkeypatch.setattr(random_values, "FACTORS", 7)
    values = torch.randn(4, 5)
    other = random_values.vary(values.t(), 3)
    assert other.shape == (5, 4)
    ratio = (other / values.t()).reshape(-1)
    assert 0.49 < ratio.abs().min() < ratio.abs().max() < 1.51
    assert torch.allclose(ratio[:7], ratio[7:14])
    assert (ratio[:7].diff() != 0).all()
