"""The referee's parts: cases, comparisons, errors."""

import math

import pytest
import torch

from problems import elementwise
from referee.comparison import accuracy, compare
from referee.comparison.reference_tensor import ReferenceTensor
from referee.messages import first_error_line
from referee.reference import random_values
from referee.reference.dtypes import DTYPES

CPU = torch.device("cpu")
INF = math.inf
NAN = math.nan
LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("sign", [1, -1])
def test_values_of_one_sign_drawn_again_differ_and_keep_it(sign):
    values = sign * torch.tensor([1.0, 2.0, 0.0, INF])
    other = random_values.vary(values, 3)
    assert torch.equal(other, random_values.vary(values, 3))
    assert torch.equal(other.sign(), values.sign())
    assert (other[:2] != values[:2]).all()
    assert random_values.vary(torch.zeros(9), 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_of_both_signs_drawn_again_get_other_signs(dtype):
    values = torch.randn(1000).to(dtype)
    values[::10] = 0
    values[1::10] = INF
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


def test_cases_are_of_the_dtypes_that_torch_takes():
    taken = elementwise.dtypes_of_relu(CPU)
    for name, dtype in DTYPES.items():
        if name in taken:
            assert torch.relu(torch.ones(1, dtype=dtype)).item() == 1
        else:
            with pytest.raises(NotImplementedError):
                torch.relu(torch.ones(1, dtype=dtype))
    every = list(elementwise.small_inputs(CPU, 5))
    assert list(dict.fromkeys(name.partition(",")[0] for name, _ in every)) == list(taken)
    assert len(every) > 400


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_values_of_unsigned_dtypes_are_in_both_halves_of_the_range(dtype):
    """This holds for special values, random ones, sprinkled ones and bit patterns."""
    largest = torch.iinfo(dtype).max
    values = elementwise.special_values(dtype).tolist()
    assert values == [largest // 2 + 1, 0, 1, largest - 1, largest]
    generator = torch.Generator().manual_seed(1)
    x = random_values.random_tensor((3, 5001), dtype, CPU, generator)
    halves = sum(value > largest // 2 for value in x.view(-1).tolist()) / x.numel()
    assert 0.45 < halves < 0.55
    before = x.tolist()
    random_values.draw_into(x.t()[7], generator)
    assert [b[7] for b in before] != x.t()[7].tolist()
    elementwise.sprinkle(x, generator)
    assert {*values} <= {*x.view(-1).tolist()}
    patterns = elementwise.bit_patterns(dtype, CPU, generator)
    assert x.dtype == patterns.dtype == dtype
    assert len(set(patterns.tolist())) >= min(largest + 1, 99_000)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_zeros_of_any_sign_and_any_nan_are_equal_and_other_values_are_not(dtype):
    x = elementwise.special_values(dtype)
    assert compare.first_mismatch(x, x.clone(), bitwise=True) is None
    if not dtype.is_floating_point:
        return

    def differ(got: float, want: float) -> object:
        return compare.first_mismatch(*(torch.tensor([v], dtype=dtype) for v in (got, want)))

    largest = torch.finfo(dtype).max
    smallest = torch.finfo(dtype).smallest_normal / 4
    for got, want in [(0.0, -0.0), (NAN, -NAN), (INF, INF)]:
        assert differ(got, want) is None
    for got, want in [(NAN, INF), (0.0, NAN), (INF, -INF), (largest, INF), (smallest, 0.0)]:
        assert differ(got, want)
        assert differ(want, got)


@pytest.mark.parametrize("shape", [(7, 101), (7 * 101,)])
def test_one_wrong_bit_in_the_last_element_is_found(shape):
    x = torch.rand(shape)
    x.view(-1)[3] = NAN
    y = x.clone()
    y.view(torch.int32).view(-1)[-1] ^= 1
    mismatch = compare.first_mismatch(y, x)
    place = [size - 1 for size in shape]
    values = [t.view(-1)[-1].item() for t in (y, x)]
    want = "1 of 707 elements differ, the first at {}: got {}, expected {}"
    assert mismatch == want.format(place, *values)
    y.view(-1)[[50, 250]] = -1
    turned = [t.mT if x.dim() > 1 else t for t in (y, x)]
    assert compare.first_mismatch(*turned).startswith("3 of 707 elements differ")


def test_the_signs_of_zeros_and_nan_count_in_an_exact_comparison_alone():
    x = torch.tensor([0.0, NAN])
    assert compare.first_mismatch(x, -x) is None
    assert compare.first_mismatch(x, -x, bitwise=True).startswith("2 of 2 ")


def test_tensors_without_elements_or_dimensions_are_compared():
    assert compare.first_mismatch(torch.empty(0, 3), torch.empty(0, 3)) is None
    mismatch = compare.first_mismatch(torch.tensor(1.0), torch.tensor(2.0))
    assert mismatch == "1 of 1 elements differ, the first at []: got 1.0, expected 2.0"


def test_tensors_of_one_storage_share_memory():
    x = torch.zeros(10)
    assert compare.share_memory(x[:2], x[5:])
    assert not compare.share_memory(x, x.clone())
    assert not compare.share_memory(torch.empty(0), torch.empty(0))


COMPILER = "Error building 'x': [1/2] c++ -c /a/main.cpp\nFAILED: main.o\n/a/b/"
ERROR = "main.cpp:3:5: error: expected ';' before '}' token"
NVCC = 'cuda.cu(12): error: identifier "foo" is undefined'
TEXTS = [("one\ntwo", "one"), ("", ""), (f"Error building\n/a/{NVCC}\n", NVCC)]


@pytest.mark.parametrize(
    ("text", "line"), [*TEXTS, (f"{COMPILER}{ERROR}\nninja: error: no", ERROR)]
)
def test_the_first_line_with_an_error_is_found(text, line):
    """If no line has a compiler's error, it is the first line."""
    assert first_error_line(text) == line


def errors(got, exact, dtype=torch.float32):
    """Return the errors of numbers that are computed in a dtype."""
    exact = torch.tensor(exact, dtype=torch.float64)
    return accuracy.element_errors(torch.tensor(got, dtype=dtype), exact.to(dtype), exact).tolist()


# Pairs of a wrong result and the exact one, of which at least one is not finite or overflows.
BAD = [(NAN, 1.0), (1.0, NAN), (0.0, INF), (-INF, INF), (INF, NAN), (INF, 1.0), (LARGEST, INF)]


@pytest.mark.parametrize(("got", "exact"), BAD)
def test_a_misplaced_infinity_or_nan_is_an_infinite_error(got, exact):
    """Eager decides what is right there, even if eager differs from the exact result."""
    assert errors([got, 1.5], [exact, 1.0]) == [INF, 0.5]
    assert errors([exact, 1.5], [exact, 1.0]) == [0.0, 0.5]
    limit = torch.full((2,), 0.1)
    right = torch.tensor([exact, 1.0])
    wrong = torch.tensor([got, 1.0])
    for eager in (right, wrong):
        output = ReferenceTensor(eager, right.double(), limit=limit)
        assert output.compare(eager).mistake is None
        other = wrong if eager is right else right
        assert output.compare(other).mistake.startswith("1 of 2 elements beyond")


def test_a_result_is_right_within_the_limit_or_if_it_errs_no_more_than_eager():
    """The limit is 0.25. One element of the result is off by 0.25 or by 0.5."""
    exact = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    limit = torch.full((3,), 0.25)
    for off, is_within_limit in ((0.25, True), (0.5, False)):
        for eager_off in (0.0, 0.4, 0.5):
            output = ReferenceTensor(exact.float() + eager_off, exact, limit=limit)
            found = output.compare((exact + torch.tensor([0, off, 0])).float())
            assert (found.mistake is None) == (is_within_limit or eager_off == 0.5)
            assert (found.errors.largest, found.errors.mean) == (off, pytest.approx(off / 3))
            assert found.errors.relative == pytest.approx(off / math.sqrt(5))
            assert found.wrong.tolist() == [False, not is_within_limit, False]
    assert found.mistake is None
    strict = ReferenceTensor(exact.float(), exact, limit=limit)
    problem = "1 of 3 elements beyond the error budget, the first: got 2.5, expected 2"
    assert strict.compare(torch.tensor([1.0, 2.5, 0.0])).mistake == problem


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_infinity_is_right_for_a_result_beyond_the_range_of_a_dtype(dtype):
    assert errors([INF], [1e39], dtype) == [0.0]
    assert errors([torch.finfo(dtype).max], [1e39], dtype)[0] > 6e38
