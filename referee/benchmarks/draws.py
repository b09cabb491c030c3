"""Tensors that operands are made of, on one device, from one seed."""

import torch
from torch import Tensor

# The nonzero elements of a row of a composition are at most so many powers of two apart.
RANGE = 24


class Draw:
    """Tensors on one device, from one seed."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.options = {"generator": generator, "device": device}

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
        return torch.zeros(shape, device=self.options["device"])

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
        return torch.arange(count, device=self.options["device"])

    def grades(self, span: int, k: int, shuffled: bool) -> Tensor:
        """2^-span .. 2^span along k, rising or in random order."""
        exponents = torch.linspace(-span, span, k, device=self.options["device"]).round()
        return (exponents[self.columns(k, k)] if shuffled else exponents).exp2()


def few(d: Draw, rows: int, k: int, count: int) -> Tensor:
    """True at `count` places of every row, drawn for each."""
    kept = d.zeros(rows, k).bool()
    return kept.scatter_(1, d.uniform(rows, k).topk(min(count, k)).indices, True)


def one_hot(d: Draw, rows: int, k: int) -> Tensor:
    """A single 1 in every row."""
    return few(d, rows, k, 1).float()


def cross_entropy_gradient(d: Draw, rows: int, k: int) -> Tensor:
    """softmax - one-hot."""
    return (3 * d.normal(rows, k)).softmax(1) - one_hot(d, rows, k)


def blocks(d: Draw, rows: int, k: int) -> Tensor:
    """True in 8 blocks along the diagonal."""
    return d.index(rows)[:, None] * 8 // rows == d.index(k) * 8 // k


def whole(rows: Tensor, largest: int) -> Tensor:
    """Whole numbers up to `largest`, which each row has."""
    maximum = rows.abs().amax(1, keepdim=True)
    return (rows * (largest / torch.where(maximum == 0, 1.0, maximum))).round()


def in_range(rows: Tensor) -> Tensor:
    """With zeros for elements below 2^-RANGE of their row's largest."""
    magnitude = rows.abs()
    return rows * (magnitude >= magnitude.amax(1, keepdim=True) * 2.0**-RANGE)
