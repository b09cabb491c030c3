"""The promises about the error of a float32 product x weight^T, on any operands."""

from dataclasses import dataclass

import torch
from torch import Tensor

# The single-product kernel may err this many times as much as torch's TF32 product. Both round
# operands to 11 bits, but they sum differently.
ONE_PRODUCT_SLACK = 1.02
# fp16x3 may err this many times as much as torch's float32 product.
SLACK = 1.05
# A case passes as well if its largest error is at most this much of |x| |weight|^T + |bias|, even
# if torch's errors are smaller: with few terms torch's sum may be exact.
FEW_TERMS = 12 * 2.0**-24
# FEW_TERMS is multiplied by this if K < 256. 12.7 u were found.
SHORT_SUMS = 1.25

# The limit, relative to the same, for the error of a random composition where torch errs less.
# docs/SPLIT.md says how many err by more than FEW_TERMS.
COMPOSED = 24 * 2.0**-24
COMPOSED_OF_LONG_INTERVALS = 48 * 2.0**-24  # for a promotion interval of 128

# Cases in which results consist of elements more than 2^24 times smaller than the largest of their
# row. Only the bound of docs/SPLIT.md is promised for these.
WIDE = [
    "graded and inversely graded, shuffled",
    "1e30 meets a zero column",
    "weight of 1e30 meets a zero column",
    "huge sampled weights meet zeros",
    "tiny shared columns",
    "one-hot x meets a tiny column",
]
# Cases whose sums have so few terms that the rounding of each term counts: FEW_TERMS is promised.
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
# Cases in which one fp16 product may err more than TF32: it rounds operands that are exact in TF32,
# or fp16 does not have the range of a row.
NOT_AS_TF32 = [
    "12-bit integers",
    "integers, larger ones in the sample",
    "one-hot x meets a tiny column",
    "huge sampled weights meet zeros",
]
# Cases in which each result is one element of weight. Relative to the largest of its row, the
# result is as accurate as TF32's; but fp16 has fewer bits of an element that is 2^17 smaller.
NOT_RELATIVE_TO_ITSELF = ["one-hot x"]


def few_terms(name: str) -> float:
    """Return the argument `few_terms` of `broken_promises` for a named case with K >= 1024."""
    if name in WIDE:
        return float("inf")
    return FEW_TERMS if name in SHORT else 0.0


def few_terms_in_all(name: str) -> float:
    """Return the same for shorter K, where the sums of every case may have few terms.

    In "large values meet zeros" 1 in 50 columns counts. With a short K, all terms of a sum may be
    more than 2^24 times smaller than the largest element of their row.
    """
    if name == "large values meet zeros":
        return float("inf")
    return max(few_terms(name), FEW_TERMS)


@dataclass(frozen=True)
class Errors:
    """The errors of the finite results.

    Attributes:
        max, mean: the maximum and the mean error.
        relative: the maximum error relative to |x| |weight|^T + |bias|.
    """

    max: float
    mean: float
    relative: float


class Reference:
    """relu(x weight^T + bias) / divisor in float64, with or without relu, and errors against it.

    Attributes:
        out: the result.
        magnitude: (|x| |weight|^T + |bias|) / |divisor|.
        bound: the largest error that fp16x3 may have, by docs/SPLIT.md.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor, divisor: float, relu: bool = True
    ) -> None:
        x, weight, bias = x.double(), weight.double(), bias.double()
        z = x @ weight.t() + bias
        self.out = (torch.relu(z) if relu else z) / divisor
        self.magnitude = (x.abs() @ weight.abs().t() + bias.abs()) / abs(divisor)
        k = x.shape[1]
        # The second line of the bound: hi and lo lose up to 2^-40 of the largest product for each
        # of k terms, and two subnormal results are rounded.
        largest = x.abs().amax(1)[:, None] * weight.abs().amax(1)
        self.bound = (64 + k / 64) * 2.0**-24 * self.magnitude
        self.bound += 2.0**-40 * k * largest / abs(divisor) + 2.0**-149

    def errors(self, out: Tensor) -> Errors:
        """Return the errors of out where out and the reference are finite."""
        assert out.shape == self.out.shape
        finite = torch.isfinite(out) & torch.isfinite(self.out)
        error = (out.double() - self.out).abs()[finite]
        if not error.numel():
            return Errors(0, 0, 0)
        # If all terms of a sum are zero, its magnitude is 0, and any error is infinitely large.
        relative = torch.where(error == 0, 0, error / self.magnitude[finite])
        return Errors(error.max().item(), error.mean().item(), relative.max().item())


def same_place(out: Tensor, trusted: Tensor, reference: Tensor) -> Tensor:
    """Return where out is finite, inf or NaN as trusted is.

    Where trusted overflowed, but the exact result is a finite float32, out may be finite too.
    """
    same = (out == trusted) | (out.isnan() & trusted.isnan())
    overflowed = ~torch.isfinite(trusted) & torch.isfinite(reference.float())
    should_be_finite = torch.isfinite(trusted) | overflowed
    is_right = torch.where(should_be_finite, torch.isfinite(out), same)
    return is_right | (overflowed & same)


def of_bound(out: Tensor, reference: Reference) -> Tensor:
    """Return error / bound; 0 where operands are not finite or the sum may overflow."""
    parts = (out.double() - reference.out).abs() / reference.bound
    parts = torch.where(torch.isfinite(out), parts, float("inf"))
    return torch.where(reference.magnitude < 2.0**127, parts, 0)


def broken_promises(
    out: Tensor, trusted: Tensor, reference: Reference, slack: float = 1.0, few_terms: float = 0.0
) -> list[str]:
    """Return a message for each promise that out breaks; empty if it keeps all of them.

    The maximum, mean and relative error of out are at most `slack` times those of trusted, torch's
    result, unless the relative error is at most `few_terms`. Infinities and NaN are where they are
    in trusted.
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
