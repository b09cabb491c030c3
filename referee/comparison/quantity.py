"""A result or gradient, compared with the reference's over several training steps.

Where a sum is near zero, rounding decides whether ReLU passes a gradient, so an honest gradient may
differ by much. A single wrong element is therefore a mistake only in these cases:

- The step belongs to a problem that knows these places. The outputs' gradients are zero there.
- Only eager's values are right, as for integers.
- It is in a result of a timed step, and a second look does not excuse it.

In all other cases several steps decide, whose inputs have these places elsewhere. "Gradients of
timed steps" in INTERNALS.md has four rules: a gradient is wrong if it is far off in one step, far
off in most steps, wrong in every step, or inaccurate in many steps. In steps that are not timed,
only "wrong in every step" holds; it then judges results, too.
"""

import math
from collections.abc import Callable
from enum import Enum

import torch

from referee.comparison.accuracy import GROSS, count_true, typical_error
from referee.comparison.compare import flat_reals, relative_difference
from referee.comparison.mistakes import describe_wrong
from referee.comparison.reference_tensor import Comparison, ReferenceTensor
from referee.comparison.second_look import SecondLook
from referee.contestants.autograd import is_differentiable

# Far off in one step: ReLU near zero makes at most this relative error.
LARGEST_RELATIVE_ERROR = 0.25
# Far off in most steps: ReLU near zero also makes a part of the reference's own error. So in at
# least half of the steps, it makes at most MOST_TIMES_OWN_ERROR times that error. A relative error
# up to LEAST_FAR_OFF never counts as far off: it may be that of a lower precision.
MOST_TIMES_OWN_ERROR = 4
LEAST_FAR_OFF = 0.02
# Wrong in every step: chance predicts how many elements rounding makes wrong in all steps. It
# explains those that are wrong if it predicts at least LEAST_PREDICTED_SHARE of their number;
# `_WrongInEveryStep` has an example. It explains nothing if more than LARGEST_SHARE_BY_ROUNDING of
# the elements is wrong in each step, or if the relative error is larger than GROSS in each step.
LEAST_PREDICTED_SHARE = 0.01
LARGEST_SHARE_BY_ROUNDING = 0.02
# Inaccurate in many steps: a step's typical error is too large if it is more than
# MOST_TIMES_OTHER_ROUNDINGS times what other roundings make. The share of such steps may be at most
# LARGEST_INACCURATE_SHARE.
MOST_TIMES_OTHER_ROUNDINGS = 2
LARGEST_INACCURATE_SHARE = 0.25


class Kind(Enum):
    """The kinds of quantities."""

    RESULT = "result"
    INPUT_GRADIENT = "gradient of an input"
    PARAMETER_GRADIENT = "gradient of a parameter"


class _WrongInEveryStep:
    """The rule "wrong in every step", whose question is: can rounding have chosen the elements?

    An example: of 1,000 elements, 3 are wrong in each of two steps, and 2 of them are the same. If
    rounding had chosen them, an element would be wrong in both steps with a probability of
    0.003 * 0.003, so chance would choose 0.009 elements twice. That is less than 1% of the 2 that
    are wrong twice (the share is LEAST_PREDICTED_SHARE): the gradient is wrong.
    """

    def __init__(self) -> None:
        self._had_a_right_step = False
        # The least of the steps so far: of the relative error, and of the share of wrong elements.
        self._least_relative_error = math.inf
        self._least_wrong_share = math.inf
        # A flat mask of the elements that are wrong in every step; None before a step is wrong.
        self._always_wrong: torch.Tensor | None = None
        # The probability that an element is wrong in every step, if rounding chooses the wrong
        # elements of each step independently: the product of the shares of wrong elements.
        self._chance_of_always_wrong = 1.0

    def add_right_step(self) -> None:
        """Add a step without wrong elements, which switches the rule off."""
        self._had_a_right_step = True

    def add_wrong_step(self, wrong: torch.Tensor, relative_error: float) -> None:
        """Add a step with wrong elements.

        Args:
            wrong: a flat mask of the elements that are off by too much, at least one.
            relative_error: the relative error of the whole tensor.
        """
        wrong_share = count_true(wrong) / len(wrong)
        self._least_relative_error = min(self._least_relative_error, relative_error)
        self._least_wrong_share = min(self._least_wrong_share, wrong_share)
        self._chance_of_always_wrong *= wrong_share
        if self._always_wrong is None:
            self._always_wrong = wrong
        else:
            self._always_wrong = self._always_wrong & wrong

    def is_mistake(self) -> bool:
        """Return whether all steps together show a mistake that rounding does not explain."""
        if self._always_wrong is None or self._had_a_right_step:
            return False
        are_too_many = self._least_wrong_share > LARGEST_SHARE_BY_ROUNDING
        are_too_far_off = self._least_relative_error > GROSS
        if are_too_many or are_too_far_off:
            return True
        count = count_true(self._always_wrong)
        count_by_chance = self._chance_of_always_wrong * len(self._always_wrong)
        return count_by_chance < LEAST_PREDICTED_SHARE * count


class Quantity:
    """A result or a gradient of a training step, and how far off it was in the steps so far.

    Args:
        name: the quantity in messages: "result 0", "gradient of x".
        kind: a result, or the gradient of an input or of a parameter.

    Attributes:
        expected: the reference's tensor in this step, with its budget; None where it has none.
        comparison: the comparison of the last step; None before the first.
        is_wrong_in_one_step: true once a single step has shown that the quantity is wrong.
    """

    def __init__(self, name: str, kind: Kind) -> None:
        self.name = name
        self.kind = kind
        self.expected: ReferenceTensor | None = None
        self.comparison: Comparison | None = None
        self.is_wrong_in_one_step = False
        self._first_mistake = ""
        self._timed_steps = 0
        self._timed_steps_far_off = 0
        self._inaccurate_timed_steps = 0
        self._wrong_in_every_step = _WrongInEveryStep()

    def compare(self, got: torch.Tensor, is_strict: bool) -> None:
        """Compare the solution's tensor of one untimed step; free the reference's tensor.

        Args:
            got: the tensor.
            is_strict: whether a single wrong element is a mistake, in any step.
        """
        comparison = self.expected.compare(got)
        self.comparison = comparison
        one_step_decides = is_strict or self.expected.must_equal_eager
        has_wrong_elements = bool(comparison.wrong.any())
        if not one_step_decides:
            if has_wrong_elements:
                relative_error = comparison.errors.relative
                self._wrong_in_every_step.add_wrong_step(comparison.wrong, relative_error)
            else:
                self._wrong_in_every_step.add_right_step()
        # A mistake without wrong elements is the mean error. It does not count here, because
        # rounding near ReLU's zero can make it.
        if comparison.mistake and has_wrong_elements:
            self._keep_first(comparison.mistake)
            if one_step_decides:
                self.is_wrong_in_one_step = True
        self.expected.forget()

    def compare_timed(
        self,
        got: torch.Tensor,
        eager: torch.Tensor,
        second_look: SecondLook | None = None,
        error_of_other_roundings: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Compare the solution's tensor of a timed step with eager's.

        Args:
            got: the solution's tensor.
            eager: eager's.
            second_look: for a result, yields the reference's results, rounded otherwise.
            error_of_other_roundings: computes the typical error of eager's tensor if it is rounded
                otherwise; for a gradient.
        """
        one_step_decides = self.expected.must_equal_eager or self.kind is Kind.RESULT
        if not one_step_decides:
            self._compare_gradient(got, eager, error_of_other_roundings)
            return
        mistake = self.expected.other_draws.find_mistake(got, eager, second_look)
        if mistake:
            self.is_wrong_in_one_step = True
            self._keep_first(mistake)

    def find_mistake(self) -> str | None:
        """Return in words what is wrong for certain; None if rounding may explain it."""
        is_wrong = (
            self.is_wrong_in_one_step
            or self._is_far_off_in_most_steps()
            or self._wrong_in_every_step.is_mistake()
            or self._is_inaccurate_in_many_steps()
        )
        return f"{self.name}: {self._first_mistake}" if is_wrong else None

    def without_steps(self) -> "Quantity":
        """Return a quantity with the same name and budget, for which no step was compared."""
        made = Quantity(self.name, self.kind)
        made.expected = self.expected
        return made

    def _compare_gradient(
        self,
        got: torch.Tensor,
        eager: torch.Tensor,
        error_of_other_roundings: Callable[[], float],
    ) -> None:
        """Compare a gradient of a timed step by the four rules.

        The arguments are those of `compare_timed`.
        """
        self._timed_steps += 1
        wrong = self.expected.other_draws.find_wrong(got, eager)
        mistake = describe_wrong(wrong, got, eager)
        if mistake is None:
            self._wrong_in_every_step.add_right_step()
            return
        self._keep_first(mistake)
        relative_error = relative_difference(got, eager)
        self._wrong_in_every_step.add_wrong_step(wrong, relative_error)
        if relative_error > LARGEST_RELATIVE_ERROR:
            self.is_wrong_in_one_step = True
        if relative_error > self._far_off_limit():
            self._timed_steps_far_off += 1
        if self._is_inaccurate(got, eager, error_of_other_roundings):
            self._inaccurate_timed_steps += 1

    def _is_inaccurate(
        self, got: torch.Tensor, eager: torch.Tensor, error_of_other_roundings: Callable[[], float]
    ) -> bool:
        """Return whether the typical error of a gradient is larger than rounding explains.

        ReLU near zero changes a few rows of a gradient, which the typical error does not see. But
        in a deep network it changes all elements a little. The reference's gradient changes as much
        if it is rounded otherwise.
        """
        typical = typical_error(flat_reals(got), flat_reals(eager))
        if typical <= self.expected.typical_slack:
            return False  # the usual case, in which no other roundings are computed
        return typical > MOST_TIMES_OTHER_ROUNDINGS * error_of_other_roundings()

    def _far_off_limit(self) -> float:
        """Return the relative error beyond which a gradient counts as far off in a step."""
        own_error = self.expected.reference_errors.relative
        if own_error == 0:  # there is no float64 result, or no error
            return LARGEST_RELATIVE_ERROR
        limit = max(MOST_TIMES_OWN_ERROR * own_error, LEAST_FAR_OFF)
        return min(limit, LARGEST_RELATIVE_ERROR)

    def _keep_first(self, mistake: str) -> None:
        """Keep the words for the first mistake, which the message quotes."""
        if not self._first_mistake:
            self._first_mistake = mistake

    def _is_far_off_in_most_steps(self) -> bool:
        """Return whether the relative error was too large in more than half of the timed steps."""
        return self._timed_steps_far_off > self._timed_steps / 2

    def _is_inaccurate_in_many_steps(self) -> bool:
        """Return whether the typical error was too large in more timed steps than it may be."""
        return self._inaccurate_timed_steps > LARGEST_INACCURATE_SHARE * self._timed_steps


def make_quantities(inputs: list, parameters: list[str], output_count: int) -> list[Quantity]:
    """Return a training step's results and gradients, in the order of a reply.

    Inputs are numbered as in the call, also those that have no gradient. An input that is the only
    one with a gradient is x in messages.
    """
    results = [Quantity(f"result {i}", Kind.RESULT) for i in range(output_count)]
    indices = [i for i, x in enumerate(inputs) if is_differentiable(x)]
    names = ["x"] if len(indices) == 1 else [f"input {i}" for i in indices]
    of_inputs = [Quantity(f"gradient of {name}", Kind.INPUT_GRADIENT) for name in names]
    of_parameters = [
        Quantity(f"gradient of {name}", Kind.PARAMETER_GRADIENT) for name in parameters
    ]
    return results + of_inputs + of_parameters
