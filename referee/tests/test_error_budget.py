"""The error budget: which results are right, and how a result's errors are measured."""

import math
from dataclasses import replace

import pytest
import torch

from referee.comparison import accuracy
from referee.comparison.budget import budget_from_errors
from referee.comparison.reference_tensor import ReferenceTensor
from referee.reference.file import load
from referee.reference.operators import Operators
from referee.reference.problem import Problem
from referee.reference.reference_step import StepArguments, draw_gradients, step_with_budgets
from referee.testing.texts import IMPORTS, reference

INF = math.inf
NAN = math.nan
LARGEST = torch.finfo(torch.float32).max


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Round to TF32, which drops the last 13 bits of a float32."""
    return ((x.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


def test_the_budget_is_that_of_the_table_in_verdicts():
    """The table has a row for float32 as a rule, and one for lower precisions.

    Its example is an element of size 2, where eager's largest error is 1e-7 and s is 1.
    """
    exact_product = accuracy.ErrorSizes(
        largest=1e-7, mean=1e-8, relative=1e-4, mean_magnitude=0.8, root_mean_square=1.0
    )
    in_tf32 = replace(exact_product, largest=1e-3, mean=1e-4, relative=1.1e-4)
    eps = torch.finfo(torch.float32).eps
    for eager, factor, roundings in ((exact_product, 32, 8), (in_tf32, 4, 1)):
        budget = budget_from_errors(eager, torch.float32, terms=1)
        for size in (0.0, 2.0):
            limit = factor * eager.largest + eps * 1.0 + roundings * eps * size
            assert budget.allowed(torch.tensor(size).double()).item() == pytest.approx(limit)
        assert budget.mean_limit == pytest.approx(factor * eager.mean + roundings * eps * 0.8)
    example = budget_from_errors(exact_product, torch.float32, terms=1)
    assert f"{example.allowed(torch.tensor(2.0).double()).item():.1e}" == "5.2e-06"


@pytest.mark.parametrize(
    ("largest", "name"),
    [
        (1e-4, "float32-grade"),
        (1.2e-3, "TF32-grade"),
        (1e-2, "bf16-grade"),
        (math.inf, "worse than bf16"),
    ],
)
def test_an_accuracy_class_reaches_up_to_its_largest_error(largest, name):
    assert accuracy.accuracy_class(largest) == name
    assert accuracy.accuracy_class(1.01 * largest) != name or largest == math.inf


@pytest.fixture
def product():
    """Return x, weight, and the reference tensor of their product."""
    x = torch.randn(40, 2048)
    weight = torch.randn(30, 2048)
    return x, weight, ReferenceTensor(x @ weight.T, x.double() @ weight.double().T)


def test_the_budget_forbids_lower_precision(product):
    x, weight, output = product
    assert output.compare(output.eager).has_eagers_bits
    found = output.compare((tf32(x) @ tf32(weight).T).view(-1))
    assert "beyond the error budget" in found.mistake
    assert accuracy.accuracy_class(found.errors.relative) == "TF32-grade"
    half = (x.bfloat16() @ weight.bfloat16().T).float().view(-1)
    assert accuracy.accuracy_class(output.compare(half).errors.relative) == "bf16-grade"
    # Each element is within the budget, but not their mean error.
    off = output.eager + 0.9 * output.spec.budget.atol
    assert output.compare(off).mistake.startswith("mean error")


def test_a_plain_sum_of_many_positive_products_is_less_accurate_than_tf32():
    """So no limit of the error could forbid TF32 alone. With both signs TF32 is far off."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(32, 1 << 16, generator=generator)
    weight = torch.rand(1 << 16, 32, generator=generator)
    plain_sum = torch.zeros(32, 32)
    for column, row in zip(x.T, weight, strict=True):
        plain_sum.addr_(column, row)
    output = ReferenceTensor(x @ weight, x.double() @ weight.double(), terms=len(weight))
    of_plain_sum = output.compare(plain_sum.view(-1))
    of_tf32 = output.compare((tf32(x).double() @ tf32(weight).double()).float().view(-1))
    assert of_plain_sum.mistake is None
    assert of_tf32.mistake is None
    assert of_tf32.errors.mean < of_plain_sum.errors.mean
    weight -= 0.5
    signed = ReferenceTensor(x @ weight, x.double() @ weight.double(), terms=len(weight))
    in_tf32 = (tf32(x).double() @ tf32(weight).double()).float().view(-1)
    assert "beyond the error budget" in signed.compare(in_tf32).mistake


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_have_a_narrow_budget(dtype):
    x = torch.randn(40, 512, dtype=dtype)
    weight = torch.randn(30, 512, dtype=dtype)
    exact = x.double() @ weight.double().T
    output = ReferenceTensor(x @ weight.T, exact)
    eps = torch.finfo(dtype).eps
    for other, is_right in ((exact, True), (exact * (1 + 8 * eps), False), (exact + 1, False)):
        assert (output.compare(other.to(dtype).view(-1)).mistake is None) == is_right


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0])
def test_one_wrong_element_is_found(product, value):
    *_, output = product
    wrong = output.eager.clone()
    wrong[77] = value
    assert output.compare(wrong).mistake.startswith("1 of 1,200 elements")
    spec = output.spec
    mistake = spec.find_mistake(wrong[70:80], output.eager[70:80])
    assert mistake.startswith("1 of 10 elements")
    assert spec.find_mistake(wrong[:70], output.eager[:70]) is None


def test_nan_infinities_and_integers_must_be_equal():
    eager = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    output = ReferenceTensor(eager, eager.double())
    assert output.compare(eager).mistake is None
    for i in range(3):
        assert output.compare(eager.where(torch.arange(4) != i, 0.5)).mistake
    integers = ReferenceTensor(torch.arange(9), None)
    assert integers.compare(torch.arange(9)).has_eagers_bits
    assert integers.compare(torch.arange(1, 10)).mistake.startswith("9 of 9")


@pytest.mark.parametrize("exact", [None, torch.tensor([1.0, 2.0]).double()])
@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_a_finite_value_is_wrong_where_another_draw_of_eager_is_infinite(exact, infinity):
    output = ReferenceTensor(torch.tensor([1.0, 2.0]), exact)
    eager = torch.tensor([infinity, 2.0])
    got = torch.tensor([5.0, 2.0])
    assert output.spec.find_mistake(got, eager).startswith("1 of 2 elements")
    assert output.spec.compare_with_eager(got, eager).wrong.tolist() == [True, False]
    assert output.spec.find_mistake(eager, eager) is None


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
        output = ReferenceTensor(eager, right.double(), element_limits=limit)
        assert output.compare(eager).mistake is None
        other = wrong if eager is right else right
        assert output.compare(other).mistake.startswith("1 of 2 elements beyond")


def test_a_result_is_right_within_the_limit_or_if_it_errs_no_more_than_eager():
    """The limit is 0.25. One element of the result is off by 0.25 or by 0.5."""
    exact = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    limit = torch.full((3,), 0.25)
    for off, is_within_limit in ((0.25, True), (0.5, False)):
        for eager_off in (0.0, 0.4, 0.5):
            output = ReferenceTensor(exact.float() + eager_off, exact, element_limits=limit)
            found = output.compare((exact + torch.tensor([0, off, 0])).float())
            assert (found.mistake is None) == (is_within_limit or eager_off == 0.5)
            assert (found.errors.largest, found.errors.mean) == (off, pytest.approx(off / 3))
            assert found.errors.relative == pytest.approx(off / math.sqrt(5))
            assert found.wrong.tolist() == [False, not is_within_limit, False]
    strict = ReferenceTensor(exact.float(), exact, element_limits=limit)
    problem = "1 of 3 elements beyond the error budget, the first at [1]: got 2.5, expected 2"
    assert strict.compare(torch.tensor([1.0, 2.5, 0.0])).mistake == problem


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_infinity_is_right_for_a_result_beyond_the_range_of_a_dtype(dtype):
    assert errors([INF], [1e39], dtype) == [0.0]
    assert errors([torch.finfo(dtype).max], [1e39], dtype)[0] > 6e38


IMAGES = torch.randn(2, 6, 4, 5)  # batch, channels, height, width


@pytest.mark.parametrize(
    ("call", "terms"),
    [
        (lambda: torch.randn(3, 7) @ torch.randn(7, 5), 7),
        (lambda: torch.zeros(3, 5).addmm_(torch.randn(3, 7), torch.randn(7, 5)), 7),
        (lambda: IMAGES.sum(dim=(2, 3)), 20),
        (lambda: IMAGES.cumsum(1), 6),
        (lambda: torch.layer_norm(IMAGES, [4, 5]), 20),
        (lambda: torch.group_norm(IMAGES, 2), 3 * 20),  # three channels of one image
        (lambda: torch.nn.BatchNorm2d(6)(IMAGES), 2 * 20),
        (lambda: torch.conv2d(IMAGES, torch.randn(8, 6, 3, 3)), 6 * 9),
    ],
)
def test_the_terms_of_the_longest_sum_are_counted(call, terms):
    with Operators() as observed:
        call()
    assert observed.most_terms == terms


# x is [32, 6, 4, 5]: a channel has 640 elements.
BATCH = torch.randn(32, 6, 4, 5)


@pytest.mark.parametrize(
    ("forward", "terms"),
    [
        (torch.relu, 1),
        (torch.nn.functional.gelu, 1),
        (lambda x: x[:, 1:], 1),
        (lambda x: torch.softmax(x, 1), 6),
        (lambda x: torch.log_softmax(x, 0), 32),
        (torch.nn.Linear(5, 3), 32 * 6 * 4),  # the gradients of weight and bias
        (torch.nn.LayerNorm([4, 5]), 32 * 6),
        (torch.nn.BatchNorm2d(6), 640),
        (torch.nn.GroupNorm(2, 6), 640),
        (torch.nn.Conv2d(6, 8, 3, padding=1), 640),
        (torch.nn.ConvTranspose2d(6, 8, 3, padding=1), 640),
        (lambda x: torch.nn.functional.embedding(torch.zeros(9, dtype=torch.int), x[0, 0]), 9),
        (lambda x: x[:, torch.zeros(9, dtype=torch.long)], 9),
        (lambda x: x.gather(0, torch.zeros(9, 6, 4, 5, dtype=torch.long)), 9),
        (lambda x: torch.zeros_like(x).index_put((torch.arange(3),), x[:3]), 1),
    ],
)
def test_the_terms_of_a_backward_are_counted(forward, terms):
    x = BATCH.clone().requires_grad_()
    with Operators() as observed:
        y = forward(x)
        y.backward(torch.ones_like(y))
    assert observed.most_terms == terms


def test_an_output_of_a_step_has_the_budget_of_a_forward(tmp_path):
    """ReLU sums nothing: a million elements are no reason for KernelBench's tolerance."""
    path = tmp_path / "relu.py"
    path.write_text(IMPORTS + reference("return torch.relu(x)", "[torch.rand(1024, 1024)]"))
    problem = Problem("relu", load(path), torch.device("cpu"))
    module, inputs = problem.construct(0), problem.draw()
    step = StepArguments(module, inputs, draw_gradients(problem.run(module, inputs)), [], 1)
    in_forward = problem.reference_tensors(module, inputs)[0].spec.budget
    tensors, _ = step_with_budgets(problem, step)
    for tensor in tensors:
        budget = tensor.spec.budget
        assert budget.rtol == in_forward.rtol
        assert budget.atol < 1e-6
