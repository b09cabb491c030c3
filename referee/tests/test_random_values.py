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


@pytest.mark.parametrize("make", [torch.ones, torch.randn])
def test_each_of_many_values_has_a_factor_of_its_own(make, monkeypatch):
    monkeypatch.setattr(random_values, "PART_LENGTH", {"cpu": 7})
    values = make(4, 5).t()
    other = random_values.vary(values, 3)
    assert torch.equal(other, random_values.vary(values, 3))
    ratio = (other / values).abs().reshape(-1)
    assert 0.49 < ratio.min() < ratio.max() < 1.51
    assert len(ratio.unique()) == len(ratio)


def test_each_part_of_a_complex_value_is_drawn_as_a_float():
    values = torch.randn(100, dtype=torch.complex64)
    parts = torch.view_as_real(values)
    expected = torch.view_as_complex(random_values.vary(parts, 3))
    assert torch.equal(random_values.vary(values, 3), expected)
    assert torch.equal(random_values.vary(values.conj(), 3).abs(), expected.abs())


def test_new_values_may_go_into_memory_that_stores_columns():
    values = torch.randn(4, 5)
    columns = torch.empty(5, 4).t()
    random_values.vary_into(columns, values, 3)
    assert torch.equal(columns, random_values.vary(values, 3))
