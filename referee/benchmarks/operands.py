"""Operands of a float32 product x weight^T + bias: named cases.

All are float32: x `[m, k]`, weight `[n, k]`, bias `[n]`. K is at least 8.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from referee.benchmarks import draws
from referee.benchmarks.draws import Draw

Operands = tuple[Tensor, Tensor, Tensor]
Case = Callable[[Draw, int, int, int], Operands]  # given m, k and n
Side = Callable[[Draw, int, int], Tensor]  # given rows and K

INF, NAN = float("inf"), float("nan")
ALL, COLUMN = slice(None), 5


def named(name: str, m: int, k: int, n: int, device: str = "cpu") -> Operands:
    """x, weight and bias of a case of CASES."""
    return CASES[name](Draw(0, device), m, k, n)


def sampled(k: int) -> Tensor:
    """The columns of a weight row of which kernels that sample see the maximum."""
    chunk = torch.arange(8)[:, None] * (k // 8) // 16 * 16 + torch.arange(16)
    return chunk[chunk < k].unique()


def _put(values: Tensor, index: object, new: Tensor | float) -> Tensor:
    values[index] = new
    return values


def _times(factor: float, side: Side = Draw.normal) -> Side:
    return lambda d, r, k: side(d, r, k) * factor


def _plus(offset: float, side: Side = Draw.uniform) -> Side:
    return lambda d, r, k: side(d, r, k) + offset


def _column(new: float) -> Side:
    return lambda d, r, k: _put(d.normal(r, k), (ALL, COLUMN), new)


def _cycle(d: Draw, rows: int, *factors: float) -> Tensor:
    """A factor for each row, in turn."""
    return torch.tensor(factors, device=d.options["device"])[d.index(rows) % len(factors), None]


def _times_sample(*factors: float) -> Side:
    """Sampled columns are multiplied by these, one row after the other."""

    def draw(d: Draw, rows: int, k: int) -> Tensor:
        values, columns = d.normal(rows, k), sampled(k)
        return _put(values, (ALL, columns), values[:, columns] * _cycle(d, rows, *factors))

    return draw


def _nonfinite(d: Draw, rows: int, k: int) -> Tensor:
    values = d.normal(rows, k)
    for row, value in enumerate([INF, -INF, NAN]):
        values[row::7, d.columns(1, k)] = value
    values[3::7, 0], values[3::7, -1] = INF, -INF
    return values


def _linear_weight(d: Draw, rows: int, k: int) -> Tensor:
    return (2 * d.uniform(rows, k) - 1) * k**-0.5


# Of x; the weight is normal.
X: dict[str, Side] = {
    "normal": Draw.normal,
    "outlier columns": lambda d, r, k: d.normal(r, k) * (1 + 999.0 * d.choice(0.01, k)),
    "one dominant column": lambda d, r, k: _put(d.normal(r, k), (ALL, 0), 1e4),
    "last column large": lambda d, r, k: d.normal(r, k) * (1 + 9999.0 * (d.index(k) == k - 1)),
    "sparse x, 1 in 100": lambda d, r, k: d.normal(r, k) * d.choice(0.01, r, k),
    "sparse x, 1 in 10": lambda d, r, k: d.normal(r, k) * d.choice(0.1, r, k),
    "sparse x, 1 in 2": lambda d, r, k: d.normal(r, k) * d.choice(0.5, r, k),
    "two wide rows of x": lambda d, r, k: _put(
        d.normal(r, k), slice(2), d.lognormal(4, min(r, 2), k)
    ),
    "graded columns": lambda d, r, k: d.normal(r, k) * d.grades(20, k, False),
    "graded columns, shuffled": lambda d, r, k: d.normal(r, k) * d.grades(20, k, True),
    "one-hot x": draws.one_hot,  # a lookup: exact in float32
    "softmax - one-hot": draws.cross_entropy_gradient,
    "large bias": Draw.normal,
    "inf and NaN in the bias": Draw.normal,
    "inf in one row of x": lambda d, r, k: _put(d.normal(r, k), (r // 2, d.columns(1, k)), INF),
    "inf in every 64th row of x": lambda d, r, k: _put(
        d.normal(r, k), (slice(None, None, 64), d.columns(1, k)), INF
    ),
    "inf in all rows of x": lambda d, r, k: _put(d.normal(r, k), (ALL, d.columns(1, k)), INF),
}
# Of x; the weight is uniform.
X_POSITIVE: dict[str, Side] = {
    "16 outlier columns, all positive": lambda d, r, k: (
        d.uniform(r, k) * (1 + _put(d.zeros(k), d.columns(16, k), 299))
    ),
    "first quarter of x is zero": lambda d, r, k: d.uniform(r, k) * (d.index(k) >= k // 4),
    "first 7/8 of x are zero": lambda d, r, k: d.uniform(r, k) * (d.index(k) >= 7 * k // 8),
}
# Of the weight; x is normal.
WEIGHT: dict[str, Side] = {
    "ones in the weight": _plus(1, Draw.zeros),  # row sums
    "zero weight": Draw.zeros,
    # one 1 in a row: exact in float32
    "weight that selects": lambda d, r, k: (d.index(k) == d.index(r)[:, None] * 37 % k).float(),
    "outliers in the weight": lambda d, r, k: d.normal(r, k) * (1 + 999.0 * d.choice(0.001, r, k)),
    "sparse weight, 1 in 100": X["sparse x, 1 in 100"],
    "1% zeros in the weight": lambda d, r, k: d.normal(r, k) * d.choice(0.99, r, k),
    "2:4 sparse weight": lambda d, r, k: (  # of each four neighbours two are zero
        (d.uniform(r, -(-k // 4), 4).argsort(2) < 2).flatten(1)[:, :k] * d.normal(r, k)
    ),
    "128 wide rows of the weight": lambda d, r, k: _put(
        d.normal(r, k), slice(128), d.lognormal(4, min(r, 128), k)
    ),
    "sampled weights are zero": _times(1e-6, _times_sample(0.0)),
    "sampled weights are tiny": _times_sample(0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-20),
    "sampled weights are huge": _times_sample(10.0, 1e2, 1e3, 1e4, 1e6, 1e20),
    "student weight": Draw.student,
    "int8 weight": lambda d, r, k: draws.whole(d.normal(r, k), 127),
}
# Of both.
BOTH: dict[str, Side] = {
    "lognormal": lambda d, r, k: d.lognormal(1, r, k),
    "wide lognormal": lambda d, r, k: d.lognormal(2, r, k),
    "all positive": Draw.uniform,
    "all positive, lognormal": lambda d, r, k: d.lognormal(1, r, k).abs(),
    "small integers": lambda d, r, k: (d.uniform(r, k) * 9 - 4).round(),  # exact in float32
    "ones": _plus(1, Draw.zeros),  # exact in float32
    "half precision": lambda d, r, k: d.normal(r, k).half().float(),
    "12-bit integers": lambda d, r, k: draws.whole(d.normal(r, k), 4095),  # low pieces of both
    "outlier rows": lambda d, r, k: d.normal(r, k) * _cycle(d, r, 3e3, 1.0, 1.0),
    "zero rows": lambda d, r, k: d.normal(r, k) * _cycle(d, r, 0.0, 1.0, 1.0),
    "sparse x and weight, 1 in 10": X["sparse x, 1 in 10"],
    # 2^-60, 2^-30, ... so that the largest are many
    "scaled rows": lambda d, r, k: d.normal(r, k) * d.powers(-2, 2, r, 1) ** 30,
    "subnormal results": _times(2.0**-70),
}
PAIRS: dict[str, tuple[Side, Side]] = {
    "uniform": (Draw.uniform, _linear_weight),  # KernelBench's inputs, nn.Linear's parameters
    "1e30 meets a zero column": (_column(1e30), _column(0)),
    "weight of 1e30 meets a zero column": (_column(0), _column(1e30)),
    "2^10 .. 2^24 meet a zero column": (  # on both sides of every threshold
        lambda d, r, k: _put(d.normal(r, k), (ALL, COLUMN), d.powers(10, 24, r)),
        _column(0),
    ),
    "subnormals in x": (_times(2.0**-132), _times(2.0**40)),
    "subnormals in the weight": (_times(2.0**40), _times(2.0**-132)),
    "near overflow, finite": (_times(2.0**112, Draw.uniform), _times(2.0, _plus(-0.5))),
    "operands near overflow": (_times(2.0**127, _plus(-0.5)), _times(2.0**-100, _plus(-0.5))),
    "overflow": (  # in every second column
        _times(2.0**100, _plus(0.5)),
        lambda d, r, k: (d.uniform(r, k) + 0.5) * _cycle(d, r, -(2.0**40), 1.0, 2.0**40, 1.0),
    ),
    "inf and NaN in x": (_nonfinite, X["sparse x, 1 in 2"]),
    "inf and NaN in the weight": (X["sparse x, 1 in 2"], _nonfinite),
    "huge sampled weights meet zeros": (_times_sample(0.0), WEIGHT["sampled weights are huge"]),
    "one-hot x, scaled columns of the weight": (
        lambda d, r, k: draws.one_hot(d, r, k) * d.normal(r, 1),
        lambda d, r, k: draws.in_range(d.normal(r, k) * d.grades(10, k, True)),
    ),
    "one-hot x meets a tiny column": (  # the weight gradient where a row of x is tiny
        lambda d, r, k: _put(d.zeros(r, k), (ALL, COLUMN), 1),
        lambda d, r, k: d.normal(r, k) * _put(d.zeros(k) + 1, COLUMN, 1e-10),
    ),
    "block-diagonal weight": (
        Draw.uniform,
        lambda d, r, k: d.uniform(r, k) * draws.blocks(d, r, k),
    ),
    "integers, larger ones in the sample": (
        BOTH["small integers"],
        lambda d, r, k: BOTH["small integers"](d, r, k) + _put(d.zeros(k), sampled(k), 2.0**-11),
    ),
}
# Where it is not zeros, given 1 and N.
BIAS: dict[str, Side] = {
    **dict.fromkeys(["normal", "half precision", "zero weight", "zero rows"], Draw.normal),
    **dict.fromkeys(["all positive", "all positive, lognormal"], Draw.uniform),
    "uniform": _linear_weight,
    "small integers": _plus(3, Draw.zeros),
    "large bias": _plus(1e6, Draw.zeros),
    "inf and NaN in the bias": lambda d, r, n: _cycle(d, n, INF, -INF, NAN, -1, 0, 0.5, 2).T,
}


def _apart(name, x, weight, d, m, k, n):
    return x(d, m, k), weight(d, n, k), BIAS.get(name, Draw.zeros)(d, 1, n)[0]


def _inverse(span, x, weight, d, m, k, n):
    """Columns of x graded, those of the weight inversely, in random order."""
    grades = d.grades(span, k, True)
    return x(d, m, k) * grades, weight(d, n, k) / grades, d.zeros(n)


def _large_values_meet_zeros(d, m, k, n):
    """What is left of a row of x is small, and all of it counts."""
    x, weight, kept = d.normal(m, k), d.normal(n, k), d.choice(0.02, k)
    return torch.where(kept, x, x * 2.0**24), weight * kept, d.zeros(n)


def _shared(count, factor, d, m, k, n):
    """x and weight share some columns, multiplied by the factor; each has half of the others."""
    order, count = d.columns(k, k), count or k // 16
    half = (k + count) // 2
    x, weight, common = d.normal(m, k), d.normal(n, k), order[half - count : half]
    x[:, order[half:]], weight[:, order[: half - count]] = 0, 0
    for side in (x, weight):
        side[:, common] *= factor
    return x, weight, d.zeros(n)


CASES: dict[str, Case] = {
    **{name: partial(_apart, name, x, Draw.normal) for name, x in X.items()},
    **{name: partial(_apart, name, x, Draw.uniform) for name, x in X_POSITIVE.items()},
    **{name: partial(_apart, name, Draw.normal, weight) for name, weight in WEIGHT.items()},
    **{name: partial(_apart, name, side, side) for name, side in BOTH.items()},
    **{name: partial(_apart, name, *sides) for name, sides in PAIRS.items()},
    "graded and inversely graded, shuffled": partial(_inverse, 20, Draw.normal, Draw.normal),
    # all within what two pieces carry
    "mildly graded and inversely graded": partial(_inverse, 8, Draw.normal, Draw.normal),
    "graded by 2^22 and inversely graded": partial(_inverse, 11, Draw.uniform, _plus(-0.5)),
    "large values meet zeros": _large_values_meet_zeros,
    "1/16 of the columns shared": partial(_shared, 0, 1.0),
    "16 columns shared": partial(_shared, 16, 1.0),
    "1 column shared": partial(_shared, 1, 1.0),
    "tiny shared columns": partial(_shared, 0, 2.0**-30),
}
