"""Mistakes of a result in words, for messages."""

import torch

from referee.comparison.accuracy import count_true


def describe_wrong(wrong: torch.Tensor, got: torch.Tensor, eager: torch.Tensor) -> str | None:
    """Return how many elements are wrong, and the first of them; None if none is.

    Args:
        wrong: a flat mask.
        got: the flat result.
        eager: eager's flat result for the same inputs.
    """
    first_wrong = describe_first_wrong(wrong, got, eager)
    if not first_wrong:
        return None
    count = f"{count_true(wrong):,} of {got.numel():,}"
    return f"{count} elements beyond the error budget, the first: {first_wrong}"


def describe_first_wrong(wrong: torch.Tensor, got: torch.Tensor, expected: torch.Tensor) -> str:
    """Return the first wrong element; "" if there is none.

    Args:
        wrong: a flat mask.
        got: the flat result.
        expected: the right values.
    """
    if not wrong.any():
        return ""
    index = wrong.to(torch.uint8).argmax().item()
    return f"got {got[index]:.9g}, expected {expected[index]:.9g}"


def describe_mean_error(mean: float, mean_slack: float) -> str:
    """Return a mean error that is too large, and the largest that is allowed."""
    return f"mean error {mean:.3g}; eager's own error allows {mean_slack:.3g}"
