"""Linear -> ReLU -> divide is as accurate as the reference, on operands that hypothesis draws."""

import math
import warnings
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from problems.linear_relu_divide import U32, U_TF32, exact_sums
from referee.comparison.accuracy import element_errors
from tests.support import properties
from tests.support.compare import checked_call, exact_gradients, outcome
from tests.support.properties import (
    TensorDescription,
    assert_same_layout,
    assert_same_outcome,
    assume,
    choice_of,
    given,
    st,
)
from tests.support.tensors import FLOATING, float32_precision, linear_modules, step

FLOATING = tuple(FLOATING)
DIVISORS = (2.0, 3.0, -1.5, 1.0)
SPECIAL_DIVISORS = (2.0, 3.0, -1.5, 0.0, -0.0, math.inf, math.nan)
SMALL = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33, 64, 65, 129, 257)
# On a GPU, torch multiplies small operands, and our kernels large ones.
SIZES = {"cpu": SMALL, "cuda": (*SMALL, 513, 1024, 1025, 2049)}
MAX_PRODUCTS = {"cpu": 1 << 16, "cuda": 1 << 27}  # the most products: M * N * K
DENSE = torch.contiguous_format
EXACT = (1.0, 2.0, -0.5)  # divisors for which quotients of small integers are exact
PRECISIONS = {"cpu": ("highest",), "cuda": ("highest", "high", "medium")}
# The errors of two results of the same accuracy differ by up to these factors. The keys are
# attributes of `Errors`.
NOISE = {"largest": 1.15, "mean": 1.02, "relative": 1.15}

# Small products on a busy machine wait for other threads longer than they take.
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Operands:
    """Descriptions of x, weight and bias, of one dtype, and the divisor."""

    x: TensorDescription
    weight: TensorDescription
    bias: TensorDescription | None
    divisor: float

    def modules(self, device):
        """Return the replacement and the reference."""
        n, k = self.weight.layout.shape
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            modules = linear_modules(k, n, self.divisor, self.x.dtype, device, bool(self.bias))
        for module in modules:
            module.linear.weight = nn.Parameter(self.weight.make(device))
            if self.bias:
                module.linear.bias = nn.Parameter(self.bias.make(device))
        return modules


@cache
@st.composite
def operands(draw, device, values, divisors, dtypes=FLOATING):
    """Draw operands that fit together, in any layouts; now and then K or N is 0."""
    limits = {"sizes": SIZES[device], "max_dims": 3}
    k = draw(choice_of(SIZES[device]))
    n = draw(choice_of(SIZES[device]))
    rows = properties.draw_shape(
        draw, max_elements=max(MAX_PRODUCTS[device] // (n * k), 1), **limits
    )
    if draw(properties.integers(0, 29)) == 29:
        k, n = draw(choice_of(((0, n), (k, 0))))
    x = properties.draw_tensor(draw, dtypes, values, properties.draw_layout(draw, (*rows, k)))
    weight = properties.draw_tensor(draw, (x.dtype,), values, properties.draw_layout(draw, (n, k)))
    bias = properties.draw_tensor(draw, (x.dtype,), values, properties.draw_layout(draw, (n,)))
    has_bias = draw(properties.booleans)
    return Operands(x, weight, bias if has_bias else None, draw(choice_of(divisors)))


@st.composite
def like(draw, shape, dtype, values):
    """Draw tensors of one shape, in any layout."""
    return properties.draw_tensor(draw, (dtype,), (values,), properties.draw_layout(draw, shape))


@dataclass(frozen=True)
class Errors:
    """The errors of a result.

    Attributes:
        wrong_elements: how many elements err by more than a few roundings.
        largest: the largest error.
        mean: the mean error.
        relative: the largest error relative to the sum of the terms' magnitudes.
    """

    wrong_elements: int
    largest: float
    mean: float
    relative: float


@dataclass(frozen=True)
class Exact:
    """An exact result: sums, in float64.

    Attributes:
        values: the result.
        magnitudes: for each element, the sum of its terms' magnitudes.
        terms: the number of terms of each sum.
        is_product: False for sums that are no products, as the bias's gradient.
    """

    values: torch.Tensor
    magnitudes: torch.Tensor
    terms: int
    is_product: bool = True

    def errors_of(self, got, setting):
        """Return the errors of a result; `setting` is the precision of float32 products."""
        if not got.numel():
            return Errors(0, 0.0, 0.0, 0.0)
        rounded = self.values.to(got.dtype)
        exact = torch.where(rounded.isinf(), rounded.double(), self.values)
        magnitudes = self.magnitudes.nan_to_num(0, 0)
        error = element_errors(got, rounded, exact)

        limits = torch.finfo(got.dtype)
        smallest_subnormal = limits.smallest_normal * limits.eps
        allowed = magnitudes * self.relative_limit(got.dtype, setting) + smallest_subnormal / 2
        if got.dtype.itemsize == 2:  # the result is rounded once more
            allowed += (exact.abs() * (limits.eps / 2)).nan_to_num(0, 0, 0)

        relative = error / magnitudes.clamp_min(torch.finfo(torch.float64).smallest_normal)
        return Errors(
            wrong_elements=int((error > allowed).sum()),
            largest=error.max().item(),
            mean=error.mean().item(),
            relative=relative.max().item(),
        )

    def relative_limit(self, dtype, setting):
        """Return the error that a few roundings may cause, relative to the magnitudes."""
        if dtype == torch.float64:  # the values themselves have this error
            return (self.terms + 4) * torch.finfo(dtype).eps
        if dtype == torch.float32 and self.is_product:
            once_each = 4 * U32  # operands, sum and quotient are rounded once each
            return once_each if setting == "highest" else once_each + 2 * U_TF32
        return (4 + math.sqrt(self.terms)) * U32


def exact_output(module, x):
    """Return the exact output of a module."""
    z, magnitudes = exact_sums(module.linear, x)
    return Exact(torch.relu(z) / module.divisor, magnitudes / abs(module.divisor), x.shape[-1])


def are_alike(errors, torch_errors):
    """Return whether errors are finite, and at most NOISE times the reference's."""
    for kind, factor in NOISE.items():
        error = getattr(errors, kind)
        if not (error < math.inf and error <= factor * getattr(torch_errors, kind)):
            return False
    return True


def possible_roundings(dtype, terms, is_expanded):
    """Return how many roundings of a result may add up; the arguments are `assert_accurate`'s."""
    if dtype.itemsize == 2:
        return 4
    if is_expanded:
        return 4 + terms / 2
    return 4 + math.sqrt(terms)


def assert_accurate(errors, torch_errors, dtype, terms, is_expanded=False):
    """Assert that a result is as accurate as the reference's.

    One of three conditions is enough:

    * every element is within a few roundings;
    * the errors are no larger than the reference's;
    * the largest relative error is one that roundings alone may cause. This condition is needed
      because in some of thousands of cases the reference's order of summation is luckier.

    Args:
        errors: the errors of our result.
        torch_errors: the errors of the reference's result.
        dtype: the dtype of the results. Half types are summed in float32, and rounded after
            product, bias and division.
        terms: the number of terms of each sum.
        is_expanded: whether an operand is expanded. A sum may then have equal terms, whose
            roundings all have one sign.
    """
    roundings = possible_roundings(dtype, terms, is_expanded)
    is_rounding = errors.relative <= roundings * torch.finfo(dtype).eps / 2
    is_right = errors.wrong_elements == 0 or are_alike(errors, torch_errors) or is_rounding
    assert is_right, f"{errors}, the reference's {torch_errors}"


@given(st.data())
def test_results_are_as_accurate_as_in_the_reference(device, data):
    """This holds at every precision. Operands do not change."""
    check_forward(device, data, ("normal",), DIVISORS)


@pytest.mark.gpu
@given(st.data())
def test_results_of_special_values_on_a_gpu_match_the_reference(data):
    """Sums of infinities, NaN and integers are exact; the divisor may be 0, infinite or NaN."""
    check_forward("cuda", data, ("sprinkled",), SPECIAL_DIVISORS)


def check_forward(device, data, values, divisors):
    """Draw operands of these kinds of values, and compare our forward with the reference's."""
    case = data.draw(operands(device, values, divisors))
    ours, reference = case.modules(device)
    x = case.x.make(device)
    n = len(ours.linear.weight)
    size = math.prod((*x.shape[:-1], n)) * x.element_size()
    setting = data.draw(choice_of(PRECISIONS[device]))
    with torch.no_grad(), float32_precision(setting):
        got = checked_call(lambda: ours(x), [x, *ours.parameters()], size)
        want = reference(x)
    assert_same_layout(got, want)
    is_expanded = 0 in (*case.x.layout.stride, *case.weight.layout.stride)
    exact = exact_output(reference, x)
    errors = exact.errors_of(got, setting)
    torch_errors = exact.errors_of(want, setting)
    assert_accurate(errors, torch_errors, x.dtype, exact.terms, is_expanded)


@given(operands("cpu", ("integers", "sprinkled"), (3.0, 0.0, 1e-40, -1e300, 5, True)))
def test_results_on_a_cpu_match_the_reference_bit_for_bit(case):
    """On a CPU torch computes the product.

    This includes infinities, NaN and any divisor. Operands are integers because the address of a
    tensor may decide in which order a library sums. Batches are dense: for those with gaps torch
    rounds the product before it adds the bias. Weights of bfloat16 are dense: with others torch 2.9
    loses NaN, and torch 2.11 has NaN that come and go.
    """
    ours, reference = case.modules("cpu")
    x = case.x.make("cpu")
    x = x.contiguous() if x.dim() > 2 else x
    if x.dtype == torch.bfloat16:
        for module in (ours, reference):
            module.linear.weight = nn.Parameter(module.linear.weight.detach().contiguous())
    with torch.no_grad():
        assert_same_outcome(ours(x), reference(x))


def step_gradients(x, weight, grad_output, direction, passes):
    """Return the gradients of `step` in float64: those of x, weight and bias, and the second one.

    `passes` is grad_z divided by grad_output: 1 / divisor where ReLU passes the gradient, and 0
    elsewhere. Here grad_z is the gradient of z = x weight^T + bias.
    """
    second = linear(direction.double(), weight.double()) * passes
    return [*exact_gradients(x, weight, grad_output * passes), second]


def exact_step(module, x, grad_output, direction, passes):
    """Return the exact results of `step`; the arguments are those of `step_gradients`."""
    operands = x, module.linear.weight.detach(), grad_output, direction, passes
    n, k = module.linear.weight.shape
    m = passes.numel() // n
    results = [exact_output(module, x)]
    sums = step_gradients(*operands)
    magnitudes = step_gradients(*(operand.abs() for operand in operands))
    of_x, of_weight, of_bias, second = zip(sums, magnitudes, strict=True)
    results += [Exact(*of_x, terms=n), Exact(*of_weight, terms=m)]
    if module.linear.bias is not None:
        results.append(Exact(*of_bias, terms=m, is_product=False))
    return [*results, Exact(*second, terms=k)]


def error_of_z(dtype, setting):
    """Return how much x weight^T + bias may err, relative to the sum of its terms' magnitudes."""
    if dtype.itemsize == 2:  # the product may be rounded before the bias is added
        return torch.finfo(dtype).eps
    if dtype == torch.float32 and setting != "highest":
        return U_TF32 * 4
    return U32 * 64


@dataclass(frozen=True)
class Signs:
    """The signs of z = x weight^T + bias. ReLU passes the gradient where z > 0.

    Attributes:
        are_clear: where z is so far from 0 that no rounding changes its sign.
        are_positive: where the exact z is positive.
    """

    are_clear: torch.Tensor
    are_positive: torch.Tensor

    def passed_gradients(self, second_gradient):
        """Return where ReLU passed the gradient in a step that had this second gradient.

        Where a sign is not clear, ReLU passed it if the second gradient is not 0.
        """
        return torch.where(self.are_clear, self.are_positive, second_gradient != 0)


def signs_of_z(module, x, setting):
    """Return the signs of z in a call of this module; `setting` is the precision."""
    z, magnitudes = exact_sums(module.linear, x)
    return Signs(z.abs() > error_of_z(x.dtype, setting) * magnitudes, z > 0)


class JudgedResult(NamedTuple):
    """A result of `step`, and its errors."""

    values: torch.Tensor
    errors: Errors


def judge_step(results, module, operands, signs, setting):
    """Return each of a step's results with its errors.

    Args:
        results: the results of `step`.
        module: the reference.
        operands: x, grad_output and direction of `step`.
        signs: the signs of z.
        setting: the precision of float32 products.
    """
    passes = signs.passed_gradients(results[-1]).double() / module.divisor
    pairs = zip(results, exact_step(module, *operands, passes), strict=True)
    return [JudgedResult(got, exact.errors_of(got, setting)) for got, exact in pairs]


@given(st.data())
def test_gradients_are_as_accurate_as_in_the_reference(device, data):
    """This holds for first gradients and the second one.

    The sign of a z near 0 depends on rounding, and with it whether ReLU passes the gradient. There
    the output's gradient is set to 0 so that the first gradients do not depend on it.
    """
    case = data.draw(operands(device, ("normal",), (2.0, -1.0)))
    assume(case.weight.layout.shape[0] > 0)  # otherwise there is nothing to compare
    ours, reference = case.modules(device)
    weight = reference.linear.weight
    x = case.x.make(device)
    setting = data.draw(choice_of(PRECISIONS[device]))
    signs = signs_of_z(reference, x, setting)
    grad_output = data.draw(like(tuple(signs.are_clear.shape), x.dtype, "normal")).make(device)
    direction = data.draw(like(tuple(x.shape), x.dtype, "normal")).make(device)
    is_expanded = any(0 in t.stride() for t in (x, weight, grad_output))
    step_operands = x, grad_output * signs.are_clear, direction

    with float32_precision(setting):
        tensors = [*step_operands, *ours.parameters()]
        our_results = checked_call(lambda: step(ours, *step_operands), tensors, grad_output.nbytes)
        torch_results = step(reference, *step_operands)

    our_step = judge_step(our_results, reference, step_operands, signs, setting)
    torch_step = judge_step(torch_results, reference, step_operands, signs, setting)
    most_terms = max(*weight.shape, grad_output[..., 0].numel())
    for got, want in zip(our_step, torch_step, strict=True):
        assert (got.values.shape, got.values.dtype) == (want.values.shape, want.values.dtype)
        # Equal values pass, for both may have the errors of torch 2.9's bfloat16 products.
        if not torch.equal(got.values, want.values):
            assert_accurate(got.errors, want.errors, x.dtype, most_terms, is_expanded)


@given(st.data())
def test_only_the_wanted_gradients_are_computed(device, data):
    """Every sum is exact, so they equal the reference's."""
    case = data.draw(operands(device, ("integers",), EXACT, (torch.float32, torch.float64)))
    wanted = data.draw(st.sets(st.sampled_from(["x", "weight", "bias"])))
    n = case.weight.layout.shape[0]
    grad_output = data.draw(like((*case.x.layout.shape[:-1], n), case.x.dtype, "integers"))
    results = []
    for module in case.modules(device):
        x = case.x.make(device).requires_grad_("x" in wanted)
        leaves = {"x": x, "weight": module.linear.weight, "bias": module.linear.bias}
        for name in ("weight", "bias"):
            if leaves[name] is not None:
                leaves[name].requires_grad_(name in wanted)
        out = module(x)
        if out.requires_grad:
            out.backward(grad_output.make(device))
        grads = [None if t is None or t.grad is None else t.grad for t in leaves.values()]
        results.append([out.detach(), *grads])
    for got, want in zip(*results, strict=True):
        assert (got is None) == (want is None)
        if want is not None:  # autograd may change the strides of gradients
            assert_same_outcome(got.clone(memory_format=DENSE), want.clone(memory_format=DENSE))


@st.composite
def misfits(draw):
    """Draw x, weight and bias of any shapes and dtypes, which need not fit together."""
    sizes = {"sizes": (1, 2, 3), "max_dims": 3}
    dtypes = (torch.float32, torch.float64, torch.float16, torch.int64, torch.bool)
    return [draw(properties.tensors(dtypes, ("integers",), **sizes)) for _ in range(3)]


@given(misfits())
def test_misfits_give_the_error_or_result_of_torch(device, operands):
    """Nothing is different for operands of any shapes, dtypes and layouts."""
    results = []
    for module in linear_modules(1, 1, 2.0):
        x, weight, bias = (t.make(device) for t in operands)
        del module.linear.weight, module.linear.bias
        module.linear.weight = weight
        module.linear.bias = bias
        results.append(outcome(module, x))
    assert_same_outcome(*results)
