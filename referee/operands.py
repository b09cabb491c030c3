"""Operands of a float32 product x weight^T + bias: named cases.

All are float32: x `[m, k]`, weight `[n, k]`, bias `[n]`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from referee.draws import Draw, blocks, cross_entropy_gradient, few, in_range, one_hot, whole

Operands = tuple[Tensor, Tensor, Tensor]

INF, NAN = float("inf"), float("nan")


CASES: dict[str, Callable[[Draw, int, int, int], Operands]] = {}


def named(name: str, m: int, k: int, n: int, device: str = "cpu") -> Operands:
    """x, weight and bias of a case of CASES."""
    return CASES[name](Draw(0, device), m, k, n)


def case(name: str) -> Callable:
    def register(operands: Callable) -> Callable:
        CASES[name] = operands
        return operands

    return register


@case("normal")
def _(d, m, k, n):
    return d.normal(m, k), d.normal(n, k), d.normal(n)


@case("uniform")  # KernelBench's inputs and nn.Linear's parameters
def _(d, m, k, n):
    bound = k**-0.5
    return d.uniform(m, k), (2 * d.uniform(n, k) - 1) * bound, (2 * d.uniform(n) - 1) * bound


@case("lognormal")
def _(d, m, k, n):
    return d.lognormal(1, m, k), d.lognormal(1, n, k), d.normal(n)


@case("wide lognormal")
def _(d, m, k, n):
    return d.lognormal(2, m, k), d.lognormal(2, n, k), d.normal(n)


@case("all positive")
def _(d, m, k, n):
    return d.uniform(m, k), d.uniform(n, k), d.uniform(n)


@case("all positive, lognormal")
def _(d, m, k, n):
    return d.lognormal(1, m, k).abs(), d.lognormal(1, n, k).abs(), d.uniform(n)


@case("small integers")  # exact in float32
def _(d, m, k, n):
    return (d.uniform(m, k) * 9 - 4).round(), (d.uniform(n, k) * 9 - 4).round(), d.zeros(n) + 3


@case("ones")  # exact in float32
def _(d, m, k, n):
    return d.zeros(m, k) + 1, d.zeros(n, k) + 1, d.zeros(n)


@case("ones in the weight")  # row sums
def _(d, m, k, n):
    return d.normal(m, k), d.zeros(n, k) + 1, d.zeros(n)


@case("weight that selects")  # one 1 in a row: exact in float32
def _(d, m, k, n):
    weight = d.zeros(n, k)
    weight[torch.arange(n), torch.arange(n) * 37 % k] = 1
    return d.normal(m, k), weight, d.zeros(n)


@case("half precision")  # values that float16 holds
def _(d, m, k, n):
    return d.normal(m, k).half().float(), d.normal(n, k).half().float(), d.normal(n)


@case("outlier rows")
def _(d, m, k, n):
    x, weight = d.normal(m, k), d.normal(n, k)
    x[::3] *= 1e4
    weight[::3] *= 1e3
    return x, weight, d.zeros(n)


@case("outlier columns")
def _(d, m, k, n):
    x = d.normal(m, k)
    x[:, d.choice(0.01, k)] *= 1e3
    return x, d.normal(n, k), d.zeros(n)


@case("one dominant column")
def _(d, m, k, n):
    x = d.normal(m, k)
    x[:, 0] = 1e4
    return x, d.normal(n, k), d.zeros(n)


@case("outliers in the weight")
def _(d, m, k, n):
    weight = d.normal(n, k)
    weight[d.choice(0.001, n, k)] *= 1e3
    return d.normal(m, k), weight, d.zeros(n)


@case("sparse x, 1 in 100")
def _(d, m, k, n):
    return d.normal(m, k) * d.choice(0.01, m, k), d.normal(n, k), d.zeros(n)


@case("sparse x, 1 in 10")
def _(d, m, k, n):
    return d.normal(m, k) * d.choice(0.1, m, k), d.normal(n, k), d.zeros(n)


@case("sparse x, 1 in 2")
def _(d, m, k, n):
    return d.normal(m, k) * d.choice(0.5, m, k), d.normal(n, k), d.zeros(n)


@case("sparse weight, 1 in 100")
def _(d, m, k, n):
    return d.normal(m, k), d.normal(n, k) * d.choice(0.01, n, k), d.zeros(n)


@case("1% zeros in the weight")
def _(d, m, k, n):
    return d.normal(m, k), d.normal(n, k) * d.choice(0.99, n, k), d.zeros(n)


@case("2:4 sparse weight")  # of each four neighbours two are zero
def _(d, m, k, n):
    kept = d.uniform(n, -(-k // 4), 4).argsort(2) < 2
    return d.normal(m, k), d.normal(n, k) * kept.flatten(1)[:, :k], d.zeros(n)


@case("zero weight")
def _(d, m, k, n):
    return d.normal(m, k), d.zeros(n, k), d.normal(n)


@case("sparse x and weight, 1 in 10")
def _(d, m, k, n):
    return d.normal(m, k) * d.choice(0.1, m, k), d.normal(n, k) * d.choice(0.1, n, k), d.zeros(n)


@case("sparse x and weight, 1 in 4")
def _(d, m, k, n):
    return d.normal(m, k) * d.choice(0.25, m, k), d.normal(n, k) * d.choice(0.25, n, k), d.zeros(n)


@case("zero rows")
def _(d, m, k, n):
    x, weight = d.normal(m, k), d.normal(n, k)
    x[::3] = 0
    weight[::4] = 0
    return x, weight, d.normal(n)


@case("two wide rows of x")
def _(d, m, k, n):
    x = d.normal(m, k)
    x[:2] = d.lognormal(4, len(x[:2]), k)
    return x, d.normal(n, k), d.zeros(n)


@case("128 wide rows of the weight")
def _(d, m, k, n):
    weight = d.normal(n, k)
    weight[:128] = d.lognormal(4, len(weight[:128]), k)
    return d.normal(m, k), weight, d.zeros(n)


@case("scaled rows")  # 2^-60, 2^-30, ... so that the largest are many
def _(d, m, k, n):
    x, weight = d.normal(m, k), d.normal(n, k)
    return x * d.powers(-2, 2, m, 1) ** 30, weight * d.powers(-2, 2, n, 1) ** 30, d.zeros(n)


@case("graded columns")
def _(d, m, k, n):
    return d.normal(m, k) * d.grades(20, k, False), d.normal(n, k), d.zeros(n)


@case("graded columns, shuffled")
def _(d, m, k, n):
    return d.normal(m, k) * d.grades(20, k, True), d.normal(n, k), d.zeros(n)


@case("graded and inversely graded")
def _(d, m, k, n):
    grades = d.grades(20, k, False)
    return d.normal(m, k) * grades, d.normal(n, k) / grades, d.zeros(n)


@case("graded and inversely graded, shuffled")
def _(d, m, k, n):
    grades = d.grades(20, k, True)
    return d.normal(m, k) * grades, d.normal(n, k) / grades, d.zeros(n)


@case("mildly graded and inversely graded")  # all within what two pieces carry
def _(d, m, k, n):
    grades = d.grades(8, k, True)
    return d.normal(m, k) * grades, d.normal(n, k) / grades, d.zeros(n)


@case("graded by 2^22 and inversely graded")
def _(d, m, k, n):
    grades = d.grades(11, k, True)
    return d.uniform(m, k) * grades, (d.uniform(n, k) - 0.5) / grades, d.zeros(n)


def _beside_zero_column(d, m, k, n, values):
    x, weight, at = d.normal(m, k), d.normal(n, k), d.column(k)
    x[:, at], weight[:, at] = values(m), 0
    return x, weight, d.normal(n)


@case("1e30 meets a zero column")
def _(d, m, k, n):
    return _beside_zero_column(d, m, k, n, lambda m: 1e30)


@case("1e5 meets a zero column")
def _(d, m, k, n):
    return _beside_zero_column(d, m, k, n, lambda m: 1e5)


@case("2^10 .. 2^24 meet a zero column")  # on both sides of every threshold
def _(d, m, k, n):
    return _beside_zero_column(d, m, k, n, lambda m: d.powers(10, 24, m))


@case("weight of 1e30 meets a zero column")
def _(d, m, k, n):
    x, weight, at = d.normal(m, k), d.normal(n, k), d.column(k)
    x[:, at], weight[:, at] = 0, 1e30
    return x, weight, d.normal(n)


@case("large values meet zeros")  # what is left of a row of x is small, all of it counts
def _(d, m, k, n):
    x, weight, kept = d.normal(m, k), d.normal(n, k), d.choice(0.02, k)
    return torch.where(kept, x, x * 2.0**24), weight * kept, d.zeros(n)


@case("subnormals in x")
def _(d, m, k, n):
    return d.normal(m, k) * 2.0**-132, d.normal(n, k) * 2.0**40, d.zeros(n)


@case("subnormals in the weight")
def _(d, m, k, n):
    return d.normal(m, k) * 2.0**40, d.normal(n, k) * 2.0**-132, d.zeros(n)


@case("subnormal results")
def _(d, m, k, n):
    return d.normal(m, k) * 2.0**-70, d.normal(n, k) * 2.0**-70, d.zeros(n)


@case("near overflow, finite")
def _(d, m, k, n):
    largest = 2.0**126 / k
    return d.uniform(m, k) * largest, 2 * d.uniform(n, k) - 1, d.zeros(n)


@case("operands near overflow")
def _(d, m, k, n):
    x, weight = d.uniform(m, k) - 0.5, d.uniform(n, k) - 0.5
    return x * 2.0**64 * 2.0**64, weight * 2.0**-100, d.zeros(n)


@case("overflow")  # in every second column
def _(d, m, k, n):
    weight = d.uniform(n, k) + 0.5
    weight[::2] *= 2.0**40
    weight[::4] *= -1
    return (d.uniform(m, k) + 0.5) * 2.0**100, weight, d.zeros(n)


def _with_inf(d, m, k, n, rows):
    x = d.normal(m, k)
    x[rows, d.column(k)] = INF
    return x, d.normal(n, k), d.normal(n)


@case("inf in one row of x")
def _(d, m, k, n):
    return _with_inf(d, m, k, n, m // 2)


@case("inf in every 64th row of x")
def _(d, m, k, n):
    return _with_inf(d, m, k, n, slice(None, None, 64))


@case("inf in all rows of x")
def _(d, m, k, n):
    return _with_inf(d, m, k, n, slice(None))


@case("inf and NaN in x")
def _(d, m, k, n):
    x, weight = d.normal(m, k), d.normal(n, k)
    for row, value in enumerate([INF, -INF, NAN]):
        x[row::7, d.column(k)] = value
    x[3::7, 0], x[3::7, -1] = INF, -INF
    weight[::5, 0] = 0
    return x, weight, d.normal(n)


@case("inf and NaN in the weight")
def _(d, m, k, n):
    x, weight = d.normal(m, k), d.normal(n, k)
    for row, value in enumerate([INF, -INF, NAN]):
        weight[row::7, d.column(k)] = value
    weight[3::7, 0], weight[3::7, -1] = INF, -INF
    x[::5, 0] = 0
    return x, weight, d.normal(n)


@case("inf and NaN in the bias")
def _(d, m, k, n):
    bias = d.normal(n)
    for row, value in enumerate([INF, -INF, NAN]):
        bias[row::7] = value
    return d.normal(m, k), d.normal(n, k), bias


@case("cancellation")  # the second half undoes the first, but for a part in 2^12
def _(d, m, k, n):
    x, weight, half = d.normal(m, k), d.normal(n, k), k // 2
    x[:, half : 2 * half] = x[:, :half]
    weight[:, half : 2 * half] = -weight[:, :half] * (1 + d.normal(n, half) * 2.0**-12)
    return x, weight, d.zeros(n)


def sampled(k: int) -> Tensor:
    """The columns of a weight row of which kernels that sample see the maximum."""
    chunk = torch.arange(8)[:, None] * (k // 8) // 16 * 16 + torch.arange(16)
    return chunk[chunk < k].unique()


def _with_sample(d, m, k, n, factors):
    weight, columns = d.normal(n, k), sampled(k)
    factors = torch.tensor(factors, device=weight.device)
    weight[:, columns] *= factors[torch.arange(n, device=weight.device) % len(factors), None]
    return d.normal(m, k), weight, d.zeros(n)


@case("sampled weights are zero")
def _(d, m, k, n):
    x, weight, bias = _with_sample(d, m, k, n, [0.0])
    return x, weight * 1e-6, bias


@case("sampled weights are tiny")
def _(d, m, k, n):
    return _with_sample(d, m, k, n, [0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-20])


@case("sampled weights are huge")
def _(d, m, k, n):
    return _with_sample(d, m, k, n, [10.0, 1e2, 1e3, 1e4, 1e6, 1e20])


@case("huge sampled weights meet zeros")
def _(d, m, k, n):
    x, weight, bias = _with_sample(d, m, k, n, [10.0, 1e2, 1e3, 1e4, 1e6, 1e20])
    x[:, sampled(k)] = 0
    return x, weight, bias


@case("last column large")
def _(d, m, k, n):
    x = d.normal(m, k)
    x[:, -1] *= 1e4
    return x, d.normal(n, k), d.zeros(n)


@case("16 outlier columns, all positive")
def _(d, m, k, n):
    x = d.uniform(m, k)
    x[:, d.columns(16, k)] *= 300
    return x, d.uniform(n, k), d.zeros(n)


def _shared(d, m, k, n, count):
    """x and weight share `count` columns; each has half of the others."""
    order, half = d.columns(k, k), (k + count) // 2
    x, weight = d.normal(m, k), d.normal(n, k)
    x[:, order[half:]] = 0
    weight[:, order[: half - count]] = 0
    return x, weight, d.zeros(n)


@case("1/16 of the columns shared")
def _(d, m, k, n):
    return _shared(d, m, k, n, k // 16)


@case("16 columns shared")
def _(d, m, k, n):
    return _shared(d, m, k, n, 16)


@case("1 column shared")
def _(d, m, k, n):
    return _shared(d, m, k, n, 1)


@case("tiny shared columns")  # 2^-30 of the largest, on both sides
def _(d, m, k, n):
    x, weight, bias = _shared(d, m, k, n, k // 16)
    tiny = (x != 0).any(0) & (weight != 0).any(0)
    scale = torch.where(tiny, 2.0**-30, 1.0)
    return x * scale, weight * scale, bias


@case("one-hot x")  # a lookup: exact in float32
def _(d, m, k, n):
    return one_hot(d, m, k), d.normal(n, k), d.zeros(n)


@case("one-hot x, scaled columns of the weight")
def _(d, m, k, n):
    weight = in_range(d.normal(n, k) * d.grades(10, k, True))
    return few(d, m, k, 1) * d.normal(m, 1), weight, d.zeros(n)


@case("one-hot x meets a tiny column")  # the weight gradient where a row of x is tiny
def _(d, m, k, n):
    x, weight, at = d.zeros(m, k), d.normal(n, k), d.column(k)
    x[:, at] = 1
    weight[:, at] *= 1e-10
    return x, weight, d.zeros(n)


@case("first quarter of x is zero")
def _(d, m, k, n):
    return d.uniform(m, k) * (d.index(k) >= k // 4), d.uniform(n, k), d.zeros(n)


@case("first 7/8 of x are zero")
def _(d, m, k, n):
    return d.uniform(m, k) * (d.index(k) >= 7 * k // 8), d.uniform(n, k), d.zeros(n)


@case("block-diagonal weight")
def _(d, m, k, n):
    return d.uniform(m, k), d.uniform(n, k) * blocks(d, n, k), d.zeros(n)


@case("dropout of relu")
def _(d, m, k, n):
    weight = (2 * d.uniform(n, k) - 1) * k**-0.5
    return d.normal(m, k).relu() * d.choice(0.7, m, k), weight, d.zeros(n)


@case("relu of h - 1")
def _(d, m, k, n):
    return (d.normal(m, k) - 1).relu(), (2 * d.uniform(n, k) - 1) * k**-0.5, d.zeros(n)


@case("softmax - one-hot")
def _(d, m, k, n):
    return cross_entropy_gradient(d, m, k), d.normal(n, k), d.zeros(n)


@case("student weight")
def _(d, m, k, n):
    return d.normal(m, k), d.student(n, k), d.zeros(n)


@case("int8 weight")
def _(d, m, k, n):
    return d.normal(m, k), whole(d.normal(n, k), 127), d.zeros(n)


@case("12-bit integers")  # low pieces on both sides
def _(d, m, k, n):
    return whole(d.normal(m, k), 4095), whole(d.normal(n, k), 4095), d.zeros(n)


@case("integers, larger ones in the sample")
def _(d, m, k, n):
    weight = (d.uniform(n, k) * 9 - 4).round()
    weight[:, sampled(k)] += 2.0**-11
    return (d.uniform(m, k) * 9 - 4).round(), weight, d.zeros(n)


@case("large bias")
def _(d, m, k, n):
    return d.normal(m, k), d.normal(n, k), d.zeros(n) + 1e6
