"""Tests of the distance of two tensors."""

from math import inf, nan

import pytest
import torch

from referee.comparison.compare import relative_difference


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([3.0, 4.0], [0.0, 4.0], 0.75),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1e-30, 0.0], [0.0, 0.0], inf),
        ([nan, 4.0], [inf, 4.0], 0.0),
        ([1, 2, 3, 4], [1, 2, 3, 5], 0.25),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], inf),
    ],
)
def test_relative_difference(x, y, expected):
    assert relative_difference(torch.tensor(x), torch.tensor(y)) == expected


def test_elements_can_be_left_out_where_the_second_is_not_finite():
    x, y = torch.tensor([9.0, 1.0]), torch.tensor([inf, 1.0])
    assert relative_difference(x, y) == 9.0
    assert relative_difference(x, y, where_finite=True) == 0.0
