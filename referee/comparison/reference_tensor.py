"""A result or gradient of the reference, with which a solution's is compared."""

from dataclasses import dataclass

import torch

from referee.comparison.accuracy import ErrorSizes, ErrorSums, count_true, element_errors
from referee.comparison.budget import Budget, budget_and_errors
from referee.comparison.compare import (
    blocks,
    describe_index,
    describe_values,
    first_mismatch,
    first_true,
    flat_reals,
)
from referee.comparison.mistakes import BEYOND_BUDGET, describe_mean_error
from referee.comparison.reference_values import ReferenceValues
from referee.comparison.result_spec import ResultSpec
from referee.comparison.second_look import RoundedOtherwise, find_excused

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
        flat_eager = flat_reals(eager)
        must_equal_eager = must_equal_eager or not flat_eager.is_floating_point()
        # A result in float64 is compared with eager's: nothing more exact is known.
        needs_exact = not must_equal_eager and flat_eager.dtype != torch.float64
        self._values = ReferenceValues(flat_eager, _flat(exact) if needs_exact else None)
        self._element_limits = _flat(element_limits)
        self._length = len(flat_eager)  # numel, or twice as much for complex numbers
        self._must_equal_eager = must_equal_eager
        if must_equal_eager:
            self._budget, self._reference_errors = Budget(), ErrorSizes()
        else:
            self._budget, self._reference_errors = budget_and_errors(
                self._values, terms, _flat(in_tf32)
            )
        self.spec = ResultSpec(
            shape=list(eager.shape),
            strides=list(eager.stride()),
            dtype=eager.dtype,
            must_equal_eager=must_equal_eager,
            budget=self._budget,
            reference_errors=self._reference_errors,
            mean_limit_elsewhere=self._mean_limit_elsewhere(),
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
        comparison = self._compare(got)
        if comparison.mistake is None or rounded_otherwise is None:
            return comparison
        excused = find_excused(comparison.wrong, got, self.eager, self._budget, rounded_otherwise)
        if excused is None:
            return comparison
        return self._compare(got, excused)

    def _compare(self, got: torch.Tensor, excused: torch.Tensor | None = None) -> Comparison:
        """Compare a flat result with the reference's, block by block.

        Args:
            got: the flat result.
            excused: a flat mask of elements whose errors count as zeros; None if all count.
        """
        sums = ErrorSums()
        wrong = torch.zeros(self._length, dtype=torch.bool, device=got.device)
        has_eagers_bits = True
        for block in blocks(self._length):
            got_part, eager_part = got[block], self.eager[block]
            is_same = first_mismatch(got_part, eager_part) is None
            has_eagers_bits = has_eagers_bits and is_same
            if is_same and self._must_equal_eager:
                continue  # there is no error to add
            expected = self._values.expected(block)
            error = element_errors(got_part, eager_part, expected)
            if excused is not None:
                error.masked_fill_(excused[block], 0)
            wrong[block] = error > self._allowed(block, expected)
            sums.add(error, expected)
        errors = sums.over(self._length)
        return Comparison(
            mistake=self._describe_mistake(wrong, got, errors),
            errors=errors,
            has_eagers_bits=has_eagers_bits,
            is_gross=self._must_equal_eager or errors.is_gross,
            wrong=wrong,
        )

    def _describe_mistake(
        self, wrong: torch.Tensor, got: torch.Tensor, errors: ErrorSizes
    ) -> str | None:
        """Return what is wrong with a result, in words; None if nothing is.

        Args:
            wrong: a flat mask of the elements that are off by too much.
            got: the flat result.
            errors: how far off the result is.
        """
        has_element_limits = self._element_limits is not None
        if has_element_limits and self._is_as_accurate_as_eager(errors):
            return None
        if wrong.any():
            return self._describe_wrong_elements(wrong, got)
        if has_element_limits:  # then the mean is not limited
            return None
        mean_limit = self._budget.mean_limit
        if errors.mean > mean_limit:
            return describe_mean_error(errors.mean, mean_limit)
        return None

    def _describe_wrong_elements(self, wrong: torch.Tensor, got: torch.Tensor) -> str:
        """Return how many elements are off by too much, and the first of them, in words."""
        first = first_true(wrong)
        if self._must_equal_eager:
            fault = "elements differ"
            expected = self.eager[first]
        else:
            fault = BEYOND_BUDGET
            expected = self._values.expected(slice(first, first + 1))
        index = describe_index(first, self.spec.shape, self.spec.dtype)
        values = describe_values(got[first], expected)
        return f"{count_true(wrong):,} of {self._length:,} {fault}, the first at {index}: {values}"

    def _is_as_accurate_as_eager(self, errors: ErrorSizes) -> bool:
        """Return whether a result's errors are as small as eager's, except for chance."""
        eager_errors = self._reference_errors
        is_max_small = errors.largest <= CHANCE_OF_MAX * eager_errors.largest
        is_mean_small = errors.mean <= CHANCE_OF_MEAN * eager_errors.mean
        return is_max_small and is_mean_small

    def _allowed(self, block: slice, expected: torch.Tensor) -> torch.Tensor:
        """Return how far off each element of a block may be."""
        if self._element_limits is None:
            return self._budget.allowed(expected)
        # A limit is not finite where operands are not. The result must be exact there. Usually it
        # is not finite either, and its error is 0 or infinity, see `element_errors`.
        return self._element_limits[block].nan_to_num(0, 0, 0)

    def _mean_limit_elsewhere(self) -> float:
        """Return the largest mean distance from eager's result in other draws."""
        if self._element_limits is None:
            return self._budget.mean_limit
        return max(self._budget.mean_limit, _mean(self._element_limits))


def _flat(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return `flat_reals` of a tensor; None for None."""
    return None if x is None else flat_reals(x)


def _mean(limits: torch.Tensor) -> float:
    """Return the mean of a flat tensor of limits; those that are not finite count as zeros."""
    total = 0.0
    for block in blocks(len(limits)):
        finite = limits[block].nan_to_num(0, 0, 0)
        total += finite.sum().item()
    return total / max(len(limits), 1)
