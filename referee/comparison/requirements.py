"""Requirements: the reference's demands on a solution's result, in any draw of inputs."""

import math
from dataclasses import dataclass

import torch

from referee.comparison.limits import Limits
from referee.comparison.other_draws import OtherDraws


@dataclass(frozen=True)
class Requirements:
    """The reference's demands on one of a solution's results or gradients.

    They follow from the reference's result for one draw of inputs, and hold in other draws, too.
    They hold none of its values.

    Attributes:
        shape, strides, dtype: of the reference's result.
        must_equal_eager: whether only eager's values are right.
        limits: how far off a result may be in that draw.
        other_draws: judges results in other draws.
    """

    shape: list[int]
    strides: list[int]
    dtype: torch.dtype
    must_equal_eager: bool
    limits: Limits
    other_draws: OtherDraws

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)
