"""The second look: which wrong elements of a result rounding explains.

Where the reference is discontinuous, as `sign(x @ w)` is, an honest result differs entirely from
eager's in a few elements. So the reference runs again on the same inputs, several times, each time
with other roundings. An element is excused if rounding moves the reference's own result that far.
"""

from collections.abc import Callable, Iterator

import torch

from referee.comparison.accuracy import count_true, element_errors
from referee.comparison.budget import Budget
from referee.comparison.compare import blocks, flat_reals

# Nothing is excused if more than this share of the elements is wrong, or if other roundings move
# more than this share far. In small results, where the count below is larger, it is the limit.
LARGEST_UNSTABLE_SHARE = 0.01
LEAST_UNSTABLE_COUNT = 4
# An element is moved far if it moves by more than FAR times what the budget allows.
FAR = 16

# Yields the reference's results for the same inputs, rounded otherwise; see `other_roundings`.
SecondLook = Callable[[], Iterator[torch.Tensor]]


def find_excused(
    wrong: torch.Tensor,
    got: torch.Tensor,
    eager: torch.Tensor,
    budget: Budget,
    second_look: SecondLook,
) -> torch.Tensor | None:
    """Return a flat mask of the wrong elements that rounding explains; None if there are none.

    Rounding explains an element if results of the reference that are rounded otherwise reach the
    solution's value there, or are on both sides of it. If one of these results is far from eager's
    in many elements, rounding says too little, and nothing is excused.

    Args:
        wrong: a flat mask of the wrong elements.
        got: the solution's flat result.
        eager: eager's flat result for the same inputs.
        budget: how far off an element may be.
        second_look: yields the reference's results, rounded otherwise.
    """
    most = max(LARGEST_UNSTABLE_SHARE * len(got), LEAST_UNSTABLE_COUNT)
    if not 0 < count_true(wrong) <= most:
        return None
    indices = wrong.nonzero().view(-1)
    low, high = eager[indices], eager[indices]
    got_there = got[indices]
    is_reached = torch.zeros_like(indices, dtype=torch.bool)
    for result in second_look():
        other = flat_reals(result)
        if other.shape != eager.shape or _count_far(other, eager, budget) > most:
            return None
        values = other[indices]
        expected = values.double()
        is_reached |= element_errors(got_there, values, expected) <= budget.allowed(expected)
        if got.is_floating_point():
            low, high = low.minimum(values), high.maximum(values)
            is_reached |= (low <= got_there) & (got_there <= high)
        if is_reached.all():
            break
    if not is_reached.any():
        return None
    excused = torch.zeros_like(wrong)
    excused[indices] = is_reached
    return excused


def _count_far(other: torch.Tensor, eager: torch.Tensor, budget: Budget) -> int:
    """Return how many elements of a flat result are far from eager's; see FAR."""
    count = 0
    for block in blocks(len(eager)):
        expected = eager[block].double()
        error = element_errors(other[block], eager[block], expected)
        count += int((error > FAR * budget.allowed(expected)).sum())
    return count
