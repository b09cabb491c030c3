"""The referee's operands of a float32 product, and others aimed at how these kernels multiply.

At samples of the weight, at pieces and their scales, at promoted sums, at the ends of the range.
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
    """Student's t with 2 degrees of freedom: heavy tails."""
    return d.normal(*shape) / d.normal(2, *shape).square().mean(0).sqrt()


def in_range(rows: Tensor) -> Tensor:
    """With zeros for elements below 2^-24 of their row's largest."""
    return rows * (rows.abs() >= rows.abs().amax(1, keepdim=True) * 2.0**-24)


def sampled(k: int) -> Tensor:
    """The columns of a weight row of which kernels that sample see the maximum."""
    chunk = torch.arange(8)[:, None] * (k // 8) // 16 * 16 + torch.arange(16)
    return chunk[chunk < k].unique()


def _sample(*factors: float) -> Side:
    """The sampled columns times these, one row after the other."""
    return times(lambda d, *s: put(d.zeros(*s) + 1, (ALL, sampled(s[1])), cycle(*factors)(d, *s)))


def _inverse(span, x, weight, d, m, k, n):
    """Columns of x graded, those of the weight inversely, in random order."""
    grades = d.grades(span, k, True)
    return x(d, m, k) * grades, weight(d, n, k) / grades, d.zeros(n)


def _large_values_meet_zeros(d, m, k, n):
    """What is left of a row of x is small, and all of it counts."""
    x, weight, kept = N(d, m, k), N(d, n, k), d.choice(0.02, k)
    return torch.where(kept, x, x * 2.0**24), weight * kept, d.zeros(n)


def _shared(count, factor, d, m, k, n):
    """x and weight share some columns, multiplied by the factor; each has half of the others."""
    order, count = d.columns(k, k), count or k // 16
    half = (k + count) // 2
    x, weight, common = N(d, m, k), N(d, n, k), order[half - count : half]
    x[:, order[half:]], weight[:, order[: half - count]] = 0, 0
    for side in (x, weight):
        side[:, common] *= factor
    return x, weight, d.zeros(n)


CASES: dict[str, Case] = operands.CASES | {
    "student weight": of(N, student),
    "sampled weights are zero": of(N, times(1e-6, _sample(0.0))),
    "sampled weights are tiny": of(N, _sample(0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-20)),
    "sampled weights are huge": of(N, _sample(10.0, 1e2, 1e3, 1e4, 1e6, 1e20)),
    "huge sampled weights meet zeros": of(_sample(0.0), _sample(10.0, 1e2, 1e3, 1e4, 1e6, 1e20)),
    "integers, larger ones in the sample": of(
        integers, lambda d, r, k: integers(d, r, k) + put(d.zeros(k), sampled(k), 2.0**-11)
    ),
    "one-hot x, scaled columns of the weight": of(
        lambda d, r, k: few(d, r, k, 1) * N(d, r, 1),
        lambda d, r, k: in_range(N(d, r, k) * d.grades(10, k, True)),
    ),
    "one-hot x meets a tiny column": of(  # the weight gradient where a row of x is tiny
        lambda d, *s: put(d.zeros(*s), (ALL, COLUMN), 1),
        times(lambda d, r, k: put(d.zeros(k) + 1, COLUMN, 1e-10)),
    ),
    "2^10 .. 2^24 meet a zero column": of(  # on both sides of every threshold
        lambda d, r, k: put(N(d, r, k), (ALL, COLUMN), d.powers(10, 24, r)), column(0)
    ),
    "large values meet zeros": _large_values_meet_zeros,
    # beyond what all hardware carries
    "subnormal results": of(times(2.0**-70)),
    "subnormals in x": of(times(2.0**-132), times(2.0**40)),
    "subnormals in the weight": of(times(2.0**40), times(2.0**-132)),
    "near overflow, finite": of(times(2.0**112, U), times(2.0, plus(-0.5))),
    "operands near overflow": of(times(2.0**127, plus(-0.5)), times(2.0**-100, plus(-0.5))),
    "overflow": of(  # in every second column
        times(2.0**100, plus(0.5)), times(cycle(-(2.0**40), 1.0, 2.0**40, 1.0), plus(0.5))
    ),
    "graded and inversely graded, shuffled": partial(_inverse, 20, N, N),
    # all within what two pieces carry
    "mildly graded and inversely graded": partial(_inverse, 8, N, N),
    "graded by 2^22 and inversely graded": partial(_inverse, 11, U, plus(-0.5)),
    "1/16 of the columns shared": partial(_shared, 0, 1.0),
    "16 columns shared": partial(_shared, 16, 1.0),
    "1 column shared": partial(_shared, 1, 1.0),
    "tiny shared columns": partial(_shared, 0, 2.0**-30),
}


def named(name: str, m: int, k: int, n: int, device: str = "cpu") -> Operands:
    """x, weight and bias of a case."""
    return CASES[name](Draw(0, device), m, k, n)
