"""The limits of a result, which follow from the errors of the reference's own result."""

import math
from dataclasses import dataclass, field

import torch

from referee.comparison.accuracy import ErrorSizes, typical_error
from referee.comparison.budget import (
    Budget,
    budget_from_errors,
    budget_without_float64,
    typical_limit,
)
from referee.comparison.reference_values import ReferenceValues


@dataclass(frozen=True)
class Limits:
    """How far off a result may be, and the errors from which that follows.

    Attributes:
        budget: the error budget.
        reference_errors: how far off the reference's own result is: eager's, or the one in TF32
            if that is further off; zeros where there is no exact result.
        typical_limit: the largest typical error that a result may have, in any draw; see
            `accuracy.typical_error`. It is infinity where there is no exact result.
    """

    budget: Budget
    reference_errors: ErrorSizes = field(default_factory=ErrorSizes)
    typical_limit: float = math.inf


def limits_of(values: ReferenceValues, terms: int, in_tf32: torch.Tensor | None) -> Limits:
    """Return the limits of results in floats.

    Args:
        values: the reference's result for the draw that sets the limits.
        terms: the number of terms of the longest sum.
        in_tf32: the flat result in float64 from operands rounded to TF32, if eager may use TF32;
            None otherwise.
    """
    dtype = values.eager.dtype
    if values.exact is None:
        return Limits(budget_without_float64(dtype))
    errors = values.errors_of(values.eager)
    typical = typical_error(values.eager, values.exact)
    if in_tf32 is not None:
        errors_in_tf32 = values.errors_of(in_tf32.to(values.eager))
        if errors_in_tf32.mean > errors.mean:
            errors = errors_in_tf32
        typical = max(typical, typical_error(in_tf32, values.exact))
    return Limits(
        budget=budget_from_errors(errors, dtype, terms),
        reference_errors=errors,
        typical_limit=typical_limit(typical, errors, dtype, terms),
    )
