"""How far results are from the float64 ones, and how far they may be."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.linalg import vector_norm

U32 = 2.0**-24  # what rounding to nearest changes at most, in parts: float32
U_TF32 = 2.0**-11  # TF32, and float16
# Two results of the same accuracy differ in their errors as two samples do. The mean of many is
# sharp; the maximum of n has a standard deviation of 4% at n = 10^7, and more below.
NOISE = {"max": 1.15, "mean": 1.02, "scaled": 1.15}
BLOCK = 256  # rows of the weight that are in float64 at a time


@dataclass(frozen=True)
class Allowance:
    """The most that an element may be off, wherever the reference is, for the dtype of the result.

    Attributes:
        result: in parts of the exact result, for its rounding to the dtype.
        terms: in parts of the sum of the terms' magnitudes.
        smallest: absolutely, for results below the dtype's normal range.
    """

    result: float = 0.0
    terms: float = 0.0
    smallest: float = 0.0

    @staticmethod
    def of(dtype: torch.dtype, precision: str, terms: int) -> "Allowance":
        """For sums of `terms` products in a dtype under a float32 precision setting."""
        limits = torch.finfo(dtype)
        smallest = limits.smallest_normal * limits.eps / 2
        if dtype == torch.float64:  # the float64 result itself is this far off
            return Allowance(0.0, (terms + 4) * limits.eps, smallest)
        if dtype == torch.float32:
            # As if x, weight, sum and quotient were rounded once each: to no input of this
            # accuracy is a result within it wrong. A short sum's largest error is mostly luck.
            operands = 0.0 if precision == "highest" else 2 * U_TF32
            return Allowance(0.0, operands + 4 * U32, smallest)
        return Allowance(limits.eps / 2, (4 + math.sqrt(terms)) * U32, smallest)

    @staticmethod
    def of_sum(dtype: torch.dtype, terms: int) -> "Allowance":
        """For sums of `terms` numbers, in float32 and in any order, float64 excepted."""
        if dtype == torch.float32:
            return Allowance(0.0, (4 + math.sqrt(terms)) * U32)
        return Allowance.of(dtype, "highest", terms)

    def times(self, factor: float) -> "Allowance":
        """The same, so many times as much."""
        return Allowance(self.result * factor, self.terms * factor, self.smallest * factor)


@dataclass
class Errors:
    """|actual - exact| over all elements, gathered block by block.

    Attributes:
        max: the largest.
        scaled: the largest in parts of the sum of the terms' magnitudes.
        beyond: how many exceed the allowance, and the first of them in words.
    """

    allowance: Allowance
    max: float = 0.0
    scaled: float = 0.0
    count: int = 0
    beyond: int = 0
    first: str = ""
    _sum: float = field(default=0.0, repr=False)
    _squares: float = field(default=0.0, repr=False)
    _exact_squares: float = field(default=0.0, repr=False)

    @property
    def mean(self) -> float:
        """The mean error."""
        return self._sum / max(self.count, 1)

    @property
    def relative(self) -> float:
        """The Frobenius norm of the errors over that of the exact results."""
        if not self._exact_squares:
            return math.inf if self._squares else 0.0
        return math.sqrt(self._squares / self._exact_squares)

    def add(self, actual: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> None:
        """Takes in a block.

        An infinite or undefined exact result, or one beyond the dtype's range, must be met
        exactly.

        Args:
            actual: the result.
            exact: in float64.
            magnitude: the sums of the terms' magnitudes, float64.
        """
        if not actual.numel():
            return
        got = actual.double()
        error = (got - exact).abs_()
        in_range = exact.abs().max() <= torch.finfo(actual.dtype).max  # false for NaN
        if not (in_range and error.sum().isfinite()):
            rounded = exact.to(actual.dtype).double()
            exact = torch.where(rounded.isinf(), rounded, exact)
            same = (got == exact) | (got.isnan() & exact.isnan())
            error = (got - exact).abs_().masked_fill_(same, 0).nan_to_num_(math.inf, math.inf)
            magnitude = magnitude.nan_to_num(0, 0)
        allowed = magnitude * self.allowance.terms + self.allowance.smallest
        if self.allowance.result:
            allowed += (exact.abs() * self.allowance.result).nan_to_num_(0, 0)
        beyond = error > allowed
        if found := int(beyond.sum()):
            if not self.beyond:
                at = beyond.to(torch.uint8).argmax().item()
                values = (t.reshape(-1)[at].item() for t in (got, exact))
                self.first = "got {:.9g}, exact is {:.9g}".format(*values)
            self.beyond += found
        self.max = max(self.max, error.max().item())
        # Nothing in parts of nothing is nothing.
        parts = error / magnitude.clamp_min(torch.finfo(torch.float64).smallest_normal)
        self.scaled = max(self.scaled, parts.max().item())
        self.count += error.numel()
        self._sum += error.sum().item()
        self._squares += vector_norm(error).item() ** 2
        self._exact_squares += vector_norm(exact.nan_to_num(0, 0, 0)).item() ** 2


@dataclass
class Comparison:
    """The errors of the solution's and of the reference's result beside each other."""

    name: str
    solution: Errors
    reference: Errors

    @staticmethod
    def of(name: str, allowance: Allowance) -> "Comparison":
        """Without elements yet."""
        return Comparison(name, Errors(allowance), Errors(allowance))

    def problem(self, strict: bool = False) -> str | None:
        """The broken promises, in words.

        The promise: every element within the allowance, or errors no larger than the reference's;
        if `strict`, the latter alone.
        """
        ours, eager = self.solution, self.reference
        if not strict and not ours.beyond:
            return None
        for metric, noise in NOISE.items():
            got, limit = getattr(ours, metric), getattr(eager, metric)
            if not (got <= noise * limit and math.isfinite(got)):
                where = f", {ours.beyond:,} beyond it: {ours.first}" if ours.beyond else ""
                return (
                    f"{metric} error {got:.3g}, the reference's {limit:.3g} "
                    f"({ours.count:,} elements{where})"
                )
        return None

    def row(self) -> dict[str, object]:
        """For the report."""
        values: dict[str, object] = {"name": self.name}
        for who in ("solution", "reference"):
            errors = getattr(self, who)
            for metric in ("max", "mean", "relative", "scaled"):
                value = getattr(errors, metric)
                values[f"{who}_{metric}"] = value if math.isfinite(value) else None  # as JSON can
        return values


def precision() -> str:
    """torch's setting for float32 products, in effect now."""
    return torch.get_float32_matmul_precision()


def compare_output(
    name: str,
    ours: torch.Tensor,
    eager: torch.Tensor,
    x: torch.Tensor,
    module: nn.Module,
    allowance: Allowance | None = None,
) -> Comparison:
    """The errors of two outputs of one shape `[..., out_features]` for x and the parameters."""
    allowance = allowance or Allowance.of(x.dtype, precision(), x.shape[-1])
    comparison = Comparison.of(name, allowance)
    divisor = module.divisor
    for part, _, z, magnitude in _blocks(x, module.linear):
        exact, magnitude = torch.relu(z) / divisor, magnitude / abs(divisor)
        comparison.solution.add(_rows(ours)[:, part], exact, magnitude)
        comparison.reference.add(_rows(eager)[:, part], exact, magnitude)
    return comparison


def _blocks(
    x: torch.Tensor, linear: nn.Linear
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Slices of the outputs; their weight, pre-activation and sums of magnitudes, in float64."""
    weight, bias = linear.weight.detach(), linear.bias
    x = _rows(x.detach()).double()
    for start in range(0, len(weight), BLOCK):
        part = slice(start, start + BLOCK)
        rows = weight[part].double()
        z, magnitude = x @ rows.T, x.abs() @ rows.abs().T
        if bias is not None:
            offset = bias.detach()[part].double()
            z, magnitude = z + offset, magnitude + offset.abs()
        yield part, rows, z, magnitude


def _rows(x: torch.Tensor) -> torch.Tensor:
    """All but the last dimension as one; a vector as one row."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]
