"""Named operands of a float32 product: the referee's, and others that are aimed at these kernels.

The others are hard for one step of the kernels: the sample of a weight row that decides its scale,
the split into hi and lo, or the sums between two promotions (docs/SPLIT.md has these steps). Or
they are at the ends of float32's range.
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


def flush_tiny(rows: Tensor) -> Tensor:
    """Return rows in which elements below 2^-24 of their row's largest are zeros."""
    return rows * (rows.abs() >= rows.abs().amax(1, keepdim=True) * 2.0**-24)


def sampled_columns(k: int) -> Tensor:
    """Return the columns of a weight row that a kernel samples for the row's scale."""
    chunk = torch.arange(8)[:, None] * (k // 8) // 16 * 16 + torch.arange(16)
    return chunk[chunk < k].unique()


def _scale_sampled_columns(*factors: float) -> Side:
    """Draw normal numbers, and multiply the sampled columns of each row by one of the factors.

    The rows take the factors in turn.
    """

    def factor_of_each(d, rows, k):
        ones = d.zeros(rows, k) + 1
        return put(ones, (ALL, sampled_columns(k)), cycle(*factors)(d, rows, k))

    return times(factor_of_each)


def _inversely_graded(span, x, weight, d, m, k, n):
    """Scale the columns of x by 2^-span to 2^span in random order, and those of weight inversely.

    `x` and `weight` are the functions that draw the two before they are scaled.
    """
    grades = d.grades(span, k, shuffled=True)
    return x(d, m, k) * grades, weight(d, n, k) / grades, d.zeros(n)


def _large_values_meet_zeros(d, m, k, n):
    """Put zeros into weight where x is large, so that only small elements of x count."""
    x, weight = N(d, m, k), N(d, n, k)
    kept = d.choice(0.02, k)
    return torch.where(kept, x, x * 2.0**24), weight * kept, d.zeros(n)


def _sharing_columns(count, factor, d, m, k, n):
    """Draw x and weight that are both nonzero in `count` columns only.

    Half of the other columns are nonzero in x alone, and half in weight alone. The shared columns
    are multiplied by the factor. A count of 0 means K / 16.
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
    "sampled weights are zero": of(N, times(1e-6, _scale_sampled_columns(0.0))),
    "sampled weights are tiny": of(N, _scale_sampled_columns(0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-20)),
    "sampled weights are huge": of(N, _scale_sampled_columns(10.0, 1e2, 1e3, 1e4, 1e6, 1e20)),
    "huge sampled weights meet zeros": of(
        _scale_sampled_columns(0.0), _scale_sampled_columns(10.0, 1e2, 1e3, 1e4, 1e6, 1e20)
    ),
    "integers, larger ones in the sample": of(
        integers, lambda d, r, k: integers(d, r, k) + put(d.zeros(k), sampled_columns(k), 2.0**-11)
    ),
    "one-hot x, scaled columns of the weight": of(
        lambda d, r, k: few(d, r, k, 1) * N(d, r, 1),
        lambda d, r, k: flush_tiny(N(d, r, k) * d.grades(10, k, shuffled=True)),
    ),
    "one-hot x meets a tiny column": of(  # the weight gradient where a row of x is tiny
        lambda d, *s: put(d.zeros(*s), (ALL, COLUMN), 1),
        times(lambda d, r, k: put(d.zeros(k) + 1, COLUMN, 1e-10)),
    ),
    # In each row of x, one element is 2^10 to 2^24 times larger than the others, on both sides of
    # every threshold of the kernels. It meets a zero, so that only the others count.
    "2^10 .. 2^24 meet a zero column": of(
        lambda d, r, k: put(N(d, r, k), (ALL, COLUMN), d.powers(10, 24, r)), column(0)
    ),
    "large values meet zeros": _large_values_meet_zeros,
    # Operands or results are subnormal, or so large that sums may overflow.
    "subnormal results": of(times(2.0**-70)),
    "subnormals in x": of(times(2.0**-132), times(2.0**40)),
    "subnormals in the weight": of(times(2.0**40), times(2.0**-132)),
    "near overflow, finite": of(times(2.0**112, U), times(2.0, plus(-0.5))),
    "operands near overflow": of(times(2.0**127, plus(-0.5)), times(2.0**-100, plus(-0.5))),
    "overflow": of(  # in every second column
        times(2.0**100, plus(0.5)), times(cycle(-(2.0**40), 1.0, 2.0**40, 1.0), plus(0.5))
    ),
    "graded and inversely graded, shuffled": partial(_inversely_graded, 20, N, N),
    # The next two stay within the range in which hi and lo keep their bits.
    "mildly graded and inversely graded": partial(_inversely_graded, 8, N, N),
    "graded by 2^22 and inversely graded": partial(_inversely_graded, 11, U, plus(-0.5)),
    "1/16 of the columns shared": partial(_sharing_columns, 0, 1.0),
    "16 columns shared": partial(_sharing_columns, 16, 1.0),
    "1 column shared": partial(_sharing_columns, 1, 1.0),
    "tiny shared columns": partial(_sharing_columns, 0, 2.0**-30),
}


def named(name: str, m: int, k: int, n: int, device: str = "cpu") -> Operands:
    """Return x [M, K], weight [N, K] and bias [N] of a case."""
    return CASES[name](Draw(0, device), m, k, n)
