"""The four rules by which a gradient is wrong: functions of its steps.

The first one may be asked after each step. The others need all steps.

"Gradients of timed steps" in INTERNALS.md compares the rules in a table. They allow for ReLU: where
a sum is near zero, rounding decides whether ReLU passes a gradient.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from referee.comparison.accuracy import GROSS, count_true
from referee.comparison.result_spec import ResultSpec

# Far off in one step: ReLU near zero makes at most this relative error.
MAX_RELATIVE_ERROR = 0.25
# Far off in most steps: ReLU near zero changes the reference's own gradient, too, and the error of
# that gradient tells how large such changes are. A step is far off if its relative error is more
# than MAX_TIMES_OWN_ERROR times that error. A relative error up to MIN_FAR_OFF never counts as far
# off: it may be that of a lower precision.
MAX_TIMES_OWN_ERROR = 4
MIN_FAR_OFF = 0.02
# Wrong in every step: rounding makes different elements wrong in each step, by chance. So it does
# not explain n elements that are wrong in all steps if chance predicts fewer than
# MIN_PREDICTED_SHARE * n of them, and n or more have a probability below MAX_CHANCE
# (`wrong_in_every_step` has an example). Nor does it explain that more than MAX_SHARE_BY_ROUNDING
# of the elements are wrong in each step, or a relative error above GROSS in each step.
MIN_PREDICTED_SHARE = 0.01
MAX_CHANCE = 1e-6
MAX_SHARE_BY_ROUNDING = 0.02
# Inaccurate in many steps: a step's typical error is too large if it is beyond the budget's limit,
# and more than MAX_TIMES_OTHER_ROUNDINGS times the one that other roundings make
# (`Quantity.judge_timed`). The share of such steps may be at most MAX_INACCURATE_SHARE.
MAX_TIMES_OTHER_ROUNDINGS = 2
MAX_INACCURATE_SHARE = 0.25


class Step(NamedTuple):
    """How far off a gradient was in one step; the errors of a right gradient count as 0.

    Attributes:
        relative_error: of the whole gradient; infinite if an element is not finite where the
            reference's is.
        wrong_share: the share of the elements that are off by too much; None if the gradient is
            right.
        is_far_off: whether the relative error is beyond `far_off_limit`.
        is_inaccurate: whether the typical error is larger than rounding explains.
    """

    relative_error: float = 0.0
    wrong_share: float | None = None
    is_far_off: bool = False
    is_inaccurate: bool = False


@dataclass
class Steps:
    """A gradient in all steps so far.

    Attributes:
        all: the steps.
        always_wrong: a flat mask of the elements that are wrong in every wrong step; None before a
            step is wrong.
    """

    all: list[Step] = field(default_factory=list)
    always_wrong: torch.Tensor | None = None

    def add_right(self) -> None:
        """Add a step in which the gradient is right: it may consist of rounding errors alone."""
        self.all.append(Step())

    def add_wrong(self, step: Step, wrong: torch.Tensor) -> None:
        """Add a step in which the gradient is wrong, with a flat mask of the wrong elements."""
        self.all.append(step._replace(wrong_share=count_true(wrong) / len(wrong)))
        self.always_wrong = wrong if self.always_wrong is None else self.always_wrong & wrong


def far_off_in_one_step(steps: Steps) -> bool:
    """Return whether a single step has a relative error beyond MAX_RELATIVE_ERROR."""
    return any(step.relative_error > MAX_RELATIVE_ERROR for step in steps.all)


def far_off_in_most_steps(steps: Steps) -> bool:
    """Return whether more than half of the steps have a relative error beyond `far_off_limit`."""
    return sum(step.is_far_off for step in steps.all) > len(steps.all) / 2


def wrong_in_every_step(steps: Steps) -> bool:
    """Return whether the gradient is wrong in every step, and rounding does not explain that.

    An example: of 1,000 elements, 3 are wrong in each of two steps, the same ones. If rounding had
    chosen them, an element would be wrong in both steps with a probability of 0.003 * 0.003, so
    chance would choose 0.009 elements twice. That is less than 1% of the 3 that are wrong twice,
    and the probability that it chooses 3 or more is at most 0.009^3 / 3! = 1.2e-7: the gradient is
    wrong. If only one of the 3 were the same in both steps, the probability would be 0.9%.
    """
    shares = [step.wrong_share for step in steps.all]
    if not shares or None in shares:  # a right step switches the rule off
        return False
    if min(shares) > MAX_SHARE_BY_ROUNDING:
        return True
    if min(step.relative_error for step in steps.all) > GROSS:
        return True
    count = count_true(steps.always_wrong)
    if count == 0:
        return False
    # If rounding chooses the wrong elements of each step independently, the number of those that
    # are wrong in all steps has a Poisson distribution. Its mean is the predicted number. (The
    # product of many shares could underflow, so their logarithms are added.)
    log_predicted = sum(map(math.log, shares)) + math.log(len(steps.always_wrong))
    log_chance = count * log_predicted - math.lgamma(count + 1)  # at most this
    is_far_more = log_predicted < math.log(MIN_PREDICTED_SHARE * count)
    return is_far_more and log_chance < math.log(MAX_CHANCE)


def inaccurate_in_many_steps(steps: Steps) -> bool:
    """Return whether too many steps have too large a typical error."""
    count = sum(step.is_inaccurate for step in steps.all)
    return count > MAX_INACCURATE_SHARE * len(steps.all)


def far_off_limit(spec: ResultSpec) -> float:
    """Return the relative error beyond which a gradient counts as far off in a step."""
    own_error = spec.reference_errors.relative
    if own_error == 0:  # the usual cause: there is no float64 result, so nothing is known
        return MAX_RELATIVE_ERROR
    limit = max(MAX_TIMES_OWN_ERROR * own_error, MIN_FAR_OFF)
    return min(limit, MAX_RELATIVE_ERROR)
