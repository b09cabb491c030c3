"""The values of one of the reference's results, and the errors of other results against them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from referee.comparison.accuracy import ErrorSizes, ErrorSums, element_errors
from referee.comparison.budget import Budget
from referee.comparison.compare import blocks, flat_reals


class Measured(NamedTuple):
    """How far off a result is.

    Attributes:
        wrong: a flat mask of the elements that are off by too much.
        errors: the errors of all elements.
    """

    wrong: torch.Tensor
    errors: ErrorSizes


class ReferenceValues:
    """The values of one result of the reference for one draw of inputs.

    Args:
        eager: the result in the problem's dtype.
        exact: the result in float64; None where there is none.
        element_limits: how far off each element may be; None if a budget decides.

    Attributes:
        shape, dtype: those of the result.
        eager, exact, element_limits: the arguments as `flat_reals` returns them.
    """

    def __init__(
        self,
        eager: torch.Tensor,
        exact: torch.Tensor | None = None,
        element_limits: torch.Tensor | None = None,
    ) -> None:
        self.shape = eager.shape
        self.dtype = eager.dtype
        self.eager = flat_reals(eager)
        self.exact = None if exact is None else flat_reals(exact)
        self.element_limits = None if element_limits is None else flat_reals(element_limits)

    def expected(self, block: slice) -> torch.Tensor:
        """Return the right values of a block, in float64.

        They are the exact ones, but eager's where either of them is not finite.
        """
        eager = self.eager[block].double()
        if self.exact is None:
            return eager
        exact = self.exact[block]
        are_both_finite = eager.isfinite() & exact.isfinite()
        return torch.where(are_both_finite, exact, eager)

    def errors_by_block(
        self, got: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield each block with its right values and the errors of a flat result, in float64."""
        for block in blocks(len(got)):
            expected = self.expected(block)
            yield block, expected, element_errors(got[block], self.eager[block], expected)

    def errors_of(self, got: torch.Tensor) -> ErrorSizes:
        """Return how far off a flat result is."""
        sums = ErrorSums()
        for _block, expected, error in self.errors_by_block(got):
            sums.add(error, expected)
        return sums.over(len(got))

    def measure(
        self, got: torch.Tensor, budget: Budget, excused: torch.Tensor | None = None
    ) -> Measured:
        """Measure how far off a flat result is, and which elements are off by too much.

        Args:
            got: the flat result.
            budget: how far off an element may be, unless there are `element_limits`.
            excused: a flat mask of elements whose errors count as zeros; None if all count.
        """
        sums = ErrorSums()
        wrong = torch.zeros(len(got), dtype=torch.bool, device=got.device)
        for block, expected, error in self.errors_by_block(got):
            if excused is not None:
                error.masked_fill_(excused[block], 0)
            wrong[block] = error > self._allowed(block, expected, budget)
            sums.add(error, expected)
        return Measured(wrong, sums.over(len(got)))

    def _allowed(self, block: slice, expected: torch.Tensor, budget: Budget) -> torch.Tensor:
        """Return how far off each element of a block may be."""
        if self.element_limits is None:
            return budget.allowed(expected)
        # A limit is not finite where operands are not. The result must be exact there. Usually it
        # is not finite either, and its error is 0 or infinity, see `element_errors`.
        return self.element_limits[block].nan_to_num(0, 0, 0)
