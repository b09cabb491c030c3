"""Operand ranges for a float32 product, and the promise its result must keep on each.

A case draws x `[m, k]`, weight `[n, k]` and bias `[n]`, float32. The promise is relative to a
product that somebody trusts (torch's own): against float64, the maximum and the mean of the error,
and the maximum of error / (|x| |weight|^T + |bias|), are no larger than that product's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# One product and TF32 round operands to the same 11 bits, and differ in how they sum.
ONE_PRODUCT_SLACK = 1.02

INF, NAN = float("inf"), float("nan")


class Draw:
    """Tensors of shape `[rows, columns]` on one device, from one seed."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.options = {"generator": self.generator, "device": device}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, **self.options)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, **self.options)

    def lognormal(self, sigma: float, *shape: int) -> Tensor:
        """Of both signs."""
        return self.normal(*shape).sign() * (self.normal(*shape) * sigma).exp()

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.options["device"])

    def choice(self, share: float, *shape: int) -> Tensor:
        """True with the probability share."""
        return self.uniform(*shape) < share

    def powers(self, low: int, high: int, *shape: int) -> Tensor:
        """2^low .. 2^high, whole exponents."""
        return torch.randint(low, high + 1, shape, **self.options).float().exp2()

    def grades(self, span: int, k: int, shuffled: bool) -> Tensor:
        """2^-span .. 2^span along k, rising or in random order."""
        exponents = torch.linspace(-span, span, k, device=self.options["device"]).round()
        if shuffled:
            exponents = exponents[torch.randperm(k, **self.options)]
        return exponents.exp2()

    def column(self, k: int) -> int:
        return int(torch.randint(k, (), **self.options))


@dataclass(frozen=True)
class Case:
    """Operands of one kind.

    Attributes:
        operands: takes a `Draw`, m, k, n and returns x, weight and bias.
    """

    operands: Callable[[Draw, int, int, int], tuple[Tensor, Tensor, Tensor]]

    def draw(
        self, m: int, k: int, n: int, seed: int = 0, device: str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.operands(Draw(seed, device), m, k, n)


CASES: dict[str, Case] = {}


def case(name: str) -> Callable:
    def register(operands: Callable) -> Callable:
        CASES[name] = Case(operands)
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


@case("sparse x, 1 in 2")
def _(d, m, k, n):
    return d.normal(m, k) * d.choice(0.5, m, k), d.normal(n, k), d.zeros(n)


@case("sparse weight, 1 in 100")
def _(d, m, k, n):
    return d.normal(m, k), d.normal(n, k) * d.choice(0.01, n, k), d.zeros(n)


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
    weight, columns = d.normal(n, k), sampled(k).to(d.options["device"])
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
    x[:, sampled(k).to(x.device)] = 0
    return x, weight, bias


@dataclass(frozen=True)
class Errors:
    """Of the finite results: maximum, mean, and maximum relative to |x| |weight|^T + |bias|."""

    max: float
    mean: float
    relative: float


class Reference:
    """relu(x weight^T + bias) / divisor in float64, and errors against it."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor, divisor: float) -> None:
        x, weight, bias = x.double(), weight.double(), bias.double()
        self.out = torch.relu(x @ weight.t() + bias) / divisor
        self.magnitude = (x.abs() @ weight.abs().t() + bias.abs()) / abs(divisor)

    def errors(self, out: Tensor) -> Errors:
        """Of out where out and the reference are finite."""
        assert out.shape == self.out.shape
        finite = torch.isfinite(out) & torch.isfinite(self.out)
        error = (out.double() - self.out).abs()[finite]
        if not error.numel():
            return Errors(0, 0, 0)
        # 0 / 0: a sum without a term that is not zero, of which any error is infinite.
        relative = torch.where(error == 0, 0, error / self.magnitude[finite])
        return Errors(error.max().item(), error.mean().item(), relative.max().item())


def same_place(out: Tensor, trusted: Tensor, reference: Tensor) -> Tensor:
    """Where out is finite, inf or NaN as it has to be.

    As trusted is; but where a partial sum of trusted overflowed and the result itself does not, out
    may be finite too.
    """
    same = (out == trusted) | (out.isnan() & trusted.isnan())
    overflowed = ~torch.isfinite(trusted) & torch.isfinite(reference.float())
    return torch.where(torch.isfinite(trusted) | overflowed, torch.isfinite(out), same) | (
        overflowed & same
    )


def broken_promises(
    out: Tensor, trusted: Tensor, reference: Reference, slack: float = 1.0
) -> list[str]:
    """What out does worse than slack times trusted, in words; empty if it keeps the promise."""
    broken = []
    wrong = ~same_place(out, trusted, reference.out)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        broken.append(
            f"{int(wrong.sum())} results misplaced, first at {at}: "
            f"{out[at].item()}, expected {trusted[at].item()}"
        )
    got, allowed = reference.errors(out), reference.errors(trusted)
    for name in ("max", "mean", "relative"):
        error, bound = getattr(got, name), slack * getattr(allowed, name)
        if not error <= bound:
            broken.append(f"{name} error {error:.2e}, allowed {bound:.2e}")
    return broken
