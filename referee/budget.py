"""The error budget: how far a result may be off, beside eager's own error.

The reference in float64 gives eager's error. In float32 a result may be FACTOR times as far off,
because a fast exponential is less accurate than torch's. It may also be as far off as a plain sum
of all terms. TF32's products are 1,000 times as far off as eager's, and float16's no less. Where
eager's own error is that of a lower precision, as for half types, the factor is LOW_FACTOR.
README.md, "What is right", has the formulas.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from referee.compare import INTEGERS, first_mismatch

FACTOR = 32
ROUNDINGS = 8  # of the result, that are allowed even where eager's result is exact
LOW_FACTOR = 4
LOW_ROUNDINGS = 1
# Rounding a plain sum of n positive terms, in order, makes an error whose standard deviation is
# sqrt(n) / 4 roundings. An element may be so many standard deviations off; the mean error, fewer.
DEVIATIONS = 16
DEVIATIONS_OF_MEAN = 4
# Relative and absolute tolerances where there is no result in float64. They are KernelBench's.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
HALF_TOLERANCE = 1e-2
# Errors of two equally accurate results differ by chance. They may differ by these factors: the
# mean of many errors varies little; the maximum of n varies by 4% at n = 10^7, and more below.
CHANCE_OF_MAX = 1.15
CHANCE_OF_MEAN = 1.02
BLOCK = 1 << 24  # elements whose errors are in memory at a time
# The largest relative error (the Frobenius norm of the errors over that of the results) of each
# accuracy class. A deep network in float32 reaches 1e-5. A single product is off by 3e-4 in TF32
# and by 2.3e-3 in bfloat16.
CLASSES = {"float32-grade": 1e-4, "TF32-grade": 1.2e-3, "bf16-grade": 1e-2}
WORST = "worse than bf16"
# No precision explains an error of an element that is larger than this part of the largest result.
GROSS = 2.0**-6

OptionalTensor = torch.Tensor | None


@dataclass(frozen=True)
class Budget:
    """How far off a result may be.

    Attributes:
        slack: how far each element may be off, whatever its size.
        relative_slack: how far each element may be off besides, relative to its size.
        mean_slack: the largest mean error.
    """

    slack: float = 0.0
    relative_slack: float = 0.0
    mean_slack: float = math.inf

    def allowed(self, expected: torch.Tensor, growth: float = 1.0) -> torch.Tensor:
        """Return how far off each element may be.

        Args:
            expected: the right values, in float64.
            growth: multiplies `slack`, where the result is larger than the budget's own.
        """
        relative = expected.abs().mul_(self.relative_slack).nan_to_num_(0, 0, 0)
        return relative.add_(growth * self.slack)

    def or_larger(self, other: "Budget") -> "Budget":
        """Return the larger of two budgets, for each of the attributes."""
        return Budget(
            slack=max(self.slack, other.slack),
            relative_slack=max(self.relative_slack, other.relative_slack),
            mean_slack=max(self.mean_slack, other.mean_slack),
        )


@dataclass
class Comparison:
    """The comparison of a result with the reference's.

    Attributes:
        mistake: what is wrong with the result, in words; None if nothing is.
        max_error: the largest error of an element.
        mean_error: the mean error of the elements.
        relative_error: the Frobenius norm of the errors over that of the reference's result.
        size: the root of the mean square of the reference's result.
        mean_size: the mean of the magnitudes of the reference's result.
        has_eagers_bits: whether the result equals eager's.
        is_gross: whether it is another result, and not a less accurate one.
        wrong: a flat mask of the elements that are off by too much. Of a result that must have
            eager's values, it leaves out the blocks that have them.
    """

    mistake: str | None
    max_error: float
    mean_error: float
    relative_error: float
    size: float
    mean_size: float
    has_eagers_bits: bool
    is_gross: bool
    wrong: torch.Tensor


@dataclass
class _Totals:
    """Sums and maxima over the elements that were compared so far."""

    largest_size: float = 0.0
    largest_error: float = 0.0
    sum_of_errors: float = 0.0
    squared_errors: float = 0.0
    sum_of_sizes: float = 0.0
    squared_sizes: float = 0.0

    def add(self, error: torch.Tensor, size: torch.Tensor) -> None:
        """Add the errors and the sizes of some elements; both tensors are overwritten."""
        self.largest_size = max(self.largest_size, size.max().item())
        self.largest_error = max(self.largest_error, error.max().item())
        self.sum_of_errors += error.sum().item()
        self.sum_of_sizes += size.sum().item()
        self.squared_errors += error.square_().sum().item()
        self.squared_sizes += size.square_().sum().item()

    @property
    def relative_error(self) -> float:
        """The Frobenius norm of the errors over that of the sizes."""
        if self.squared_sizes:
            return math.sqrt(self.squared_errors / self.squared_sizes)
        return math.inf if self.squared_errors else 0.0


class ReferenceTensor:
    """A result or a gradient of the reference, with its error budget.

    The results for one draw of inputs set the budget, and `compare` compares a solution's result
    for the same draw. The budget also holds for other draws. For these only eager's result is
    known, and `mistake_in_other_draw` compares a solution's with it.

    Args:
        eager: the result as the reference computes it.
        exact: the result in float64; None where there is none.
        terms: the number of terms of the longest sum; 0 if only eager's values are right.
        limit: how far off each element may be, instead of the budget; None for the budget.
        allowed: another result that torch's settings allow, where eager may use TF32; or None.

    Attributes:
        shape, dtype, numel: of the result; they stay when `forget` frees it.
        is_exact: whether only eager's values are right.
        budget: the error budget.
        size: the root of the exact result's mean square; 0 where there is no exact result.
        errors: eager's largest, mean and relative error; zeros where there is no exact result.
    """

    def __init__(
        self,
        eager: torch.Tensor,
        exact: OptionalTensor,
        terms: int = 1,
        limit: OptionalTensor = None,
        allowed: OptionalTensor = None,
    ) -> None:
        self.shape = list(eager.shape)
        self.dtype = eager.dtype
        self.numel = eager.numel()
        self.eager = _flat(eager)
        self.limit = _flat(limit)
        self.is_exact = terms == 0 or not self.dtype.is_floating_point
        self.exact = None if self.is_exact or self.dtype == torch.float64 else _flat(exact)
        self.size = 0.0
        self.errors = (0.0, 0.0, 0.0)
        self.budget = Budget()
        if self.exact is not None:
            own = self._compare_eager(_flat(allowed))
            self.size = own.size
            self.errors = (own.max_error, own.mean_error, own.relative_error)
            self.budget = _budget_from_errors(own, self.dtype, terms)
        elif not self.is_exact:
            tolerance = TOLERANCES.get(self.dtype, HALF_TOLERANCE)
            self.budget = Budget(tolerance, tolerance)

    def forget_exact(self) -> None:
        """Free the exact result; `compare` then uses eager's. The budget stays."""
        self.exact = None

    def forget(self) -> None:
        """Free the results; the budget stays."""
        self.eager = self.exact = self.limit = None

    def compare(self, pieces: Iterable[tuple[int, torch.Tensor]]) -> Comparison:
        """Compare a result with the reference's.

        Args:
            pieces: flat parts of the result, each with the index at which it begins.
        """
        totals = _Totals()
        wrong_parts = []
        first_wrong = ""
        has_eagers_bits = True
        for start, got in _in_blocks(pieces):
            eager = self.eager[start : start + len(got)]
            is_same = first_mismatch(got, eager) is None
            has_eagers_bits = has_eagers_bits and is_same
            if is_same and self.is_exact:
                continue
            expected = self._expected(start, len(got))
            error = errors(got, eager, expected)
            if self.limit is None:
                allowed = self.budget.allowed(expected)
            else:
                allowed = self.limit[start : start + len(got)].nan_to_num(0, 0, 0)
            wrong_parts.append(error > allowed)
            first_wrong = first_wrong or _describe_first(wrong_parts[-1], got, expected)
            totals.add(error, expected.abs().nan_to_num_(0, 0, 0))
        wrong = torch.cat(wrong_parts) if wrong_parts else torch.zeros(0, dtype=torch.bool)
        count = max(self.numel, 1)
        mean_error = totals.sum_of_errors / count
        has_gross_element = totals.largest_error > GROSS * totals.largest_size
        is_far = has_gross_element or accuracy_class(totals.relative_error) == WORST
        return Comparison(
            mistake=self._mistake(count_true(wrong), first_wrong, totals.largest_error, mean_error),
            max_error=totals.largest_error,
            mean_error=mean_error,
            relative_error=totals.relative_error,
            size=math.sqrt(totals.squared_sizes / count),
            mean_size=totals.sum_of_sizes / count,
            has_eagers_bits=has_eagers_bits,
            is_gross=self.is_exact or is_far,
            wrong=wrong,
        )

    def allows(self, got: torch.Tensor, eager: torch.Tensor) -> bool:
        """Return whether a tensor is right, for a draw in which the other one is eager's."""
        is_alike = got.dtype == eager.dtype and got.numel() == eager.numel()
        return is_alike and self.mistake_in_other_draw(got, eager) is None

    def mistake_in_other_draw(self, got: torch.Tensor, eager: torch.Tensor) -> str | None:
        """Return what is wrong with a result for other inputs, in words; None if nothing is.

        Args:
            got: the result.
            eager: eager's result for the same inputs.
        """
        got, eager = got.reshape(-1), eager.reshape(-1)
        if self.is_exact:
            return first_mismatch(got, eager)
        wrong = self.wrong_in_other_draw(got, eager)
        first_wrong = _describe_first(wrong, got, eager)
        if not first_wrong:
            return None
        return f"{count_true(wrong):,} of {got.numel():,} elements, the first: {first_wrong}"

    def wrong_in_other_draw(self, got: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
        """Return a flat mask of the elements of `got` that are too far from `eager`.

        Where the results are larger than those that set the budget, its slack grows with them.
        """
        got, eager = got.reshape(-1), eager.reshape(-1)
        if self._is_surely_near(got, eager):
            return torch.zeros(len(got), dtype=torch.bool, device=got.device)
        growth = max(1.0, _root_mean_square(eager) / self.size) if self.size else 1.0
        parts = []
        for start in range(0, len(got), BLOCK):
            got_part, eager_part = got[start : start + BLOCK], eager[start : start + BLOCK]
            expected = eager_part.double()
            error = errors(got_part, eager_part, expected)
            parts.append(error > self.budget.allowed(expected, growth))
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)

    def _compare_eager(self, allowed: OptionalTensor) -> Comparison:
        """Compare eager's result with the exact one, or the allowed result if its error is larger.

        The budget is not set yet: only the errors count.
        """
        own = self.compare([(0, self.eager)])
        if allowed is None:
            return own
        other = self.compare([(0, allowed.to(self.eager))])
        return other if other.mean_error > own.mean_error else own

    def _mistake(
        self, wrong_count: int, first_wrong: str, max_error: float, mean_error: float
    ) -> str | None:
        """Return what is wrong with a result, in words; None if nothing is.

        Args:
            wrong_count: how many elements are off by too much.
            first_wrong: the first of them, in words.
            max_error: the largest error.
            mean_error: the mean error.
        """
        if self.limit is not None:
            # A result is right, too, if its errors are as small as eager's but for chance.
            eager_max, eager_mean, _ = self.errors
            is_max_small = max_error <= CHANCE_OF_MAX * eager_max
            if is_max_small and mean_error <= CHANCE_OF_MEAN * eager_mean:
                return None
        elif not wrong_count and mean_error > self.budget.mean_slack:
            limit = f"{self.budget.mean_slack:.3g}"
            return f"mean error {mean_error:.3g}; eager's own error allows {limit}"
        if not wrong_count:
            return None
        fault = "elements differ" if self.is_exact else "elements beyond the error budget"
        return f"{wrong_count:,} of {self.numel:,} {fault}, the first: {first_wrong}"

    def _is_surely_near(self, got: torch.Tensor, eager: torch.Tensor) -> bool:
        """Return whether all errors, computed in float32, are within half of the budget.

        That is quick, and nearly always true. It is false for NaN and infinities.
        """
        if not got.is_floating_point() or got.dtype == torch.float64:
            return False
        half_slack, half_relative = 0.5 * self.budget.slack, 0.5 * self.budget.relative_slack
        for start in range(0, len(got), BLOCK):
            got_part, eager_part = (t[start : start + BLOCK].float() for t in (got, eager))
            allowed = eager_part.abs().mul_(half_relative).add_(half_slack)
            if not bool(((got_part - eager_part).abs_() <= allowed).all()):
                return False
        return True

    def _expected(self, start: int, count: int) -> torch.Tensor:
        """Return elements of the exact result, but eager's where either of them is not finite.

        Args:
            start: the first element's index.
            count: how many.
        """
        eager = self.eager[start : start + count].double()
        if self.exact is None:
            return eager
        exact = self.exact[start : start + count]
        return torch.where(eager.isfinite() & exact.isfinite(), exact, eager)


def _budget_from_errors(eager: Comparison, dtype: torch.dtype, terms: int) -> Budget:
    """Return the error budget of a result.

    Args:
        eager: eager's result beside the exact one.
        dtype: the dtype of the result.
        terms: the number of terms of the longest sum.
    """
    eps = torch.finfo(dtype).eps
    is_low = eager.relative_error > CLASSES["float32-grade"]
    factor = LOW_FACTOR if is_low else FACTOR
    roundings = LOW_ROUNDINGS if is_low else ROUNDINGS
    budget = Budget(
        slack=factor * eager.max_error + eps * eager.size,
        relative_slack=roundings * eps,
        mean_slack=factor * eager.mean_error + roundings * eps * eager.mean_size,
    )
    if dtype != torch.float32 or is_low:
        return budget
    return budget.or_larger(_budget_of_plain_sum(terms, eps, eager.size))


def _budget_of_plain_sum(terms: int, eps: float, size: float) -> Budget:
    """Return how far off a plain sum may be, whose terms are added in order.

    Args:
        terms: how many terms it has.
        eps: the distance from 1 to the next number; a rounding is half of it.
        size: the root mean square of the result.
    """
    deviation = math.sqrt(terms) / 4 * (eps / 2)
    deviation = min(deviation, CLASSES["float32-grade"] / DEVIATIONS)
    return Budget(
        slack=DEVIATIONS * deviation * size,
        relative_slack=DEVIATIONS * deviation,
        mean_slack=DEVIATIONS_OF_MEAN * deviation * size,
    )


def errors(got: torch.Tensor, eager: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the error of each element, in float64.

    The error is |got - expected|. Where that is not finite, it is 0 if `got` has eager's value, and
    infinity otherwise. For integers and booleans it is 1 where `got` and `eager` differ.
    """
    if not got.is_floating_point():
        signed = INTEGERS[got.element_size()]
        return (got.view(signed) != eager.view(signed)).double()
    error = (got.double() - expected).abs_()
    if error.sum().isfinite():
        return error
    has_eagers_value = (got == eager) | (got.isnan() & eager.isnan())
    is_right = has_eagers_value & ~error.isfinite()
    return error.nan_to_num_(math.inf, math.inf).masked_fill_(is_right, 0)


def accuracy_class(relative_error: float) -> str:
    """Return the accuracy class of a relative error."""
    for name, largest in CLASSES.items():
        if relative_error <= largest:
            return name
    return WORST


def count_true(mask: torch.Tensor) -> int:
    """Return how many elements of a flat mask are true.

    They are counted in blocks: on a GPU the sum of a mask needs eight times its memory.
    """
    count = 0
    for start in range(0, len(mask), BLOCK):
        count += int(mask[start : start + BLOCK].sum())
    return count


def _in_blocks(pieces: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the pieces in parts of at most BLOCK elements, each with the index of its first."""
    for piece_start, piece in pieces:
        for offset in range(0, len(piece), BLOCK):
            yield piece_start + offset, piece[offset : offset + BLOCK]


def _root_mean_square(x: torch.Tensor) -> float:
    """Return the root mean square of a flat tensor; elements that are not finite count as zeros."""
    squares = 0.0
    for start in range(0, len(x), BLOCK):
        squares += x[start : start + BLOCK].double().nan_to_num(0, 0, 0).square_().sum().item()
    return math.sqrt(squares / max(len(x), 1))


def _flat(x: OptionalTensor) -> OptionalTensor:
    """Return the elements of a tensor as a flat one, without a copy if it is contiguous."""
    return None if x is None else x.detach().contiguous().view(-1)


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
