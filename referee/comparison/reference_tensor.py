"""A result or gradient of the reference, with which a solution's is compared."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from referee.comparison.accuracy import (
    Errors,
    ErrorSums,
    count_true,
    errors,
    mean_and_root_mean_square,
    typical_error,
)
from referee.comparison.budget import (
    Budget,
    budget_from_errors,
    budget_without_float64,
    mean_slack_in_other_draw,
    typical_slack,
)
from referee.comparison.compare import blocks, first_mismatch, flat_reals

# Factors by which the errors of two equally accurate results may differ by chance. The mean of many
# errors varies little; the maximum of n errors varies by 4% at n = 10^7, and more for a smaller n.
CHANCE_OF_MAX = 1.15
CHANCE_OF_MEAN = 1.02

# In a second look, this share of the elements may be excused, and other roundings may move as many
# far; in a small result, this count.
LARGEST_UNSTABLE_SHARE = 0.01
LEAST_UNSTABLE_COUNT = 4
# An element is moved far if it moves by this multiple of what the budget allows.
FAR = 16

OptionalTensor = torch.Tensor | None
# Returns the reference's results for the same inputs, rounded otherwise; see `other_roundings`.
SecondLook = Callable[[], Iterator[torch.Tensor]] | None


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


@dataclass
class Distance:
    """How far a result is from eager's for the same inputs.

    Attributes:
        wrong: a flat mask of the elements that are too far off.
        mean: the mean distance.
        mean_slack: the largest mean distance that the budget allows.
    """

    wrong: torch.Tensor
    mean: float
    mean_slack: float


class ReferenceTensor:
    """A result or a gradient of the reference, with its error budget.

    The result for one draw of inputs sets the budget, which also holds for other draws. `compare`
    judges a solution's result for that draw. `mistake_in_other_draw` judges one for another draw,
    of which only eager's result is known. Of complex numbers, the real and the imaginary parts are
    compared.

    Where the reference is discontinuous, an honest result differs from eager's in a few elements.
    So if few elements are wrong, both methods take a second look, which excuses those that the
    reference itself moves that far when it rounds otherwise.

    Args:
        eager: the result as the reference computes it.
        exact: the result in float64; None where there is none.
        terms: the number of terms of the longest sum.
        limit: how far off each element may be; None if the budget decides.
        allowed: another result that torch's settings allow, where eager may use TF32; or None.
        is_exact: whether only eager's values are right. For integers and booleans they always are.

    Attributes:
        shape, strides, dtype, numel: of the result; they stay when `forget` frees it.
        is_exact: whether only eager's values are right.
        eager_errors: how far off eager's result is, or the allowed one if that is further off;
            zeros where there is no exact result.
        budget: the error budget.
        budget_in_other_draw: that of the distance from eager's result in another draw.
        typical_slack: the largest typical error, see `accuracy.typical_error`, in any draw;
            infinity where there is no exact result.
    """

    def __init__(  # noqa: PLR0913 - two results, and how far off they may be
        self,
        eager: torch.Tensor,
        exact: OptionalTensor,
        terms: int = 1,
        limit: OptionalTensor = None,
        allowed: OptionalTensor = None,
        *,
        is_exact: bool = False,
    ) -> None:
        self.shape = list(eager.shape)
        self.strides = list(eager.stride())
        self.dtype = eager.dtype
        self.numel = eager.numel()
        self.eager = _flat(eager)
        self.limit = _flat(limit)
        self._length = len(self.eager)  # numel, or twice as many real numbers
        real_dtype = self.eager.dtype
        self.is_exact = is_exact or not real_dtype.is_floating_point
        self.exact = None if self.is_exact or real_dtype == torch.float64 else _flat(exact)
        self.eager_errors = Errors()
        self.budget = Budget()
        self.typical_slack = math.inf
        if self.exact is not None:
            self.eager_errors = self._measure_eager(_flat(allowed))
            self.typical_slack = self._measure_typical_slack(_flat(allowed), terms)
            self.budget = budget_from_errors(self.eager_errors, real_dtype, terms)
        elif not self.is_exact:
            self.budget = budget_without_float64(real_dtype)
        self.budget_in_other_draw = self._budget_in_other_draw()

    def forget_exact(self) -> None:
        """Free the exact result; `compare` then uses eager's. The budget stays."""
        self.exact = None

    def forget(self) -> None:
        """Free the results; the budget stays."""
        self.eager = self.exact = self.limit = None

    def compare(self, got: torch.Tensor, second_look: SecondLook = None) -> Comparison:
        """Compare a result with the reference's.

        Args:
            got: the result.
            second_look: returns the reference's results, rounded otherwise.
        """
        got = flat_reals(got)
        comparison = self._compare(got, None)
        if comparison.mistake and second_look:
            excused = self._excused(comparison.wrong, got, self.eager, self.budget, second_look)
            if excused is not None:
                return self._compare(got, excused)
        return comparison

    def _compare(self, got: torch.Tensor, excused: OptionalTensor) -> Comparison:
        """Compare a flat result with the reference's, without the elements of a mask."""
        sums = ErrorSums()
        wrong_parts = []
        first_wrong = ""
        has_eagers_bits = True
        for block in blocks(self._length):
            got_part, eager_part = got[block], self.eager[block]
            is_same = first_mismatch(got_part, eager_part) is None
            has_eagers_bits = has_eagers_bits and is_same
            if is_same and self.is_exact:
                wrong_parts.append(torch.zeros_like(got_part, dtype=torch.bool))
                continue
            expected = self._expected(block)
            error = errors(got_part, eager_part, expected)
            if excused is not None:
                error.masked_fill_(excused[block], 0)
            wrong = error > self._allowed(block, expected)
            wrong_parts.append(wrong)
            first_wrong = first_wrong or _describe_first(wrong, got_part, expected)
            sums.add(error, expected)
        wrong = _join_masks(wrong_parts)
        result_errors = sums.over(self._length)
        return Comparison(
            mistake=self._mistake(count_true(wrong), first_wrong, result_errors),
            errors=result_errors,
            has_eagers_bits=has_eagers_bits,
            is_gross=self.is_exact or result_errors.is_gross,
            wrong=wrong,
        )

    def allows(self, got: torch.Tensor, eager: torch.Tensor) -> bool:
        """Return whether a result is right for other inputs, for which eager's is `eager`."""
        got, eager = flat_reals(got), flat_reals(eager)
        is_alike = got.dtype == eager.dtype and got.numel() == eager.numel()
        return is_alike and self.mistake_in_other_draw(got, eager) is None

    def mistake_in_other_draw(
        self, got: torch.Tensor, eager: torch.Tensor, second_look: SecondLook = None
    ) -> str | None:
        """Return what is wrong with a result for other inputs, in words; None if nothing is.

        Args:
            got: the result.
            eager: eager's result for the same inputs.
            second_look: returns the reference's results for these inputs, rounded otherwise.
        """
        got, eager = flat_reals(got), flat_reals(eager)
        if self.is_exact:
            mismatch = first_mismatch(got, eager)
            if mismatch is None or second_look is None:
                return mismatch
        elif self._is_surely_near(got, eager, 0.5 * self.budget_in_other_draw.mean_slack):
            return None
        distance = self._measure_distance(got, eager)
        if second_look:
            budget = self._budget_for(eager)
            excused = self._excused(distance.wrong, got, eager, budget, second_look)
            if excused is not None:
                distance = self._measure_distance(got, eager, excused)
        if self.is_exact:
            return mismatch if distance.wrong.any() else None
        if mistake := describe_wrong(distance.wrong, got, eager):
            return mistake
        if distance.mean > distance.mean_slack:
            return _describe_mean_error(distance.mean, distance.mean_slack)
        return None

    def wrong_in_other_draw(self, got: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
        """Return a flat mask of the elements of `got` that are too far from `eager`.

        The mean distance is not limited.
        """
        got, eager = flat_reals(got), flat_reals(eager)
        if self._is_surely_near(got, eager):
            return torch.zeros(len(got), dtype=torch.bool, device=got.device)
        return self._measure_distance(got, eager).wrong

    def _measure_eager(self, allowed: OptionalTensor) -> Errors:
        """Return eager's errors, or those of the allowed result if their mean is larger."""
        own = self._measure(self.eager)
        if allowed is None:
            return own
        other = self._measure(allowed.to(self.eager))
        return other if other.mean > own.mean else own

    def _measure_typical_slack(self, allowed: OptionalTensor, terms: int) -> float:
        """Return the largest typical error by eager's own, or that of the allowed result."""
        typical = typical_error(self.eager, self.exact)
        if allowed is not None:
            typical = max(typical, typical_error(allowed, self.exact))
        return typical_slack(typical, self.eager_errors, self.eager.dtype, terms)

    def _measure(self, got: torch.Tensor) -> Errors:
        """Return the errors of a flat result."""
        sums = ErrorSums()
        for block in blocks(self._length):
            expected = self._expected(block)
            sums.add(errors(got[block], self.eager[block], expected), expected)
        return sums.over(self._length)

    def _budget_in_other_draw(self) -> Budget:
        """Return the budget of the distance from eager's result in another draw.

        It is for results of the same size; see `_budget_for`.
        """
        budget = self.budget
        if self.limit is not None:
            budget = replace(budget, mean_slack=max(budget.mean_slack, _mean(self.limit)))
        mean_slack = mean_slack_in_other_draw(budget, self.eager_errors, self._length)
        return replace(budget, mean_slack=mean_slack)

    def _budget_for(self, eager: torch.Tensor) -> Budget:
        """Return the budget for another draw: its slacks grow with the size of eager's result."""
        own = self.eager_errors
        if not own.root_mean_square:
            return self.budget_in_other_draw
        mean_magnitude, root_mean_square = mean_and_root_mean_square(eager)
        growth = max(1.0, root_mean_square / own.root_mean_square)
        growth_of_mean = max(growth, mean_magnitude / own.mean_magnitude)
        return self.budget_in_other_draw.grown(growth, growth_of_mean)

    def _measure_distance(
        self, got: torch.Tensor, eager: torch.Tensor, excused: OptionalTensor = None
    ) -> Distance:
        """Measure how far a flat result is from eager's, without the elements of a mask."""
        budget = self._budget_for(eager)
        wrong_parts = []
        sum_of_errors = 0.0
        for block in blocks(len(got)):
            expected = eager[block].double()
            error = errors(got[block], eager[block], expected)
            if excused is not None:
                error.masked_fill_(excused[block], 0)
            wrong_parts.append(error > budget.allowed(expected))
            sum_of_errors += error.sum().item()
        mean = sum_of_errors / max(len(got), 1)
        return Distance(_join_masks(wrong_parts), mean, budget.mean_slack)

    def _excused(
        self,
        wrong: torch.Tensor,
        got: torch.Tensor,
        eager: torch.Tensor,
        budget: Budget,
        second_look: Callable[[], Iterator[torch.Tensor]],
    ) -> OptionalTensor:
        """Return a mask of the wrong elements that another rounding explains; None if none is.

        Rounding explains an element if results of the reference that are rounded otherwise reach
        the solution's value there, or lie on both sides of it. If one of these results is far from
        eager's in many elements, rounding says too little, and nothing is excused.

        Args:
            wrong: a flat mask of the wrong elements.
            got: the solution's flat result.
            eager: eager's flat result for the same inputs.
            budget: how far off an element may be.
            second_look: returns the reference's results, rounded otherwise.
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
            is_reached |= errors(got_there, values, expected) <= budget.allowed(expected)
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

    def _allowed(self, block: slice, expected: torch.Tensor) -> torch.Tensor:
        """Return how far off each element of a block may be."""
        if self.limit is None:
            return self.budget.allowed(expected)
        return self.limit[block].nan_to_num(0, 0, 0)

    def _mistake(self, wrong_count: int, first_wrong: str, result: Errors) -> str | None:
        """Return what is wrong with a result, in words; None if nothing is.

        Args:
            wrong_count: how many elements are off by too much.
            first_wrong: the first of them, in words.
            result: how far off the result is.
        """
        if self.limit is not None and self._is_as_accurate_as_eager(result):
            return None
        if wrong_count:
            fault = "elements differ" if self.is_exact else "elements beyond the error budget"
            return f"{wrong_count:,} of {self._length:,} {fault}, the first: {first_wrong}"
        if self.limit is None and result.mean > self.budget.mean_slack:
            return _describe_mean_error(result.mean, self.budget.mean_slack)
        return None

    def _is_as_accurate_as_eager(self, result: Errors) -> bool:
        """Return whether a result's errors are as small as eager's, but for chance."""
        is_max_small = result.largest <= CHANCE_OF_MAX * self.eager_errors.largest
        return is_max_small and result.mean <= CHANCE_OF_MEAN * self.eager_errors.mean

    def _is_surely_near(
        self, got: torch.Tensor, eager: torch.Tensor, mean_slack: float = math.inf
    ) -> bool:
        """Return whether all errors, computed in float32, are within half of the budget.

        That is quick, and nearly always true. It is false for NaN and infinities.

        Args:
            got: a flat result.
            eager: eager's flat result for the same inputs.
            mean_slack: the largest mean error for which the answer is true.
        """
        if not got.is_floating_point() or got.dtype == torch.float64:
            return False
        sum_of_errors = 0.0
        half_slack, half_relative = 0.5 * self.budget.slack, 0.5 * self.budget.relative_slack
        for block in blocks(len(got)):
            got_part, eager_part = got[block].float(), eager[block].float()
            allowed = eager_part.abs().mul_(half_relative).add_(half_slack)
            error = (got_part - eager_part).abs_()
            if not bool((error <= allowed).all()):
                return False
            if mean_slack < math.inf:
                sum_of_errors += error.sum().item()
        return sum_of_errors <= mean_slack * max(len(got), 1)

    def _expected(self, block: slice) -> torch.Tensor:
        """Return a block of the exact result, but eager's where either of them is not finite."""
        eager = self.eager[block].double()
        if self.exact is None:
            return eager
        exact = self.exact[block]
        return torch.where(eager.isfinite() & exact.isfinite(), exact, eager)


def _count_far(other: torch.Tensor, eager: torch.Tensor, budget: Budget) -> int:
    """Return how many elements of a flat result are far from eager's; see FAR."""
    count = 0
    for block in blocks(len(eager)):
        expected = eager[block].double()
        error = errors(other[block], eager[block], expected)
        count += int((error > FAR * budget.allowed(expected)).sum())
    return count


def _flat(x: OptionalTensor) -> OptionalTensor:
    """Return `flat_reals` of a tensor; None for None."""
    return None if x is None else flat_reals(x)


def _mean(limit: torch.Tensor) -> float:
    """Return the mean of a flat tensor of limits; those that are not finite count as zeros."""
    total = sum(limit[block].nan_to_num(0, 0, 0).sum().item() for block in blocks(len(limit)))
    return total / max(len(limit), 1)


def _describe_mean_error(mean: float, mean_slack: float) -> str:
    """Return in words that a mean error is too large."""
    return f"mean error {mean:.3g}; eager's own error allows {mean_slack:.3g}"


def _join_masks(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the masks of blocks as one."""
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def describe_wrong(wrong: torch.Tensor, got: torch.Tensor, eager: torch.Tensor) -> str | None:
    """Return how many elements are wrong, and the first of them, in words; None if none is.

    Args:
        wrong: a flat mask.
        got: the flat result.
        eager: eager's flat result for the same inputs.
    """
    first_wrong = _describe_first(wrong, got, eager)
    if not first_wrong:
        return None
    count = f"{count_true(wrong):,} of {got.numel():,}"
    return f"{count} elements beyond the error budget, the first: {first_wrong}"


def _describe_first(wrong: torch.Tensor, got: torch.Tensor, expected: torch.Tensor) -> str:
    """Return the first wrong element in words; "" if there is none.

    Args:
        wrong: a flat mask.
        got: the result.
        expected: the right values.
    """
    if not wrong.any():
        return ""
    index = wrong.to(torch.uint8).argmax().item()
    return f"got {got[index]:.9g}, expected {expected[index]:.9g}"
