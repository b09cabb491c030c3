"""The specification of a result: what the reference demands of it, in any draw of inputs."""

import math
from dataclasses import dataclass

import torch

from referee.comparison.accuracy import ErrorSizes
from referee.comparison.budget import Budget
from referee.comparison.other_draws import RulesForOtherDraws


@dataclass(frozen=True)
class ResultSpec:
    """The reference's demands on one of a solution's results or gradients.

    They follow from the reference's result for one draw of inputs, and hold in other draws, too.
    They hold none of its values.

    Attributes:
        shape, strides, dtype: of the reference's result.
        must_equal_eager: whether only eager's values are right.
        budget: how far off a result may be in that draw.
        reference_errors: how far off the reference's own result is, see `budget_and_errors`.
        in_other_draws: judges results in other draws.
    """

    shape: list[int]
    strides: list[int]
    dtype: torch.dtype
    must_equal_eager: bool
    budget: Budget
    reference_errors: ErrorSizes
    in_other_draws: RulesForOtherDraws

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)
