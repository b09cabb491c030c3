"""The four rules by which a gradient is wrong, each a class.

A rule takes in one training step after the other, and then tells whether they show a mistake.
"Gradients of timed steps" in INTERNALS.md compares the rules in a table. They allow for ReLU: where
a sum is near zero, rounding decides whether ReLU passes a gradient.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from referee.comparison.accuracy import GROSS, count_true
from referee.comparison.result_spec import ResultSpec

# Far off in one step: ReLU near zero makes at most this relative error.
MAX_RELATIVE_ERROR = 0.25
# Far off in most steps: ReLU near zero also makes a part of the reference's own error. So in at
# least half of the steps, it makes at most MAX_TIMES_OWN_ERROR times that error. A relative error
# up to MIN_FAR_OFF never counts as far off: it may be that of a lower precision.
MAX_TIMES_OWN_ERROR = 4
MIN_FAR_OFF = 0.02
# Wrong in every step: chance predicts how many elements rounding makes wrong in all steps. It
# explains those that are wrong if it predicts at least MIN_PREDICTED_SHARE of their number;
# `WrongInEveryStep` has an example. It explains nothing if more than MAX_SHARE_BY_ROUNDING of
# the elements is wrong in each step, or if the relative error is larger than GROSS in each step.
MIN_PREDICTED_SHARE = 0.01
MAX_SHARE_BY_ROUNDING = 0.02
# Inaccurate in many steps: a step's typical error is too large if it is more than
# MAX_TIMES_OTHER_ROUNDINGS times what other roundings make. The share of such steps may be at most
# MAX_INACCURATE_SHARE.
MAX_TIMES_OTHER_ROUNDINGS = 2
MAX_INACCURATE_SHARE = 0.25


@dataclass(frozen=True)
class GradientOfStep:
    """A gradient in one training step, beside the reference's.

    Attributes:
        spec: the reference's demands, with its own errors.
        mistake: the elements that are off by too much, or their mean error, in words; None if the
            gradient is right. The errors of a right gradient do not count: the rules take them for
            0, because a gradient may consist of rounding errors alone.
        wrong: a flat mask of the elements that are off by too much; None if the gradient is right.
        relative_error: of the whole gradient; infinite if an element is not finite where the
            reference's is.
        typical_error: the 90th percentile of the elements' errors, see `accuracy.typical_error`.
        error_of_other_roundings: computes the typical error of the reference's gradient if it is
            rounded otherwise.
    """

    spec: ResultSpec
    mistake: str | None = None
    wrong: torch.Tensor | None = None
    relative_error: float = 0.0
    typical_error: float = 0.0
    error_of_other_roundings: Callable[[], float] = lambda: 0.0

    @property
    def is_right(self) -> bool:
        """True if no element is off by too much, nor the elements on average."""
        return self.mistake is None


class Rule(ABC):
    """A rule for a gradient over several training steps."""

    @abstractmethod
    def add(self, step: GradientOfStep) -> None:
        """Take in the gradient of one more step."""

    @abstractmethod
    def is_mistake(self) -> bool:
        """Return whether the steps so far show a mistake that rounding does not explain."""


class FarOffInOneStep(Rule):
    """A single step has a relative error beyond MAX_RELATIVE_ERROR."""

    def __init__(self) -> None:
        self._was_far_off = False

    def add(self, step: GradientOfStep) -> None:
        """Take in one more step."""
        if step.relative_error > MAX_RELATIVE_ERROR:
            self._was_far_off = True

    def is_mistake(self) -> bool:
        """Return whether a step was far off."""
        return self._was_far_off


class FarOffInMostSteps(Rule):
    """More than half of the steps have a relative error beyond a limit, see `_far_off_limit`."""

    def __init__(self) -> None:
        self._steps = 0
        self._steps_far_off = 0

    def add(self, step: GradientOfStep) -> None:
        """Take in one more step."""
        self._steps += 1
        if step.relative_error > _far_off_limit(step.spec):
            self._steps_far_off += 1

    def is_mistake(self) -> bool:
        """Return whether most steps were far off."""
        return self._steps_far_off > self._steps / 2


class _WrongStep(NamedTuple):
    """A step in which a gradient is wrong: the share of wrong elements, and the relative error."""

    share: float
    relative_error: float


class WrongInEveryStep(Rule):
    """Elements are wrong in every step, and rounding cannot have chosen them.

    An example: of 1,000 elements, 3 are wrong in each of two steps, and 2 of them are the same. If
    rounding had chosen them, an element would be wrong in both steps with a probability of
    0.003 * 0.003, so chance would choose 0.009 elements twice. That is less than 1% of the 2 that
    are wrong twice (the share is MIN_PREDICTED_SHARE): the gradient is wrong.

    A right step switches the rule off.
    """

    def __init__(self) -> None:
        self._had_a_right_step = False
        self._wrong_steps: list[_WrongStep] = []
        # A flat mask of the elements that are wrong in every step; None before a step is wrong.
        self._always_wrong: torch.Tensor | None = None

    def add(self, step: GradientOfStep) -> None:
        """Take in one more step."""
        if step.is_right:
            self._had_a_right_step = True
            return
        share = count_true(step.wrong) / len(step.wrong)
        self._wrong_steps.append(_WrongStep(share, step.relative_error))
        if self._always_wrong is None:
            self._always_wrong = step.wrong
        else:
            self._always_wrong = self._always_wrong & step.wrong

    def is_mistake(self) -> bool:
        """Return whether all steps together show a mistake that rounding does not explain."""
        if self._had_a_right_step or not self._wrong_steps:
            return False
        shares = [step.share for step in self._wrong_steps]
        relative_errors = [step.relative_error for step in self._wrong_steps]
        are_too_many = min(shares) > MAX_SHARE_BY_ROUNDING
        are_too_far_off = min(relative_errors) > GROSS
        if are_too_many or are_too_far_off:
            return True
        # If rounding chooses the wrong elements of each step independently.
        chance_of_always_wrong = math.prod(shares)
        predicted_count = chance_of_always_wrong * len(self._always_wrong)
        return predicted_count < MIN_PREDICTED_SHARE * count_true(self._always_wrong)


class InaccurateInManySteps(Rule):
    """More than MAX_INACCURATE_SHARE of the steps have too large a typical error."""

    def __init__(self) -> None:
        self._steps = 0
        self._inaccurate_steps = 0

    def add(self, step: GradientOfStep) -> None:
        """Take in one more step."""
        self._steps += 1
        if _is_inaccurate(step):
            self._inaccurate_steps += 1

    def is_mistake(self) -> bool:
        """Return whether too many steps were inaccurate."""
        return self._inaccurate_steps > MAX_INACCURATE_SHARE * self._steps


def _far_off_limit(spec: ResultSpec) -> float:
    """Return the relative error beyond which a gradient counts as far off in a step."""
    own_error = spec.reference_errors.relative
    if own_error == 0:  # there is no float64 result, or no error
        return MAX_RELATIVE_ERROR
    limit = max(MAX_TIMES_OWN_ERROR * own_error, MIN_FAR_OFF)
    return min(limit, MAX_RELATIVE_ERROR)


def _is_inaccurate(step: GradientOfStep) -> bool:
    """Return whether the typical error of a gradient is larger than rounding explains.

    ReLU near zero changes a few rows of a gradient, which the typical error does not see. But in a
    deep network it changes all elements a little. The reference's gradient changes as much if it is
    rounded otherwise.
    """
    if step.typical_error <= step.spec.budget.typical_limit:
        return False  # the usual case, in which no other roundings are computed
    return step.typical_error > MAX_TIMES_OTHER_ROUNDINGS * step.error_of_other_roundings()
