"""Linear -> ReLU -> divide is as accurate as the reference, on operands that hypothesis draws."""

import math
import warnings
from dataclasses import dataclass
from functools import cache

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
# The errors of two results of the same accuracy differ by up to these factors: the largest error,
# the mean error, and the largest relative one.
NOISE = 1.15, 1.02, 1.15


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
    return Operands(
        x, weight, bias if draw(properties.booleans) else None, draw(choice_of(divisors))
    )


@st.composite
def like(draw, shape, dtype, values):
    """Draw tensors of one shape, in any layout."""
    return properties.draw_tensor(draw, (dtype,), (values,), properties.draw_layout(draw, shape))


def measure(got, exact, sizes, terms, setting="highest", is_product=True):
    """Measure the errors of a result.

    Args:
        got: the result.
        exact: the result in float64.
        sizes: for each element, the sum of its terms' magnitudes.
        terms: the number of terms of each sum.
        setting: the precision of float32 products.
        is_product: False for sums that are no products, as the bias's gradient.

    Returns:
        The number of elements that are wrong by more than a few roundings, and three errors: the
        largest, the mean, and the largest relative to `sizes`.
    """
    if not got.numel():
        return 0, (0.0, 0.0, 0.0)
    dtype = got.dtype
    limits = torch.finfo(dtype)
    rounded = exact.to(dtype)
    exact = torch.where(rounded.isinf(), rounded.double(), exact)
    sizes = sizes.nan_to_num(0, 0)
    error = element_errors(got, rounded, exact)
    relative = (4 + math.sqrt(terms)) * U32
    if dtype == torch.float64:  # `exact` itself has this error
        relative = (terms + 4) * limits.eps
    elif dtype == torch.float32 and is_product:  # operands, sum and quotient are rounded once each
        relative = 4 * U32
        if setting != "highest":
            relative += 2 * U_TF32
    allowed = sizes * relative + limits.smallest_normal * limits.eps / 2
    if dtype.itemsize == 2:
        allowed += (exact.abs() * (limits.eps / 2)).nan_to_num(0, 0, 0)
    relative_errors = error / sizes.clamp_min(torch.finfo(torch.float64).smallest_normal)
    three = error.max(), error.mean(), relative_errors.max()
    return int((error > allowed).sum()), [value.item() for value in three]


def measure_outputs(results, x, module, setting):
    """Measure the errors of several outputs for x and the module's parameters."""
    z, sizes = exact_sums(module.linear, x)
    exact = torch.relu(z) / module.divisor, sizes / abs(module.divisor)
    return [measure(out, *exact, x.shape[-1], setting) for out in results]


def assert_accurate(got, torchs, dtype, terms, is_expanded=False):
    """Assert that a result is as accurate as the reference's.

    One of three conditions is enough:

    * every element is within a few roundings;
    * the errors are no larger than the reference's;
    * the largest relative error is one that roundings alone may cause. This condition is needed
      because in some of thousands of cases the reference's order of summation is luckier.

    Args:
        got: what `measure` returns for our result.
        torchs: what `measure` returns for the reference's.
        dtype: the dtype of the results. Half types are summed in float32, and rounded after
            product, bias and division.
        terms: the number of terms of each sum.
        is_expanded: whether an operand is expanded. A sum may then have equal terms, whose
            roundings all have one sign.
    """
    wrong_elements, errors = got
    _, torchs_errors = torchs
    is_alike = all(
        error < math.inf and error <= factor * torchs_error
        for error, torchs_error, factor in zip(errors, torchs_errors, NOISE, strict=True)
    )
    if dtype.itemsize == 2:
        roundings = 4
    elif is_expanded:
        roundings = 4 + terms / 2
    else:
        roundings = 4 + math.sqrt(terms)
    largest_relative = errors[-1]
    is_rounding = largest_relative <= roundings * torch.finfo(dtype).eps / 2
    assert not wrong_elements or is_alike or is_rounding, (
        f"{errors}, the reference's {torchs_errors}; {wrong_elements} elements beyond"
    )


@given(st.data())
def test_results_are_as_accurate_as_the_references(device, data):
    """This holds at every precision. Operands do not change."""
    check_forward(device, data, ("normal",), DIVISORS)


@pytest.mark.gpu
@given(st.data())
def test_results_of_special_values_on_a_gpu_are_the_references(data):
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
    found = measure_outputs((got, want), x, reference, setting)
    assert_accurate(*found, case.x.dtype, case.x.layout.shape[-1], is_expanded)


@given(operands("cpu", ("integers", "sprinkled"), (3.0, 0.0, 1e-40, -1e300, 5, True)))
def test_results_on_a_cpu_have_the_references_bits(case):
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


def exact_step_gradients(x, weight, grad_z, direction, passes, has_bias):
    """Return the gradients that `step` returns, in float64; without a bias, the others.

    Args:
        x: the module's input.
        weight: its weight.
        grad_z: the gradient of z = x weight^T + bias.
        direction: the argument of `step`.
        passes: grad_z divided by the output's gradient: 0 or 1 / divisor.
        has_bias: whether there is a bias.
    """
    grad_x, grad_weight, grad_bias = exact_gradients(x, weight, grad_z)
    first = [grad_x, grad_weight, grad_bias] if has_bias else [grad_x, grad_weight]
    return [*first, linear(direction.double(), weight.double()) * passes]


def measure_gradients(gradients, x, weight, grad_output, direction, passes, setting):
    """Measure the errors of gradients that `step` returned.

    Args:
        gradients: those of x, weight and, if there is one, bias, and the second gradient.
        x: the module's input.
        weight: its weight.
        grad_output: the gradient of the output.
        direction: the argument of `step`.
        passes: grad_z divided by the output's gradient: 0 or 1 / divisor.
        setting: the precision of float32 products.

    Returns:
        What `measure` returns for each gradient.
    """
    has_bias = len(gradients) == 4
    factors = x, weight, grad_output * passes, direction, passes
    exact = exact_step_gradients(*factors, has_bias=has_bias)
    sizes = exact_step_gradients(*(t.abs() for t in factors), has_bias=has_bias)
    n, k = weight.shape
    m = passes.numel() // n
    terms = [n, m, m, k] if has_bias else [n, m, k]
    measured = []
    for i, gradient in enumerate(gradients):
        is_product = not (has_bias and i == 2)  # the bias's gradient is a plain sum
        measured.append(measure(gradient, exact[i], sizes[i], terms[i], setting, is_product))
    return measured


def error_of_z(dtype, setting):
    """Return how much x weight^T + bias may err, relative to the sum of its terms' magnitudes."""
    if dtype.itemsize == 2:  # the product may be rounded before the bias is added
        return torch.finfo(dtype).eps
    if dtype == torch.float32 and setting != "highest":
        return U_TF32 * 4
    return U32 * 64


@given(st.data())
def test_gradients_are_as_accurate_as_the_references(device, data):
    """This holds for first gradients and the second one.

    The sign of a z near 0 depends on rounding, and with it whether ReLU passes the gradient. There
    the output's gradient is set to 0 so that the first gradients do not depend on it.
    """
    case = data.draw(operands(device, ("normal",), (2.0, -1.0)))
    n, k = case.weight.layout.shape
    assume(n > 0)  # otherwise there is nothing to compare
    ours, reference = case.modules(device)
    x = case.x.make(device)
    weight = reference.linear.weight.detach()
    setting = data.draw(choice_of(PRECISIONS[device]))
    z, magnitude = exact_sums(reference.linear, x)
    has_clear_sign = z.abs() > error_of_z(x.dtype, setting) * magnitude
    grad_output, direction = (
        data.draw(like(tuple(t.shape), x.dtype, "normal")).make(device) for t in (z, x)
    )
    is_expanded = any(0 in t.stride() for t in (x, weight, grad_output))
    grad_output = grad_output * has_clear_sign
    arguments = x, grad_output, direction
    with float32_precision(setting):
        tensors = [*arguments, *ours.parameters()]
        our_results = checked_call(lambda: step(ours, *arguments), tensors, grad_output.nbytes)
        torchs_results = step(reference, *arguments)
    of_outputs = measure_outputs((our_results[0], torchs_results[0]), x, reference, setting)
    measured = []
    for results, of_output in zip((our_results, torchs_results), of_outputs, strict=True):
        # Where the sign is not clear, the second gradient shows whether ReLU passed the gradient.
        passes = torch.where(has_clear_sign, z > 0, results[-1] != 0).double() / case.divisor
        of_gradients = measure_gradients(
            results[1:], x, weight, grad_output, direction, passes, setting
        )
        measured.append([of_output, *of_gradients])
    most_terms = max(n, k, z.numel() // n)
    both = zip(our_results, torchs_results, *measured, strict=True)
    for got, want, our_errors, torchs_errors in both:
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if not torch.equal(got, want):  # both may have the errors of torch 2.9's bfloat16 products
            assert_accurate(our_errors, torchs_errors, x.dtype, most_terms, is_expanded)


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
def test_misfits_give_torchs_error_or_result(device, operands):
    """Nothing is different for operands of any shapes, dtypes and layouts."""
    results = []
    for module in linear_modules(1, 1, 2.0):
        x, weight, bias = (t.make(device) for t in operands)
        del module.linear.weight, module.linear.bias
        module.linear.weight = weight
        module.linear.bias = bias
        results.append(outcome(module, x))
    assert_same_outcome(*results)
