"""Operands, steps and promises for tests of float32 products on a GPU."""

import torch
from torch.nn.functional import linear

from tests.support.compare import assert_mask_of, assert_same_bits
from tests.support.promises import ONE_PRODUCT_SLACK
from tests.support.tensors import OPERATORS, linear_modules

INF = float("inf")
NAN = float("nan")
DIVISOR = 2.0


def slack(precision):
    """Return the factor of torch's error that our product may have at this precision."""
    return 1.0 if precision == "highest" else ONE_PRODUCT_SLACK


def draw_step(m, n, k):
    """Return our module and its reference, x [m, k], and the gradient of the output [m, n]."""
    modules = linear_modules(k, n, DIVISOR, device="cuda")
    return (*modules, torch.randn(m, k, device="cuda"), torch.randn(m, n, device="cuda"))


def grad_of_product(out, grad_output):
    """Return the gradient of x weight^T + bias for the gradient of the output."""
    return torch.where(out > 0, grad_output / DIVISOR, 0.0)


def repeated(x, rows):
    """Repeat x along its first dimension until it has at least so many rows."""
    times = -(-rows // x.shape[0])
    return x.repeat(times, *[1] * (x.dim() - 1))


def summed_at_once(a, b):
    """Return torch's product a b, computed as part of a large result.

    For large results cuBLAS makes one sum along K for each element. For small ones it adds partial
    sums, which err less, so they are no yardstick.
    """
    return (repeated(a, 1024) @ repeated(b.t(), 4096).t())[: a.shape[0], : b.shape[1]]


def forward_summed_at_once(x, weight, bias):
    """Return torch's forward, computed as part of a large result for the same reason."""
    z = linear(repeated(x, 1024), repeated(weight, 4096), repeated(bias, 4096))
    return torch.relu(z[: x.shape[0], : weight.shape[0]]) / DIVISOR


def assert_max_and_mean_error(got, torch_result, exact, slack):
    """Assert that the maximum and the mean error are at most `slack` times torch's.

    `torch_result` is torch's result, and `exact` is in float64.
    """
    assert got.shape == exact.shape
    for reduce in (torch.max, torch.mean):
        error = reduce((got.double() - exact).abs()).item()
        allowed = slack * reduce((torch_result.double() - exact).abs()).item()
        assert error <= allowed, f"{reduce.__name__} error {error:.3e}, allowed {allowed:.3e}"


def assert_special_values(got, want):
    """Assert that infinities and NaN are in the same places."""
    for is_special in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(is_special(got), is_special(want))


def unaligned(x):
    """Return the same values in memory that begins 4 bytes after a multiple of 16."""
    moved = torch.empty(x.numel() + 1, device=x.device)[1:].view(x.shape)
    return moved.copy_(x)


def with_gaps(x):
    """Return the same values as a view of rows that are 3 elements longer."""
    wide = torch.full((x.shape[0], x.shape[1] + 3), NAN, device=x.device)
    wide[:, 1:-2] = x
    return wide[:, 1:-2]


def by_columns(x):
    """Return the same values, stored by columns."""
    return x.t().contiguous().t()


def every_other_column(x):
    """Return the same values as every second column of a wider matrix."""
    return x.repeat_interleave(2, 1)[:, ::2]


# Functions that return the same matrix in another layout than rows without gaps.
LAYOUTS = [unaligned, with_gaps, by_columns, every_other_column]


def assert_integers_are_exact(m, n, k):
    """Assert that our forward of small integers has no error, with a mask and without.

    All products and sums of such integers are exact in float32.
    """
    x, weight, bias = (
        torch.randint(-8, 9, size, device="cuda").float() for size in ((m, k), (n, k), (n,))
    )
    out, mask = OPERATORS.linear_relu_divide_with_mask(x, weight, bias, DIVISOR)
    z = x.double() @ weight.double().t() + bias
    assert torch.equal(out.double(), z.relu() / DIVISOR)
    assert_mask_of(out, mask)
    assert_same_bits(OPERATORS.linear_relu_divide(x, weight, bias, DIVISOR), out)
