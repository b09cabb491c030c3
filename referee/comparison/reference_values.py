"""The reference's result for one draw, as eager and float64 give it."""

from dataclasses import dataclass

import torch

from referee.comparison.accuracy import ErrorSizes, ErrorSums, element_errors
from referee.comparison.compare import blocks


@dataclass
class ReferenceValues:
    """The values of one result of the reference.

    Attributes:
        eager: the flat result in the problem's dtype.
        exact: the flat result in float64; None where there is none.
    """

    eager: torch.Tensor
    exact: torch.Tensor | None

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

    def errors_of(self, result: torch.Tensor) -> ErrorSizes:
        """Return how far off another flat result of the reference is."""
        sums = ErrorSums()
        for block in blocks(len(self.eager)):
            expected = self.expected(block)
            sums.add(element_errors(result[block], self.eager[block], expected), expected)
        return sums.over(len(self.eager))
