"""The promises that a float32 product x weight^T must keep, on any operands."""

from dataclasses import dataclass

import torch
from torch import Tensor

# One product and TF32 round operands to the same 11 bits, and differ in how they sum.
ONE_PRODUCT_SLACK = 1.02
# Three products may err so many times as much as torch's float32 product.
SLACK = 1.05
# Or more, if relative to |x| |weight|^T + |bias| no error of the case is larger: sums of few terms.
FEW_TERMS = 12 * 2.0**-24
# With K < 256 so many times as much: 12.7 u were found.
SHORT_SUMS = 1.25

# The most that a random composition errs by, relative to the same, where torch errs less.
# docs/SPLIT.md says how many err by more than FEW_TERMS.
COMPOSED = 24 * 2.0**-24
COMPOSED_OF_LONG_SEGMENTS = 48 * 2.0**-24  # of 128
# Results are made of elements more than 2^24 smaller than the largest of their row, and only the
# bound is promised.
WIDE = [
    "graded and inversely graded, shuffled",
    "1e30 meets a zero column",
    "weight of 1e30 meets a zero column",
    "huge sampled weights meet zeros",
    "tiny shared columns",
    "one-hot x meets a tiny column",
]
# Sums of so few terms that a rounding of each term counts: FEW_TERMS is their promise.
SHORT = [
    "weight that selects",
    "sparse x, 1 in 100",
    "sparse weight, 1 in 100",
    "sparse x and weight, 1 in 10",
    "first 7/8 of x are zero",
    "block-diagonal weight",
    "large values meet zeros",
    "last column large",
    "16 columns shared",
    "1 column shared",
    "one-hot x",
    "two wide rows of x",
    "128 wide rows of the weight",
    "one-hot x, scaled columns of the weight",
]
# One product rounds to 11 bits what TF32 has exactly, or carries less of the range of a row.
NOT_AS_TF32 = [
    "12-bit integers",
    "integers, larger ones in the sample",
    "one-hot x meets a tiny column",
    "huge sampled weights meet zeros",
]
# A result that is one element of the weight is as accurate as TF32's relative to the largest of its
# row; fp16 has fewer bits of one that is 2^17 smaller.
NOT_RELATIVE_TO_ITSELF = ["one-hot x"]


def few_terms(name: str) -> float:
    """What `broken_promises` allows a named case of K >= 1024."""
    return float("inf") if name in WIDE else FEW_TERMS if name in SHORT else 0.0


def few_terms_in_all(name: str) -> float:
    """The same for shorter K, where more of the sums have few terms.

    Where 1 in 50 columns counts, all that a sum has may be more than 2^24 below its row's largest.
    """
    return float("inf") if name == "large values meet zeros" else few_terms(name) or FEW_TERMS


@dataclass(frozen=True)
class Errors:
    """Maximum, mean, and maximum relative to |x| |weight|^T + |bias|, of what is finite."""

    max: float
    mean: float
    relative: float


class Reference:
    """relu(x weight^T + bias) / divisor in float64, and errors against it; relu may be left out.

    Attributes:
        out: the result.
        magnitude: (|x| |weight|^T + |bias|) / |divisor|.
        bound: what three products may err.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor, divisor: float, relu: bool = True
    ) -> None:
        x, weight, bias = x.double(), weight.double(), bias.double()
        z = x @ weight.t() + bias
        self.out = (torch.relu(z) if relu else z) / divisor
        self.magnitude = (x.abs() @ weight.abs().t() + bias.abs()) / abs(divisor)
        k = x.shape[1]
        # 2^-40 of the largest product, k times, is lost below the range of the pieces; the last
        # places are those of two subnormal results.
        largest = x.abs().amax(1)[:, None] * weight.abs().amax(1)
        self.bound = (64 + k / 64) * 2.0**-24 * self.magnitude
        self.bound += 2.0**-40 * k * largest / abs(divisor) + 2.0**-149

    def errors(self, out: Tensor) -> Errors:
        """The errors of out where out and the reference are finite."""
        assert out.shape == self.out.shape
        finite = torch.isfinite(out) & torch.isfinite(self.out)
        error = (out.double() - self.out).abs()[finite]
        if not error.numel():
            return Errors(0, 0, 0)
        # 0 / 0: a sum without a term that is not zero, of which any error is infinite.
        relative = torch.where(error == 0, 0, error / self.magnitude[finite])
        return Errors(error.max().item(), error.mean().item(), relative.max().item())


def same_place(out: Tensor, trusted: Tensor, reference: Tensor) -> Tensor:
    """Where out is finite, inf or NaN as trusted is, or finite where only trusted overflowed."""
    same = (out == trusted) | (out.isnan() & trusted.isnan())
    overflowed = ~torch.isfinite(trusted) & torch.isfinite(reference.float())
    return torch.where(torch.isfinite(trusted) | overflowed, torch.isfinite(out), same) | (
        overflowed & same
    )


def of_bound(out: Tensor, reference: Reference) -> Tensor:
    """The error in parts of its bound; 0 where infinities, NaN or overflow may come in."""
    parts = (out.double() - reference.out).abs() / reference.bound
    parts = torch.where(torch.isfinite(out), parts, float("inf"))
    return torch.where(reference.magnitude < 2.0**127, parts, 0)


def broken_promises(
    out: Tensor, trusted: Tensor, reference: Reference, slack: float = 1.0, few_terms: float = 0.0
) -> list[str]:
    """The errors of out beyond slack times trusted, in words; empty if it keeps the promise.

    Larger ones may be if, relative to |x| |weight|^T + |bias|, none is more than few_terms.
    """
    broken = []
    wrong = ~same_place(out, trusted, reference.out)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        broken.append(
            f"{int(wrong.sum())} results misplaced, first at {at}: "
            f"{out[at].item()}, expected {trusted[at].item()}"
        )
    got, allowed = reference.errors(out), reference.errors(trusted)
    if got.relative <= few_terms:
        return broken
    for name in ("max", "mean", "relative"):
        error, bound = getattr(got, name), slack * getattr(allowed, name)
        if not error <= bound:
            broken.append(f"{name} error {error:.2e}, allowed {bound:.2e}")
    return broken
