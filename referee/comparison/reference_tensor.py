"""A result or gradient of the reference, with which a solution's is compared."""

import math
from dataclasses import dataclass, replace

import torch

from referee.comparison.accuracy import Errors, ErrorSums, count_true, element_errors, typical_error
from referee.comparison.budget import (
    Budget,
    budget_from_errors,
    budget_without_float64,
    mean_slack_in_other_draw,
    typical_slack,
)
from referee.comparison.compare import (
    blocks,
    describe_values,
    first_mismatch,
    first_true,
    flat_reals,
    place_of,
)
from referee.comparison.mistakes import BEYOND_BUDGET, describe_mean_error
from referee.comparison.other_draws import OtherDraws
from referee.comparison.second_look import SecondLook, find_excused

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
    errors: Errors
    has_eagers_bits: bool
    is_gross: bool
    wrong: torch.Tensor


class ReferenceTensor:
    """A result or a gradient of the reference, with its error budget.

    The reference's result for one draw of inputs sets the budget. `compare` judges a solution's
    result for that draw. `other_draws` judges results for other draws by the same budget, widened,
    because only eager's result is known there.

    The real and the imaginary parts of complex numbers are compared as so many real numbers.

    Args:
        eager: the result as the reference computes it.
        exact: the result in float64; None where there is none.
        terms: the number of terms of the longest sum.
        limit: how far off each element may be; None if the budget decides. A result beyond it is
            still right if its errors are as small as eager's.
        in_tf32: the result in float64 from operands rounded to TF32, if eager may use TF32; None
            otherwise. The budget then allows the errors of this result, too.
        must_equal_eager: whether only eager's values are right. For integers and booleans this is
            always so.

    Attributes:
        shape, strides, dtype, numel: of the result; they stay when `forget` frees it.
        eager: eager's result, flat; None after `forget`.
        must_equal_eager: whether only eager's values are right.
        eager_errors: how far off eager's result is, or the one in TF32 if that is further off;
            zeros where there is no exact result.
        budget: the error budget.
        typical_slack: the largest typical error that a result may have, in any draw; see
            `accuracy.typical_error`. It is infinity where there is no exact result.
        other_draws: judges results for other draws.
    """

    def __init__(  # noqa: PLR0913 - three results, and how far off they may be
        self,
        eager: torch.Tensor,
        exact: torch.Tensor | None,
        terms: int = 1,
        limit: torch.Tensor | None = None,
        in_tf32: torch.Tensor | None = None,
        *,
        must_equal_eager: bool = False,
    ) -> None:
        self.shape = list(eager.shape)
        self.strides = list(eager.stride())
        self.dtype = eager.dtype
        self.numel = eager.numel()
        self.eager: torch.Tensor | None = flat_reals(eager)
        self._length = len(self.eager)  # numel, or twice as much for complex numbers
        self._limit = _flat(limit)
        real_dtype = self.eager.dtype
        self.must_equal_eager = must_equal_eager or not real_dtype.is_floating_point
        # A result in float64 is compared with eager's: nothing more exact is known.
        needs_exact = not self.must_equal_eager and real_dtype != torch.float64
        self._exact = _flat(exact) if needs_exact else None
        self.eager_errors = Errors()
        self.typical_slack = math.inf
        if self.must_equal_eager:
            self.budget = Budget()
        elif self._exact is None:
            self.budget = budget_without_float64(real_dtype)
        else:
            flat_in_tf32 = _flat(in_tf32)
            self.eager_errors = self._measure_eager(flat_in_tf32)
            self.typical_slack = self._measure_typical_slack(flat_in_tf32, terms)
            self.budget = budget_from_errors(self.eager_errors, real_dtype, terms)
        self.other_draws = OtherDraws(
            self._widened_budget(), self.eager_errors, self.must_equal_eager
        )

    def forget_exact(self) -> None:
        """Free the exact result; `compare` then uses eager's. The budget stays."""
        self._exact = None

    def forget(self) -> None:
        """Free the results; the budget stays, and with it `other_draws`."""
        self.eager = self._exact = self._limit = None

    def compare(self, got: torch.Tensor, second_look: SecondLook | None = None) -> Comparison:
        """Compare a result with the reference's.

        Args:
            got: the result.
            second_look: yields the reference's results, rounded otherwise; None if no wrong element
                is excused.
        """
        got = flat_reals(got)
        comparison = self._compare(got)
        if comparison.mistake is None or second_look is None:
            return comparison
        excused = find_excused(comparison.wrong, got, self.eager, self.budget, second_look)
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
            if is_same and self.must_equal_eager:
                continue  # there is no error to add
            expected = self._expected(block)
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
            is_gross=self.must_equal_eager or errors.is_gross,
            wrong=wrong,
        )

    def _describe_mistake(
        self, wrong: torch.Tensor, got: torch.Tensor, errors: Errors
    ) -> str | None:
        """Return what is wrong with a result, in words; None if nothing is.

        Args:
            wrong: a flat mask of the elements that are off by too much.
            got: the flat result.
            errors: how far off the result is.
        """
        has_limits = self._limit is not None
        if has_limits and self._is_as_accurate_as_eager(errors):
            return None
        if wrong.any():
            return self._describe_wrong_elements(wrong, got)
        is_mean_limited = not has_limits
        if is_mean_limited and errors.mean > self.budget.mean_slack:
            return describe_mean_error(errors.mean, self.budget.mean_slack)
        return None

    def _describe_wrong_elements(self, wrong: torch.Tensor, got: torch.Tensor) -> str:
        """Return how many elements are off by too much, and the first of them, in words."""
        first = first_true(wrong)
        fault, expected = BEYOND_BUDGET, self._expected(slice(first, first + 1))
        if self.must_equal_eager:
            fault, expected = "elements differ", self.eager[first]
        place = place_of(first, self.shape, self.dtype)
        values = describe_values(got[first], expected)
        return f"{count_true(wrong):,} of {self._length:,} {fault}, the first at {place}: {values}"

    def _is_as_accurate_as_eager(self, errors: Errors) -> bool:
        """Return whether a result's errors are as small as eager's, but for chance."""
        is_max_small = errors.largest <= CHANCE_OF_MAX * self.eager_errors.largest
        is_mean_small = errors.mean <= CHANCE_OF_MEAN * self.eager_errors.mean
        return is_max_small and is_mean_small

    def _allowed(self, block: slice, expected: torch.Tensor) -> torch.Tensor:
        """Return how far off each element of a block may be."""
        if self._limit is None:
            return self.budget.allowed(expected)
        # A limit is not finite where operands are not. The result must be exact there. Usually it
        # is not finite either, and its error is 0 or infinity, see `element_errors`.
        return self._limit[block].nan_to_num(0, 0, 0)

    def _expected(self, block: slice) -> torch.Tensor:
        """Return a block of the exact result, but eager's where either of them is not finite."""
        eager = self.eager[block].double()
        if self._exact is None:
            return eager
        exact = self._exact[block]
        are_both_finite = eager.isfinite() & exact.isfinite()
        return torch.where(are_both_finite, exact, eager)

    # The methods from here on set the budgets. Only the constructor calls them.

    def _measure_eager(self, in_tf32: torch.Tensor | None) -> Errors:
        """Return eager's errors, or those of the result in TF32 if their mean is larger."""
        own = self._measure(self.eager)
        if in_tf32 is None:
            return own
        other = self._measure(in_tf32.to(self.eager))
        return other if other.mean > own.mean else own

    def _measure(self, result: torch.Tensor) -> Errors:
        """Return the errors of a flat result of the reference, compared with the exact one."""
        sums = ErrorSums()
        for block in blocks(self._length):
            expected = self._expected(block)
            sums.add(element_errors(result[block], self.eager[block], expected), expected)
        return sums.over(self._length)

    def _measure_typical_slack(self, in_tf32: torch.Tensor | None, terms: int) -> float:
        """Return the largest typical error that a result may have.

        It follows from eager's typical error, or from that of the result in TF32 if it is larger.
        """
        typical = typical_error(self.eager, self._exact)
        if in_tf32 is not None:
            typical = max(typical, typical_error(in_tf32, self._exact))
        return typical_slack(typical, self.eager_errors, self.eager.dtype, terms)

    def _widened_budget(self) -> Budget:
        """Return the budget of the distance from eager's result in another draw.

        Eager's result is off itself, so the limit of the mean distance is wider. The limits of
        elements stay the same.
        """
        budget = self.budget
        if self._limit is not None:
            budget = replace(budget, mean_slack=max(budget.mean_slack, _mean(self._limit)))
        mean_slack = mean_slack_in_other_draw(budget, self.eager_errors, self._length)
        return replace(budget, mean_slack=mean_slack)


def _flat(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return `flat_reals` of a tensor; None for None."""
    return None if x is None else flat_reals(x)


def _mean(limit: torch.Tensor) -> float:
    """Return the mean of a flat tensor of limits; those that are not finite count as zeros."""
    total = 0.0
    for block in blocks(len(limit)):
        finite = limit[block].nan_to_num(0, 0, 0)
        total += finite.sum().item()
    return total / max(len(limit), 1)
