"""Operands on Hopper that are stored by rows or by columns: half types, and float32."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import nn

from problems.operands import draw_case
from tests.support.compare import assert_as_accurate, assert_mask_of, assert_same_bits
from tests.support.tensors import OPERATORS, float32_precision, linear_modules, linear_path, step

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]
SMALL = (300, 264, 1000)
SEVERAL_TILES = (2048, 4096, 320)  # for each cluster
# [m, n, k]: multiples of the tiles, parts of them, a K shorter than a k-tile, and several tiles for
# each cluster.
SHAPES = [
    (256, 256, 64),
    (1, 1, 1),
    (3, 130, 8),
    (17, 8, 200),
    (129, 385, 65),
    SMALL,
    (257, 520, 127),
    (1000, 1001, 999),
    SEVERAL_TILES,
]


class Transposed(NamedTuple):
    """For x and for weight: True if it is stored by columns."""

    x: bool
    weight: bool


TRANSPOSED = [Transposed(*both) for both in itertools.product([False, True], repeat=2)]
# Sanitizers run every layout, and for several tiles those with an x stored by rows.
EVERY_LAYOUT = {"dtype": [torch.float16], "shape": [SMALL]}
X_BY_ROWS = {
    "dtype": [torch.float16],
    "shape": [SEVERAL_TILES],
    "transposed": [Transposed(x=False, weight=False), Transposed(x=False, weight=True)],
}


@pytest.fixture(autouse=True)
def sm90():
    with linear_path("sm90"):
        yield


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def name_of_layout(transposed):
    x, weight = ("^T" if is_transposed else "" for is_transposed in transposed)
    return f"x{x}-weight{weight}"


@pytest.fixture(params=TRANSPOSED, ids=name_of_layout)
def transposed(request):
    return request.param


def laid_out(x, is_transposed, alignment=8):
    """Return the same matrix, stored by rows or by columns.

    Each row, or column, begins at a multiple of `alignment` elements; the gaps between them are
    NaN.
    """
    lines = x.t() if is_transposed else x
    length = -(-lines.shape[1] // alignment) * alignment
    wide = torch.full((lines.shape[0], length), float("nan"), dtype=x.dtype, device=x.device)
    view = wide[:, : lines.shape[1]].copy_(lines)
    return view.t() if is_transposed else view


def integers(shape, dtype, most=4):
    """Draw small integers: sums of fewer than 2^20 of their products are exact in float32."""
    return torch.randint(-most, most + 1, shape, device="cuda").to(dtype)


def module_of(weight, bias, divisor):
    """Return our module with this weight and bias."""
    ours, _ = linear_modules(weight.shape[1], weight.shape[0], divisor, weight.dtype, "cuda")
    ours.linear.weight = nn.Parameter(weight)
    ours.linear.bias = None if bias is None else nn.Parameter(bias)
    return ours


def exact_step(x, weight, grad_output):
    """Return the output for a divisor of 2, and the gradients of x and weight, in float64."""
    x = x.double()
    weight = weight.double()
    grad_output = grad_output.double()
    z = x @ weight.t()
    grad_z = grad_output / 2 * (z > 0)
    return z.relu() / 2, grad_z @ weight, grad_z.t() @ x


def assert_same_but_for_zeros(got, want):
    """Assert that tensors have the same bits, except for the sign of zero."""
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a + 0, b.to(a.dtype) + 0)  # + 0 drops the sign of zero


@pytest.mark.sanitize("sm90", **EVERY_LAYOUT, divisor=[2.0])
@pytest.mark.sanitize("sm90", **X_BY_ROWS, divisor=[2.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("divisor", [2.0, -3.0])
def test_sums_of_integers_are_exact(dtype, transposed, shape, divisor):
    m, n, k = shape
    x, weight, bias = (integers(s, dtype) for s in ((m, k), (n, k), (n,)))
    z = x.double() @ weight.double().t() + bias.double()
    want = (z.relu().float() / torch.tensor(divisor, device="cuda")).to(dtype)
    x = laid_out(x, transposed.x)
    weight = laid_out(weight, transposed.weight)
    arguments = (x, weight, bias, divisor)
    out, mask = OPERATORS.linear_relu_divide_with_mask(*arguments)
    assert_same_but_for_zeros([out, OPERATORS.linear_relu_divide(*arguments)], [want, want])
    assert_mask_of(z, mask)


# In the last two, a cluster computes several tiles, with fewer k-tiles than TMA boxes to store.
GRADIENT_SHAPES = [*(s for s in SHAPES if s[1] % 8 == 0), (40, 4352, 4104), (200, 2056, 8200)]


@pytest.mark.sanitize("sm90", **EVERY_LAYOUT)
@pytest.mark.sanitize("sm90", **X_BY_ROWS)
@pytest.mark.parametrize("shape", GRADIENT_SHAPES, ids=str)
def test_gradients_of_integers_are_exact(dtype, transposed, shape):
    m, n, k = shape
    x, weight, bias = (integers(s, dtype, 3) for s in ((m, k), (n, k), (n,)))
    grad_output = 2 * integers((m, n), dtype, 3)
    passes = x.double() @ weight.double().t() + bias.double() > 0
    grad_z = (grad_output.double() / 2) * passes
    want = grad_z @ weight.double(), grad_z.t() @ x.double(), grad_z.sum(0)
    module = module_of(laid_out(weight, transposed.weight), bias, 2.0)
    got = step(module, laid_out(x, transposed.x), grad_output)[1:]
    assert_same_but_for_zeros(got, want)


@pytest.mark.parametrize("shape", [(1000, 1000, 1000), (512, 1024, 4096)], ids=str)
def test_results_are_as_accurate_as_in_torch(dtype, transposed, shape):
    m, n, k = shape
    x, weight, bias = (torch.randn(s, device="cuda", dtype=dtype) for s in ((m, k), (n, k), (n,)))
    grad_output = torch.randn(m, n, device="cuda", dtype=dtype)
    module = module_of(laid_out(weight, transposed.weight), bias, 2.0)
    out, grad_x, grad_weight, _ = step(module, laid_out(x, transposed.x), grad_output)
    wide_x = x.double()
    wide_weight = weight.double()
    torch_result = nn.functional.linear(x, weight, bias).relu() / 2
    assert_as_accurate(out, torch_result, (wide_x @ wide_weight.t() + bias.double()).relu() / 2)
    grad_z = torch.where(out != 0, grad_output / 2, 0)
    wide = grad_z.double()
    assert_as_accurate(grad_x, grad_z @ weight, wide @ wide_weight)
    assert_as_accurate(grad_weight, grad_z.t() @ x, wide.t() @ wide_x)


def test_operands_need_not_be_aligned(dtype, transposed):
    """The forward copies such operands, and torch's products compute the gradients."""
    x = integers((130, 257), dtype, 1)
    weight = integers((261, 257), dtype, 1)
    grad_output = 2 * integers((130, 261), dtype, 1)
    module = module_of(laid_out(weight, transposed.weight, 1), None, 2.0)
    got = step(module, laid_out(x, transposed.x, 1), grad_output)
    assert_same_but_for_zeros(got, exact_step(x, weight, grad_output))


def test_x_may_have_three_dimensions_and_be_stored_by_columns(dtype):
    x = integers((200, 5, 16), dtype)
    weight = integers((72, 200), dtype)
    with torch.no_grad():
        got = module_of(weight, None, 2.0)(x.permute(1, 2, 0))
    rows = x.permute(1, 2, 0).reshape(80, 200).double()
    want = (rows @ weight.double().t()).relu() / 2
    assert_same_bits(got + 0, want.to(dtype).view(5, 16, 72) + 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_in_their_row(dtype, transposed, value):
    """The other rows have no error."""
    x = integers((300, 200), dtype)
    weight = integers((264, 200), dtype)
    want = (x.double() @ weight.double().t()).relu() / 2
    x[7, 199] = value
    want[7] = (x[7].double() @ weight.double().t()).relu() / 2
    with torch.no_grad():
        got = module_of(laid_out(weight, transposed.weight), None, 2.0)(laid_out(x, transposed.x))
    assert_same_bits(got + 0, want.to(dtype) + 0)


def test_no_operand_is_copied(dtype, transposed):
    """A step allocates its results, the gradient of the product, the mask, and at most 256 KiB."""
    m, n, k = 512, 1024, 4096
    x = torch.randn(m, k, device="cuda")
    weight = torch.randn(n, k, device="cuda")
    x = laid_out(x.to(dtype), transposed.x)
    weight = laid_out(weight.to(dtype), transposed.weight)
    grad_output = torch.randn(m, n, device="cuda", dtype=dtype)
    module = module_of(weight, None, 2.0)
    step(module, x, grad_output)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = step(module, x, grad_output)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= sum(t.nbytes for t in results) + grad_output.nbytes + m * n // 8 + 2**18


def test_the_kernels_compute_large_aligned_products_and_torch_all_others(dtype):
    """This holds for the gradients as for the forward. In a step torch's op is aten::mm."""
    large = (8192, 8192, 8192)
    small = (256, 512, 1024)
    unaligned = (8192, 8192, 8191)
    with linear_path("auto"):
        for (m, n, k), is_ours in ((large, True), (small, False), (unaligned, False)):
            module = module_of(integers((n, k), dtype), None, 2.0)
            x = integers((m, k), dtype)
            grad_output = integers((m, n), dtype)
            with torch.profiler.profile() as profile:
                step(module, x, grad_output)
            ops = {event.key for event in profile.key_averages()}
            assert ("aten::mm" not in ops) == is_ours


# The dtype and the precision of each kind of product that the sm90 kernels compute.
SM90_PRODUCTS = [(dtype, "highest") for dtype in (*DTYPES, torch.float32)] + [
    (torch.float32, "high")
]


@pytest.mark.parametrize(("dtype", "precision"), SM90_PRODUCTS, indirect=["precision"], ids=str)
def test_kernels_read_the_results_of_the_kernel_before(dtype, precision, transposed):
    """Our kernels start before the kernel in front of them has ended, but wait for its results."""
    x = laid_out(integers((520, 1024), dtype), transposed.x)
    weight = laid_out(integers((776, 1024), dtype), transposed.weight)
    module = module_of(weight, None, 2.0)
    grad_output = torch.zeros(520, 776, device="cuda", dtype=dtype)
    for _ in range(20):
        x.copy_(integers(x.shape, dtype))
        weight.copy_(integers(weight.shape, dtype))
        grad_output.copy_(2 * integers(grad_output.shape, dtype))
        got = step(module, x, grad_output)
        assert_same_but_for_zeros(got, exact_step(x, weight, grad_output))


@pytest.mark.parametrize(
    "shape",
    [(300, 512, 1024), (257, 1000, 1001), (64, 40, 72), (1024, 4096, 2048), (20001, 68, 72)],
    ids=str,
)
@pytest.mark.parametrize(
    "name",
    [
        "normal",
        "lognormal",
        "outlier rows",
        "outliers in the weight",  # some overflow fp16
        "inf and NaN in the weight",
        "128 wide rows of the weight",  # some of them have too many subnormals
        "sparse weight, 1 in 100",  # the sample of some rows is zero
    ],
)
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_the_layout_changes_no_bit_in_float32(precision, name, shape, transposed):
    """Operands stored by rows and by columns give a step the same bits."""
    m, n, k = shape
    x, weight, bias = draw_case(name, m, k, n, device="cuda")
    grad_output = torch.randn(m, n, device="cuda")
    results = []
    with float32_precision(precision):
        for layout in (Transposed(x=False, weight=False), transposed):
            module = module_of(laid_out(weight, layout.weight, 4), bias, 2.0)
            results.append(step(module, laid_out(x, layout.x, 4), grad_output))
    want, got = results
    assert_same_bits(got, want)
