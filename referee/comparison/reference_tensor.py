"""A result or gradient of the reference, with which a solution's is compared."""

import math
from dataclasses import dataclass

import torch

from referee.comparison.accuracy import ErrorSizes, typical_error
from referee.comparison.budget import Budget, budget_from_errors, budget_without_float64
from referee.comparison.compare import blocks, first_mismatch, flat_reals
from referee.comparison.mistakes import BEYOND_BUDGET, DIFFER, describe_mistake
from referee.comparison.reference_values import Measured, ReferenceValues
from referee.comparison.result_spec import ResultSpec
from referee.comparison.second_look import RoundedOtherwise, measure_with_second_look

# Factors by which the errors of two equally accurate results may differ by chance. The mean of many
# errors varies little; the maximum of n errors varies by 4% at n = 10^7, and more for a smaller n.
CHANCE_OF_MAX = 1.15
CHANCE_OF_MEAN = 1.02


@dataclass
class Comparison:
    """The comparison of a result with the reference's.

    Attributes:
        mistake: what is wrong with the result, in words; None if nothing is.
        errors: how far off the result is.
        has_eagers_bits: whether the result equals eager's.
        is_gross: whether it is another result, and not a less accurate one.
        wrong: a flat mask of the elements that are off by too much.
    """

    mistake: str | None
    errors: ErrorSizes
    has_eagers_bits: bool
    is_gross: bool
    wrong: torch.Tensor


class ReferenceTensor:
    """A result or a gradient of the reference for one draw of inputs, with its values.

    These values set the error budget. `compare` judges a solution's result for that draw.
    `spec` judges results for other draws; it needs none of the values, so a caller keeps it and
    drops the tensor.

    A complex number is compared as two real ones.

    Args:
        eager: the result as the reference computes it.
        exact: the result in float64; None where there is none.
        terms: the number of terms of the longest sum.
        element_limits: how far off each element may be; None if the budget decides. A result
            beyond them is still right if its errors are as small as eager's.
        in_tf32: the result from operands rounded to TF32, if eager may use TF32; None otherwise.
            The budget then allows the errors of this result, too.
        must_equal_eager: whether only eager's values are right. For integers and booleans this is
            always so.

    Attributes:
        spec: the demands on a solution's result, in this draw and in others.
    """

    def __init__(  # noqa: PLR0913 - three results, and how far off they may be
        self,
        eager: torch.Tensor,
        exact: torch.Tensor | None,
        terms: int = 1,
        element_limits: torch.Tensor | None = None,
        in_tf32: torch.Tensor | None = None,
        *,
        must_equal_eager: bool = False,
    ) -> None:
        real_dtype = eager.dtype.to_real()
        must_equal_eager = must_equal_eager or not real_dtype.is_floating_point
        # A result in float64 is compared with eager's: nothing more exact is known.
        needs_exact = not must_equal_eager and real_dtype != torch.float64
        self._values = ReferenceValues(eager, exact if needs_exact else None, element_limits)
        if must_equal_eager:
            budget, reference_errors = Budget(), ErrorSizes()
        else:
            budget, reference_errors = _budget_and_errors(self._values, terms, in_tf32)
        mean_limit_elsewhere = budget.mean_limit
        if element_limits is not None:
            mean_limit_elsewhere = max(budget.mean_limit, _mean(self._values.element_limits))
        self.spec = ResultSpec(
            shape=list(eager.shape),
            strides=list(eager.stride()),
            dtype=eager.dtype,
            must_equal_eager=must_equal_eager,
            budget=budget,
            reference_errors=reference_errors,
            mean_limit_elsewhere=mean_limit_elsewhere,
        )

    @property
    def eager(self) -> torch.Tensor:
        """Eager's result, flat."""
        return self._values.eager

    def forget_exact(self) -> None:
        """Free the exact result; `compare` then uses eager's. The budget stays."""
        self._values.exact = None

    def compare(
        self, got: torch.Tensor, rounded_otherwise: RoundedOtherwise | None = None
    ) -> Comparison:
        """Compare a result with the reference's.

        Args:
            got: the result.
            rounded_otherwise: yields the reference's results with other roundings; None if no wrong
                element is excused.
        """
        got = flat_reals(got)
        must_equal_eager = self.spec.must_equal_eager
        has_eagers_bits = first_mismatch(got, self.eager) is None
        if has_eagers_bits and must_equal_eager:  # there are no errors to measure
            measured = Measured(torch.zeros_like(got, dtype=torch.bool), ErrorSizes())
        else:
            measured = measure_with_second_look(
                self._values, got, self.spec.budget, rounded_otherwise
            )
        return Comparison(
            mistake=self._describe_mistake(measured, got),
            errors=measured.errors,
            has_eagers_bits=has_eagers_bits,
            is_gross=must_equal_eager or measured.errors.is_gross,
            wrong=measured.wrong,
        )

    def _describe_mistake(self, measured: Measured, got: torch.Tensor) -> str | None:
        """Return what is wrong with a flat result, in words; None if nothing is."""
        mean_limit = self.spec.budget.mean_limit
        if self._values.element_limits is not None:
            if self._is_as_accurate_as_eager(measured.errors):
                return None
            mean_limit = math.inf  # only the elements are limited
        fault = DIFFER if self.spec.must_equal_eager else BEYOND_BUDGET
        return describe_mistake(measured, got, self._values, mean_limit, fault)

    def _is_as_accurate_as_eager(self, errors: ErrorSizes) -> bool:
        """Return whether a result's errors are as small as eager's, except for chance."""
        eager_errors = self.spec.reference_errors
        is_max_small = errors.largest <= CHANCE_OF_MAX * eager_errors.largest
        is_mean_small = errors.mean <= CHANCE_OF_MEAN * eager_errors.mean
        return is_max_small and is_mean_small


def _budget_and_errors(
    values: ReferenceValues, terms: int, in_tf32: torch.Tensor | None
) -> tuple[Budget, ErrorSizes]:
    """Return the error budget of a result in floats, and the errors from which it follows.

    These are eager's errors, or those of the result in TF32 if that is further off. They are zeros
    where there is no exact result.

    Args:
        values: the reference's result for the draw that sets the budget.
        terms: the number of terms of the longest sum.
        in_tf32: the result from operands rounded to TF32, if eager may use TF32; None otherwise.
    """
    dtype = values.eager.dtype
    if values.exact is None:
        return budget_without_float64(dtype), ErrorSizes()
    errors = values.errors_of(values.eager)
    typical = typical_error(values.eager, values.exact)
    if in_tf32 is not None:
        in_tf32 = flat_reals(in_tf32)
        errors_in_tf32 = values.errors_of(in_tf32.to(values.eager))
        if errors_in_tf32.mean > errors.mean:
            errors = errors_in_tf32
        typical = max(typical, typical_error(in_tf32, values.exact))
    return budget_from_errors(errors, dtype, terms, typical), errors


def _mean(limits: torch.Tensor) -> float:
    """Return the mean of a flat tensor of limits; those that are not finite count as zeros."""
    total = 0.0
    for block in blocks(len(limits)):
        finite = limits[block].nan_to_num(0, 0, 0)
        total += finite.sum().item()
    return total / max(len(limits), 1)
