"""Comparisons of two tensors: the first element that differs, shared memory, the distance."""

from math import inf, nan

import pytest
import torch

from referee.comparison.compare import first_mismatch, relative_difference, share_memory
from referee.comparison.reference_tensor import ReferenceTensor
from referee.reference.dtypes import DTYPES


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_value_is_equal_to_itself(dtype):
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        values = [0.0, -0.0, limits.smallest_normal / 4, limits.max, -limits.max, inf, nan, -nan]
    else:
        values = [torch.iinfo(dtype).min, 0, 1, torch.iinfo(dtype).max]
    x = torch.tensor(values, dtype=dtype)
    assert first_mismatch(x, x.clone(), bitwise=True) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zeros_of_any_sign_and_any_nan_are_equal_and_other_values_are_not(dtype):
    def differ(got: float, want: float) -> object:
        return first_mismatch(*(torch.tensor([value], dtype=dtype) for value in (got, want)))

    largest = torch.finfo(dtype).max
    smallest = torch.finfo(dtype).smallest_normal / 4
    for got, want in [(0.0, -0.0), (nan, -nan), (inf, inf)]:
        assert differ(got, want) is None
    for got, want in [(nan, inf), (0.0, nan), (inf, -inf), (largest, inf), (smallest, 0.0)]:
        assert differ(got, want)
        assert differ(want, got)


@pytest.mark.parametrize("shape", [(7, 101), (7 * 101,)])
def test_one_wrong_bit_in_the_last_element_is_found(shape):
    x = torch.rand(shape)
    x.view(-1)[3] = nan
    y = x.clone()
    y.view(torch.int32).view(-1)[-1] ^= 1
    mismatch = first_mismatch(y, x)
    place = [size - 1 for size in shape]
    values = [t.view(-1)[-1].item() for t in (y, x)]
    want = "1 of 707 elements differ, the first at {}: got {}, expected {}"
    assert mismatch == want.format(place, *(f"{value:.9g}" for value in values))
    y.view(-1)[[50, 250]] = -1
    turned = [t.mT if x.dim() > 1 else t for t in (y, x)]
    assert first_mismatch(*turned).startswith("3 of 707 elements differ")


def test_the_signs_of_zeros_and_nan_count_in_an_exact_comparison_alone():
    x = torch.tensor([0.0, nan])
    assert first_mismatch(x, -x) is None
    assert first_mismatch(x, -x, bitwise=True).startswith("2 of 2 ")


def test_tensors_without_elements_or_dimensions_are_compared():
    assert first_mismatch(torch.empty(0, 3), torch.empty(0, 3)) is None
    mismatch = first_mismatch(torch.tensor(1.0), torch.tensor(2.0))
    assert mismatch == "1 of 1 elements differ, the first at []: got 1, expected 2"


def test_an_element_has_its_place_in_the_shape_of_the_result():
    x = torch.arange(6).view(2, 3)
    y = x.clone()
    y[1, 2] = 1 << 40
    message = "1 of 6 elements differ, the first at [1, 2]: got 1099511627776, expected 5"
    assert first_mismatch(y.view(-1), x) == message
    assert ReferenceTensor(x, None).compare(y.view(-1)).mistake == message
    assert ReferenceTensor(x, None).spec.find_mistake(y.view(-1), x) == message


def test_a_part_of_a_complex_number_has_its_place_and_its_name():
    x = torch.zeros(2, 3, dtype=torch.complex64)
    for part in ("real", "imag"):
        got = x.clone()
        getattr(got, part)[0, 2] = 1
        message = f"1 of 12 elements beyond the error budget, the first at [0, 2].{part}: got 1,"
        reference = ReferenceTensor(x, x.to(torch.complex128))
        assert reference.compare(got).mistake.startswith(message)
        assert reference.spec.find_mistake(got, x).startswith(message)


def test_values_of_float64_have_enough_digits():
    x = torch.tensor([0.1], dtype=torch.float64)
    message = first_mismatch(x + 1e-16, x)
    assert message.endswith("got 0.1000000000000001, expected 0.1")


def test_tensors_of_one_storage_share_memory_unless_they_are_empty():
    x = torch.zeros(10)
    assert share_memory(x[:2], x[5:])
    assert not share_memory(x, x.clone())
    assert not share_memory(torch.empty(0), torch.empty(0))


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
def test_the_relative_difference_is_the_distance_relative_to_the_second_tensor(x, y, expected):
    assert relative_difference(torch.tensor(x), torch.tensor(y)) == expected


def test_elements_can_be_left_out_where_the_second_is_not_finite():
    x, y = torch.tensor([9.0, 1.0]), torch.tensor([inf, 1.0])
    assert relative_difference(x, y) == 9.0
    assert relative_difference(x, y, where_finite=True) == 0.0
