"""Operands, steps and promises for tests of float32 products on a GPU."""

import torch
from compare import assert_mask_of, assert_same_bits
from ranges import ONE_PRODUCT_SLACK
from tensors import OPERATORS, linear_modules
from torch.nn.functional import linear

INF, NAN = float("inf"), float("nan")
DIVISOR = 2.0


def slack(precision):
    return 1.0 if precision == "highest" else ONE_PRODUCT_SLACK


def draw(m, n, k):
    """A module and the reference, x, and the gradient of the output."""
    modules = linear_modules(k, n, DIVISOR, device="cuda")
    return (*modules, torch.randn(m, k, device="cuda"), torch.randn(m, n, device="cuda"))


def grad_of_product(out, grad_output):
    return torch.where(out > 0, grad_output / DIVISOR, 0.0)


def repeated(x, rows):
    """x again and again, in at least so many rows."""
    return x.repeat(-(-rows // x.shape[0]), *[1] * (x.dim() - 1))


def summed_at_once(a, b):
    """torch's a b, as part of a result so large that cuBLAS makes one sum of each row and column.

    Where the result is small it adds up partial sums, which err less: no yardstick for a split.
    """
    return (repeated(a, 1024) @ repeated(b.t(), 4096).t())[: a.shape[0], : b.shape[1]]


def forward_summed_at_once(x, weight, bias):
    z = linear(repeated(x, 1024), repeated(weight, 4096), repeated(bias, 4096))
    return torch.relu(z[: x.shape[0], : weight.shape[0]]) / DIVISOR


def assert_promise(got, trusted, exact, slack):
    """Maximum and mean of the error are at most those of what torch computes."""
    assert got.shape == exact.shape
    for reduce in (torch.max, torch.mean):
        error, allowed = (reduce((t.double() - exact).abs()).item() for t in (got, trusted))
        assert error <= slack * allowed, f"{reduce.__name__} error {error:.3e} of {allowed:.3e}"


def assert_special_values(got, want):
    """Infinities and NaN are where they are to be."""
    for is_special in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(is_special(got), is_special(want))


def unaligned(x):
    """The same values one element behind a multiple of 16 bytes."""
    moved = torch.empty(x.numel() + 1, device=x.device)[1:].view(x.shape)
    return moved.copy_(x)


def with_gaps(x):
    """The same values in rows that are 3 elements longer."""
    wide = torch.full((x.shape[0], x.shape[1] + 3), NAN, device=x.device)
    wide[:, 1:-2] = x
    return wide[:, 1:-2]


def by_columns(x):
    return x.t().contiguous().t()


def every_other_column(x):
    return x.repeat_interleave(2, 1)[:, ::2]


LAYOUTS = [unaligned, with_gaps, by_columns, every_other_column]


def assert_exact(m, n, k):
    """Small integers leave no room for errors."""
    x, weight, bias = (
        torch.randint(-8, 9, size, device="cuda").float() for size in ((m, k), (n, k), (n,))
    )
    out, mask = OPERATORS.linear_relu_divide_with_mask(x, weight, bias, DIVISOR)
    z = x.double() @ weight.double().t() + bias
    assert torch.equal(out.double(), z.relu() / DIVISOR)
    assert_mask_of(out, mask)
    assert_same_bits(OPERATORS.linear_relu_divide(x, weight, bias, DIVISOR), out)
