"""The error budget: how far off a result may be.

The budget is a multiple of eager's own error, which the reference in float64 shows. A float32
result may be FACTOR times as far off, because a fast exponential is less accurate than torch's; it
may also be as far off as a plain sum of all terms. Products in TF32 or float16 are outside this
budget: their errors are some 1,000 times eager's. Where eager's own error is that of a lower
precision, as for half types, the factor is LOW_FACTOR.

VERDICTS.md, "What is right", has the formulas.
"""

import math
from dataclasses import dataclass, replace

import torch

from referee.comparison.accuracy import CLASSES, Errors

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
# So many elements may be off by their slack in another draw, however small eager's mean error was.
FREE_ELEMENTS = 4
# Relative and absolute tolerances where there is no result in float64. They are KernelBench's.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
HALF_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Budget:
    """How far off a result may be.

    Attributes:
        slack: how far each element may be off, regardless of its magnitude.
        relative_slack: how much further each element may be off, relative to its magnitude.
        mean_slack: the largest mean error.
    """

    slack: float = 0.0
    relative_slack: float = 0.0
    mean_slack: float = math.inf

    def allowed(self, expected: torch.Tensor) -> torch.Tensor:
        """Return how far off each element may be.

        Args:
            expected: the right values, in float64.
        """
        relative = expected.abs().mul_(self.relative_slack).nan_to_num_(0, 0, 0)
        return relative.add_(self.slack)

    def grown(self, growth: float, growth_of_mean: float) -> "Budget":
        """Return the budget for larger results.

        Args:
            growth: what the slack of each element is multiplied by.
            growth_of_mean: what the mean slack is multiplied by.
        """
        return replace(self, slack=growth * self.slack, mean_slack=growth_of_mean * self.mean_slack)

    def or_larger(self, other: "Budget") -> "Budget":
        """Return the larger of two budgets, for each of the attributes."""
        return Budget(
            slack=max(self.slack, other.slack),
            relative_slack=max(self.relative_slack, other.relative_slack),
            mean_slack=max(self.mean_slack, other.mean_slack),
        )


def budget_from_errors(eager: Errors, dtype: torch.dtype, terms: int) -> Budget:
    """Return the error budget of a result whose float64 result is known.

    Args:
        eager: the errors of eager's result.
        dtype: the dtype of the result.
        terms: the number of terms of the longest sum.
    """
    eps = torch.finfo(dtype).eps
    is_low = eager.relative > CLASSES["float32-grade"]
    factor = LOW_FACTOR if is_low else FACTOR
    roundings = LOW_ROUNDINGS if is_low else ROUNDINGS
    budget = Budget(
        slack=factor * eager.largest + eps * eager.root_mean_square,
        relative_slack=roundings * eps,
        mean_slack=factor * eager.mean + roundings * eps * eager.mean_magnitude,
    )
    if dtype != torch.float32 or is_low:
        return budget
    return budget.or_larger(_budget_of_plain_sum(terms, eps, eager.root_mean_square))


def mean_slack_in_other_draw(budget: Budget, eager: Errors, count: int) -> float:
    """Return how large a result's mean distance from eager's result may be.

    This is for results of the same magnitude as in the draw that set the budget.

    Eager's result is off itself. If both are within their limits, their mean distance is at most
    the sum of the two limits. FREE_ELEMENTS are added, because the mean of few errors varies.

    Args:
        budget: the error budget in the draw that set it.
        eager: the errors of eager's result in that draw.
        count: the number of elements.
    """
    mean_slack = budget.mean_slack
    if eager.are_sparse:
        mean_slack = max(mean_slack, SPARSE_FACTOR * eager.mean)
    return mean_slack + eager.mean + FREE_ELEMENTS * budget.slack / max(count, 1)


def typical_slack(typical: float, eager: Errors, dtype: torch.dtype, terms: int) -> float:
    """Return the largest typical error of a result, relative to its elements' typical size.

    Args:
        typical: eager's typical error; see `accuracy.typical_error`.
        eager: the errors of eager's result.
        dtype: the dtype of the result.
        terms: the number of terms of the longest sum.
    """
    # The unit here is the elements' typical size, which is thus 1. Eager's typical error takes the
    # place of its largest one. The sum is then the budget's limit for an element of that size.
    typical_errors = replace(eager, largest=typical, root_mean_square=1.0)
    budget = budget_from_errors(typical_errors, dtype, terms)
    return budget.slack + budget.relative_slack


def budget_without_float64(dtype: torch.dtype) -> Budget:
    """Return the error budget of a result that is compared with eager's alone."""
    tolerance = TOLERANCES.get(dtype, HALF_TOLERANCE)
    return Budget(slack=tolerance, relative_slack=tolerance)


def _budget_of_plain_sum(terms: int, eps: float, root_mean_square: float) -> Budget:
    """Return how far off a sum may be if its terms are added in order.

    Args:
        terms: how many terms it has.
        eps: the distance from 1 to the next number; a rounding is half of it.
        root_mean_square: that of the result.
    """
    deviation = math.sqrt(terms) / 4 * (eps / 2)
    # However long the sum, the relative slack is at most that of a float32-grade result.
    deviation = min(deviation, CLASSES["float32-grade"] / DEVIATIONS)
    return Budget(
        slack=DEVIATIONS * deviation * root_mean_square,
        relative_slack=DEVIATIONS * deviation,
        mean_slack=DEVIATIONS_OF_MEAN * deviation * root_mean_square,
    )
