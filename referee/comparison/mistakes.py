"""Mistakes of a result in words, for messages."""

import torch

from referee.comparison.accuracy import count_true
from referee.comparison.compare import describe_index, describe_values, first_true, flat_reals

BEYOND_BUDGET = "elements beyond the error budget"


def describe_wrong(wrong: torch.Tensor, got: torch.Tensor, eager: torch.Tensor) -> str | None:
    """Return how many elements are wrong, and the first of them; None if none is.

    Args:
        wrong: a flat mask.
        got: the result; it may be flat.
        eager: eager's result for the same inputs, in its own shape.
    """
    if not wrong.any():
        return None
    first = first_true(wrong)
    index = describe_index(first, eager.shape, eager.dtype)
    values = describe_values(flat_reals(got)[first], flat_reals(eager)[first])
    count = f"{count_true(wrong):,} of {len(wrong):,}"
    return f"{count} {BEYOND_BUDGET}, the first at {index}: {values}"


def describe_mean_error(mean: float, mean_limit: float) -> str:
    """Return a mean error that is too large, and the largest that is allowed."""
    return f"mean error {mean:.3g}; eager's own error allows {mean_limit:.3g}"
