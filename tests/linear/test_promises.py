"""The tools that judge float32 results, and the operands that they are judged on."""

import pytest
import torch

from problems.operands import INF, NAN
from tests.support import compositions
from tests.support.compare import assert_same_bits
from tests.support.named_operands import CASES, draw_case
from tests.support.promises import (
    FEW_TERMS_ERROR,
    FP16X3_SLACK,
    Reference,
    bound_ratio,
    broken_promises,
)
from tests.support.split_twin import cublas, maxima

pytestmark = pytest.mark.usefixtures("one_thread")
DIVISOR = 2.0
UNIT = 2.0**-24
# Cases whose float32 results are exact.
EXACT = [
    "small integers",
    "ones",
    "weight that selects",
    "integers, larger ones in the sample",
    "one-hot x",
    "one-hot x meets a tiny column",
    "zero weight",
    "inf in all rows of x",
]


@pytest.mark.parametrize("name", CASES)
def test_cases_have_finite_results_and_errors(name):
    """Results are finite except in cases named otherwise; float32 errs except in exact cases."""
    x, weight, bias = draw_case(name, 24, 1024, 32)
    torch_out = cublas(x, weight, bias, DIVISOR)
    assert torch.isfinite(torch_out).all() == ("inf " not in name and name != "overflow")
    assert torch.isfinite(torch_out).double().mean() > 0.25
    errors = Reference(x, weight, bias, DIVISOR).errors(torch_out)
    assert (errors.relative > 1e-8) == (name not in EXACT)


def test_compositions_are_reproducible_finite_and_have_24_bits_of_range():
    name, *tensors = compositions.operands(3, 5, 70, 6)
    same_name, *same_tensors = compositions.operands(3, 5, 70, 6)
    assert name == same_name
    assert_same_bits(tensors, same_tensors)
    assert len({compositions.operands(seed, 2, 16, 2)[0] for seed in range(100)}) > 95
    for seed in range(100):
        name, x, weight, bias = compositions.operands(seed, 16, 256, 16)
        for rows in (x, weight, bias[None]):
            assert torch.isfinite(rows).all(), name
        for rows in (x, weight):
            smallest = torch.where(rows == 0, INF, rows.abs()).amin(1)
            assert (smallest * 2.0**24 >= maxima(rows)).all(), name


@pytest.fixture
def reference_and_result():
    """Return a reference, and torch's result; ReLU changes no element of them."""
    x, weight, bias = draw_case("normal", 8, 64, 8)
    bias += 100
    return Reference(x, weight, bias, 1.0), cublas(x, weight, bias, 1.0)


def broken_by(value, torch_out, reference):
    """Return the promises that torch's result breaks if one element of it has this value."""
    out = torch_out.clone()
    out[3, 4] = value
    return broken_promises(out, torch_out, reference)


def test_broken_promises_names_misplaced_values_and_errors(reference_and_result):
    reference, torch_out = reference_and_result
    assert broken_promises(torch_out, torch_out, reference) == []
    for value in (NAN, INF, -INF):
        assert "misplaced" in broken_by(value, torch_out, reference)[0]
    assert len(broken_by(99.0, torch_out, reference)) == 3
    broken = broken_promises(torch_out * (1 + 1e-6), torch_out, reference)
    assert any("mean" in line for line in broken)


def test_an_infinity_of_torch_may_be_finite_in_ours_if_the_exact_result_is(reference_and_result):
    reference, torch_out = reference_and_result
    exact = reference.out[3, 4].item()
    torch_out[3, 4] = INF
    assert broken_by(INF, torch_out, reference) == []
    assert not any("misplaced" in line for line in broken_by(exact, torch_out, reference))
    reference.out[3, 4] = INF
    assert broken_by(INF, torch_out, reference) == []
    for value in (NAN, -INF, 3e38, 0.0):
        assert "misplaced" in broken_by(value, torch_out, reference)[0]


def test_broken_promises_allows_larger_errors_of_few_terms(reference_and_result):
    reference, torch_out = reference_and_result
    for units, count in ((5, 0), (20, 3), (70, 3)):
        out = (reference.out + units * UNIT * reference.magnitude).float()
        broken = broken_promises(out, torch_out, reference, FP16X3_SLACK, FEW_TERMS_ERROR)
        assert len(broken) == count
        assert (bound_ratio(out, reference).max() > 1) == (units == 70)
