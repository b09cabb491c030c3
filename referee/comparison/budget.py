"""The error budget: how far off a result may be.

The budget is a multiple of eager's own error, which the reference in float64 shows; but a float32
result may also be as far off as a plain sum of all terms. VERDICTS.md, "What is right?", has the
formulas, and INTERNALS.md, "Long sums", those of sums.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from referee.comparison.accuracy import CLASSES, ErrorSizes

FACTOR = 32
ROUNDINGS = 8  # of the result; allowed even where eager's result is exact
LOW_FACTOR = 4
LOW_ROUNDINGS = 1
# The roundings of a plain sum of n positive terms, added in order, make an error with a standard
# deviation of sqrt(n) / 4 roundings. An element may be off by DEVIATIONS times as much, and the
# elements on average by DEVIATIONS_OF_MEAN times as much.
DEVIATIONS = 16
DEVIATIONS_OF_MEAN = 4
# If eager's errors are sparse, its mean error varies with the draw: where rounding flips a sign in
# one element, it may flip ten in another draw. With this factor, an honest mean error is beyond the
# limit with a probability below 1e-8, even in 1,600 draws, if the flips are independent.
SPARSE_FACTOR = 64
# This many elements may be off by their atol in another draw, however small eager's mean error was.
FREE_ELEMENTS = 4
# Relative and absolute tolerances where there is no result in float64. That of float32 is
# KernelBench's.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
HALF_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Budget:
    """How far off a result may be.

    Attributes:
        atol, rtol: an element whose right value is y may be off by atol + rtol |y|, as in
            `torch.allclose`.
        mean_limit: the largest mean error.
        typical_limit: the largest typical error, see `accuracy.typical_error`. It is the same in
            any draw, and infinity where there is no exact result.
    """

    atol: float = 0.0
    rtol: float = 0.0
    mean_limit: float = math.inf
    typical_limit: float = math.inf

    def allowed(self, expected: torch.Tensor) -> torch.Tensor:
        """Return how far off each element may be.

        Args:
            expected: the right values, in float64.
        """
        relative = expected.abs().mul_(self.rtol).nan_to_num_(0, 0, 0)
        return relative.add_(self.atol)


class Growth(NamedTuple):
    """How much larger eager's result is than in the budget draw; 1 if it is not larger.

    Attributes:
        of_elements: by the root mean square.
        of_mean: by the mean magnitude, but at least `of_elements`.
    """

    of_elements: float = 1.0
    of_mean: float = 1.0


NO_GROWTH = Growth()


@dataclass(frozen=True)
class _Leniency:
    """How lenient the budget of a dtype is: the factors in VERDICTS.md's table.

    Attributes:
        eps: the distance from 1 to the next number; a rounding is half of it.
        factor: the multiple of eager's own error that is allowed.
        roundings: how many eps of its own magnitude an element may be off, even where eager's
            result is exact; the same number holds for the mean.
        sum_deviation: the standard deviation of a plain sum, relative to the result; 0 where the
            budget need not allow a plain sum.
    """

    eps: float
    factor: int
    roundings: int
    sum_deviation: float

    def atol_for(self, largest_error: float, root_mean_square: float) -> float:
        """Return how far each element may be off, regardless of its magnitude.

        Args:
            largest_error: eager's largest error.
            root_mean_square: that of the exact result.
        """
        from_error = self.factor * largest_error + self.eps * root_mean_square
        from_plain_sum = DEVIATIONS * self.sum_deviation * root_mean_square
        return max(from_error, from_plain_sum)

    @property
    def rtol(self) -> float:
        """How much further each element may be off, relative to its magnitude."""
        return max(self.roundings * self.eps, DEVIATIONS * self.sum_deviation)

    def mean_limit_for(self, reference: ErrorSizes) -> float:
        """Return the largest mean error."""
        from_roundings = self.roundings * self.eps * reference.mean_magnitude
        from_error = self.factor * reference.mean + from_roundings
        from_plain_sum = DEVIATIONS_OF_MEAN * self.sum_deviation * reference.root_mean_square
        return max(from_error, from_plain_sum)

    def typical_limit_for(self, typical: float) -> float:
        """Return the largest typical error, for eager's typical error.

        It is the limit for an element of typical size, with eager's typical error in place of its
        largest one. Both are relative to the typical size, so the size itself is 1.
        """
        return self.atol_for(typical, root_mean_square=1.0) + self.rtol


def budget_from_errors(
    reference: ErrorSizes, dtype: torch.dtype, terms: int, typical: float = 0.0
) -> Budget:
    """Return the error budget of a result whose float64 result is known.

    Args:
        reference: the errors of the reference's own result.
        dtype: the dtype of the result.
        terms: the number of terms of the longest sum.
        typical: the typical error of the reference's own result.
    """
    leniency = _leniency(reference, dtype, terms)
    return Budget(
        atol=leniency.atol_for(reference.largest, reference.root_mean_square),
        rtol=leniency.rtol,
        mean_limit=leniency.mean_limit_for(reference),
        typical_limit=leniency.typical_limit_for(typical),
    )


def budget_without_float64(dtype: torch.dtype) -> Budget:
    """Return the error budget of a result that is compared only with eager's."""
    tolerance = TOLERANCES.get(dtype, HALF_TOLERANCE)
    return Budget(atol=tolerance, rtol=tolerance)


def budget_in_another_draw(
    budget: Budget, eager: ErrorSizes, count: int, growth: Growth = NO_GROWTH
) -> Budget:
    """Return how far from eager's result a result may be in another draw.

    Args:
        budget: that of the budget draw.
        eager: eager's errors in the budget draw.
        count: the number of elements.
        growth: how much larger eager's result is in the other draw.
    """
    mean_limit = budget.mean_limit
    if eager.are_sparse:
        mean_limit = max(mean_limit, SPARSE_FACTOR * eager.mean)
    free_elements = FREE_ELEMENTS * budget.atol / max(count, 1)
    return Budget(
        atol=growth.of_elements * budget.atol,
        rtol=budget.rtol,
        # Eager's result is off itself, so its own error is added.
        mean_limit=growth.of_mean * (mean_limit + eager.mean + free_elements),
        typical_limit=budget.typical_limit,
    )


def _leniency(reference: ErrorSizes, dtype: torch.dtype, terms: int) -> _Leniency:
    """Return how lenient the budget is; the arguments are those of `budget_from_errors`."""
    eps = torch.finfo(dtype).eps
    if reference.relative > CLASSES["float32-grade"]:
        return _Leniency(eps, LOW_FACTOR, LOW_ROUNDINGS, sum_deviation=0.0)
    sum_deviation = 0.0
    if dtype == torch.float32:
        sum_deviation = math.sqrt(terms) / 4 * (eps / 2)
        # However long the sum, rtol is at most that of a float32-grade result.
        sum_deviation = min(sum_deviation, CLASSES["float32-grade"] / DEVIATIONS)
    return _Leniency(eps, FACTOR, ROUNDINGS, sum_deviation)
