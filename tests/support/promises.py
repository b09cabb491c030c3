"""The promises about the error of a float32 product x weight^T, on any operands.

Errors are compared with those of torch's own product. An error is called relative if it is divided
by |x| |weight|^T + |bias|, which is the sum of the magnitudes of the result's terms. An "allowance"
is a relative error that a result may have even if torch's is smaller. The unit u is 2^-24, the
largest relative error of rounding to float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# fp16x3 may err this many times as much as torch's float32 product.
FP16X3_SLACK = 1.05
# The one-product kernel may err this many times as much as torch's TF32 product. Both round
# operands to 11 bits, but they sum differently.
ONE_PRODUCT_SLACK = 1.02
# The allowance of sums with few terms, where torch's sum may be exact.
FEW_TERMS_ERROR = 12 * 2.0**-24
# The allowance is multiplied by this if K < 256. There, an error of 12.7 u was found.
SHORT_SUMS_FACTOR = 1.25

# In the bound of docs/SPLIT.md, the largest element of a row counts as at least this.
LEAST_COUNTED = 2.0**-125

# The allowance of random compositions. docs/BENCHMARKS.md counts those that err by more than
# FEW_TERMS_ERROR and by more than FP16X3_SLACK times torch's error.
COMPOSITION_ALLOWANCE = 24 * 2.0**-24
LONG_INTERVAL_ALLOWANCE = 48 * 2.0**-24  # for a promotion interval of 128

# Cases whose results come from elements that are more than 2^24 times smaller than the largest
# element of their row. The only promise for these is the bound of docs/SPLIT.md.
BOUND_ONLY_CASES = [
    "graded and inversely graded, shuffled",
    "1e30 meets a zero column",
    "weight of 1e30 meets a zero column",
    "huge sampled weights meet zeros",
    "tiny shared columns",
    "one-hot x meets a tiny column",
]
# Cases whose sums have so few terms that the rounding of each term counts. They have the allowance
# FEW_TERMS_ERROR.
FEW_TERM_CASES = [
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
# Cases in which one fp16 product may err more than TF32's: many of their operands are halfway
# between two numbers, which fp16 and TF32 may round to different sides, or fp16 does not have the
# range of a row.
LESS_ACCURATE_THAN_TF32 = [
    "12-bit integers",
    "integers, larger ones in the sample",
    "one-hot x meets a tiny column",
    "huge sampled weights meet zeros",
]
# Cases without the promise about the relative error at `high`. Each of their results is one element
# of weight. fp16 keeps fewer bits of it than TF32 if it is 2^17 times smaller than the largest
# element of its row. Relative to that largest element, the error is as small as TF32's.
NO_RELATIVE_PROMISE = ["one-hot x"]


def allowance_of_long_sums(name: str) -> float:
    """Return the allowance of a named case with K >= 1024; infinite if it has the bound alone."""
    if name in BOUND_ONLY_CASES:
        return float("inf")
    return FEW_TERMS_ERROR if name in FEW_TERM_CASES else 0.0


def allowance_of_short_sums(name: str) -> float:
    """Return the allowance of a named case with K < 1024, where every sum may have few terms.

    In "large values meet zeros" 1 in 50 columns counts. With a short K, all terms of a sum may be
    more than 2^24 times smaller than the largest element of their row.
    """
    if name == "large values meet zeros":
        return float("inf")
    return max(allowance_of_long_sums(name), FEW_TERMS_ERROR)


@dataclass(frozen=True)
class Errors:
    """The errors of the finite results.

    Attributes:
        max: the largest error.
        mean: the mean error.
        relative: the largest relative error.
    """

    max: float
    mean: float
    relative: float


class Reference:
    """relu(x weight^T + bias) / divisor in float64, with or without relu, and errors against it.

    Attributes:
        out: the result.
        magnitude: (|x| |weight|^T + |bias|) / |divisor|.
        bound: the largest error that fp16x3 may have, by docs/SPLIT.md, if the divisor is a power
            of two and at least 1.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor, divisor: float, relu: bool = True
    ) -> None:
        x = x.double()
        weight = weight.double()
        bias = bias.double()
        z = x @ weight.t() + bias
        self.out = (torch.relu(z) if relu else z) / divisor
        self.magnitude = (x.abs() @ weight.abs().t() + bias.abs()) / abs(divisor)
        k = x.shape[1]
        # The promise has two terms, and at float32's lower end 2^-149 + 2^-147 / |divisor| more.
        # This bound is stricter: it has only 2^-149. For a divisor that is a power of two, the
        # unscaled sum and the output are the only numbers that may be rounded to a subnormal, which
        # costs 2^-150 / |divisor| + 2^-150 (docs/SPLIT-PROOF.md, "float32's lower
        # end").
        largest_x, largest_weight = (
            rows.abs().amax(1).clamp(min=LEAST_COUNTED) for rows in (x, weight)
        )
        largest = largest_x[:, None] * largest_weight
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


def is_special_where_torch_is(got: Tensor, torch_result: Tensor, reference: Tensor) -> Tensor:
    """Return for each element whether our result is finite, inf, -inf or NaN as torch's is.

    Where torch's result overflowed, but the exact result is a finite float32, ours may also be
    finite.

    Args:
        got: our result.
        torch_result: torch's result.
        reference: the exact result in float64.
    """
    is_same = (got == torch_result) | (got.isnan() & torch_result.isnan())
    is_as_in_torch = torch.where(torch.isfinite(torch_result), torch.isfinite(got), is_same)
    torch_overflowed = ~torch.isfinite(torch_result) & torch.isfinite(reference.float())
    return is_as_in_torch | (torch_overflowed & torch.isfinite(got))


def bound_ratio(out: Tensor, reference: Reference) -> Tensor:
    """Return error / bound; 0 where operands are not finite or the sum may overflow."""
    ratio = (out.double() - reference.out).abs() / reference.bound
    ratio = torch.where(torch.isfinite(out), ratio, float("inf"))
    return torch.where(reference.magnitude < 2.0**127, ratio, 0)


def broken_promises(
    got: Tensor,
    torch_result: Tensor,
    reference: Reference,
    slack: float = 1.0,
    allowance: float = 0.0,
) -> list[str]:
    """Return a message for each promise that our result breaks; empty if it keeps all of them.

    The promises: infinities and NaN are where they are in torch's result. The maximum, mean and
    relative errors are at most `slack` times torch's, or the relative error is at most `allowance`.

    Args:
        got: our result.
        torch_result: torch's result.
        reference: the exact result.
        slack: a factor.
        allowance: a relative error.
    """
    broken = []
    wrong = ~is_special_where_torch_is(got, torch_result, reference.out)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        broken.append(
            f"{int(wrong.sum())} results misplaced, first at {at}: "
            f"{got[at].item()}, expected {torch_result[at].item()}"
        )
    errors = reference.errors(got)
    torch_errors = reference.errors(torch_result)
    if errors.relative <= allowance:
        return broken
    for name in ("max", "mean", "relative"):
        error = getattr(errors, name)
        allowed = slack * getattr(torch_errors, name)
        if not error <= allowed:
            broken.append(f"{name} error {error:.2e}, allowed {allowed:.2e}")
    return broken
