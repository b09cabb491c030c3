"""Linear -> ReLU -> divide, forward.

On a CPU the results have the bits of the reference; on a GPU they are as accurate.
"""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from model_new import linear_ops
from problems.benchmark.paths.kernel_paths import PATHS
from tests.support.compare import (
    assert_as_accurate,
    assert_same_bits,
    bits,
    outcome,
    rounding_errors,
)
from tests.support.tensors import (
    FLOAT32_PATHS,
    FLOATING,
    MATRIX_VIEWS,
    OPERATORS,
    draw,
    draw_sizes,
    linear_modules,
    linear_path,
)

HALF = (torch.float16, torch.bfloat16)
INF = float("inf")
NAN = float("nan")
# Powers of two and others, integers, a bool, zeros, infinities and NaN. Then numbers that are
# subnormal, very small or very large, in float32 or even in float64.
DIVISORS = [2.0, 3.0, -3.0, 0.7, 5, -4, True, 0.0, -0.0, INF, -INF, NAN]
DIVISORS += [1e-40, -(2.0**-128), -1e-300, 5e-324, 2.0**-126, 3e38, 1e39, 1e300]


class PathCase(NamedTuple):
    """A device, the path of its products, and a dtype; the path supports any shape and layout."""

    device: str
    path: str
    dtype: torch.dtype

    @property
    def may_be_ours(self):
        """Return whether our float32 kernels may compute the products."""
        return self.device == "cuda" and self.path != "torch" and self.dtype == torch.float32


def parameters(cases):
    """Return the cases as parameters of a test, with their names and markers."""
    on_gpu = {"cpu": [], "cuda": [pytest.mark.gpu]}
    return [pytest.param(c, id="-".join(map(str, c)), marks=on_gpu[c.device]) for c in cases]


CASES = [PathCase("cpu", "auto", dtype) for dtype in FLOATING]
CASES += [PathCase("cuda", path, dtype) for path in ("auto", "torch") for dtype in FLOATING]
CASES += [PathCase("cuda", path, torch.float32) for path in FLOAT32_PATHS]


@pytest.fixture(params=parameters(CASES))
def case(request):
    """Select the case's path, and return the case."""
    with linear_path(request.param.path):
        yield request.param


def exact_result(module, x):
    """Return the exact result in float64, for the divisor as torch rounds it before it divides."""
    weight = module.linear.weight.double()
    bias = module.linear.bias
    z = linear(x.double(), weight, None if bias is None else bias.double())
    divisor = torch.tensor(float(module.divisor), device=x.device)
    divisor = divisor.to(torch.float64 if x.dtype == torch.float64 else torch.float32).double()
    return torch.relu(z) / divisor


def torch_result(module, x):
    """Return the reference's result, with the bias added in the product and, on a GPU, a division.

    The reference itself multiplies by the reciprocal on a GPU.
    """
    x = x.contiguous() if x.dim() > 2 else x
    if x.is_cuda and x.dtype not in HALF:
        divisor = torch.tensor(float(module.divisor), dtype=x.dtype, device=x.device)
        return torch.relu(module.linear(x)) / divisor
    return module(x)


def assert_right(ours, reference, x, may_be_ours=False):
    """Assert that ours(x) is contiguous, has the right values, and leaves x unchanged.

    On a CPU the bits are the reference's. On a GPU the error is at most torch's, and a few
    roundings more if our kernels may compute the product (`may_be_ours`).
    """
    before = x.clone()
    with torch.no_grad():
        got = ours(x)
        want = torch_result(reference, x)
    assert got.is_contiguous()
    assert torch.equal(bits(x), bits(before))
    if x.is_cuda:
        allowance = 0.0
        if may_be_ours:
            allowance = rounding_errors(x, *ours.linear.parameters()) / abs(ours.divisor)
        assert_as_accurate(got, want, exact_result(ours, x), allowance=allowance)
    else:
        assert_same_bits(got, want)


SIZES = [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129, 1000, 4097]


@pytest.mark.parametrize(("m", "n", "k"), draw_sizes(0, 80, SIZES, largest_product=2**21))
def test_results_are_right_for_any_sizes(case, m, n, k):
    has_bias = (m + n + k) % 4 > 0
    ours, reference = linear_modules(k, n, -3.0, case.dtype, case.device, has_bias)
    assert_right(ours, reference, draw((m, k), case.dtype, case.device), case.may_be_ours)


# The shape of x, and N: any number of dimensions, empty tensors, and results for several threads.
OTHER_SHAPES = [((7,), 9), ((2, 3, 7), 9), ((2, 1, 3, 7), 9), ((1, 1, 1, 1, 7), 9)]
OTHER_SHAPES += [((0, 7), 9), ((3, 0, 7), 9), ((0,), 9), ((5, 0), 9), ((0, 0), 9), ((5, 7), 0)]
OTHER_SHAPES += [((1, 3), 70_007), ((70_001, 3), 5), ((513, 3), 1024), ((40_001, 3), 8)]
BY_TORCH = [case for case in CASES if not case.may_be_ours]


@pytest.mark.parametrize("case", parameters(BY_TORCH), indirect=True)
@pytest.mark.parametrize(("shape", "n"), OTHER_SHAPES)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_results_are_right_for_any_dimensions(case, shape, n):
    has_bias = (sum(shape) + n) % 4 > 0
    ours, reference = linear_modules(shape[-1], n, -3.0, case.dtype, case.device, has_bias)
    x = draw(shape, case.dtype, case.device)
    assert_right(ours, reference, x)
    assert ours(x).shape == (*shape[:-1], n)


EACH_VIEW = pytest.mark.parametrize("view", MATRIX_VIEWS.values(), ids=MATRIX_VIEWS.keys())
EACH_MATRIX = pytest.mark.parametrize("size", [(12, 16), (130, 192)], ids=str)


@EACH_VIEW
@EACH_MATRIX
def test_results_are_right_for_an_x_of_any_strides(case, view, size):
    x = view(draw(size, case.dtype, case.device))
    ours, reference = linear_modules(x.shape[-1], 24, 3.0, case.dtype, case.device)
    assert_right(ours, reference, x, case.may_be_ours)


@EACH_VIEW
@EACH_MATRIX
def test_results_are_right_for_a_weight_of_any_strides(case, view, size):
    weight = view(draw(size, case.dtype, case.device)).flatten(0, -2)
    n, k = weight.shape
    ours, reference = linear_modules(k, n, 3.0, case.dtype, case.device, bias=False)
    ours.linear.weight = reference.linear.weight = nn.Parameter(weight)
    assert_right(ours, reference, draw((17, k), case.dtype, case.device), case.may_be_ours)


def test_results_are_right_for_a_bias_with_gaps(case):
    ours, reference = linear_modules(16, 6, 3.0, case.dtype, case.device)
    bias = draw((12,), case.dtype, case.device)[::2]
    ours.linear.bias = reference.linear.bias = nn.Parameter(bias)
    assert_right(ours, reference, draw((5, 16), case.dtype, case.device), case.may_be_ours)


@pytest.mark.parametrize("divisor", DIVISORS, ids=str)
def test_results_are_right_for_any_divisor(case, divisor):
    """On a CPU results have the reference's bits.

    On a GPU NaN, infinities, zeros and signs are where the reference has them.
    """
    device, _, dtype = case
    for n in (3, 64, 129):
        ours, reference = linear_modules(16, n, divisor, dtype, device)
        x = draw((5, 16), dtype, device)
        x[0] = 0
        ours.linear.bias.data[:2] = reference.linear.bias.data[:2] = torch.tensor([0.0, -1.0])
        with torch.no_grad():
            got = ours(x)
            want = reference(x)
        if device == "cpu" or not 2.0**-126 <= abs(divisor) <= 2.0**126:
            assert_same_bits(got, want)
        else:  # torch multiplies by the reciprocal, so only special values are the same
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.isinf(), want.isinf())
            assert torch.equal(got == 0, want == 0)
            assert torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan())


@pytest.mark.parametrize("divisor", [2**53 + 1, torch.tensor(2.0), torch.rand(9) + 1])
def test_divisors_that_are_tensors_or_large_integers_match_the_reference(divisor):
    ours, reference = linear_modules(7, 9, divisor)
    x = torch.randn(5, 7)
    assert_same_bits(ours(x), reference(x))


def test_results_are_nan_or_infinite_where_those_of_torch_are(case):
    device, _, dtype = case
    for m, n, k in ((1, 9, 8), (16, 72, 64), (65, 129, 40)):
        ours, reference = linear_modules(k, n, 3.0, dtype, device)
        x = draw((m, k), dtype, device)
        some = x.view(-1)[::7]
        some.copy_(torch.tensor([NAN, INF, -INF, 0.0]).repeat(m * k)[: len(some)])
        with torch.no_grad():
            got = ours(x)
            want = reference(x)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
        x = torch.zeros(m, k, dtype=dtype, device=device)
        x[0, 0] = NAN
        with torch.no_grad():
            assert torch.equal(ours(x).isnan(), reference(x).isnan())


@pytest.mark.gpu
@pytest.mark.parametrize("divisor", [2.0, 3.0])
@pytest.mark.parametrize("n", [512, 129])
def test_float16_is_finite_where_the_quotient_fits(n, divisor):
    """Our kernel rounds once, after the division. torch rounds z = 80000 to infinity before it."""
    x = torch.zeros(300, 64, dtype=torch.float16, device="cuda")
    weight = torch.zeros(n, 64, dtype=torch.float16, device="cuda")
    bias = torch.full((n,), 16000.0, dtype=torch.float16, device="cuda")
    x[:, 5] = 250  # 250 * 256 + 16000 = 80000; these numbers, and 64000, are exact in float16
    weight[:, 5] = 256
    want = torch.full((300, n), 80000 / divisor, dtype=torch.float16, device="cuda")
    with linear_path("sm90"):
        got, _ = OPERATORS.linear_relu_divide_with_mask(x, weight, bias, divisor)
        assert_same_bits(OPERATORS.linear_relu_divide(x, weight, bias, divisor), want)
    assert_same_bits(got, want)
    assert (torch.relu(linear(x, weight, bias)) / divisor).isinf().all()
    with linear_path("torch"):
        assert OPERATORS.linear_relu_divide(x, weight, bias, divisor).isinf().all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_bit_pattern_of_half_types_is_divided_right(device, dtype):
    """The product multiplies each pattern by 1. Some divisions are exact, and some round."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    for divisor in (1.0, 3.0, 2.0**-20, 2.0**20):
        ours, _ = linear_modules(1, 1, divisor, dtype, device, bias=False)
        nn.init.ones_(ours.linear.weight)
        with torch.no_grad():
            got = ours(x.unsqueeze(1))
            z = linear(x.unsqueeze(1), ours.linear.weight)  # on a CPU, 0 for some subnormals
        want = (torch.relu(z).float() / divisor).to(dtype)
        assert torch.equal(bits(got + 0), bits(want + 0))


def test_parameters_and_divisor_are_read_in_each_call(device):
    ours, reference = linear_modules(6, 5, 2.0, device=device)
    x = torch.randn(4, 6, device=device)
    first = ours(x)
    ours.divisor = reference.divisor = -0.3
    assert_right(ours, reference, x)
    state = {name: torch.randn_like(value) for name, value in ours.state_dict().items()}
    for module in (ours, reference):
        module.load_state_dict(state)
    assert_right(ours, reference, x)
    weight = nn.Parameter(torch.randn(8, 6, device=device))
    for module in (ours, reference):
        module.linear.weight = weight
        module.linear.bias = None
    assert_right(ours, reference, x)
    with torch.no_grad():
        weight.mul_(2)
    assert_right(ours, reference, x)
    assert first.shape == (4, 5)


def set_attributes(**attributes):
    """Return a function that sets attributes of a module, and parameters of its `linear`."""

    def change(module):
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                setattr(module.linear, name, nn.Parameter(value))
            else:
                setattr(module, name, value)

    return change


def rows():
    """Return an x that fits the modules."""
    return torch.randn(3, 6)


# Calls that fail. Each pair: a change of the modules, or None, and a function that makes x.
FAILING_CALLS = [
    (None, lambda: torch.tensor(1.0)),
    (None, lambda: torch.randn(5)),
    (None, lambda: torch.randn(3, 6, dtype=torch.float64)),
    (None, lambda: torch.ones(3, 6, dtype=torch.complex64)),
    (None, lambda: torch.empty(3, 6, device="meta")),
    (None, lambda: [1.0] * 6),
    (None, lambda: None),
    (lambda m: m.to(torch.complex64), lambda: torch.ones(3, 6, dtype=torch.complex64)),
    (set_attributes(bias=torch.randn(4)), rows),
    (set_attributes(bias=torch.randn(5).double()), rows),
    (set_attributes(weight=torch.randn(5, 7)), rows),
    (set_attributes(divisor="two"), rows),
    (set_attributes(divisor=2**70), rows),
    (set_attributes(divisor=None), rows),
]


@pytest.mark.parametrize(("change", "make"), FAILING_CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_call_that_fails_raises_the_error_of_the_reference(device, change, make, grad):
    """The type and the message are the same."""
    x = make()
    x = x.to(device) if isinstance(x, torch.Tensor) and not x.is_meta else x
    modules = linear_modules(6, 5)
    for module in modules:
        if change:
            change(module)
        module.to(device)
    with torch.set_grad_enabled(grad):
        got, want = (outcome(module, x) for module in modules)
    assert issubclass(want[0], Exception)
    assert got == want


def test_a_path_that_does_not_exist_raises():
    names = ", ".join(["auto", *PATHS])
    with pytest.raises(RuntimeError, match=f"expected a path among {names}, got fast"):
        linear_ops.set_linear_path("fast")


@pytest.mark.gpu
def test_a_path_that_does_not_support_a_dtype_raises():
    ours, _ = linear_modules(6, 5, 2.0, torch.float64, "cuda")
    with linear_path("sm80"), pytest.raises(RuntimeError, match="does not support"):
        ours(torch.randn(3, 6, dtype=torch.float64, device="cuda"))


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 4), (2, 0, 4), (0,)])
def test_the_forward_with_a_mask_takes_empty_tensors_of_any_dimensions(shape):
    """Compiled programs that train call this operator."""
    x = torch.ones(shape)
    weight = torch.ones(5, shape[-1])
    bias = torch.ones(5)
    out, mask = OPERATORS.linear_relu_divide_with_mask(x, weight, bias, 2.0)
    assert torch.equal(out, torch.relu(linear(x, weight, bias)) / 2.0)
    assert mask.shape == (*shape[:-1], 1)


def test_the_forward_with_a_mask_says_what_it_rejects():
    message = r"got input Float \[2, 3\] on cpu, weight Float \[4, 5\] on cpu, bias None, divisor 2"
    with pytest.raises(RuntimeError, match=message):
        OPERATORS.linear_relu_divide_with_mask(torch.ones(2, 3), torch.ones(4, 5), None, 2.0)
