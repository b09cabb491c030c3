"""Operands of a float32 product x weight^T + bias: named cases, many of them hard for a product.

`CASES` has a function for each case. It returns float32 operands: x `[m, k]`, weight `[n, k]` and
bias `[n]`, where k is at least 8.

The three operands of a case are independent: `IndependentOperands` has one function for each. The
functions for x and weight take a `Draw`, the number of rows, and k. `functools.partial` sets their
keyword arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

INF = float("inf")
NAN = float("nan")
SPECIAL_COLUMN = 5  # the column of x and weight that some cases overwrite


class Draw:
    """Draws tensors on one device, from one seed."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.device = device
        self.options = {"generator": torch.Generator(device).manual_seed(seed), "device": device}

    def normal(self, *shape: int) -> Tensor:
        """Return normally distributed values, of mean 0 and variance 1."""
        return torch.randn(shape, **self.options)

    def uniform(self, *shape: int) -> Tensor:
        """Return values distributed evenly from 0 to 1."""
        return torch.rand(shape, **self.options)

    def lognormal(self, sigma: float, *shape: int) -> Tensor:
        """Return values of both signs whose logarithms are normal, of deviation sigma."""
        return self.normal(*shape).sign() * (self.normal(*shape) * sigma).exp()

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros."""
        return torch.zeros(shape, device=self.device)

    def ones(self, *shape: int) -> Tensor:
        """Return ones."""
        return torch.ones(shape, device=self.device)

    def mask(self, share: float, *shape: int) -> Tensor:
        """Return a mask that is true with the probability `share`."""
        return self.uniform(*shape) < share

    def powers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return powers of two from 2^low to 2^high."""
        return torch.randint(low, high + 1, shape, **self.options).float().exp2()

    def random_columns(self, count: int, k: int) -> Tensor:
        """Return the indices of `count` different columns of k, in random order."""
        return torch.randperm(k, **self.options)[:count]

    def indices(self, count: int) -> Tensor:
        """Return the indices 0, 1, ..., count - 1."""
        return torch.arange(count, device=self.device)

    def grades(self, largest_exponent: int, k: int, *, shuffled: bool) -> Tensor:
        """Return rising powers of two for k columns, in random order if they are shuffled.

        The smallest is 2^-largest_exponent, and the largest 2^largest_exponent.
        """
        exponents = torch.linspace(-largest_exponent, largest_exponent, k, device=self.device)
        exponents = exponents.round()
        if shuffled:
            exponents = exponents[self.random_columns(k, k)]
        return exponents.exp2()


Operands = tuple[Tensor, Tensor, Tensor]  # x, weight, bias
MatrixFunction = Callable[[Draw, int, int], Tensor]  # takes the numbers of rows and columns
BiasFunction = Callable[[Draw, int], Tensor]  # takes n
OperandsCase = Callable[[Draw, int, int, int], Operands]  # takes m, k and n


@dataclass(frozen=True)
class IndependentOperands:
    """A case whose operands are drawn one after the other.

    Attributes:
        x: returns x, from m and k.
        weight: returns weight, from n and k.
        bias: returns bias, from n.
    """

    x: MatrixFunction
    weight: MatrixFunction
    bias: BiasFunction = Draw.zeros

    def __call__(self, draw: Draw, m: int, k: int, n: int) -> Operands:
        """Draw x, weight and bias, in this order."""
        x = self.x(draw, m, k)
        weight = self.weight(draw, n, k)
        bias = self.bias(draw, n)
        return x, weight, bias


def draw_case(name: str, m: int, k: int, n: int, device: str = "cpu") -> Operands:
    """Return x, weight and bias of a case of `CASES`. The values depend on the device too."""
    return CASES[name](Draw(0, device), m, k, n)


# --------------------------------------------------------------------------------- masks, rounding


def mask_in_each_row(draw: Draw, rows: int, k: int, count: int) -> Tensor:
    """Return a mask `[rows, k]` that is true at `count` random places of each row."""
    mask = draw.zeros(rows, k).bool()
    places = draw.uniform(rows, k).topk(min(count, k)).indices
    return mask.scatter_(1, places, value=True)


def block_diagonal_mask(draw: Draw, rows: int, k: int) -> Tensor:
    """Return a mask `[rows, k]` that is true in 8 blocks along the diagonal."""
    block_of_row = draw.indices(rows)[:, None] * 8 // rows
    block_of_column = draw.indices(k) * 8 // k
    return block_of_row == block_of_column


def round_to_integers(values: Tensor, largest: int) -> Tensor:
    """Scale each row so that its largest magnitude is `largest`, and round it to integers."""
    maximum = values.abs().amax(1, keepdim=True)
    divisor = torch.where(maximum == 0, 1.0, maximum)
    return (values * (largest / divisor)).round()


# ------------------------------------------------------------------- matrices of one distribution


def lognormal(draw: Draw, rows: int, k: int, *, sigma: float) -> Tensor:
    """Return values of both signs whose logarithms have the deviation sigma."""
    return draw.lognormal(sigma, rows, k)


def positive_lognormal(draw: Draw, rows: int, k: int) -> Tensor:
    """Return positive values whose logarithms have the deviation 1."""
    return draw.lognormal(1, rows, k).abs()


def small_integers(draw: Draw, rows: int, k: int) -> Tensor:
    """Return integers from -4 to 5."""
    return (draw.uniform(rows, k) * 9 - 4).round()


def integers(draw: Draw, rows: int, k: int, *, largest: int) -> Tensor:
    """Return normal values, scaled and rounded to integers up to `largest` in magnitude."""
    return round_to_integers(draw.normal(rows, k), largest)


def half_precision(draw: Draw, rows: int, k: int) -> Tensor:
    """Return normal values that float16 represents exactly."""
    return draw.normal(rows, k).half().float()


def linear_weight(draw: Draw, rows: int, k: int) -> Tensor:
    """Return values distributed evenly from -k^-0.5 to k^-0.5, as `nn.Linear` initializes them."""
    return (draw.uniform(rows, k) * 2 - 1) * k**-0.5


def one_hot(draw: Draw, rows: int, k: int) -> Tensor:
    """Return a 1 in each row, and zeros elsewhere."""
    return mask_in_each_row(draw, rows, k, 1).float()


def softmax_minus_one_hot(draw: Draw, rows: int, k: int) -> Tensor:
    """Return the gradient of a cross-entropy loss: a softmax minus a one-hot row."""
    return (3 * draw.normal(rows, k)).softmax(1) - one_hot(draw, rows, k)


def selection(draw: Draw, rows: int, k: int) -> Tensor:
    """Return a weight that selects one column of x for each feature: a 1 in each row."""
    selected = draw.indices(rows)[:, None] * 37 % k
    return (draw.indices(k) == selected).float()


# -------------------------------------------------------------------------- matrices with zeros


def sparse(draw: Draw, rows: int, k: int, *, share: float) -> Tensor:
    """Return normal values at this share of the places, and zeros elsewhere."""
    return draw.normal(rows, k) * draw.mask(share, rows, k)


def sparse_two_of_four(draw: Draw, rows: int, k: int) -> Tensor:
    """Return normal values, of which two of each four neighbours in a row are zeros."""
    groups = (k + 3) // 4
    mask = draw.uniform(rows, groups, 4).argsort(2) < 2
    return draw.normal(rows, k) * mask.flatten(1)[:, :k]


def block_diagonal(draw: Draw, rows: int, k: int) -> Tensor:
    """Return uniform values in 8 blocks along the diagonal, and zeros elsewhere."""
    return draw.uniform(rows, k) * block_diagonal_mask(draw, rows, k)


def zeros_in_first_columns(draw: Draw, rows: int, k: int, *, eighths: int) -> Tensor:
    """Return uniform values, with zeros in the first `eighths` eighths of the columns."""
    first_nonzero = eighths * k // 8
    mask = draw.indices(k) >= first_nonzero
    return draw.uniform(rows, k) * mask


# ---------------------------------------------------------------- matrices of unequal magnitudes


def normal_with_column(
    draw: Draw, rows: int, k: int, *, value: float, column: int = SPECIAL_COLUMN
) -> Tensor:
    """Return normal values, but for one column, which has the same value everywhere."""
    values = draw.normal(rows, k)
    values[:, column] = value
    return values


def outlier_columns(draw: Draw, rows: int, k: int) -> Tensor:
    """Return normal values, with about 1% of the columns multiplied by 1000."""
    values = draw.normal(rows, k)
    return values * torch.where(draw.mask(0.01, k), 1000.0, 1.0)


def positive_outlier_columns(draw: Draw, rows: int, k: int) -> Tensor:
    """Return uniform values, with 16 columns multiplied by 300."""
    values = draw.uniform(rows, k)
    factors = draw.ones(k)
    factors[draw.random_columns(16, k)] = 300
    return values * factors


def large_last_column(draw: Draw, rows: int, k: int) -> Tensor:
    """Return normal values, with the last column multiplied by 10,000."""
    return draw.normal(rows, k) * torch.where(draw.indices(k) == k - 1, 10_000.0, 1.0)


def outliers(draw: Draw, rows: int, k: int) -> Tensor:
    """Return normal values, with about 0.1% of them multiplied by 1000."""
    values = draw.normal(rows, k)
    return values * torch.where(draw.mask(0.001, rows, k), 1000.0, 1.0)


def wide_rows(draw: Draw, rows: int, k: int, *, count: int) -> Tensor:
    """Return normal values, but for the first `count` rows, which are lognormal of deviation 4."""
    values = draw.normal(rows, k)
    values[:count] = draw.lognormal(4, min(rows, count), k)
    return values


def graded_columns(draw: Draw, rows: int, k: int, *, shuffled: bool) -> Tensor:
    """Return normal values, with the columns multiplied by powers of two, 2^-20 to 2^20."""
    return draw.normal(rows, k) * draw.grades(20, k, shuffled=shuffled)


def repeat_factors(draw: Draw, factors: list[float], count: int) -> Tensor:
    """Return a tensor `[count]` of the factors in turn."""
    return torch.tensor(factors, device=draw.device)[draw.indices(count) % len(factors)]


def scaled_rows(draw: Draw, rows: int, k: int, *, factors: list[float]) -> Tensor:
    """Return normal values, with the rows multiplied by the factors in turn."""
    return draw.normal(rows, k) * repeat_factors(draw, factors, rows)[:, None]


def rows_scaled_by_powers(draw: Draw, rows: int, k: int) -> Tensor:
    """Return normal values, with each row multiplied by 2^-60, 2^-30, 1, 2^30 or 2^60.

    There are so few factors that many rows have the largest one.
    """
    return draw.normal(rows, k) * draw.powers(-2, 2, rows, 1) ** 30


# --------------------------------------------------------------- matrices with infinities and NaN


def inf_in_rows(draw: Draw, rows: int, k: int, *, step: int) -> Tensor:
    """Return normal values, but for one random column: it is infinite in every step-th row."""
    values = draw.normal(rows, k)
    values[::step, draw.random_columns(1, k)] = INF
    return values


def inf_in_middle_row(draw: Draw, rows: int, k: int) -> Tensor:
    """Return normal values, but for an infinity in a random column of the middle row."""
    values = draw.normal(rows, k)
    values[rows // 2, draw.random_columns(1, k)] = INF
    return values


def nonfinite(draw: Draw, rows: int, k: int) -> Tensor:
    """Return normal values, but for infinities and NaN in four of each seven rows.

    Row 3 of the seven has two infinities of opposite signs.
    """
    values = draw.normal(rows, k)
    for row, value in enumerate([INF, -INF, NAN]):
        values[row::7, draw.random_columns(1, k)] = value
    values[3::7, 0] = INF
    values[3::7, -1] = -INF
    return values


# ------------------------------------------------------------------------------------------ biases


def linear_bias(draw: Draw, n: int) -> Tensor:
    """Return values distributed evenly from -n^-0.5 to n^-0.5."""
    return (draw.uniform(n) * 2 - 1) * n**-0.5


def constant_bias(draw: Draw, n: int, *, value: float) -> Tensor:
    """Return the same value n times."""
    return draw.zeros(n) + value


def nonfinite_bias(draw: Draw, n: int) -> Tensor:
    """Return infinities, NaN and finite values in turn."""
    return repeat_factors(draw, [INF, -INF, NAN, -1.0, 0.0, 0.5, 2.0], n)


# ------------------------------------------------------------------------------------------- cases

# x and weight of some of the cases below.
_lognormal = partial(lognormal, sigma=1)
_wide_lognormal = partial(lognormal, sigma=2)
_twelve_bit_integers = partial(integers, largest=4095)  # one bit more than float16 has
_outlier_rows = partial(scaled_rows, factors=[3e3, 1.0, 1.0])
_zero_rows = partial(scaled_rows, factors=[0.0, 1.0, 1.0])
_half_sparse = partial(sparse, share=0.5)
_tenth_sparse = partial(sparse, share=0.1)
_zero_column = partial(normal_with_column, value=0.0)
_huge_column = partial(normal_with_column, value=1e30)

CASES: dict[str, OperandsCase] = {
    # KernelBench's x, and parameters like those of nn.Linear.
    "uniform": IndependentOperands(x=Draw.uniform, weight=linear_weight, bias=linear_bias),
    "normal": IndependentOperands(x=Draw.normal, weight=Draw.normal, bias=Draw.normal),
    # ---- The bias is special.
    "large bias": IndependentOperands(
        x=Draw.normal, weight=Draw.normal, bias=partial(constant_bias, value=1e6)
    ),
    "inf and NaN in the bias": IndependentOperands(
        x=Draw.normal, weight=Draw.normal, bias=nonfinite_bias
    ),
    # ---- x is special.
    "outlier columns": IndependentOperands(x=outlier_columns, weight=Draw.normal),
    "one dominant column": IndependentOperands(
        x=partial(normal_with_column, value=1e4, column=0), weight=Draw.normal
    ),
    "last column large": IndependentOperands(x=large_last_column, weight=Draw.normal),
    "sparse x, 1 in 100": IndependentOperands(x=partial(sparse, share=1 / 100), weight=Draw.normal),
    "sparse x, 1 in 10": IndependentOperands(x=_tenth_sparse, weight=Draw.normal),
    "sparse x, 1 in 2": IndependentOperands(x=_half_sparse, weight=Draw.normal),
    "two wide rows of x": IndependentOperands(x=partial(wide_rows, count=2), weight=Draw.normal),
    "graded columns": IndependentOperands(
        x=partial(graded_columns, shuffled=False), weight=Draw.normal
    ),
    "graded columns, shuffled": IndependentOperands(
        x=partial(graded_columns, shuffled=True), weight=Draw.normal
    ),
    "one-hot x": IndependentOperands(x=one_hot, weight=Draw.normal),  # exact in float32
    "softmax - one-hot": IndependentOperands(x=softmax_minus_one_hot, weight=Draw.normal),
    "inf in one row of x": IndependentOperands(x=inf_in_middle_row, weight=Draw.normal),
    "inf in every 64th row of x": IndependentOperands(
        x=partial(inf_in_rows, step=64), weight=Draw.normal
    ),
    "inf in all rows of x": IndependentOperands(x=partial(inf_in_rows, step=1), weight=Draw.normal),
    "16 outlier columns, all positive": IndependentOperands(
        x=positive_outlier_columns, weight=Draw.uniform
    ),
    "first quarter of x is zero": IndependentOperands(
        x=partial(zeros_in_first_columns, eighths=2), weight=Draw.uniform
    ),
    "first 7/8 of x are zero": IndependentOperands(
        x=partial(zeros_in_first_columns, eighths=7), weight=Draw.uniform
    ),
    # ---- The weight is special.
    "ones in the weight": IndependentOperands(x=Draw.normal, weight=Draw.ones),  # sums of rows of x
    "zero weight": IndependentOperands(x=Draw.normal, weight=Draw.zeros, bias=Draw.normal),
    "weight that selects": IndependentOperands(x=Draw.normal, weight=selection),  # exact in float32
    "outliers in the weight": IndependentOperands(x=Draw.normal, weight=outliers),
    "sparse weight, 1 in 100": IndependentOperands(
        x=Draw.normal, weight=partial(sparse, share=0.01)
    ),
    "1% zeros in the weight": IndependentOperands(
        x=Draw.normal, weight=partial(sparse, share=0.99)
    ),
    "2:4 sparse weight": IndependentOperands(x=Draw.normal, weight=sparse_two_of_four),
    "block-diagonal weight": IndependentOperands(x=Draw.uniform, weight=block_diagonal),
    "128 wide rows of the weight": IndependentOperands(
        x=Draw.normal, weight=partial(wide_rows, count=128)
    ),
    "int8 weight": IndependentOperands(x=Draw.normal, weight=partial(integers, largest=127)),
    # ---- x and weight are special.
    "lognormal": IndependentOperands(x=_lognormal, weight=_lognormal),
    "wide lognormal": IndependentOperands(x=_wide_lognormal, weight=_wide_lognormal),
    "all positive": IndependentOperands(x=Draw.uniform, weight=Draw.uniform, bias=Draw.uniform),
    "all positive, lognormal": IndependentOperands(
        x=positive_lognormal, weight=positive_lognormal, bias=Draw.uniform
    ),
    "small integers": IndependentOperands(  # exact in float32
        x=small_integers, weight=small_integers, bias=partial(constant_bias, value=3)
    ),
    "12-bit integers": IndependentOperands(x=_twelve_bit_integers, weight=_twelve_bit_integers),
    "ones": IndependentOperands(x=Draw.ones, weight=Draw.ones),  # exact in float32
    "half precision": IndependentOperands(
        x=half_precision, weight=half_precision, bias=Draw.normal
    ),
    "outlier rows": IndependentOperands(x=_outlier_rows, weight=_outlier_rows),
    "zero rows": IndependentOperands(x=_zero_rows, weight=_zero_rows, bias=Draw.normal),
    "sparse x and weight, 1 in 10": IndependentOperands(x=_tenth_sparse, weight=_tenth_sparse),
    "scaled rows": IndependentOperands(x=rows_scaled_by_powers, weight=rows_scaled_by_powers),
    "inf and NaN in x": IndependentOperands(x=nonfinite, weight=_half_sparse),
    "inf and NaN in the weight": IndependentOperands(x=_half_sparse, weight=nonfinite),
    "1e30 meets a zero column": IndependentOperands(x=_huge_column, weight=_zero_column),
    "weight of 1e30 meets a zero column": IndependentOperands(x=_zero_column, weight=_huge_column),
}
