"""Mistakes of a result in words, for messages."""

import torch

from referee.comparison.accuracy import count_true
from referee.comparison.compare import describe_index, describe_values, first_true
from referee.comparison.reference_values import Measured, ReferenceValues

# Faults of elements, in messages.
DIFFER = "elements differ"
BEYOND_BUDGET = "elements beyond the error budget"


def describe_mistake(
    measured: Measured,
    got: torch.Tensor,
    values: ReferenceValues,
    mean_limit: float,
    fault: str = BEYOND_BUDGET,
) -> str | None:
    """Return what is wrong with a result, in words; None if nothing is.

    Args:
        measured: how far off the result is.
        got: the flat result.
        values: the reference's result; the message names an index in its shape.
        mean_limit: the largest mean error.
        fault: the words for elements that are off by too much.
    """
    if measured.wrong.any():
        return _describe_wrong_elements(measured.wrong, got, values, fault)
    if measured.errors.mean > mean_limit:
        return describe_mean_error(measured.errors.mean, mean_limit)
    return None


def describe_mean_error(mean: float, mean_limit: float) -> str:
    """Return a mean error that is too large, and the largest that is allowed."""
    return f"mean error {mean:.3g}; eager's own error allows {mean_limit:.3g}"


def _describe_wrong_elements(
    wrong: torch.Tensor, got: torch.Tensor, values: ReferenceValues, fault: str
) -> str:
    """Return how many elements are wrong, and the first of them, in words."""
    first = first_true(wrong)
    if got.is_floating_point():
        expected = values.expected(slice(first, first + 1))
    else:
        expected = values.eager[first]
    index = describe_index(first, values.shape, values.dtype)
    both_values = describe_values(got[first], expected)
    return f"{count_true(wrong):,} of {len(wrong):,} {fault}, the first at {index}: {both_values}"
