"""Operands of a float32 product x weight^T + bias: named cases, and what they are made of.

All are float32: x `[m, k]`, weight `[n, k]`, bias `[n]`. K is at least 8.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

INF, NAN = float("inf"), float("nan")
ALL, COLUMN = slice(None), 5


class Draw:
    """Tensors on one device, from one seed."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.device = device
        self.options = {"generator": torch.Generator(device).manual_seed(seed), "device": device}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, **self.options)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, **self.options)

    def lognormal(self, sigma: float, *shape: int) -> Tensor:
        """Values of both signs."""
        return self.normal(*shape).sign() * (self.normal(*shape) * sigma).exp()

    def student(self, *shape: int) -> Tensor:
        """Student's t with 2 degrees of freedom: heavy tails."""
        return self.normal(*shape) / self.normal(2, *shape).square().mean(0).sqrt()

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device)

    def choice(self, share: float, *shape: int) -> Tensor:
        """True with the probability share."""
        return self.uniform(*shape) < share

    def powers(self, low: int, high: int, *shape: int) -> Tensor:
        """2^low .. 2^high, whole exponents."""
        return torch.randint(low, high + 1, shape, **self.options).float().exp2()

    def columns(self, count: int, k: int) -> Tensor:
        """Indices of `count` different columns."""
        return torch.randperm(k, **self.options)[:count]

    def index(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device)

    def grades(self, span: int, k: int, shuffled: bool) -> Tensor:
        """2^-span .. 2^span along k, rising or in random order."""
        exponents = torch.linspace(-span, span, k, device=self.device).round()
        return (exponents[self.columns(k, k)] if shuffled else exponents).exp2()


Operands = tuple[Tensor, Tensor, Tensor]
Case = Callable[[Draw, int, int, int], Operands]  # given m, k and n
Side = Callable[[Draw, int, int], Tensor]  # given rows and K
N, U = Draw.normal, Draw.uniform


def few(d: Draw, rows: int, k: int, count: int) -> Tensor:
    """True at `count` places of every row, drawn for each."""
    kept = d.zeros(rows, k).bool()
    return kept.scatter_(1, d.uniform(rows, k).topk(min(count, k)).indices, True)


def blocks(d: Draw, rows: int, k: int) -> Tensor:
    """True in 8 blocks along the diagonal."""
    return d.index(rows)[:, None] * 8 // rows == d.index(k) * 8 // k


def whole(rows: Tensor, largest: int) -> Tensor:
    """Whole numbers up to `largest`, which each row has."""
    maximum = rows.abs().amax(1, keepdim=True)
    return (rows * (largest / torch.where(maximum == 0, 1.0, maximum))).round()


def in_range(rows: Tensor) -> Tensor:
    """With zeros for elements below 2^-24 of their row's largest."""
    return rows * (rows.abs() >= rows.abs().amax(1, keepdim=True) * 2.0**-24)


def sampled(k: int) -> Tensor:
    """The columns of a weight row of which kernels that sample see the maximum."""
    chunk = torch.arange(8)[:, None] * (k // 8) // 16 * 16 + torch.arange(16)
    return chunk[chunk < k].unique()


def named(name: str, m: int, k: int, n: int, device: str = "cpu") -> Operands:
    """x, weight and bias of a case of CASES."""
    return CASES[name](Draw(0, device), m, k, n)


def _put(values: Tensor, index: object, new: Tensor | float) -> Tensor:
    values[index] = new
    return values


def _column(new: float, column: int = COLUMN) -> Side:
    return lambda d, r, k: _put(N(d, r, k), (ALL, column), new)


def _wide(rows: int) -> Side:
    return lambda d, r, k: _put(N(d, r, k), slice(rows), d.lognormal(4, min(r, rows), k))


def _plus(offset: float, side: Side = U) -> Side:
    return lambda *of: side(*of) + offset


def _times(factor: float | Side, side: Side = N) -> Side:
    return lambda *of: side(*of) * (factor(*of) if callable(factor) else factor)


def _sparse(share: float) -> Side:
    return _times(lambda d, r, k: d.choice(share, r, k))


def _cycle(*factors: float) -> Side:
    """A factor for each row, in turn."""
    return lambda d, r, _: torch.tensor(factors, device=d.device)[d.index(r) % len(factors), None]


def _sample(*factors: float) -> Side:
    """The sampled columns times these, one row after the other."""
    cycle = _cycle(*factors)
    return _times(lambda d, r, k: _put(d.zeros(r, k) + 1, (ALL, sampled(k)), cycle(d, r, k)))


def _nonfinite(d: Draw, rows: int, k: int) -> Tensor:
    values = N(d, rows, k)
    for row, value in enumerate([INF, -INF, NAN]):
        values[row::7, d.columns(1, k)] = value
    values[3::7, 0], values[3::7, -1] = INF, -INF
    return values


def _integers(d: Draw, rows: int, k: int) -> Tensor:
    return (U(d, rows, k) * 9 - 4).round()


def _linear_weight(d: Draw, rows: int, k: int) -> Tensor:
    return (2 * U(d, rows, k) - 1) * k**-0.5


def _of(x: Side, weight: Side | None = None, bias: Side = Draw.zeros) -> Case:
    """The weight is by default like x."""
    return lambda d, m, k, n: (x(d, m, k), (weight or x)(d, n, k), bias(d, 1, n)[0])


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


CASES: dict[str, Case] = {
    "uniform": _of(U, _linear_weight, _linear_weight),  # KernelBench's x, nn.Linear's parameters
    "normal": _of(N, N, N),
    "large bias": _of(N, N, _plus(1e6, Draw.zeros)),
    "inf and NaN in the bias": _of(
        N, N, lambda d, r, n: _cycle(INF, -INF, NAN, -1, 0, 0.5, 2)(d, n, r).T
    ),
    # x
    "outlier columns": _of(_times(lambda d, r, k: 1 + 999.0 * d.choice(0.01, k)), N),
    "one dominant column": _of(_column(1e4, 0), N),
    "last column large": _of(_times(lambda d, r, k: 1 + 9999.0 * (d.index(k) == k - 1)), N),
    "sparse x, 1 in 100": _of(_sparse(0.01), N),
    "sparse x, 1 in 10": _of(_sparse(0.1), N),
    "sparse x, 1 in 2": _of(_sparse(0.5), N),
    "two wide rows of x": _of(_wide(2), N),
    "graded columns": _of(_times(lambda d, r, k: d.grades(20, k, False)), N),
    "graded columns, shuffled": _of(_times(lambda d, r, k: d.grades(20, k, True)), N),
    "one-hot x": _of(lambda *of: few(*of, 1).float(), N),  # a lookup: exact in float32
    "softmax - one-hot": _of(lambda *of: (3 * N(*of)).softmax(1) - few(*of, 1).float(), N),
    "inf in one row of x": _of(lambda d, r, k: _put(N(d, r, k), (r // 2, d.columns(1, k)), INF), N),
    "inf in every 64th row of x": _of(
        lambda d, r, k: _put(N(d, r, k), (slice(None, None, 64), d.columns(1, k)), INF), N
    ),
    "inf in all rows of x": _of(lambda d, r, k: _put(N(d, r, k), (ALL, d.columns(1, k)), INF), N),
    "16 outlier columns, all positive": _of(
        _times(lambda d, r, k: 1 + _put(d.zeros(k), d.columns(16, k), 299), U), U
    ),
    "first quarter of x is zero": _of(_times(lambda d, r, k: d.index(k) >= k // 4, U), U),
    "first 7/8 of x are zero": _of(_times(lambda d, r, k: d.index(k) >= 7 * k // 8, U), U),
    # the weight
    "ones in the weight": _of(N, _plus(1, Draw.zeros)),  # row sums
    "zero weight": _of(N, Draw.zeros, N),
    "weight that selects": _of(  # one 1 in a row: exact in float32
        N, lambda d, r, k: (d.index(k) == d.index(r)[:, None] * 37 % k).float()
    ),
    "outliers in the weight": _of(N, _times(lambda d, *s: 1 + 999.0 * d.choice(0.001, *s))),
    "sparse weight, 1 in 100": _of(N, _sparse(0.01)),
    "1% zeros in the weight": _of(N, _sparse(0.99)),
    "2:4 sparse weight": _of(  # of each four neighbours two are zero
        N, _times(N, lambda d, r, k: (U(d, r, -(-k // 4), 4).argsort(2) < 2).flatten(1)[:, :k])
    ),
    "block-diagonal weight": _of(U, _times(blocks, U)),
    "128 wide rows of the weight": _of(N, _wide(128)),
    "sampled weights are zero": _of(N, _times(1e-6, _sample(0.0))),
    "sampled weights are tiny": _of(N, _sample(0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-20)),
    "sampled weights are huge": _of(N, _sample(10.0, 1e2, 1e3, 1e4, 1e6, 1e20)),
    "huge sampled weights meet zeros": _of(_sample(0.0), _sample(10.0, 1e2, 1e3, 1e4, 1e6, 1e20)),
    "student weight": _of(N, Draw.student),
    "int8 weight": _of(N, lambda *of: whole(N(*of), 127)),
    # both
    "lognormal": _of(lambda d, *s: d.lognormal(1, *s)),
    "wide lognormal": _of(lambda d, *s: d.lognormal(2, *s)),
    "all positive": _of(U, U, U),
    "all positive, lognormal": _of(lambda d, *s: d.lognormal(1, *s).abs(), bias=U),
    "small integers": _of(_integers, bias=_plus(3, Draw.zeros)),  # exact in float32
    "integers, larger ones in the sample": _of(
        _integers, lambda d, r, k: _integers(d, r, k) + _put(d.zeros(k), sampled(k), 2.0**-11)
    ),
    "12-bit integers": _of(lambda *of: whole(N(*of), 4095)),  # low pieces of both
    "ones": _of(_plus(1, Draw.zeros)),  # exact in float32
    "half precision": _of(lambda *of: N(*of).half().float(), bias=N),
    "outlier rows": _of(_times(_cycle(3e3, 1.0, 1.0))),
    "zero rows": _of(_times(_cycle(0.0, 1.0, 1.0)), bias=N),
    "sparse x and weight, 1 in 10": _of(_sparse(0.1)),
    # by 2^-60, 2^-30, ... so that the largest are many
    "scaled rows": _of(_times(lambda d, r, k: d.powers(-2, 2, r, 1) ** 30)),
    "subnormal results": _of(_times(2.0**-70)),
    "subnormals in x": _of(_times(2.0**-132), _times(2.0**40)),
    "subnormals in the weight": _of(_times(2.0**40), _times(2.0**-132)),
    "near overflow, finite": _of(_times(2.0**112, U), _times(2.0, _plus(-0.5))),
    "operands near overflow": _of(_times(2.0**127, _plus(-0.5)), _times(2.0**-100, _plus(-0.5))),
    "overflow": _of(  # in every second column
        _times(2.0**100, _plus(0.5)), _times(_cycle(-(2.0**40), 1.0, 2.0**40, 1.0), _plus(0.5))
    ),
    "inf and NaN in x": _of(_nonfinite, _sparse(0.5)),
    "inf and NaN in the weight": _of(_sparse(0.5), _nonfinite),
    # large values meet zeros, or are alone in their rows
    "1e30 meets a zero column": _of(_column(1e30), _column(0)),
    "weight of 1e30 meets a zero column": _of(_column(0), _column(1e30)),
    "2^10 .. 2^24 meet a zero column": _of(  # on both sides of every threshold
        lambda d, r, k: _put(N(d, r, k), (ALL, COLUMN), d.powers(10, 24, r)), _column(0)
    ),
    "large values meet zeros": _large_values_meet_zeros,
    "one-hot x, scaled columns of the weight": _of(
        lambda d, r, k: few(d, r, k, 1) * N(d, r, 1),
        lambda d, r, k: in_range(N(d, r, k) * d.grades(10, k, True)),
    ),
    "one-hot x meets a tiny column": _of(  # the weight gradient where a row of x is tiny
        lambda d, *s: _put(d.zeros(*s), (ALL, COLUMN), 1),
        _times(lambda d, r, k: _put(d.zeros(k) + 1, COLUMN, 1e-10)),
    ),
    "graded and inversely graded, shuffled": partial(_inverse, 20, N, N),
    # all within what two pieces carry
    "mildly graded and inversely graded": partial(_inverse, 8, N, N),
    "graded by 2^22 and inversely graded": partial(_inverse, 11, U, _plus(-0.5)),
    "1/16 of the columns shared": partial(_shared, 0, 1.0),
    "16 columns shared": partial(_shared, 16, 1.0),
    "1 column shared": partial(_shared, 1, 1.0),
    "tiny shared columns": partial(_shared, 0, 2.0**-30),
}
