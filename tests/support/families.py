"""Named operands of a float32 product: the referee's, and others that are aimed at these kernels.

The others are hard for the sample of the weight, for hi and lo and their scales, for sums between
two promotions, or they are at the ends of float32's range.
"""

from functools import partial

import torch
from torch import Tensor

from problems import operands
from problems.operands import (
    ALL,
    COLUMN,
    Case,
    Draw,
    N,
    Operands,
    Side,
    U,
    column,
    cycle,
    few,
    integers,
    of,
    plus,
    put,
    times,
)


def student(d: Draw, *shape: int) -> Tensor:
    """Draw from Student's t with 2 degrees of freedom, which has heavy tails."""
    return d.normal(*shape) / d.normal(2, *shape).square().mean(0).sqrt()


def in_range(rows: Tensor) -> Tensor:
    """Replace elements below 2^-24 of their row's largest by zeros."""
    return rows * (rows.abs() >= rows.abs().amax(1, keepdim=True) * 2.0**-24)


def sampled_columns(k: int) -> Tensor:
    """Return the columns of a weight row that a kernel samples for the row's scale."""
    chunk = torch.arange(8)[:, None] * (k // 8) // 16 * 16 + torch.arange(16)
    return chunk[chunk < k].unique()


def _sample(*factors: float) -> Side:
    """Multiply the sampled columns of normal numbers by these factors, row by row in turn."""

    def factor_of_each(d, rows, k):
        ones = d.zeros(rows, k) + 1
        return put(ones, (ALL, sampled_columns(k)), cycle(*factors)(d, rows, k))

    return times(factor_of_each)


def _inverse(span, x, weight, d, m, k, n):
    """Scale the columns of x by 2^-span to 2^span, those of weight inversely, in random order."""
    grades = d.grades(span, k, shuffled=True)
    return x(d, m, k) * grades, weight(d, n, k) / grades, d.zeros(n)


def _large_values_meet_zeros(d, m, k, n):
    """Let all large elements of x meet zeros of weight, so that only small elements count."""
    x, weight = N(d, m, k), N(d, n, k)
    kept = d.choice(0.02, k)
    return torch.where(kept, x, x * 2.0**24), weight * kept, d.zeros(n)


def _shared(count, factor, d, m, k, n):
    """Let x and weight be nonzero in `count` common columns, and each in half of the others.

    The common columns are multiplied by the factor. If the count is 0, it is K / 16.
    """
    order = d.columns(k, k)
    count = count or k // 16
    half = (k + count) // 2
    x, weight = N(d, m, k), N(d, n, k)
    x[:, order[half:]] = 0
    weight[:, order[: half - count]] = 0
    common = order[half - count : half]
    x[:, common] *= factor
    weight[:, common] *= factor
    return x, weight, d.zeros(n)


CASES: dict[str, Case] = operands.CASES | {
    "student weight": of(N, student),
    "sampled weights are zero": of(N, times(1e-6, _sample(0.0))),
    "sampled weights are tiny": of(N, _sample(0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-20)),
    "sampled weights are huge": of(N, _sample(10.0, 1e2, 1e3, 1e4, 1e6, 1e20)),
    "huge sampled weights meet zeros": of(_sample(0.0), _sample(10.0, 1e2, 1e3, 1e4, 1e6, 1e20)),
    "integers, larger ones in the sample": of(
        integers, lambda d, r, k: integers(d, r, k) + put(d.zeros(k), sampled_columns(k), 2.0**-11)
    ),
    "one-hot x, scaled columns of the weight": of(
        lambda d, r, k: few(d, r, k, 1) * N(d, r, 1),
        lambda d, r, k: in_range(N(d, r, k) * d.grades(10, k, shuffled=True)),
    ),
    "one-hot x meets a tiny column": of(  # the weight gradient where a row of x is tiny
        lambda d, *s: put(d.zeros(*s), (ALL, COLUMN), 1),
        times(lambda d, r, k: put(d.zeros(k) + 1, COLUMN, 1e-10)),
    ),
    "2^10 .. 2^24 meet a zero column": of(  # on both sides of every threshold
        lambda d, r, k: put(N(d, r, k), (ALL, COLUMN), d.powers(10, 24, r)), column(0)
    ),
    "large values meet zeros": _large_values_meet_zeros,
    # subnormal, or so large that sums may overflow
    "subnormal results": of(times(2.0**-70)),
    "subnormals in x": of(times(2.0**-132), times(2.0**40)),
    "subnormals in the weight": of(times(2.0**40), times(2.0**-132)),
    "near overflow, finite": of(times(2.0**112, U), times(2.0, plus(-0.5))),
    "operands near overflow": of(times(2.0**127, plus(-0.5)), times(2.0**-100, plus(-0.5))),
    "overflow": of(  # in every second column
        times(2.0**100, plus(0.5)), times(cycle(-(2.0**40), 1.0, 2.0**40, 1.0), plus(0.5))
    ),
    "graded and inversely graded, shuffled": partial(_inverse, 20, N, N),
    # within the range in which hi and lo keep their bits
    "mildly graded and inversely graded": partial(_inverse, 8, N, N),
    "graded by 2^22 and inversely graded": partial(_inverse, 11, U, plus(-0.5)),
    "1/16 of the columns shared": partial(_shared, 0, 1.0),
    "16 columns shared": partial(_shared, 16, 1.0),
    "1 column shared": partial(_shared, 1, 1.0),
    "tiny shared columns": partial(_shared, 0, 2.0**-30),
}


def named(name: str, m: int, k: int, n: int, device: str = "cpu") -> Operands:
    """Return x, weight and bias of a case."""
    return CASES[name](Draw(0, device), m, k, n)
