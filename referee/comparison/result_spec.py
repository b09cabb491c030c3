"""Rules for a result in other draws than the budget draw, the one that set its error budget.

The inputs of timed calls are drawn anew in each round, and the reference does not run in float64 on
them. A solution's result is compared with eager's, and its error is the distance from that.
"""

import math
from dataclasses import dataclass, replace

import torch

from referee.comparison.accuracy import ErrorSizes, mean_and_root_mean_square
from referee.comparison.budget import NO_GROWTH, Budget, Growth, budget_in_another_draw
from referee.comparison.compare import blocks, first_mismatch, flat_reals
from referee.comparison.mistakes import describe_mistake
from referee.comparison.reference_values import ReferenceValues
from referee.comparison.second_look import RoundedOtherwise, measure_with_second_look


@dataclass(frozen=True)
class Difference:
    """The differences of a result from eager's for the same inputs.

    Attributes:
        wrong: a flat mask of the elements that are too far off.
        mistake: the wrong elements in words, or a mean distance that is too large; None if there
            is neither.
    """

    wrong: torch.Tensor
    mistake: str | None


@dataclass(frozen=True)
class ResultSpec:
    """The reference's demands on one of a solution's results or gradients.

    They follow from the reference's result for one draw of inputs, the budget draw, and hold none
    of its values. The methods judge a result in other draws, for which only eager's is known.

    Attributes:
        shape, strides, dtype: of the reference's result.
        must_equal_eager: whether only eager's values are right, and those that a second look
            excuses.
        budget: how far off a result may be in the budget draw.
        reference_errors: how far off the reference's own result is; zeros where no exact result is
            known. The budget follows from them.
        mean_limit_elsewhere: for other draws, in place of the budget's; larger where the problem
            says how far off each element may be.
    """

    shape: list[int]
    strides: list[int]
    dtype: torch.dtype
    must_equal_eager: bool
    budget: Budget
    reference_errors: ErrorSizes
    mean_limit_elsewhere: float

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def budget_elsewhere(self, growth: Growth = NO_GROWTH) -> Budget:
        """Return how far from eager's a result may be in another draw."""
        budget = replace(self.budget, mean_limit=self.mean_limit_elsewhere)
        reals = 2 * self.numel if self.dtype.is_complex else self.numel
        return budget_in_another_draw(budget, self.reference_errors, reals, growth)

    def allows(self, got: torch.Tensor, eager: torch.Tensor) -> bool:
        """Return whether a result is right; one of another dtype or size than eager's is not."""
        is_alike = got.dtype == eager.dtype and got.numel() == eager.numel()
        return is_alike and self.find_mistake(got, eager) is None

    def find_mistake(
        self,
        got: torch.Tensor,
        eager: torch.Tensor,
        rounded_otherwise: RoundedOtherwise | None = None,
    ) -> str | None:
        """Return what is wrong with a result, in words; None if nothing is.

        Args:
            got: the result; it may be flat.
            eager: eager's result for the same inputs; messages name indices in its shape.
            rounded_otherwise: yields the reference's results for these inputs with other roundings;
                None if no wrong element is excused.
        """
        if self.must_equal_eager:
            return self._find_difference(got, eager, rounded_otherwise)
        return self.compare_with_eager(got, eager, rounded_otherwise).mistake

    def compare_with_eager(
        self,
        got: torch.Tensor,
        eager: torch.Tensor,
        rounded_otherwise: RoundedOtherwise | None = None,
    ) -> Difference:
        """Compare a result of a floating-point dtype with eager's.

        The arguments are those of `find_mistake`.
        """
        got = flat_reals(got)
        values = ReferenceValues(eager)
        if self._is_clearly_right(got, values.eager):
            return Difference(torch.zeros_like(got, dtype=torch.bool), mistake=None)
        budget = self.budget_elsewhere(self._growth(values.eager))
        measured = measure_with_second_look(values, got, budget, rounded_otherwise)
        mistake = describe_mistake(measured, got, values, budget.mean_limit)
        return Difference(measured.wrong, mistake)

    def _find_difference(
        self, got: torch.Tensor, eager: torch.Tensor, rounded_otherwise: RoundedOtherwise | None
    ) -> str | None:
        """Return in words how a result differs from eager's; None if it does not.

        The words are about the first difference. But if there is a second look, and it excuses all
        elements that are beyond the budget, the result is None.
        """
        mismatch = first_mismatch(got, eager)
        if mismatch is None or rounded_otherwise is None:
            return mismatch
        got = flat_reals(got)
        values = ReferenceValues(eager)
        budget = self.budget_elsewhere(self._growth(values.eager))
        measured = measure_with_second_look(values, got, budget, rounded_otherwise)
        return mismatch if measured.wrong.any() else None

    def _growth(self, eager: torch.Tensor) -> Growth:
        """Return how much larger eager's flat result is than in the budget draw."""
        in_budget_draw = self.reference_errors  # has the magnitudes of the expected values, too
        if not in_budget_draw.root_mean_square:
            return NO_GROWTH
        mean_magnitude, root_mean_square = mean_and_root_mean_square(eager)
        of_elements = max(1.0, root_mean_square / in_budget_draw.root_mean_square)
        of_mean = max(of_elements, mean_magnitude / in_budget_draw.mean_magnitude)
        return Growth(of_elements, of_mean)

    def _is_clearly_right(self, got: torch.Tensor, eager: torch.Tensor) -> bool:
        """Return whether every element, and their mean distance, is within half of the budget.

        This check is quick, because it computes in float32; the other half of the budget covers
        the roundings. Nearly always it suffices. It never does for NaN, infinities and float64.

        Args:
            got: a flat result.
            eager: eager's flat result for the same inputs.
        """
        if not got.is_floating_point() or got.dtype == torch.float64:
            return False
        sum_of_errors = 0.0
        budget = self.budget_elsewhere()
        half_atol = 0.5 * budget.atol
        half_rtol = 0.5 * budget.rtol
        for block in blocks(len(got)):
            got_part = got[block].float()
            eager_part = eager[block].float()
            allowed = eager_part.abs().mul_(half_rtol).add_(half_atol)
            error = (got_part - eager_part).abs_()
            # With <=, anything would be near an infinity.
            if not bool((error < allowed).all()):
                return False
            sum_of_errors += error.sum().item()
        mean = sum_of_errors / max(len(got), 1)
        return mean <= 0.5 * budget.mean_limit
