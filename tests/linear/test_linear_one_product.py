"""float32 at `high` on Hopper: fp16 products, and the tiles that are computed again as TF32.

The kernel (kernels/linear/sm90/gemm_one_product/) scales the rows of both operands by powers of
two and rounds them to fp16. Where fp16 cannot represent a row as accurately as TF32, the row's
tiles of 256 x 256 results are computed again, from the float32 operands as TF32.
"""

from functools import partial

import pytest
import torch

from tests.support.compare import assert_mask_of, assert_same_bits
from tests.support.float32_on_gpu import DIVISOR, INF, LAYOUTS, NAN, forward_summed_at_once
from tests.support.promises import ONE_PRODUCT_SLACK, Reference, broken_promises
from tests.support.tensors import OPERATORS, float32_precision, linear_path

pytestmark = pytest.mark.gpu


@pytest.fixture
def sm90_at_high():
    """Use the sm90 kernels at precision `high`."""
    with linear_path("sm90"), float32_precision("high"):
        yield


def put(row, at, value):
    """Set the elements `at` of a row to `value`."""
    row[at] = value


def put_both_infinities(row):
    """Set an element of a row to infinity, and another one to -infinity."""
    row[5] = INF
    row[-5] = -INF


def grade(row):
    """Scale the elements of a row by 2^-20 to 2^20, from its first to its last."""
    row *= torch.linspace(-20, 20, len(row), device=row.device).exp2()


def make_subnormal(row):
    """Scale a row so that its elements are subnormal in float32."""
    row *= 2.0**-130


# By name, a function that changes a row of normal numbers into a "wide" row, which fp16 cannot
# represent as accurately as TF32. These are wide both in x and in the weight, although the rows of
# the two are scaled differently.
WIDE_ON_BOTH_SIDES = {
    "inf": partial(put, at=-1, value=INF),
    "both infinities": put_both_infinities,
    "NaN": partial(put, at=500, value=NAN),
    "graded": grade,
    "all but one are tiny": partial(put, at=slice(1, None), value=2.0**-38),
}
WIDE_ROWS = {
    "x": WIDE_ON_BOTH_SIDES
    | {
        "1 in 16 is tiny": partial(put, at=slice(0, None, 16), value=2.0**-34),
        "subnormal": make_subnormal,
    },
    "weight": WIDE_ON_BOTH_SIDES
    | {
        "1 in 16 is small": partial(put, at=slice(0, None, 16), value=2.0**-20),
        "outlier": partial(put, at=700, value=2.0**20),
    },
}
WIDE = [(side, name) for side in WIDE_ROWS for name in WIDE_ROWS[side]]


def draw_wide(side, name, rows, m=700, n=1100, k=1030):
    """Draw x, weight and bias; these rows of x or of the weight (`side`) are wide."""
    x, weight, bias = (torch.randn(size, device="cuda") for size in ((m, k), (n, k), (n,)))
    operand = x if side == "x" else weight
    if isinstance(rows, slice):
        rows = range(len(operand))[rows]
    for i in rows:
        WIDE_ROWS[side][name](operand[i])
    return x, weight, bias


@pytest.mark.parametrize("rows", [[300], [0, 255, 256, 699], slice(None)], ids=str)
@pytest.mark.parametrize(("side", "name"), WIDE)
def test_wide_rows_are_as_accurate_as_tf32(sm90_at_high, side, name, rows):
    """Results with wide rows keep the promise of `high`, with a mask and without one."""
    x, weight, bias = draw_wide(side, name, rows)
    out, mask = OPERATORS.linear_relu_divide_with_mask(x, weight, bias, DIVISOR)
    assert_same_bits(OPERATORS.linear_relu_divide(x, weight, bias, DIVISOR), out)
    torch_result = forward_summed_at_once(x, weight, bias)
    reference = Reference(x, weight, bias, DIVISOR)
    assert broken_promises(out, torch_result, reference, ONE_PRODUCT_SLACK) == []
    assert_mask_of(torch.where(out.isnan(), 1.0, out), mask)  # the gradient of NaN passes


@pytest.mark.parametrize("divisor", [2.0, 3.0, -0.7])
@pytest.mark.parametrize("size", [(256, 512, 1024), (257, 260, 1025), (700, 1101, 1030)], ids=str)
def test_tiles_are_computed_again_at_any_size(sm90_at_high, size, divisor):
    """The fp16 kernel and its TF32 repetition give the same bits, for any size and divisor.

    Products and sums of small integers are exact, so any error shows. The sizes and divisors reach
    each way of storing a tile.
    """
    m, n, k = size
    x, weight, bias = (
        torch.randint(-8, 9, size, device="cuda").float() for size in ((m, k), (n, k), (n,))
    )
    run = OPERATORS.linear_relu_divide_with_mask
    weight[:, 3] = 0
    results = []
    for value in (1.0, 2.0**100):  # no row of x is wide; then all are; the weight there is 0
        x[:, 3] = value
        out, mask = run(x, weight, bias, divisor)
        without_bias, _ = run(x, weight, None, divisor)
        results.append((out, mask, without_bias))
    assert_same_bits(*results)
    z = x.double() @ weight.double().t() + bias
    torch.testing.assert_close(out.double(), z.relu() / divisor, rtol=2e-7, atol=0)
    assert_mask_of(z, mask)


# M, and the tiles of x that are computed again. An x of 1500 rows has 6 tiles, one of 2200 has 9.
REPEATED_TILES = [
    (m, tiles)
    for m, count in ((1500, 6), (2200, 9))
    for tiles in ([1], [0, 1], [0, 2, 4], [1, 2, 3, 4, 5], [count - 1], range(count))
]


@pytest.mark.parametrize(("m", "tiles"), REPEATED_TILES, ids=str)
def test_any_tiles_of_x_are_computed_again(sm90_at_high, m, tiles):
    """Any subset of the tiles of x may be wide; the exact sums of integers do not change.

    Up to 9 x 35 tiles are more than all clusters compute at a time, so a cluster computes several.
    """
    x = torch.randint(-8, 9, (m, 136), device="cuda").float()
    weight = torch.randint(-8, 9, (8960, 136), device="cuda").float()
    weight[:, 3] = 0
    linear_relu_divide = OPERATORS.linear_relu_divide
    want = linear_relu_divide(x, weight, None, 2.0)
    for tile in tiles:
        x[tile * 256 + 9 : tile * 256 + 10, 3] = 2.0**100
    assert_same_bits(linear_relu_divide(x, weight, None, 2.0), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_changes_no_bit_of_the_result(sm90_at_high, layout):
    """Strided, transposed and misaligned operands give the bits that contiguous ones give."""
    for k in (1028, 1031):
        x, weight, bias = draw_wide("x", "graded", [3, 299], 300, 130, k)
        want = OPERATORS.linear_relu_divide(x, weight, bias, DIVISOR)
        for operands in ((layout(x), weight), (x, layout(weight)), (layout(x), layout(weight))):
            assert_same_bits(OPERATORS.linear_relu_divide(*operands, bias, DIVISOR), want)
