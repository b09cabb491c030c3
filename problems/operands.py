"""Operands of a float32 product x weight^T + bias: named cases, and what they are made of.

All are float32: x `[m, k]`, weight `[n, k]`, bias `[n]`. K is at least 8.
"""

from collections.abc import Callable

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

    def choice(self, share: float, *shape: int) -> Tensor:
        """Return a mask that is true with the probability `share`."""
        return self.uniform(*shape) < share

    def powers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return powers of two from 2^low to 2^high."""
        return torch.randint(low, high + 1, shape, **self.options).float().exp2()

    def columns(self, count: int, k: int) -> Tensor:
        """Return the indices of `count` different columns."""
        return torch.randperm(k, **self.options)[:count]

    def index(self, count: int) -> Tensor:
        """Return 0, 1 and so on, `count` numbers."""
        return torch.arange(count, device=self.device)

    def grades(self, span: int, k: int, *, shuffled: bool) -> Tensor:
        """Return powers of two from 2^-span to 2^span along k, rising or in random order."""
        exponents = torch.linspace(-span, span, k, device=self.device).round()
        return (exponents[self.columns(k, k)] if shuffled else exponents).exp2()


Operands = tuple[Tensor, Tensor, Tensor]
Case = Callable[[Draw, int, int, int], Operands]  # given m, k and n
Side = Callable[[Draw, int, int], Tensor]  # given rows and K
N, U = Draw.normal, Draw.uniform


def few(d: Draw, rows: int, k: int, count: int) -> Tensor:
    """Return a mask that is true at `count` places of every row, drawn for each row."""
    kept = d.zeros(rows, k).bool()
    return kept.scatter_(1, d.uniform(rows, k).topk(min(count, k)).indices, value=True)


def blocks(d: Draw, rows: int, k: int) -> Tensor:
    """Return a mask that is true in 8 blocks along the diagonal."""
    return d.index(rows)[:, None] * 8 // rows == d.index(k) * 8 // k


def whole(rows: Tensor, largest: int) -> Tensor:
    """Scale each row so that its largest magnitude is `largest`, and round to whole numbers."""
    maximum = rows.abs().amax(1, keepdim=True)
    return (rows * (largest / torch.where(maximum == 0, 1.0, maximum))).round()


def named(name: str, m: int, k: int, n: int, device: str = "cpu") -> Operands:
    """Return x, weight and bias of a case of CASES."""
    return CASES[name](Draw(0, device), m, k, n)


def put(values: Tensor, index: object, new: Tensor | float) -> Tensor:
    """Set some of the values; return all of them."""
    values[index] = new
    return values


def column(new: float, at: int = COLUMN) -> Side:
    """Return what draws normal values, but for one column, which has the same everywhere."""
    return lambda *s: put(N(*s), (ALL, at), new)


def plus(offset: float, side: Side = U) -> Side:
    """Return what draws a side and adds an offset."""
    return lambda *s: side(*s) + offset


def times(factor: float | Side, side: Side = N) -> Side:
    """Return what draws a side and multiplies it by a factor, which may be drawn, too."""
    return lambda *s: side(*s) * (factor(*s) if callable(factor) else factor)


def cycle(*factors: float) -> Side:
    """Return what gives each row one of the factors, in turn."""
    return lambda d, r, _: torch.tensor(factors, device=d.device)[d.index(r) % len(factors), None]


def integers(d: Draw, rows: int, k: int) -> Tensor:
    """Return whole numbers from -4 to 5."""
    return (U(d, rows, k) * 9 - 4).round()


def of(x: Side, weight: Side | None = None, bias: Side = Draw.zeros) -> Case:
    """Return a case whose sides are drawn one after the other; the weight by default as x is."""
    return lambda d, m, k, n: (x(d, m, k), (weight or x)(d, n, k), bias(d, 1, n)[0])


def _wide(rows: int) -> Side:
    return lambda d, r, k: put(N(d, r, k), slice(rows), d.lognormal(4, min(r, rows), k))


def _sparse(share: float) -> Side:
    return times(lambda d, r, k: d.choice(share, r, k))


def _infinite(rows: slice) -> Side:
    """Return what draws normal values, but for infinities in one column of these rows."""
    return lambda d, r, k: put(N(d, r, k), (rows, d.columns(1, k)), INF)


def _nonfinite(d: Draw, rows: int, k: int) -> Tensor:
    values = N(d, rows, k)
    for row, value in enumerate([INF, -INF, NAN]):
        values[row::7, d.columns(1, k)] = value
    values[3::7, 0], values[3::7, -1] = INF, -INF
    return values


CASES: dict[str, Case] = {
    # KernelBench's x, nn.Linear's parameters
    "uniform": of(U, *[times(lambda d, r, k: k**-0.5, plus(-1, times(2, U)))] * 2),
    "normal": of(N, N, N),
    "large bias": of(N, N, plus(1e6, Draw.zeros)),
    "inf and NaN in the bias": of(
        N, N, lambda d, r, n: cycle(INF, -INF, NAN, -1, 0, 0.5, 2)(d, n, r).T
    ),
    # x
    "outlier columns": of(times(lambda d, r, k: 1 + 999.0 * d.choice(0.01, k)), N),
    "one dominant column": of(column(1e4, 0), N),
    "last column large": of(times(lambda d, r, k: 1 + 9999.0 * (d.index(k) == k - 1)), N),
    **{f"sparse x, 1 in {count}": of(_sparse(1 / count), N) for count in (100, 10, 2)},
    "two wide rows of x": of(_wide(2), N),
    "graded columns": of(times(lambda d, r, k: d.grades(20, k, shuffled=False)), N),
    "graded columns, shuffled": of(times(lambda d, r, k: d.grades(20, k, shuffled=True)), N),
    "one-hot x": of(lambda *s: few(*s, 1).float(), N),  # a lookup: exact in float32
    "softmax - one-hot": of(lambda *s: (3 * N(*s)).softmax(1) - few(*s, 1).float(), N),
    "inf in one row of x": of(lambda d, r, k: put(N(d, r, k), (r // 2, d.columns(1, k)), INF), N),
    "inf in every 64th row of x": of(_infinite(slice(None, None, 64)), N),
    "inf in all rows of x": of(_infinite(ALL), N),
    "16 outlier columns, all positive": of(
        times(lambda d, r, k: 1 + put(d.zeros(k), d.columns(16, k), 299), U), U
    ),
    "first quarter of x is zero": of(times(lambda d, r, k: d.index(k) >= k // 4, U), U),
    "first 7/8 of x are zero": of(times(lambda d, r, k: d.index(k) >= 7 * k // 8, U), U),
    # the weight
    "ones in the weight": of(N, plus(1, Draw.zeros)),  # row sums
    "zero weight": of(N, Draw.zeros, N),
    "weight that selects": of(  # one 1 in a row: exact in float32
        N, lambda d, r, k: (d.index(k) == d.index(r)[:, None] * 37 % k).float()
    ),
    "outliers in the weight": of(N, times(lambda d, *s: 1 + 999.0 * d.choice(0.001, *s))),
    "sparse weight, 1 in 100": of(N, _sparse(0.01)),
    "1% zeros in the weight": of(N, _sparse(0.99)),
    "2:4 sparse weight": of(  # of each four neighbours two are zero
        N, times(N, lambda d, r, k: (U(d, r, -(-k // 4), 4).argsort(2) < 2).flatten(1)[:, :k])
    ),
    "block-diagonal weight": of(U, times(blocks, U)),
    "128 wide rows of the weight": of(N, _wide(128)),
    "int8 weight": of(N, lambda *s: whole(N(*s), 127)),
    # both
    "lognormal": of(lambda d, *s: d.lognormal(1, *s)),
    "wide lognormal": of(lambda d, *s: d.lognormal(2, *s)),
    "all positive": of(U, U, U),
    "all positive, lognormal": of(lambda d, *s: d.lognormal(1, *s).abs(), bias=U),
    "small integers": of(integers, bias=plus(3, Draw.zeros)),  # exact in float32
    "12-bit integers": of(lambda *s: whole(N(*s), 4095)),  # low pieces of both
    "ones": of(plus(1, Draw.zeros)),  # exact in float32
    "half precision": of(lambda *s: N(*s).half().float(), bias=N),
    "outlier rows": of(times(cycle(3e3, 1.0, 1.0))),
    "zero rows": of(times(cycle(0.0, 1.0, 1.0)), bias=N),
    "sparse x and weight, 1 in 10": of(_sparse(0.1)),
    # by 2^-60, 2^-30, ... so that the largest are many
    "scaled rows": of(times(lambda d, r, k: d.powers(-2, 2, r, 1) ** 30)),
    "inf and NaN in x": of(_nonfinite, _sparse(0.5)),
    "inf and NaN in the weight": of(_sparse(0.5), _nonfinite),
    "1e30 meets a zero column": of(column(1e30), column(0)),
    "weight of 1e30 meets a zero column": of(column(0), column(1e30)),
}
