"""The second look: which wrong elements of a result rounding explains.

Where the reference is discontinuous, as `sign(x @ w)` is, an honest result differs entirely from
eager's in a few elements. So the reference runs again on the same inputs, several times, each time
with other roundings. An element is excused if rounding moves the reference's own result that far.
"""

from collections.abc import Callable, Iterator

import torch

from referee.comparison.accuracy import count_true, element_errors
from referee.comparison.budget import Budget
from referee.comparison.compare import flat_reals
from referee.comparison.reference_values import Measured, ReferenceValues

# Nothing is excused if more than this share of the elements is wrong, or if more than this share is
# unstable. In small results, where the count below is larger, it is the limit.
MAX_UNSTABLE_SHARE = 0.01
MIN_UNSTABLE_COUNT = 4
# An element is unstable if other roundings move it by more than this multiple of what the budget
# allows.
MAX_STABLE_MOVE = 16

# Yields the reference's results for the same inputs with other roundings; see `other_roundings`.
RoundedOtherwise = Callable[[], Iterator[torch.Tensor]]


def measure_with_second_look(
    values: ReferenceValues,
    got: torch.Tensor,
    budget: Budget,
    rounded_otherwise: RoundedOtherwise | None,
) -> Measured:
    """Measure how far off a flat result is; errors that rounding explains count as zeros.

    Args:
        values: the reference's result.
        got: the solution's flat result.
        budget: how far off an element may be.
        rounded_otherwise: yields the reference's results with other roundings; None if no wrong
            element is excused.
    """
    measured = values.measure(got, budget)
    if rounded_otherwise is None:
        return measured
    excused = find_excused(measured.wrong, got, values.eager, budget, rounded_otherwise)
    if excused is None:
        return measured
    return values.measure(got, budget, excused)


def find_excused(
    wrong: torch.Tensor,
    got: torch.Tensor,
    eager: torch.Tensor,
    budget: Budget,
    rounded_otherwise: RoundedOtherwise,
) -> torch.Tensor | None:
    """Return a flat mask of the wrong elements that rounding explains; None if there are none.

    Rounding explains an element if results of the reference that are rounded otherwise reach the
    solution's value there, or are on both sides of it. If one of these results has many unstable
    elements, rounding says too little, and nothing is excused.

    Args:
        wrong: a flat mask of the wrong elements.
        got: the solution's flat result.
        eager: eager's flat result for the same inputs.
        budget: how far off an element may be.
        rounded_otherwise: yields the reference's results with other roundings.
    """
    most = max(MAX_UNSTABLE_SHARE * len(got), MIN_UNSTABLE_COUNT)
    if not 0 < count_true(wrong) <= most:
        return None
    wrong_elements = _WrongElements(wrong, got, eager)
    for result in rounded_otherwise():
        other = flat_reals(result)
        if other.shape != eager.shape or _count_unstable(other, eager, budget) > most:
            return None
        wrong_elements.add(other, budget)
        if wrong_elements.are_explained.all():
            break
    if not wrong_elements.are_explained.any():
        return None
    excused = torch.zeros_like(wrong)
    excused[wrong_elements.indices] = wrong_elements.are_explained
    return excused


class _WrongElements:
    """The wrong elements of a result, and those of them that rounding has explained so far.

    Args:
        wrong: a flat mask of the wrong elements.
        got: the solution's flat result.
        eager: eager's flat result.

    Attributes:
        indices: the indices of the wrong elements.
        are_explained: a mask over these, true where rounding explains the solution's value.
    """

    def __init__(self, wrong: torch.Tensor, got: torch.Tensor, eager: torch.Tensor) -> None:
        self.indices = wrong.nonzero().view(-1)
        self.are_explained = torch.zeros_like(self.indices, dtype=torch.bool)
        self._got = got[self.indices]
        # The range of the reference's values, eager's and those with other roundings.
        self._lowest = eager[self.indices]
        self._highest = self._lowest

    def add(self, other: torch.Tensor, budget: Budget) -> None:
        """Explain the elements whose values a result with other roundings reaches or passes.

        Args:
            other: a flat result of the reference, rounded otherwise.
            budget: how far off an element may be.
        """
        values = other[self.indices]
        expected = values.double()
        errors = element_errors(self._got, values, expected)
        self.are_explained |= errors <= budget.allowed(expected)
        if values.is_floating_point():
            self._lowest = self._lowest.minimum(values)
            self._highest = self._highest.maximum(values)
            self.are_explained |= (self._lowest <= self._got) & (self._got <= self._highest)


def _count_unstable(other: torch.Tensor, eager: torch.Tensor, budget: Budget) -> int:
    """Return how many elements of a flat result are unstable; see MAX_STABLE_MOVE."""
    count = 0
    for _block, expected, error in ReferenceValues(eager).errors_by_block(other):
        count += int((error > MAX_STABLE_MOVE * budget.allowed(expected)).sum())
    return count
